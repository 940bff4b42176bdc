"""Discrete copula diffusion: the dependence of an autoregressive model, the marginals of the base."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adjust_dlm.bases import Base, Partner
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks
from adjust_dlm.options import DcdOptions, Keep
from adjust_dlm.sampling import ORDER, draw, process
from adjust_dlm.types import State


class _Round(NamedTuple):
    """States [B, L, D] given the canvas and given its left part alone; which positions are kept and drawn [B, L]."""

    target_BLD: Tensor
    left_BLD: Tensor
    kept_BL: Tensor
    drawn_BL: Tensor


def dcd(base: Base, partner: Partner, canvas: Canvas, options: DcdOptions) -> None:
    """Fills the canvas; a round draws from left to right and keeps K tokens (Liu et al., arXiv 2410.01949).

    With x the canvas at the round's start, token i is drawn from p_AR(x_i | x_<i) p(x_i | x) / p(x_i | x left of i),
    normalised: one step towards the I-projection of the partner's law onto the base's marginals. Nothing depends on
    what is right of the last kept position, so that is not drawn. K beyond all masks is a single completion. A
    partner pass reads all columns up to the next one to draw. The rule for the next position plays no part.

    Raises:
        InputError: `reference` is causal and the base has no causal pass.
        FloatingPointError: NaN, or base and partner have no token in common.
    """
    while canvas.open:
        target_BLD = base.by_position(base.hidden(canvas), canvas)
        canvas.start_round()
        kept_BL = _kept(canvas, options.keep)
        drawn_BL = canvas.masked_BL & (kept_BL.flip(1).cumsum(1).flip(1) > 0)
        if not bool(drawn_BL.any()):
            continue  # an empty round of a published schedule
        if options.alpha == 0:
            left_BLD = target_BLD
        elif options.reference == "causal":
            canvas.base_calls_B += drawn_BL.any(1)
            left_BLD = base.by_position(base.hidden_causal(canvas), canvas)
        else:
            left_BLD = _remasked(base, canvas, target_BLD, drawn_BL)
        _complete(base, partner, canvas, _Round(target_BLD, left_BLD, kept_BL, drawn_BL), options.alpha)


def _kept(canvas: Canvas, keep: Keep) -> Tensor:
    """The open positions that this round commits, as many as each row's quota: [B, L]."""
    row_R, position_R = canvas.open_BL.nonzero(as_tuple=True)
    score_BL = torch.full(canvas.tokens_BL.shape, -torch.inf, dtype=torch.float64, device=canvas.tokens_BL.device)
    at_random = keep == "random"
    score_BL[row_R, position_R] = canvas.uniforms(position_R, row_R, ORDER) if at_random else -position_R.double()
    rank_BL = canvas.lead(score_BL).sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    return canvas.open_BL & (rank_BL < canvas.quota_B[:, None])


def _remasked(base: Base, canvas: Canvas, target_BLD: Tensor, drawn_BL: Tensor) -> Tensor:
    """States of drawn positions with all tokens right of them masked; one pass for all with equally many there."""
    visible_BL = canvas.real_BL & ~canvas.masked_BL
    behind_BL = visible_BL.flip(1).cumsum(1).flip(1)  # visible tokens from here on
    left_BLD = target_BLD.clone()
    for count in behind_BL[drawn_BL].unique().tolist():
        if count:  # with nothing to hide the target is the answer
            at_BL = drawn_BL & (behind_BL == count)
            rows = at_BL.any(1)
            masked_BL = (canvas.masked_BL | (visible_BL & (behind_BL <= count)))[rows]
            tokens_BL = canvas.tokens_BL[rows].masked_fill(masked_BL, base.spec.mask_id)
            state = State(tokens_BL, canvas.real_BL[rows], masked_BL, canvas.padded)
            left_BLD[at_BL] = base.by_position(base.hidden(state), state)[at_BL[rows]]
            canvas.base_calls_B += rows
    return left_BLD


def _complete(base: Base, partner: Partner, canvas: Canvas, now: _Round, alpha: float) -> None:
    """Draws column by column, the rows of a batch in lockstep, and commits what is kept."""
    config, read, memory = canvas.config, 0, None
    tokens_BL = canvas.tokens_BL.masked_fill(canvas.masked_BL, 0)  # masks are never read by rows that still draw
    for i in now.drawn_BL.any(0).nonzero()[:, 0].tolist():
        draws_B = now.drawn_BL[:, i] & canvas.busy_B
        row_R = draws_B.nonzero()[:, 0]
        if not len(row_R):
            continue
        canvas.partner_calls_B += draws_B
        if i:
            h_BND, memory = partner.read(tokens_BL[:, read:i], canvas.real_BL[:, :i], memory)
            own_RV, read = partner.logits(h_BND[row_R, -1], suppress_eos=config.suppress_eos), i
        else:  # a partner that scores the first token without anything before it: see `Partner.require_start`
            own_RV = partner.logits(partner.hidden(canvas)[row_R, 0], suppress_eos=config.suppress_eos)
        states = (now.target_BLD[row_R, i], now.left_BLD[row_R, i])
        target_RV, left_RV = (base.logits(h_RD, suppress_eos=config.suppress_eos) for h_RD in states)
        forbidden_RV = own_RV.isneginf() | target_RV.isneginf()  # and not -inf minus -inf
        logits_RV = (own_RV + alpha * (target_RV - left_RV)).masked_fill(forbidden_RV, -torch.inf)
        if not bool(logits_RV.amax(-1).isfinite().all()):
            raise FloatingPointError(f"base {base.spec.name!r} and partner {partner.name!r} leave no finite logits")
        u_R = canvas.uniforms(torch.full_like(row_R, i), row_R)
        tokens_BL[row_R, i] = draw(process(logits_RV, config), u_R, config.temperature)
        keeps_B1 = (draws_B & now.kept_BL[:, i])[:, None]
        if bool(keeps_B1.any()):
            canvas.commit(Picks(torch.full_like(keeps_B1, i, dtype=torch.long), tokens_BL[:, i : i + 1], keeps_B1))
