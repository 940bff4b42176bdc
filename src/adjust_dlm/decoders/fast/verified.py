"""A round of `verified` on a lane: the reference's own, in shapes that hold for any number of commits.

How many tokens a row commits is known to the device alone. So a round drafts `depth` - 1 tokens for every row, even
those with nothing to draft, and on a block base it computes two blocks of each row, since any may have entered one.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.bases.memory import renew
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders.fast.blocks import pass_over
from adjust_dlm.decoders.fast.lane import Lane
from adjust_dlm.decoders.fast.pick import picks
from adjust_dlm.decoders.machinery.cache import hidden_drafts, step_at_columns
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks
from adjust_dlm.decoders.verified import verified_round
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import State


def play(base: Base, sampler: Sampler, lane: Lane, width: int, *, depth: int, law: bool) -> None:
    """One round of every slot, which may be captured; no row has more than `width` open positions at a time."""
    size = base.spec.block or 0
    # g has read all but the block before where a row has entered one; of a round's later steps nothing.
    columns = itertools.chain([2 * size], itertools.repeat(size))

    def step(h_BLD: Tensor, draft: State) -> Tensor:
        if not size or not isinstance(draft, Canvas):
            return sampler(h_BLD, draft)
        return renew(h_BLD.clone(), *step_at_columns(sampler, h_BLD, draft, next(columns)))

    def look(base: Base, canvas: Canvas, drafts: list[State]) -> list[Tensor]:
        if size and not drafts and isinstance(base, TransformerBase):
            pass_over(base, canvas, 2 * size)
            return [lane.h_BLD]
        return hidden_drafts(base, canvas, drafts, count=2 * size)

    def pick(base: Base, h_BLD: Tensor, canvas: Canvas) -> Picks:
        assert isinstance(canvas, Lane)
        return picks(base, h_BLD, canvas, width, plain=law)

    last_BLD, looked_B = verified_round(
        base, step, lane, lane.h_BLD, depth=depth, law=law, pick=pick, look=look, asks=False
    )
    lane.h_BLD.copy_(last_BLD)
    lane.looked_B.copy_(looked_B)
