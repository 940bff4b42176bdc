"""Joint decoding, several tokens a pass: g drafts, the base checks all drafts at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.cache import hidden_drafts, passes_open
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks
from adjust_dlm.decoders.machinery.pick import pick
from adjust_dlm.options import VerifiedOptions
from adjust_dlm.sampling import REDRAW, coupled, draw_from
from adjust_dlm.types import State, require


def verified(base: Base, sampler: Callable[[Tensor, State], Tensor], canvas: Canvas, options: VerifiedOptions) -> None:
    """Fills the canvas as `joint` does (without a prefix cache), at every temperature, in fewer passes.

    From the last states that the base gave, g drafts the next commits one after another, as in `adjust`. One pass over
    all these canvases then gives the exact commit of each. They stand as long as the draft made the same: a commit is a
    function of the states and of uniforms that belong to its number and position, so the exact one can be compared.
    Under `match="law"` the exact token is drawn from the base's law so that it mostly is the draft's (`coupled`); the
    position is the base's all the same. The commit after the last right draft is exact too, so a pass commits at least
    one token and at most `depth`.

    Every canvas looked at is booked as a base pass, right or wrong; `rounds_B` counts the batched passes, which are
    what a row waits for.

    Raises:
        InputError: see `couples`.
    """
    law = couples(options, canvas)
    while canvas.open:
        canvas.last_BLD = verified_round(base, sampler, canvas, canvas.last_BLD, depth=options.depth, law=law)


def couples(options: VerifiedOptions, canvas: Canvas) -> bool:
    """Whether draws are coupled by their laws.

    Raises:
        InputError: `match="law"` where the order looks at drawn tokens, so that a token has no law of its own.
    """
    law = options.match == "law" and canvas.config.temperature > 0
    require(
        not law or canvas.rule != "confidence",
        f"match is 'law', and at temperature {canvas.config.temperature} order confidence looks at the drawn tokens, "
        "which so have no law of their own; set another order, or match=token",
    )
    return law


def verified_round(
    base: Base, sampler: Callable[[Tensor, State], Tensor], canvas: Canvas, last_BLD: Tensor | None, *, depth: int,
    law: bool, pick: Callable[[Base, Tensor, Canvas], Picks] = pick,
    look: Callable[[Base, Canvas, list[State]], list[Tensor]] = hidden_drafts, asks: bool = True,
) -> Tensor:  # fmt: skip
    """One round, by the last states that the base gave, and those that the next one needs: [B, L, D or more].

    Nothing here asks the device but `pick`, `look`, the canvas, and, unless `asks` is False, whether a draft can go on:
    what the host does not know is in masks, so that rows without drafts take part in every step and change nothing.
    """
    # A block that no pass has looked at is not drafted: its first pass makes what stands before it final.
    stands_B, drafted_BL = canvas.open_B, canvas.seen_BL & (canvas.commits_B > 0)[:, None] & passes_open(base)
    states, drafts = _drafts(base, sampler, canvas, last_BLD, depth, drafted_BL, law, pick, asks)
    left_B, looks = canvas.masked_BL.sum(-1), look(base, canvas, states)
    if base.spec.block is not None and not base.spec.causal:  # as passes with a cache have it
        canvas.memory.counts_B3[:, 2] = (canvas.block_of(base.spec.block) + 1) * base.spec.block
    room_BL = canvas.seen_BL.clone()  # where a draft may be gone on from
    h_BLD = looks[0] if last_BLD is None else last_BLD
    for j, checked_BLD in enumerate(looks):
        if j:
            before_B, left_B = left_B, states[j - 1].masked_BL.sum(-1)
            open_B = (states[j - 1].masked_BL & room_BL).any(-1) & (left_B < before_B)
            canvas.base_calls_B += open_B
            stands_B = stands_B & open_B & (canvas.tokens_BL == states[j - 1].tokens_BL).all(-1)
        canvas.start_round(stands_B.long(), same_pass=j > 0)
        h_BLD = torch.where(stands_B[:, None, None], checked_BLD, h_BLD)
        picks = pick(base, h_BLD, canvas)
        canvas.commit(_coupled(picks, drafts[j], canvas) if law and j < len(drafts) else picks)
    return h_BLD


def _coupled(own: Picks, draft: Picks, canvas: Canvas) -> Picks:
    """The base's commit, drawn anew from its law beside the draft's token where both are of one position."""
    assert own.processed_RV is not None and draft.processed_RV is not None
    same_BN = draft.valid_BN & (draft.position_BN == own.position_BN)
    row_B, position_B = torch.arange(len(same_BN), device=same_BN.device), own.position_BN[:, 0]
    mass_BV = coupled(own.processed_RV, draft.processed_RV, draft.token_BN[:, 0])
    token_B = draw_from(mass_BV, canvas.uniforms(position_B, row_B, REDRAW))
    token_BN = torch.where(same_BN, token_B[:, None], own.token_BN)
    canvas.note_chance(row_B, position_B, own.processed_RV, token_BN[:, 0])
    return replace(own, token_BN=token_BN)


def _drafts(
    base: Base, sampler: Callable[[Tensor, State], Tensor], canvas: Canvas, h_BLD: Tensor | None, depth: int,
    drafted_BL: Tensor, law: bool, pick: Callable[[Base, Tensor, Canvas], Picks], asks: bool,
) -> tuple[list[State], list[Picks]]:  # fmt: skip
    """The canvases that may follow, one commit by g after another: by masks of `drafted_BL` alone.

    Also these commits, if their law will be asked for: the logits of the row that each was drawn from are kept.
    """
    draft, elsewhere_BL = copy.copy(canvas), canvas.masked_BL & ~drafted_BL
    draft.masked_BL = drafted_BL.clone()
    for name in ("tokens_BL", "order_BL", "commits_B", "quota_B"):
        setattr(draft, name, getattr(canvas, name).clone())
    draft.watch = None
    if base.spec.causal:  # of the text no pass has looked at the latest token, and no step counts behind it
        first_B, start_B = (part_BL.long().argmax(-1) for part_BL in (canvas.masked_BL, canvas.real_BL))
        canvas.memory.counts_B3[:, 1] = canvas.sampler_memory.counts_B3[:, 1] = first_B - start_B - 1
    states, commits = list[State](), list[Picks]()
    for _ in range(depth - 1):
        if h_BLD is None or (asks and not bool(draft.open_B.any())):
            break
        goes_B = draft.open_B.long()
        draft.start_round(goes_B, same_pass=True)
        canvas.sampler_calls_B += goes_B
        h_BLD = sampler(h_BLD, draft)
        picks = pick(base, h_BLD, draft)
        draft.commit(picks)
        more_BL = elsewhere_BL & ~draft.finished(draft.tokens_BL, draft.masked_BL, draft.order_BL >= 0)[:, None]
        states.append(State(draft.tokens_BL.clone(), draft.real_BL, draft.masked_BL | more_BL, draft.padded))
        if law:
            commits.append(picks)
    return states, commits
