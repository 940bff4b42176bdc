"""The prefix cache: prompt and finished text are recomputed once in several base passes."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.types import DecodeConfig, State


def with_prefix_cache(base: Base, config: DecodeConfig) -> Base:
    """The base as the settings of a canvas have it look at this; itself where no cache is asked for."""
    if config.cache_period is None:
        return base
    cached = copy.copy(base)
    cached.hidden = functools.partial(_hidden, base, config.cache_period, config.cache_window)  # type: ignore[method-assign]
    return cached


def _hidden(base: Base, period: int, window: int | None, state: State) -> Tensor:
    """States h_BLD of the canvas; any other state is looked at exactly.

    A row is computed whole in its first pass, when it enters a block, and once `period` passes are over. In between,
    all columns before the first mask it then had keep their states, keys and values; the last of them is computed
    anyway, since in a shifted frame it scores that mask. A window lets what is kept follow the first mask. What a row
    reuses depends on that row alone. Columns count from the right, where pads that come and go change nothing.
    """
    if not isinstance(state, Canvas):
        return base.hidden(state)
    memory, length, open_B, block_B = state.memory, state.tokens_BL.shape[1], state.open_B, state.block_B
    age_B, before_B, last_B = memory.counts_B3.unbind(-1)
    again_B = open_B & ((age_B % period == 0) | (block_B != before_B))
    now_B = torch.where(again_B, length, last_B).masked_fill(~open_B, 0)  # nothing to score: none
    count = min(length, int(now_B.max())) if memory.kept else length
    column_BN = torch.arange(length - count, length, device=now_B.device).expand(len(now_B), -1)
    h_BLD = base.hidden_again(state, memory, column_BN, column_BN >= length - now_B[:, None])
    open_behind_B = length - state.masked_BL.long().argmax(-1) + (window or 1)
    follows_B = last_B if window is None else last_B.minimum(open_behind_B)
    last_B = torch.where(again_B, open_behind_B, follows_B)
    memory.counts_B3 = torch.stack([torch.where(again_B, 0, age_B) + 1, block_B, last_B], -1)
    return h_BLD
