"""ADJUST: K tokens per base pass, drawn one after another (the paper's Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.canvas import Canvas, pick
from adjust_dlm.types import State, require_count


@dataclass(frozen=True, kw_only=True)
class AdjustOptions:
    """Settings of `adjust`.

    Attributes:
        restart: calls of g after which it begins again from the base's states, seeing all tokens of the round at once;
            None goes on from its own. For rounds much longer than the rollouts that g was trained on.
    """

    restart: int | None = None

    def __post_init__(self) -> None:
        require_count("restart", self.restart, 1, optional=True)


def adjust(base: Base, sampler: Callable[[Tensor, State], Tensor], canvas: Canvas, options: AdjustOptions) -> None:
    """Fills the canvas; each commit of a round sees the ones before it through the sampler g.

    Line 8 is moved to the front of the inner loop: the last call of a round as printed is never used,
    so g runs K-1 times for K commits.
    """
    while canvas.open:  # line 2
        h_BLD = start_BLD = base.hidden(canvas)  # line 3
        for k in canvas.round():  # line 4
            if k:
                again = options.restart is not None and (k - 1) % options.restart == 0
                h_BLD = sampler(start_BLD if again else h_BLD, canvas)  # line 8
            canvas.commit(pick(base, h_BLD, canvas))  # lines 5-7
