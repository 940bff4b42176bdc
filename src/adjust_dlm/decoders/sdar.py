"""SDAR's loop. Held to what the published code computes by tests."""

from __future__ import annotations

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import commit_best, drawn_probability, plain_logits, propose
from adjust_dlm.options import SdarOptions


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
        wanted_B = (share + (step_B % options.denoising_steps < rest)).clamp_min(1)
        if options.remasking == "low_confidence_dynamic":
            wanted_B = torch.maximum(wanted_B, (score_BL > options.confidence_threshold).sum(-1))
        canvas.start_round(wanted_B)
        commit_best(canvas, score_BL, token_BL)
        step_B = step_B + 1


def _leftmost(_logits_RV: Tensor, _token_R: Tensor, _row_R: Tensor, position_R: Tensor) -> Tensor:
    return -position_R
