"""LLaDA's `generate`: guidance and end token switches. Held to what the published code computes by tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import Logits, Score, commit_best, plain_logits, propose
from adjust_dlm.sampling import ORDER, confidence
from adjust_dlm.types import GIVEN, State, require, require_kinds

EndSwitch = Literal["off", "faithful", "sane"]


@dataclass(frozen=True, kw_only=True)
class GuidedOptions:
    """Settings of `guided`.

    Attributes:
        cfg_scale: w >= 0 of un + (w + 1)(cond - un); costs a second pass.
        logits_eos_inf: never draw the EOS token.
        confidence_eos_eot_inf: commit EOS and EOT last. "faithful" does what the release does, where at T > 0 EOS keeps
            its confidence; "sane" holds both back at every T and under every order.
        eos_eot: ids of these two; None: the base's first two end ids (EOT is EOS where there is one only).
    """

    cfg_scale: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: EndSwitch = "off"
    eos_eot: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        ids: Any = self.eos_eot
        pair = ids is None or (isinstance(ids, list | tuple) and [type(i) for i in ids] == [int, int])
        require(pair, f"eos_eot is {ids!r}; it must be two token ids, or none")
        object.__setattr__(self, "eos_eot", ids and tuple(ids))  # a list in a file
        require_kinds(self)
        scale = self.cfg_scale
        require(0 <= scale < math.inf, f"cfg_scale is {scale}; it must be a finite number >= 0")


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
