"""A token for every open position at once, and the commit of the best: what the rules without a sampler share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adjust_dlm.bases import Base, Partner
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks
from adjust_dlm.decoders.machinery.pick import refuse_nan, rows_at_once
from adjust_dlm.sampling import DRAW, confidence, draw, process

Logits = Callable[[Tensor, Tensor], Tensor]  # (row [R], position [R]) -> fp32 logits [R, V]
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (logits [R, V], token [R], row [R], position [R]) -> [R]
Allowed = Callable[[Tensor, Tensor], Tensor]  # scores, falling, -inf behind the last, positions -> which ranks may go


def plain_logits(model: Base | Partner, h_BLD: Tensor, canvas: Canvas) -> Logits:
    """A model's own logits of states."""

    def logits(row_R: Tensor, position_R: Tensor) -> Tensor:
        return model.logits(model.at(h_BLD, canvas, row_R, position_R), suppress_eos=canvas.config.suppress_eos)

    return logits


def propose(
    base: Base, canvas: Canvas, open_BL: Tensor, logits: Logits, score: Score, *, stream: int = DRAW, copies: int = 1
) -> tuple[Tensor, Tensor]:
    """A token and its score for every open position: scores [B, L] (-inf elsewhere) and tokens [B, L].

    `score` holds so many `copies` of a chunk's logits at a time.

    Raises:
        FloatingPointError: the states gave NaN or infinite logits.
    """
    config, token_BL = canvas.config, canvas.tokens_BL.clone()
    score_BL = torch.full(open_BL.shape, -torch.inf, dtype=torch.float64, device=open_BL.device)
    row_R, position_R = open_BL.nonzero(as_tuple=True)
    chunk = max(1, rows_at_once(base) // copies)
    for row, position in zip(row_R.split(chunk), position_R.split(chunk), strict=True):
        logits_RV = logits(row, position)
        refuse_nan(base, logits_RV=logits_RV)
        processed_RV = process(logits_RV, config)
        token_R = draw(processed_RV, canvas.uniforms(position, row, stream), config.temperature)
        canvas.note_chance(row, position, processed_RV, token_R)
        token_BL[row, position] = token_R
        score_BL[row, position] = score(logits_RV, token_R, row, position).double()
    return canvas.lead(score_BL), token_BL


def commit_best(canvas: Canvas, score_BL: Tensor, token_BL: Tensor) -> None:
    """Commits the positions of each row that score best, as many as its quota; ties go to the lowest position."""
    most = max(1, int(canvas.quota_B.max()))
    position_BN = score_BL.sort(dim=-1, descending=True, stable=True).indices[:, :most]
    valid_BN = score_BL.gather(1, position_BN) > -torch.inf
    canvas.commit(Picks(position_BN, token_BL.gather(1, position_BN), valid_BN))


def probability(logits_RV: Tensor, token_R: Tensor, _row_R: Tensor, _position_R: Tensor) -> Tensor:
    """The score of the confidence rules: that of the drawn token, before temperature and filters."""
    return confidence(logits_RV, token_R)


def drawn_probability(canvas: Canvas) -> Score:
    """Probability of the drawn token, after temperature and filters; at T = 0 before them."""

    def score(logits_RV: Tensor, token_R: Tensor, _row_R: Tensor, _position_R: Tensor) -> Tensor:
        return confidence(process(logits_RV, canvas.config) if canvas.config.temperature else logits_RV, token_R)

    return score


def largest_probability(logits_RV: Tensor, _token_R: Tensor, _row_R: Tensor, _position_R: Tensor) -> Tensor:
    """That of the likeliest token, before temperature and filters: a function of the canvas, whatever is drawn."""
    return logits_RV.softmax(-1).amax(-1)


def fill_by_rule(base: Base, canvas: Canvas, score: Score, allowed: Allowed) -> None:
    """Fills the canvas: pass after pass, the longest allowed prefix of each row's ranking; the first of it always."""
    while canvas.open:
        h_BLD = base.hidden(canvas)
        score_BL, token_BL = propose(base, canvas, canvas.open_BL, plain_logits(base, h_BLD, canvas), score)
        ranked_BN, position_BN = score_BL.sort(dim=-1, descending=True, stable=True)
        prefix_BN = (allowed(ranked_BN, position_BN) & (ranked_BN > -torch.inf)).cumprod(-1)
        canvas.start_round(prefix_BN.sum(-1).clamp_min(1))
        commit_best(canvas, score_BL, token_BL)
