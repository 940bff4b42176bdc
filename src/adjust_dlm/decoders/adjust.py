"""ADJUST: K tokens per base pass, drawn one after another (the paper's Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.canvas import Canvas, pick
from adjust_dlm.types import State


def adjust(base: Base, sampler: Callable[[Tensor, State], Tensor], canvas: Canvas) -> None:
    """Fills the canvas; each commit of a round sees the ones before it through the sampler g.

    Line 8 is moved to the front of the inner loop: the last call of a round as printed is never used,
    so g runs K-1 times for K commits.
    """
    while canvas.open:  # line 2
        h_BLD = base.hidden(canvas)  # line 3
        for k in canvas.round():  # line 4
            if k:
                h_BLD = sampler(h_BLD, canvas)  # line 8
            canvas.commit(pick(base, h_BLD, canvas))  # lines 5-7
