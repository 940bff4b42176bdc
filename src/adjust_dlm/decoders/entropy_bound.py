"""The most tokens whose entropies a budget allows."""

from __future__ import annotations

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import fill_by_rule
from adjust_dlm.options import EntropyBoundOptions
from adjust_dlm.sampling import negative_entropy, process


def entropy_bound(base: Base, canvas: Canvas, options: EntropyBoundOptions) -> None:
    """Fills the canvas; a pass commits the largest set U of lowest entropy with sum H - max H <= gamma (EB-Sampler).

    The left side bounds the KL between the joint law of the set and the product of its marginals.
    """
    on_processed = canvas.on_processed
    entropy_BL = torch.zeros(canvas.tokens_BL.shape, dtype=torch.float64, device=canvas.tokens_BL.device)

    def certainty(logits_RV: Tensor, _token_R: Tensor, row_R: Tensor, position_R: Tensor) -> Tensor:
        score_R = negative_entropy(process(logits_RV, canvas.config) if on_processed else logits_RV)
        entropy_BL[row_R, position_R] = -score_R.double()
        return score_R

    def allowed(_score_BN: Tensor, position_BN: Tensor) -> Tensor:
        entropy_BN = entropy_BL.gather(1, position_BN)
        return entropy_BN.cumsum(-1) - entropy_BN.cummax(-1).values <= options.gamma

    fill_by_rule(base, canvas, certainty, allowed)
