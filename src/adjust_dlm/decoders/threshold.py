"""All tokens that the base is certain enough of."""

from __future__ import annotations

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.proposals import fill_by_rule, largest_probability, probability
from adjust_dlm.options import ThresholdOptions


def threshold(base: Base, canvas: Canvas, options: ThresholdOptions) -> None:
    """Fills the canvas; a pass commits all drawn tokens of probability >= tau (Fast-dLLM's confidence threshold)."""
    score = probability if options.score == "drawn" else largest_probability
    fill_by_rule(base, canvas, score, lambda score_BN, _: score_BN >= options.tau)
