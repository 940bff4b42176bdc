"""Whole completions from the base's marginals; the one that an autoregressive partner prefers is committed in part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adjust_dlm.bases import Base, Partner
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.pick import refuse_nan, rows_at_once
from adjust_dlm.decoders.machinery.proposals import commit_best, plain_logits
from adjust_dlm.options import EdlmOptions
from adjust_dlm.sampling import DRAW, ORDER, SCORES, confidence, draw, process
from adjust_dlm.types import GIVEN, OrderRule, State

_CHOICE = ORDER + 1  # stream of the choice among completions; those after the first draw from the streams behind it
_NEVER = -1e4  # log of a chance of zero: further than all others, and finite


class Completions(NamedTuple):
    """C ways to fill the canvas: tokens, log q of each under its marginal (0 where nothing was masked), order score."""

    token_CBL: Tensor
    log_q_CBL: Tensor
    score_CBL: Tensor


def edlm(base: Base, partner: Partner, canvas: Canvas, options: EdlmOptions) -> None:
    """Fills the canvas; a round completes it several times, keeps one completion, and commits its K best positions.

    The rule "best" keeps argmin_c E_c with E = -log p_AR(x) a token, "resample" draws c with probability
    softmax(-E_c / temperature) and E = -log p_AR(x) + log q(x), q the product of the marginals that x was drawn from:
    with many completions, c follows p_AR given the canvas. Positions count from the first mask of the row on, tokens
    of earlier rounds too (their chance depends on new tokens left of them), up to the first end token, where the text
    ends. Without end tokens all completions of a row are of one length, and mean and sum order them alike.
    """
    first_B = (canvas.order_BL != GIVEN).sum(-1)
    row_B = torch.arange(len(first_B), device=first_B.device)
    while canvas.open:
        h_BLD = base.hidden(canvas)
        canvas.start_round()
        made = _complete(base, h_BLD, canvas, options.completions)
        share_B = canvas.masked_BL.sum(-1).double() / first_B
        inside_B = (options.window_end <= share_B) & (share_B <= options.window_start)
        asking_R = (canvas.busy_B & (inside_B | (options.rule == "best")) & (options.completions > 1)).nonzero()[:, 0]
        kept_B = torch.zeros_like(row_B)
        if len(asking_R):
            kept_B[asking_R] = _choose(canvas, _energies(partner, canvas, made, asking_R, options), asking_R, options)
        score_BL = canvas.lead(made.score_CBL[kept_B, row_B].masked_fill(~canvas.open_BL, -torch.inf))
        commit_best(canvas, score_BL, made.token_CBL[kept_B, row_B])


def _complete(base: Base, h_BLD: Tensor, canvas: Canvas, count: int) -> Completions:
    """Draws every masked position `count` times; the first time as `parallel` does.

    Raises:
        FloatingPointError: the states gave NaN or infinite logits.
    """
    config, logits = canvas.config, plain_logits(base, h_BLD, canvas)
    rule = canvas.rule
    on_processed = canvas.on_processed
    token_CBL = canvas.tokens_BL.repeat(count, 1, 1)
    log_q_CBL = torch.zeros_like(token_CBL, dtype=torch.float64)
    score_CBL = torch.full_like(log_q_CBL, -torch.inf)
    row_R, position_R = (canvas.seen_BL & canvas.busy_B[:, None]).nonzero(as_tuple=True)
    chunk = rows_at_once(base)
    for row, position in zip(row_R.split(chunk), position_R.split(chunk), strict=True):
        raw_RV = logits(row, position)
        refuse_nan(base, logits_RV=raw_RV)
        processed_RV = process(raw_RV, config)
        log_total_R = processed_RV.logsumexp(-1)
        seen_RV = processed_RV if on_processed else raw_RV
        for c in range(count):
            u_R = canvas.uniforms(position, row, DRAW if c == 0 else _CHOICE + c)
            token_R = draw(processed_RV, u_R, config.temperature)
            log_q_CBL[c, row, position] = (processed_RV.gather(-1, token_R[:, None])[:, 0] - log_total_R).double()
            token_CBL[c, row, position] = token_R
            if c == 0 or rule == "confidence":  # the other rules do not look at tokens
                score_CBL[c:, row, position] = _order(canvas, rule, seen_RV, token_R, row, position).double()
    return Completions(token_CBL, log_q_CBL, score_CBL)


def _order(
    canvas: Canvas, rule: OrderRule, seen_RV: Tensor, token_R: Tensor, row_R: Tensor, position_R: Tensor
) -> Tensor:
    """The order rule's score of positions whose tokens are drawn already: fp32 [R]."""
    if rule == "left_to_right":
        return -position_R.float()
    if rule == "random":
        return canvas.uniforms(position_R, row_R, ORDER).float()
    return confidence(seen_RV, token_R) if rule == "confidence" else SCORES[rule](seen_RV)


def _energies(partner: Partner, canvas: Canvas, made: Completions, asking_R: Tensor, options: EdlmOptions) -> Tensor:
    """E of every completion of the asking rows: float64 [C, R]; books a partner pass for each.

    Raises:
        FloatingPointError: the partner gave NaN.
    """
    count, spec = len(made.token_CBL), partner.spec
    canvas.partner_calls_B[asking_R] += count
    token_NL, log_q_NL = made.token_CBL[:, asking_R].flatten(0, 1), made.log_q_CBL[:, asking_R].flatten(0, 1)
    real_NL, new_NL, masked_NL = (
        part_BL[asking_R].repeat(count, 1) for part_BL in (canvas.real_BL, canvas.order_BL != GIVEN, canvas.seen_BL)
    )
    end_NL = torch.isin(token_NL, torch.tensor(spec.end_ids, device=token_NL.device, dtype=torch.long)) & new_NL
    text_NL = (token_NL != spec.mask_id) & (new_NL.cumsum(-1) > 0) & (end_NL.long().cumsum(-1) - end_NL.long() == 0)
    counted_NL = masked_NL if options.as_released else text_NL
    h_NLD = partner.hidden(State(token_NL, real_NL, torch.zeros_like(real_NL), padded=canvas.padded))
    log_p_NL = torch.zeros_like(log_q_NL)
    row_R, position_R = counted_NL.nonzero(as_tuple=True)
    chunk = rows_at_once(canvas.base)
    for row, position in zip(row_R.split(chunk), position_R.split(chunk), strict=True):
        logits_RV = partner.logits(h_NLD[row, position], suppress_eos=canvas.config.suppress_eos)
        log_p_R = logits_RV.log_softmax(-1).gather(-1, token_NL[row, position][:, None])[:, 0]
        log_p_NL[row, position] = log_p_R.double().clamp_min(_NEVER)
    if bool(log_p_NL.isnan().any()):
        raise FloatingPointError(f"partner {partner.name!r} gave NaN")
    if options.rule == "best":
        energy_N = -log_p_NL.sum(-1) / counted_NL.sum(-1)
    else:
        energy_N = (log_q_NL * counted_NL - log_p_NL).sum(-1)
    return energy_N.view(count, -1)


def _choose(canvas: Canvas, energy_CR: Tensor, asking_R: Tensor, options: EdlmOptions) -> Tensor:
    """Which completion each asking row keeps: int64 [R]; of equal energies the first."""
    if options.rule == "best":
        return energy_CR.argmin(0)
    sign = 1 if options.as_released else -1
    start_R = canvas.real_BL[asking_R].long().argmax(-1)
    u_R = canvas.uniforms(start_R, asking_R, _CHOICE)
    return draw(sign * energy_CR.T / options.importance_temperature, u_R, 1.0)
