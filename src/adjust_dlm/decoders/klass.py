"""All tokens that the base is certain enough of, and has been of one mind about for some passes."""

from __future__ import annotations

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import Logits, Score, commit_best, plain_logits, propose
from adjust_dlm.losses import kl_rows
from adjust_dlm.options import KlassOptions
from adjust_dlm.sampling import confidence

_COPIES = 6  # of fp32 logits that a row takes here: this pass, the one before, and their logarithms


def klass(base: Base, canvas: Canvas, options: KlassOptions) -> None:
    """Fills the canvas; a pass commits all calm tokens of probability >= tau, or else the most certain one (KLASS).

    Both signs are read off the base's distributions before temperature and filters. A pass has no KL without one
    before it, so nothing is calm in the first, and `history` + 1 passes come before the first commit of several.

    Between passes the states [B, L, D] are kept and the head runs on them once more: V / D times smaller than the
    distributions they stand for, which exist one chunk at a time.
    """
    calm_BL = torch.zeros_like(canvas.tokens_BL)
    before, looked_BL = None, torch.zeros_like(canvas.masked_BL)
    while canvas.open:
        now = plain_logits(base, base.hidden(canvas), canvas)
        score = _watch(before, looked_BL, calm_BL, options.epsilon_kl)
        seen_BL = canvas.seen_BL
        score_BL, token_BL = propose(base, canvas, seen_BL, now, score, copies=_COPIES)
        score_BL = score_BL.masked_fill(~canvas.open_BL, -torch.inf)
        calm_score_BL = score_BL.where(calm_BL >= options.history, score_BL.clamp_max(-1))  # below any tau
        ready_BL = canvas.lead(calm_score_BL) >= options.tau
        held_BL = ready_BL.any(-1, keepdim=True) & ~ready_BL
        canvas.start_round(ready_BL.sum(-1).clamp_min(1))
        commit_best(canvas, score_BL.masked_fill(held_BL, -torch.inf), token_BL)
        before, looked_BL = now, seen_BL


def _watch(before: Logits | None, looked_BL: Tensor, calm_BL: Tensor, epsilon_kl: float) -> Score:
    """The probability of drawn tokens; on the way, `calm_BL` counts the passes in a row that changed little.

    `looked_BL` are the positions that the pass before looked at.
    """

    def score(logits_RV: Tensor, token_R: Tensor, row_R: Tensor, position_R: Tensor) -> Tensor:
        if before is not None:
            calm_R = looked_BL[row_R, position_R] & (kl_rows(logits_RV, before(row_R, position_R)) < epsilon_kl)
            calm_BL[row_R, position_R] = torch.where(calm_R, calm_BL[row_R, position_R] + 1, 0)
        return confidence(logits_RV, token_R)

    return score
