"""How many tokens a pass is decided by the base's own certainty: rules without training that commit several at once.

Each rule proposes a token for every open position, ranks them, and commits the longest prefix of the ranking that it
allows, one at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.canvas import Canvas
from adjust_dlm.decoders.proposals import Score, commit_best, plain_logits, propose
from adjust_dlm.sampling import confidence, negative_entropy, process
from adjust_dlm.types import is_number, require

Allowed = Callable[[Tensor], Tensor]  # scores [B, N], falling, -inf behind the last -> which ranks may go [B, N]


@dataclass(frozen=True, kw_only=True)
class ThresholdOptions:
    """Settings of `threshold`.

    Attributes:
        tau: commit every token with at least this probability; above 1 it is one token a pass.
    """

    tau: float = 0.9

    def __post_init__(self) -> None:
        require(is_number(self.tau) and 0 < self.tau < math.inf, f"tau is {self.tau}; it must be a number above 0")


@dataclass(frozen=True, kw_only=True)
class FactorOptions:
    """Settings of `factor`.

    Attributes:
        f: commit the n most certain tokens while (n + 1) (1 - p_n) < f, p_n the n-th probability.
    """

    f: float = 1.0

    def __post_init__(self) -> None:
        require(is_number(self.f) and 0 <= self.f < math.inf, f"f is {self.f}; it must be a number >= 0")


@dataclass(frozen=True, kw_only=True)
class EntropyBoundOptions:
    """Settings of `entropy_bound`.

    Attributes:
        gamma: nats; what the entropies of a pass's tokens, the largest left out, may sum to.
    """

    gamma: float = 0.1

    def __post_init__(self) -> None:
        require(is_number(self.gamma) and self.gamma >= 0, f"gamma is {self.gamma}; it must be a number >= 0")


def threshold(base: Base, canvas: Canvas, options: ThresholdOptions) -> None:
    """Fills the canvas; a pass commits all drawn tokens of probability >= tau (Fast-dLLM's confidence threshold)."""
    _fill(base, canvas, _probability, lambda score_BN: score_BN >= options.tau)


def factor(base: Base, canvas: Canvas, options: FactorOptions) -> None:
    """Fills the canvas; a pass commits the most certain n tokens while (n + 1) (1 - p_n) < f (Fast-dLLM's factor)."""

    def allowed(score_BN: Tensor) -> Tensor:
        n_N = torch.arange(1, score_BN.shape[1] + 1, device=score_BN.device)
        return (n_N + 1) * (1 - score_BN) < options.f

    _fill(base, canvas, _probability, allowed)


def entropy_bound(base: Base, canvas: Canvas, options: EntropyBoundOptions) -> None:
    """Fills the canvas; a pass commits the largest set U of lowest entropy with sum H - max H <= gamma (EB-Sampler).

    The left side bounds the KL between the joint law of the set and the product of its marginals. Ranked by entropy,
    the largest of a prefix is its last.
    """
    on_processed = (canvas.config.order_on or base.spec.order_on) == "processed"

    def certainty(logits_RV: Tensor, _token_R: Tensor, _row_R: Tensor, _position_R: Tensor) -> Tensor:
        return negative_entropy(process(logits_RV, canvas.config) if on_processed else logits_RV)

    def allowed(score_BN: Tensor) -> Tensor:
        entropy_BN = -score_BN
        before_BN = entropy_BN.masked_fill(entropy_BN.isinf(), 0).cumsum(-1) - entropy_BN
        return before_BN <= options.gamma

    _fill(base, canvas, certainty, allowed)


def _probability(logits_RV: Tensor, token_R: Tensor, _row_R: Tensor, _position_R: Tensor) -> Tensor:
    return confidence(logits_RV, token_R)


def _fill(base: Base, canvas: Canvas, score: Score, allowed: Allowed) -> None:
    """Pass after pass, the longest allowed prefix of each row's ranking; the first of it always."""
    while canvas.open:
        h_BLD = base.hidden(canvas)
        score_BL, token_BL = propose(base, canvas, canvas.masked_BL, plain_logits(base, h_BLD, canvas), score)
        ranked_BN = score_BL.sort(dim=-1, descending=True).values
        prefix_BN = (allowed(ranked_BN) & (ranked_BN > -torch.inf)).cumprod(-1)
        canvas.start_round(prefix_BN.sum(-1).clamp_min(1))
        commit_best(canvas, score_BL, token_BL)
