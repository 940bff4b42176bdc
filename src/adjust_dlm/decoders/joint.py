"""Exact joint sampling: one token per base pass."""

from __future__ import annotations

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.pick import pick


def joint(base: Base, canvas: Canvas) -> None:
    """Fills the canvas one commit per pass: exact under the base (paper, eq. of p_*)."""
    while canvas.open:
        h_BLD = base.hidden(canvas)
        canvas.start_round()
        canvas.commit(pick(base, h_BLD, canvas))
