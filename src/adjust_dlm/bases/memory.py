"""Keys and values that outlive a pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

KeepKeys = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # keys and values of a pass -> those of all columns


class Memory:
    """Keys and values of the last pass, layer by layer, and which columns the next pass takes from it.

    Attributes:
        stale_BL: columns whose keys and values stay as they are.
        first: the first column that the pass computes; all before it are stale in every row.
    """

    def __init__(self) -> None:
        self.stale_BL: Tensor | None = None
        self.first = 0
        self._kept: list[tuple[Tensor, Tensor]] = []

    def plan(self, stale_BL: Tensor) -> None:
        """Says what the next pass may take; a first pass has nothing to take."""
        fresh_L = torch.ones_like(stale_BL[0]) if not self._kept else ~stale_BL.all(0)
        self.stale_BL, self.first = stale_BL & bool(self._kept), int(fresh_L.long().argmax())

    def merge(self, old: Tensor, new: Tensor) -> Tensor:
        """Old columns [B, L, ...] with those of the pass [B, N, ...] where they are not stale."""
        assert self.stale_BL is not None
        stale = self.stale_BL[:, self.first :].to(new.device)
        stale = stale.view(*stale.shape, *[1] * (new.ndim - 2))
        return torch.cat([old[:, : self.first], torch.where(stale, old[:, self.first :], new)], 1)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, L, d] of a layer, given those of the computed columns; they are kept."""
        if layer == len(self._kept):
            self._kept.append((k, v))
        else:
            pairs = zip(self._kept[layer], (k, v), strict=True)
            k, v = (self.merge(old.transpose(1, 2), new.transpose(1, 2)).transpose(1, 2) for old, new in pairs)
            self._kept[layer] = k, v
        return k, v
