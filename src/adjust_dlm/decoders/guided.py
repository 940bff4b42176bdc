"""LLaDA's `generate`: guidance and end token switches. Held to what the published code computes by tests."""

from __future__ import annotations

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import Logits, Score, commit_best, plain_logits, propose
from adjust_dlm.options import GuidedOptions
from adjust_dlm.sampling import ORDER, confidence
from adjust_dlm.types import GIVEN, State, require


def guided(base: Base, canvas: Canvas, options: GuidedOptions) -> None:
    """Fills the canvas, the most confident positions first; with `cfg_scale` a step is two passes, and two are booked.

    Confidence is that of the drawn token on logits before temperature and filters, or a random number (order
    "random"). Blocks and their published step counts are settings of every decoder: `block_length`, `schedule`.

    Raises:
        InputError: another order rule; a switch for a base without end tokens.
    """
    rule = canvas.rule
    require(rule in ("confidence", "random"), f"order is {rule!r}; guided knows confidence and random")
    score = _score(base, canvas, options)
    while canvas.open:
        logits = _guided(base, canvas, options)
        canvas.start_round()
        commit_best(canvas, *propose(base, canvas, canvas.open_BL, logits, score))


def _score(base: Base, canvas: Canvas, options: GuidedOptions) -> Score:
    """Certainty of drawn tokens, end tokens held back as asked.

    The release blanks EOS on the logits that the noise was added to, and EOT on the plain ones. Only the plain ones
    are read afterwards; at T=0 both are one tensor. Under the random order it does nothing.
    """
    switch, is_random = options.confidence_eos_eot_inf, canvas.rule == "random"
    held = [] if switch == "off" else list(_ends(base, options))
    if switch == "faithful" and canvas.config.temperature > 0:
        held = held[1:]

    def score(logits_RV: Tensor, token_R: Tensor, row_R: Tensor, position_R: Tensor) -> Tensor:
        held_H = torch.tensor(held, device=token_R.device, dtype=torch.long)
        if not is_random:
            return confidence(logits_RV.index_fill(1, held_H, -torch.inf), token_R)
        score_R = canvas.uniforms(position_R, row_R, ORDER)
        return score_R - torch.isin(token_R, held_H).double() if switch == "sane" else score_R

    return score


def _ends(base: Base, options: GuidedOptions) -> tuple[int, int]:
    """(EOS, EOT)."""
    if options.eos_eot is not None:
        eos, eot = options.eos_eot
        wrong = [i for i in (eos, eot) if not 0 <= i < base.spec.vocab_size]
        require(not wrong, f"eos_eot holds {wrong[:1]}; ids run from 0 to {base.spec.vocab_size - 1}")
        return eos, eot
    ends = base.spec.end_ids
    require(bool(ends), f"base {base.spec.name!r} has no end tokens; name them with eos_eot")
    return ends[0], ends[:2][-1]


def _guided(base: Base, canvas: Canvas, options: GuidedOptions) -> Logits:
    """One pass, or two with guidance: un + (w + 1)(cond - un), un with the prompt masked."""
    cond, scale = plain_logits(base, base.hidden(canvas), canvas), options.cfg_scale
    un = None
    if scale > 0:
        given_BL = canvas.order_BL == GIVEN
        tokens_BL = canvas.tokens_BL.masked_fill(given_BL, base.spec.mask_id)
        bare = State(tokens_BL, canvas.real_BL, canvas.masked_BL | (given_BL & canvas.real_BL), padded=canvas.padded)
        un = plain_logits(base, base.hidden(bare), canvas)
        canvas.base_calls_B += canvas.open_B

    def logits(row_R: Tensor, position_R: Tensor) -> Tensor:
        out_RV = cond(row_R, position_R)
        if un is not None:
            un_RV, forbidden_RV = un(row_R, position_R), out_RV.isneginf()
            out_RV = (un_RV + (scale + 1) * (out_RV - un_RV)).masked_fill(forbidden_RV, -torch.inf)
        if options.logits_eos_inf:
            out_RV[:, _ends(base, options)[0]] = -torch.inf
        return out_RV

    return logits
