"""The most tokens whose joint probability a bound on their product allows."""

from __future__ import annotations

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import fill_by_rule, probability
from adjust_dlm.options import FactorOptions


def factor(base: Base, canvas: Canvas, options: FactorOptions) -> None:
    """Fills the canvas; a pass commits the most certain n tokens while (n + 1) (1 - p_n) < f (Fast-dLLM's factor)."""

    def allowed(score_BN: Tensor, _position_BN: Tensor) -> Tensor:
        n_N = torch.arange(1, score_BN.shape[1] + 1, device=score_BN.device)
        return (n_N + 1) * (1 - score_BN) < options.f

    fill_by_rule(base, canvas, probability, allowed)
