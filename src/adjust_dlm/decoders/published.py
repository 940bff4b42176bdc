"""Loops of the public releases that the other decoders do not have: `origin`, `soft_order` and `blocks`.

`origin` and `soft_order` are Dream's `alg="origin"` and `alg_temp`; `blocks` is LLaDA's `generate` with its blocks,
guidance and end token switches. Tests hold them to what the published code computes. Steps are ceil(new tokens /
`tokens_per_step`), the releases' own when they divide. Every random number comes from `Canvas.uniforms`, so a row does
not depend on its batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.canvas import Canvas
from adjust_dlm.decoders.proposals import Logits, Score, commit_best, plain_logits, propose
from adjust_dlm.sampling import ORDER, confidence, score_rows
from adjust_dlm.types import GIVEN, State, require

EndSwitch = Literal["off", "faithful", "sane"]

_STEP = ORDER + 1  # the first of the streams that `origin` takes, one for each step


@dataclass(frozen=True, kw_only=True)
class PublishedConfig:
    """Settings of the releases that `DecodeConfig` does not have.

    Attributes:
        eps: `origin`: the time at which its steps end, in [0, 1).
        alg_temp: `soft_order`: temperature of the choice of positions; 0 takes the best ones.
        block_length: `blocks`: new tokens of a block, left to right; None is one block.
        cfg_scale: `blocks`: w >= 0 of un + (w + 1)(cond - un); costs a second pass.
        logits_eos_inf: `blocks`: never draw the EOS token.
        confidence_eos_eot_inf: `blocks`: commit EOS and EOT last. "faithful" does what the release does, where at
            T > 0 EOS keeps its confidence; "sane" holds both back at every T and under every order.
        eos_eot: ids of these two; None: the base's first two end ids (EOT is EOS where there is one only).
    """

    eps: float = 1e-3
    alg_temp: float = 0.0
    block_length: int | None = None
    cfg_scale: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: EndSwitch = "off"
    eos_eot: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        require(0 <= self.eps < 1, f"eps is {self.eps}; it must lie in [0, 1)")
        for name in ("alg_temp", "cfg_scale"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"{name} is {value}; it must be a finite number >= 0")
        require(
            self.block_length is None or self.block_length >= 1,
            f"block_length is {self.block_length}; it must be at least 1",
        )
        known = get_args(EndSwitch)
        require(
            self.confidence_eos_eot_inf in known,
            f"confidence_eos_eot_inf is {self.confidence_eos_eot_inf!r}; it must be one of {', '.join(known)}",
        )


DEFAULTS = PublishedConfig()


def origin(base: Base, canvas: Canvas, options: PublishedConfig = DEFAULTS) -> None:
    """Fills the canvas at random: each masked position on its own, with probability 1 - s/t.

    t and s are neighbours on linspace(1, eps, steps + 1); the last step takes all that is left. The rule for the
    next position plays no part. A step that commits nothing is a pass all the same.
    """
    steps = -(-canvas.config.max_new_tokens // canvas.config.tokens_per_step)
    times = torch.linspace(1, options.eps, steps + 1)
    for step in range(steps):
        if not canvas.open:
            return
        h_BLD = base.hidden(canvas)
        canvas.start_round()
        share = 1 - float(times[step + 1] / times[step]) if step < steps - 1 else 1.0
        row_R, position_R = canvas.masked_BL.nonzero(as_tuple=True)
        chosen_R = canvas.uniforms(position_R, row_R, _STEP + step) < share
        chosen_BL = torch.zeros_like(canvas.masked_BL)
        chosen_BL[row_R, position_R] = chosen_R
        score_BL, token_BL = propose(base, canvas, chosen_BL, plain_logits(base, h_BLD, canvas), _any_order)
        canvas.quota_B = chosen_BL.sum(-1)
        commit_best(canvas, score_BL, token_BL)


def soft_order(base: Base, canvas: Canvas, options: PublishedConfig = DEFAULTS) -> None:
    """Fills the canvas, positions drawn without replacement from softmax(certainty / alg_temp).

    The n largest of certainty / alg_temp + Gumbel noise are such a draw. Counts are the canvas's own (see `schedule`).

    Raises:
        InputError: the order rule does not look at logits.
    """
    rule = canvas.config.order or base.spec.order
    require(rule in ("entropy", "confidence", "margin"), f"order is {rule!r}; alg_temp needs a certainty to soften")
    on_processed = (canvas.config.order_on or base.spec.order_on) == "processed"

    def certainty(logits_RV: Tensor, _token_R: Tensor, row_R: Tensor, position_R: Tensor) -> Tensor:
        u_R = canvas.uniforms(position_R, row_R)
        score_R = score_rows(logits_RV, u_R, rule, on_processed=on_processed, config=canvas.config).double()
        if options.alg_temp == 0:
            return score_R
        noise_R = canvas.uniforms(position_R, row_R, ORDER).clamp_min(2.0**-33)  # finite for u = 0 too
        return score_R / options.alg_temp - (-noise_R.log()).log()

    while canvas.open:
        h_BLD = base.hidden(canvas)
        canvas.start_round()
        score_BL, token_BL = propose(base, canvas, canvas.masked_BL, plain_logits(base, h_BLD, canvas), certainty)
        commit_best(canvas, score_BL, token_BL)


def blocks(base: Base, canvas: Canvas, options: PublishedConfig = DEFAULTS) -> None:
    """Fills the canvas block by block, the most confident positions of a block first.

    Counts are the base's published ones for each row and block, confidence is that of the drawn token on logits
    before temperature and filters, or a random number (order "random"). Masks inside the prompt belong to the first
    block. With `cfg_scale` a step is two passes, and two are booked.

    Raises:
        InputError: blocks do not divide the new tokens; another order rule; a switch for a base without end tokens.
    """
    new, rule = canvas.config.max_new_tokens, canvas.config.order or base.spec.order
    length = options.block_length or new
    require(new % length == 0, f"block_length is {length}; it must divide the {new} new tokens")
    require(rule in ("confidence", "random"), f"order is {rule!r}; blocks know confidence and random")
    steps = -(-length // canvas.config.tokens_per_step)
    score = _block_score(base, canvas, options)
    first = canvas.tokens_BL.shape[1] - new + length
    for end in range(first, first + new, length):
        masked = canvas.masked_BL[:, :end].sum(-1).tolist()
        count_SB = torch.tensor([base.reference_schedule(m, steps) for m in masked], device=base.device).T
        for count_B in count_SB:
            if not canvas.masked_BL[:, :end].any():
                break
            logits = _guided(base, canvas, options)
            open_BL = canvas.masked_BL.clone()
            open_BL[:, end:] = False
            canvas.start_round(count_B.minimum(open_BL.sum(-1)))
            commit_best(canvas, *propose(base, canvas, open_BL, logits, score))


def _any_order(_logits_RV: Tensor, token_R: Tensor, _row_R: Tensor, _position_R: Tensor) -> Tensor:
    """Equal scores: all are committed, from left to right."""
    return torch.zeros_like(token_R)


def _block_score(base: Base, canvas: Canvas, options: PublishedConfig) -> Score:
    """Certainty of drawn tokens in `blocks`, end tokens held back as asked.

    The release blanks EOS on the logits that the noise was added to, and EOT on the plain ones. Only the plain ones
    are read afterwards; at T=0 both are one tensor. Under the random order it does nothing.
    """
    switch, is_random = options.confidence_eos_eot_inf, (canvas.config.order or base.spec.order) == "random"
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


def _ends(base: Base, options: PublishedConfig) -> tuple[int, int]:
    """(EOS, EOT)."""
    if options.eos_eot is not None:
        return options.eos_eot
    ends = base.spec.end_ids
    require(bool(ends), f"base {base.spec.name!r} has no end tokens; name them with eos_eot")
    return ends[0], ends[:2][-1]


def _guided(base: Base, canvas: Canvas, options: PublishedConfig) -> Logits:
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
