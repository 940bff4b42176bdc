"""A round of `verified` on a lane: the reference's own, in shapes that hold for any number of commits.

How many tokens a row commits is known to the device alone. So a round drafts `depth` - 1 tokens for every row, even
those with nothing to draft, and on a block base it computes two blocks of each row, since any may have entered one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.bases.memory import renew
from adjust_dlm.decoders.fast.lane import Lane
from adjust_dlm.decoders.fast.pick import picks
from adjust_dlm.decoders.machinery.cache import hidden_drafts, step_at_columns
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks
from adjust_dlm.decoders.verified import verified_round
from adjust_dlm.sampler import Sampler
from adjust_dlm.sampling import draw, no_softmax, process
from adjust_dlm.types import State


def play(base: Base, sampler: Sampler, lane: Lane, width: int, *, depth: int, law: bool) -> None:
    """One round of every slot, which may be captured; no row has more than `width` open positions at a time."""
    size, leftmost = base.spec.block or 0, law and lane.rule == "left_to_right" and not lane.noting
    own, exact = list[Tensor](), list[Tensor]()  # the open block's columns and which are drafted; logits of all checks

    def step(h_BLD: Tensor, draft: State) -> Tensor:
        if not size or not isinstance(draft, Canvas):
            return sampler(h_BLD, draft)
        if own and not sampler.causal:  # drafts stay in their block
            return renew(h_BLD, sampler.rows(h_BLD, draft, own[0], draft.sampler_memory, own[1]), *own)
        lacks = max(2 * size, size + 3)  # a block before; a causal g what a round of drafts and one without committed
        new_BND, *columns = step_at_columns(sampler, h_BLD, draft, 1 if own else lacks)
        own.extend(part[:, -size:] for part in columns)
        return renew(h_BLD.clone(), new_BND, *columns)

    def look(base: Base, canvas: Canvas, drafts: list[State]) -> list[Tensor]:
        looks = hidden_drafts(base, canvas, drafts, count=2 * size)
        if leftmost:  # the head's matrix is read once for all checks
            exact.extend(_processed(base, lane, looks, [canvas, *drafts]))
        return looks

    def pick(base: Base, h_BLD: Tensor, canvas: Canvas) -> Picks:
        assert isinstance(canvas, Lane)
        if not leftmost:
            return picks(base, h_BLD, canvas, width, plain=law)
        return _pick_first(canvas, (exact or _processed(base, canvas, [h_BLD], [canvas])).pop(0))

    lane.h_BLD.copy_(
        verified_round(base, step, lane, lane.h_BLD, depth=depth, law=law, pick=pick, look=look, asks=False)
    )


def _processed(base: Base, lane: Lane, looks: list[Tensor], states: list[State]) -> list[Tensor]:
    """Of each look the logits [B, V] that each row's first mask is drawn from."""
    parts = [base.at(h, lane, lane.slot_B, s.masked_BL.long().argmax(-1)) for h, s in zip(looks, states, strict=True)]
    logits_RV = base.logits(torch.cat(parts), suppress_eos=lane.config.suppress_eos)
    return list(process(logits_RV, lane.config).split(len(lane.slot_B)))


def _pick_first(lane: Lane, processed_BV: Tensor) -> Picks:
    """As `picks` from left to right; rows without commits left may have any logits, those of a wrong draft."""
    position_B1, valid_B1 = lane.masked_BL.long().argmax(-1, keepdim=True), lane.quota_B[:, None] > 0
    lane.bad |= (no_softmax(processed_BV) & valid_B1[:, 0]).any()
    token_B = draw(processed_BV, lane.uniforms(position_B1[:, 0], lane.slot_B), lane.config.temperature)
    return Picks(position_B1, token_B[:, None], valid_B1, processed_BV)
