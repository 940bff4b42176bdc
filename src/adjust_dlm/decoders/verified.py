"""Joint decoding, token for token, several tokens a pass: g drafts, the base checks all drafts at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.cache import hidden_drafts
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.pick import pick
from adjust_dlm.types import State, require_count


@dataclass(frozen=True, kw_only=True)
class VerifiedOptions:
    """Settings of `verified`.

    Attributes:
        depth: canvases of a row that one pass looks at: the present one and depth - 1 drafts; 1 is `joint`.
    """

    depth: int = 4

    def __post_init__(self) -> None:
        require_count("depth", self.depth, 1)


def verified(base: Base, sampler: Callable[[Tensor, State], Tensor], canvas: Canvas, options: VerifiedOptions) -> None:
    """Fills the canvas exactly as `joint` does (without a prefix cache), at every temperature, in fewer passes.

    From the last states that the base gave, g drafts the next commits one after another, as in `adjust`. One pass over
    all these canvases then gives the exact commit of each. They stand as long as the draft made the same: a commit is a
    function of the states and of uniforms that belong to its number and position, so the exact one can be compared.
    The commit after the last right draft is exact too, so a pass commits at least one token and at most `depth`.

    Every canvas looked at is booked as a base pass, right or wrong; `rounds_B` counts the batched passes, which are
    what a row waits for where a pass costs as much for one canvas as for several (small batches on a GPU).
    """
    canvas.start_round(torch.ones_like(canvas.commits_B))
    h_BLD, part_B = base.hidden(canvas), canvas.part_B
    canvas.commit(pick(base, h_BLD, canvas))
    while canvas.open:
        # A block that no pass has looked at is not drafted: its first pass makes what stands before it final.
        drafted_BL = canvas.seen_BL & (canvas.part_B == part_B)[:, None]
        states = _drafts(base, sampler, canvas, h_BLD, options.depth, drafted_BL)
        looks = hidden_drafts(base, canvas, states[1:])
        stands_B, part_B, seen_BL = canvas.open_B, canvas.part_B, canvas.seen_BL
        for j, (state, checked_BLD) in enumerate(zip(states, looks, strict=True)):
            stands_B = stands_B & canvas.open_B & (canvas.part_B == part_B)
            stands_B = stands_B & (canvas.tokens_BL == state.tokens_BL).all(-1)
            canvas.start_round(stands_B.long(), same_pass=j > 0)
            canvas.base_calls_B += (state.masked_BL & seen_BL & drafted_BL).any(-1) & (j > 0)
            h_BLD = torch.where(stands_B[:, None, None], checked_BLD, h_BLD)
            canvas.commit(pick(base, h_BLD, canvas))


def _drafts(
    base: Base, sampler: Callable[[Tensor, State], Tensor], canvas: Canvas, h_BLD: Tensor, depth: int,
    drafted_BL: Tensor,
) -> list[State]:  # fmt: skip
    """The present canvas and, one commit by g after another, those that may follow: by masks of `drafted_BL` alone."""
    draft, elsewhere_BL = copy.copy(canvas), canvas.masked_BL & ~drafted_BL
    draft.masked_BL = drafted_BL.clone()
    for name in ("tokens_BL", "order_BL", "commits_B", "_before_B", "quota_B", "base_calls_B", "rounds_B"):
        setattr(draft, name, getattr(canvas, name).clone())
    draft.watch = None
    states = [_now(draft, elsewhere_BL)]
    for _ in range(depth - 1):
        if not draft.open:
            break
        draft.start_round(torch.ones_like(draft.commits_B))
        canvas.sampler_calls_B += draft.open_B
        h_BLD = sampler(h_BLD, draft)
        draft.commit(pick(base, h_BLD, draft))
        states.append(_now(draft, elsewhere_BL))
    return states


def _now(canvas: Canvas, elsewhere_BL: Tensor) -> State:
    return State(canvas.tokens_BL.clone(), canvas.real_BL, canvas.masked_BL | elsewhere_BL, canvas.padded)
