"""Fast-dLLM v2's loop. Held to what the published code computes by tests."""

from __future__ import annotations

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import Logits, commit_best, drawn_probability, plain_logits, propose
from adjust_dlm.options import FastDllmOptions


def fast_dllm(base: Base, canvas: Canvas, options: FastDllmOptions) -> None:
    """Fills the canvas; a pass commits the drawn tokens above the threshold, and always the best one.

    In a shifted block base a block's first token is the likeliest one at every temperature, and its pass commits no
    other. The release's sub-blocks are `block_length=8`.
    """
    score = drawn_probability(canvas)
    while canvas.open:
        logits = _likeliest_first(canvas, plain_logits(base, base.hidden(canvas), canvas))
        score_BL, token_BL = propose(base, canvas, canvas.open_BL, logits, score)
        first_BL = score_BL == torch.inf
        goes_BL = torch.where(first_BL.any(-1, keepdim=True), first_BL, score_BL > options.threshold)
        canvas.start_round(goes_BL.sum(-1).clamp_min(1))
        commit_best(canvas, score_BL, token_BL)


def _likeliest_first(canvas: Canvas, plain: Logits) -> Logits:
    """Logits that leave one token where a block's first position is scored by the block before."""
    lead_BL = canvas.lead_BL

    def logits(row_R: Tensor, position_R: Tensor) -> Tensor:
        out_RV, first_R = plain(row_R, position_R), lead_BL[row_R, position_R]
        best_RV = torch.zeros_like(out_RV, dtype=torch.bool).scatter_(1, out_RV.argmax(-1, keepdim=True), True)
        return out_RV.masked_fill(first_R[:, None] & ~best_RV, -torch.inf)

    return logits
