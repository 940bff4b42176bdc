"""All tokens that the base is certain enough of: by a threshold, a factor or a budget of entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import fill_by_rule, largest_probability, probability
from adjust_dlm.sampling import negative_entropy, process
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
    fill_by_rule(base, canvas, score, lambda score_BN: score_BN >= options.tau)


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

    def allowed(score_BN: Tensor) -> Tensor:
        n_N = torch.arange(1, score_BN.shape[1] + 1, device=score_BN.device)
        return (n_N + 1) * (1 - score_BN) < options.f

    fill_by_rule(base, canvas, probability, allowed)


@dataclass(frozen=True, kw_only=True)
class EntropyBoundOptions:
    """Settings of `entropy_bound`.

    Attributes:
        gamma: nats; what the entropies of a pass's tokens, the largest left out, may sum to.
    """

    gamma: float = 0.1

    def __post_init__(self) -> None:
        require(is_number(self.gamma) and self.gamma >= 0, f"gamma is {self.gamma}; it must be a number >= 0")


def entropy_bound(base: Base, canvas: Canvas, options: EntropyBoundOptions) -> None:
    """Fills the canvas; a pass commits the largest set U of lowest entropy with sum H - max H <= gamma (EB-Sampler).

    The left side bounds the KL between the joint law of the set and the product of its marginals. Ranked by entropy,
    the largest of a prefix is its last.
    """
    on_processed = canvas.on_processed

    def certainty(logits_RV: Tensor, _token_R: Tensor, _row_R: Tensor, _position_R: Tensor) -> Tensor:
        return negative_entropy(process(logits_RV, canvas.config) if on_processed else logits_RV)

    def allowed(score_BN: Tensor) -> Tensor:
        entropy_BN = -score_BN
        before_BN = entropy_BN.masked_fill(entropy_BN.isinf(), 0).cumsum(-1) - entropy_BN
        return before_BN <= options.gamma

    fill_by_rule(base, canvas, certainty, allowed)
