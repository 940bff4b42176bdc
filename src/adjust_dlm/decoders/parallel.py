"""Parallel decoding: K tokens per base pass, each from its own marginal."""

from __future__ import annotations

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.pick import pick


def parallel(base: Base, canvas: Canvas) -> None:
    """Fills the canvas K commits per pass: a product of marginals (paper, eq. of p_parallel)."""
    while canvas.open:
        h_BLD = base.hidden(canvas)
        canvas.commit(pick(base, h_BLD, canvas, canvas.start_round()))
