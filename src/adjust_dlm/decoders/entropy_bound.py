"""The most tokens whose entropies a budget allows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import fill_by_rule
from adjust_dlm.sampling import negative_entropy, process
from adjust_dlm.types import is_number, require


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
