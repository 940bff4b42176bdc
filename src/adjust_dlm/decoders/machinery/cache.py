"""The prefix cache: prompt and finished text are recomputed once in several base passes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.types import DecodeConfig, State


class PrefixCache:
    """Stands in for `base.hidden` during one decode.

    A row is recomputed whole in its first pass, when it enters a block, and once `period` passes are over. In between,
    all columns before the first mask it then had keep their states, keys and values; the last of them is computed
    anyway, since in a shifted frame it scores that mask. What a row reuses depends on that row alone.
    """

    def __init__(self, base: Base, period: int, window: int | None = None) -> None:
        """`period` passes use one computation of the prefix; 1 is exact. See `DecodeConfig` for the window."""
        self.base, self.period, self.window = base, period, window
        self._memory: Any = None
        self._age_B = self._block_B = self._first_B = self._stop_B = torch.empty(0)

    def __call__(self, state: State) -> Tensor:
        """States h_BLD of the canvas; any other state is looked at exactly."""
        if not isinstance(state, Canvas):
            return self.base.hidden(state)
        h_BLD, self._memory = self.base.hidden_again(state, self._stale(state), self._memory)
        return h_BLD

    def _stale(self, canvas: Canvas) -> Tensor:
        """Which columns stay as they are: [B, L]."""
        block_B, open_B = canvas.block_B, canvas.open_B
        if self._memory is None:
            self._age_B = self._first_B = self._stop_B = torch.zeros_like(block_B)
            self._block_B = block_B
        elif self.window is not None:  # what stood before the first mask of the last pass was computed as it is
            self._stop_B = self._stop_B.maximum(self._first_B - self.window)
        again_B = open_B & ((self._age_B % self.period == 0) | (block_B != self._block_B))
        self._age_B, self._block_B = torch.where(again_B, 0, self._age_B) + 1, block_B
        column_L = torch.arange(canvas.tokens_BL.shape[1], device=block_B.device)
        stop_B = torch.where(again_B, 0, self._stop_B).masked_fill(~open_B, len(column_L))  # nothing to score: all
        self._first_B = canvas.masked_BL.long().argmax(-1)
        self._stop_B = torch.where(again_B, self._first_B - (self.window or 1), self._stop_B)
        return column_L < stop_B[:, None]


def with_prefix_cache(base: Base, config: DecodeConfig) -> Base:
    """The base with a cache for one decode; itself where none is asked for."""
    if config.cache_period is None:
        return base
    cached = copy.copy(base)
    cached.hidden = PrefixCache(base, config.cache_period, config.cache_window)  # type: ignore[method-assign]
    return cached
