"""All tokens that the base is certain enough of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import fill_by_rule, largest_probability, probability
from adjust_dlm.types import is_number, require


@dataclass(frozen=True, kw_only=True)
class ThresholdOptions:
    """Settings of `threshold`.

    Attributes:
        tau: commit every token with at least this probability; above 1 it is one token a pass.
        score: whose probability that is: "drawn", the token's own (the release's rule), or "likeliest", that of the
            position's likeliest token, so that what was drawn does not decide whether it stays. The same at T = 0.
    """

    tau: float = 0.9
    score: Literal["drawn", "likeliest"] = "drawn"

    def __post_init__(self) -> None:
        require(is_number(self.tau) and 0 < self.tau < math.inf, f"tau is {self.tau}; it must be a number above 0")
        require(self.score in ("drawn", "likeliest"), f"score is {self.score!r}; it must be drawn or likeliest")


def threshold(base: Base, canvas: Canvas, options: ThresholdOptions) -> None:
    """Fills the canvas; a pass commits all drawn tokens of probability >= tau (Fast-dLLM's confidence threshold)."""
    score = probability if options.score == "drawn" else largest_probability
    fill_by_rule(base, canvas, score, lambda score_BN, _: score_BN >= options.tau)
