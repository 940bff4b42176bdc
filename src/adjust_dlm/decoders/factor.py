"""The most tokens whose joint probability a bound on their product allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import fill_by_rule, probability
from adjust_dlm.types import is_number, require


@dataclass(frozen=True, kw_only=True)
class FactorOptions:
    """Settings of `factor`.

    Attributes:
        f: commit the n most certain tokens while (n + 1) (1 - p_n) < f, p_n the n-th probability.
    """

    f: float = 1.0

    def __post_init__(self) -> None:
        require(is_number(self.f) and 0 <= self.f < math.inf, f"f is {self.f}; it must be a number >= 0")


def factor(base: Base, canvas: Canvas, options: FactorOptions) -> None:
    """Fills the canvas; a pass commits the most certain n tokens while (n + 1) (1 - p_n) < f (Fast-dLLM's factor)."""

    def allowed(score_BN: Tensor, _position_BN: Tensor) -> Tensor:
        n_N = torch.arange(1, score_BN.shape[1] + 1, device=score_BN.device)
        return (n_N + 1) * (1 - score_BN) < options.f

    fill_by_rule(base, canvas, probability, allowed)
