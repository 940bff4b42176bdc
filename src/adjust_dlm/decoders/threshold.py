"""All tokens that the base is certain enough of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adjust_dlm.bases import Base
from adjust_dlm.decoders.canvas import Canvas
from adjust_dlm.decoders.proposals import fill_by_rule, probability
from adjust_dlm.types import is_number, require


@dataclass(frozen=True, kw_only=True)
class ThresholdOptions:
    """Settings of `threshold`.

    Attributes:
        tau: commit every token with at least this probability; above 1 it is one token a pass.
    """

    tau: float = 0.9

    def __post_init__(self) -> None:
        require(is_number(self.tau) and 0 < self.tau < math.inf, f"tau is {self.tau}; it must be a number above 0")


def threshold(base: Base, canvas: Canvas, options: ThresholdOptions) -> None:
    """Fills the canvas; a pass commits all drawn tokens of probability >= tau (Fast-dLLM's confidence threshold)."""
    fill_by_rule(base, canvas, probability, lambda score_BN: score_BN >= options.tau)
