"""The releases' loops of block bases, Fast-dLLM v2's and SDAR's. Held to what the published code computes by tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import Logits, Score, commit_best, plain_logits, propose
from adjust_dlm.sampling import confidence, process
from adjust_dlm.types import is_number, require, require_count, require_kinds

Remasking = Literal["low_confidence_static", "low_confidence_dynamic", "sequential"]


@dataclass(frozen=True, kw_only=True)
class FastDllmOptions:
    """Settings of `fast_dllm`.

    Attributes:
        threshold: commit every token above this probability, and always the best one; from 1 on it is one a pass.
    """

    threshold: float = 1.0

    def __post_init__(self) -> None:
        _check_threshold("threshold", self.threshold)


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
        _check_threshold("confidence_threshold", self.confidence_threshold)


def _check_threshold(name: str, value: float) -> None:
    require(is_number(value) and 0 <= value < math.inf, f"{name} is {value}; it must be a finite number >= 0")


def fast_dllm(base: Base, canvas: Canvas, options: FastDllmOptions) -> None:
    """Fills the canvas; a pass commits the drawn tokens above the threshold, and always the best one.

    In a shifted block base a block's first token is the likeliest one at every temperature, and its pass commits no
    other. The release's sub-blocks are `block_length=8`.
    """
    score = _drawn(canvas)
    while canvas.open:
        logits = _likeliest_first(canvas, plain_logits(base, base.hidden(canvas), canvas))
        score_BL, token_BL = propose(base, canvas, canvas.open_BL, logits, score)
        first_BL = score_BL == torch.inf
        goes_BL = torch.where(first_BL.any(-1, keepdim=True), first_BL, score_BL > options.threshold)
        canvas.start_round(goes_BL.sum(-1).clamp_min(1))
        commit_best(canvas, score_BL, token_BL)


def sdar(base: Base, canvas: Canvas, options: SdarOptions) -> None:
    """Fills the canvas; passes of a block, or of all where there are none, commit as many tokens as the options say."""
    size = canvas.config.block_length or base.spec.block or canvas.config.max_new_tokens
    share, rest = divmod(size, options.denoising_steps)
    step_B, block_B = torch.zeros_like(canvas.commits_B), canvas.block_B
    score = _leftmost if options.remasking == "sequential" else _drawn(canvas)
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


def _drawn(canvas: Canvas) -> Score:
    """Probability of the drawn token, after temperature and filters; at T = 0 before them."""

    def score(logits_RV: Tensor, token_R: Tensor, _row_R: Tensor, _position_R: Tensor) -> Tensor:
        return confidence(process(logits_RV, canvas.config) if canvas.config.temperature else logits_RV, token_R)

    return score


def _leftmost(_logits_RV: Tensor, _token_R: Tensor, _row_R: Tensor, position_R: Tensor) -> Tensor:
    return -position_R


def _likeliest_first(canvas: Canvas, plain: Logits) -> Logits:
    """Logits that leave one token where a block's first position is scored by the block before."""
    lead_BL = canvas.lead_BL

    def logits(row_R: Tensor, position_R: Tensor) -> Tensor:
        out_RV, first_R = plain(row_R, position_R), lead_BL[row_R, position_R]
        best_RV = torch.zeros_like(out_RV, dtype=torch.bool).scatter_(1, out_RV.argmax(-1, keepdim=True), True)
        return out_RV.masked_fill(first_R[:, None] & ~best_RV, -torch.inf)

    return logits
