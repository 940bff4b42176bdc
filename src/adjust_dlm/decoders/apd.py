"""A left-to-right draft of the base, as far as an autoregressive partner agrees (Israel et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from adjust_dlm.bases import Base, Partner
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks
from adjust_dlm.decoders.machinery.pick import rows_at_once
from adjust_dlm.decoders.machinery.proposals import Logits, plain_logits
from adjust_dlm.options import ApdOptions
from adjust_dlm.sampling import process
from adjust_dlm.types import State

_COPIES = 8  # of fp32 logits that one row takes here: two models, and noise in 64 bits


def apd(base: Base, partner: Partner, canvas: Canvas, options: ApdOptions) -> None:
    """Fills the canvas; a pass commits the longest prefix of the draft x that the target would have drawn too.

    x_i ~ p_D(. | committed), y_i ~ p_T proportional to p_D^R p_AR(. | x_<i)^(1-R), both Gumbel-max over the same noise
    (Algorithm 1); both models are tempered and filtered first. The first of a draft always stands and asks no partner.

    Law: behind the first, token a stands with chance m(a) = 1 / sum_b max(p_D(b) / p_D(a), p_T(b) / p_T(a)). With
    `correct` a mismatch commits y_i, so the law there is p_T exactly. Without, the next round draws that position from
    its own p_D, so the law is m + (1 - sum m) p_D(. | committed). This holds because noise is keyed by the row's number
    of commits: what a mismatch was conditioned on never comes back.

    Raises:
        FloatingPointError: a model gave NaN.
    """
    most = options.lookahead or canvas.tokens_BL.shape[1]
    while canvas.open:
        own = plain_logits(base, base.hidden(canvas), canvas)
        position_BN, drafted_BN = _next_open(canvas, most)
        draft_BN = _draw_coupled(base, canvas, position_BN, drafted_BN, [(1.0, own)])
        target_BN, asked_BN = draft_BN.clone(), drafted_BN.clone()
        asked_BN[:, 0] = False
        asked_BN &= options.mixture < 1  # the target is the base's own law, and so is the draft
        if bool(asked_BN.any()):
            other = plain_logits(partner, partner.hidden(_filled(canvas, position_BN, draft_BN, drafted_BN)), canvas)
            experts = [(options.mixture, own), (1 - options.mixture, other)]
            drawn_BN = _draw_coupled(base, canvas, position_BN, asked_BN, experts)
            target_BN = torch.where(asked_BN, drawn_BN, draft_BN)
            canvas.partner_calls_B += asked_BN.any(-1)
        stands_BN = ((target_BN == draft_BN) & drafted_BN).long().cumprod(-1)
        if options.correct:  # and the token behind those, if the target has one
            reached_BN = torch.cat([stands_BN[:, :1], stands_BN[:, :-1]], dim=1)
            stands_BN = reached_BN * (drafted_BN & (target_BN >= 0))
        canvas.start_round(stands_BN.sum(-1))
        canvas.commit(Picks(position_BN, target_BN, stands_BN.bool()))


def _next_open(canvas: Canvas, most: int) -> tuple[Tensor, Tensor]:
    """The first open positions of each row [B, N], and which of them there are: at most `most`, N >= 1.

    A mask that is not open ends the draft, as the partner cannot read over it.
    """
    open_BL = canvas.open_BL
    shut_BL = (canvas.masked_BL & ~open_BL).cumsum(-1) > 0
    rank_BL = open_BL.cumsum(-1)
    drafted_BL = open_BL & (rank_BL <= most) & (~shut_BL | (rank_BL == 1))
    width = max(1, int(drafted_BL.sum(-1).max()))
    position_BN = drafted_BL.long().sort(dim=-1, descending=True, stable=True).indices[:, :width]
    return position_BN, drafted_BL.gather(1, position_BN)


def _filled(canvas: Canvas, position_BN: Tensor, token_BN: Tensor, valid_BN: Tensor) -> State:
    """The canvas with a draft in it."""
    tokens_BL, masked_BL = canvas.tokens_BL.clone(), canvas.masked_BL.clone()
    at = (valid_BN.nonzero()[:, 0], position_BN[valid_BN])
    tokens_BL[at], masked_BL[at] = token_BN[valid_BN], False
    return State(tokens_BL, canvas.real_BL, masked_BL, canvas.padded)


def _draw_coupled(
    base: Base, canvas: Canvas, position_BN: Tensor, valid_BN: Tensor, experts: Iterable[tuple[float, Logits]]
) -> Tensor:
    """argmax(sum of weight * log p + Gumbel noise) [B, N]; -1 where no token has a chance, or nothing was asked."""
    config, out_BN = canvas.config, torch.full_like(position_BN, -1)
    at_R = valid_BN.nonzero(as_tuple=True)
    used = [(weight, logits) for weight, logits in experts if weight]  # 0 * log 0
    token_V = torch.arange(base.spec.vocab_size, device=position_BN.device)
    for row_R, n_R in zip(*(part.split(max(1, rows_at_once(base) // _COPIES)) for part in at_R), strict=True):
        position_R = position_BN[row_R, n_R]
        parts = (weight * process(logits(row_R, position_R), config).log_softmax(-1) for weight, logits in used)
        score_RV = sum(parts, torch.zeros(()))
        if bool(score_RV.isnan().any()):
            raise FloatingPointError(f"base {base.spec.name!r} or its partner gave NaN ({base.dtype} on {base.device})")
        if config.temperature > 0:
            score_RV = score_RV + canvas.gumbels(position_R, row_R, token_V)
        best = score_RV.max(-1)
        out_BN[row_R, n_R] = best.indices.masked_fill(best.values.isneginf(), -1)
    return out_BN
