"""SDAR's loop. Held to what the published code computes by tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import commit_best, drawn_probability, plain_logits, propose
from adjust_dlm.types import is_number, require, require_count, require_kinds

Remasking = Literal["low_confidence_static", "low_confidence_dynamic", "sequential"]


@dataclass(frozen=True, kw_only=True)
class SdarOptions:
    """Settings of `sdar`.

    Attributes:
        remasking: "low_confidence_static" commits the n best tokens of a pass; "low_confidence_dynamic" all above the
            threshold if these are more; "sequential" the n leftmost.
        denoising_steps: D; pass t of a block of S has n = S // D, one more if t < S % D, and at least 1.
        confidence_threshold: of "low_confidence_dynamic".
    """

    remasking: Remasking = "low_confidence_dynamic"
    denoising_steps: int = 4
    confidence_threshold: float = 0.85

    def __post_init__(self) -> None:
        require_kinds(self)
        require_count("denoising_steps", self.denoising_steps, 1)
        value = self.confidence_threshold
        require(
            is_number(value) and 0 <= value < math.inf,
            f"confidence_threshold is {value}; it must be a finite number >= 0",
        )


def sdar(base: Base, canvas: Canvas, options: SdarOptions) -> None:
    """Fills the canvas; passes of a block, or of all where there are none, commit as many tokens as the options say."""
    size = canvas.config.block_length or base.spec.block or canvas.config.max_new_tokens
    share, rest = divmod(size, options.denoising_steps)
    step_B, block_B = torch.zeros_like(canvas.commits_B), canvas.block_B
    score = _leftmost if options.remasking == "sequential" else drawn_probability(canvas)
    while canvas.open:
        step_B, block_B = torch.where(canvas.block_B == block_B, step_B, 0), canvas.block_B
        logits = plain_logits(base, base.hidden(canvas), canvas)
        score_BL, token_BL = propose(base, canvas, canvas.open_BL, logits, score)
        wanted_B = (share + (step_B < rest)).clamp_min(1)
        if options.remasking == "low_confidence_dynamic":
            wanted_B = torch.maximum(wanted_B, (score_BL > options.confidence_threshold).sum(-1))
        canvas.start_round(wanted_B)
        commit_best(canvas, score_BL, token_BL)
        step_B = step_B + 1


def _leftmost(_logits_RV: Tensor, _token_R: Tensor, _row_R: Tensor, position_R: Tensor) -> Tensor:
    return -position_R
