"""What columns leave behind in a pass, for later passes that compute some columns and see all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

KeepKeys = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # keys and values of a pass -> those of all columns


class Memory:
    """Keys and values of every layer, row by row: it is taken apart and joined with the rows that it belongs to.

    Attributes:
        kept: of each layer its keys and values [B, L, 2 heads d], see `side_by_side`; behind them, where they are kept,
            the final states [B, L, D]. Empty before the first pass.
        width: L, where the first pass is not over all columns; zeros stand at the others.
        writes: how often a pass has written here.
        seen: how many columns passes see, where nothing may look behind them; None: all.
        counts_B3: of each row, for the prefix cache: passes since it was computed whole (0: never was), the block it
            was in, and how many of its last columns the next pass computes. On a block base: how many of its positions
            are final, that of its first mask in the latest pass, and the one behind the last that this looked at.
    """

    def __init__(self, rows: int = 0, device: torch.device | None = None) -> None:
        """Holds nothing; g's needs no counts."""
        self.kept: list[Tensor] = []
        self.width: int | None = None
        self.writes = 0
        self.seen: int | None = None
        self.counts_B3 = torch.zeros(rows, 3, dtype=torch.long, device=device)

    def write(self, n: int, new: Tensor, column_BN: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Puts [B, N, D] of a pass into entry n, see `renew`, and returns the entry."""
        self.writes += 1
        if n == len(self.kept):
            if self.width is None:
                self.kept.append(new)
                return new
            self.kept.append(new.new_zeros(len(new), self.width, new.shape[-1]))
        return renew(self.kept[n], new, column_BN, valid_BN)

    def keep(self, n: int, column_BN: Tensor, valid_BN: Tensor | None = None) -> KeepKeys:
        """What layer n of a pass over some columns does with their keys and values [B, heads, N, d]."""

        def written(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return apart(self.write(n, side_by_side(k, v), column_BN, valid_BN), k.shape[-1])

        return written

    def beside(self, n: int) -> KeepKeys:
        """What layer n of a pass over other columns does: they see these behind which they stand, and write nothing.

        The rows of the pass are those here, once or several times over.
        """

        def joined(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            known = self.kept[n].repeat(len(k) // len(self.kept[n]), 1, 1)
            return apart(torch.cat([known, side_by_side(k, v)], 1), k.shape[-1])

        return joined

    def before(self) -> Memory:
        """Itself as it is now, without a copy: for a block base, where a repeated round writes the same again."""
        out = copy.copy(self)
        out.kept, out.counts_B3 = list(self.kept), self.counts_B3.clone()
        return out

    def make_room(self, other: Memory, columns: int) -> None:
        """Zeros for all rows where nothing is kept yet, with more columns than the other memory has."""
        if not self.kept:
            rows = len(self.counts_B3)
            self.kept = [part.new_zeros(rows, part.shape[1] + columns, part.shape[2]) for part in other.kept]
            self.width = None if other.width is None else other.width + columns

    def load(self, rows: slice | Tensor, other: Memory, index: slice | Tensor | list[int]) -> None:
        """Copies rows of another memory into these, where both keep something; columns count from the right."""
        self.counts_B3[rows] = other.counts_B3[index]
        for mine, theirs in zip(self.kept, other.kept, strict=False):
            mine[rows, -theirs.shape[1] :] = theirs[index]

    def take(self, index_B: Tensor, first: int) -> Memory:
        """A copy of some rows, without the columns left of `first`."""
        out = Memory()
        out.counts_B3 = self.counts_B3[index_B]
        out.kept = [part[:, first:][index_B] for part in self.kept]
        out.width = None if self.width is None else self.width - first
        return out

    def of_rows(self, row_E: Tensor) -> Memory:
        """Some rows, all different: a pass over these writes here. Its own counts are a copy."""
        return _Rows(self, row_E)

    @staticmethod
    def join(parts: Sequence[Memory], width: int) -> Memory:
        """The rows of all, with columns added on the left; rows that were in no pass yet get zeros."""
        out = Memory()
        out.counts_B3 = torch.cat([part.counts_B3 for part in parts])
        out.width = width if any(part.width is not None for part in parts) else None
        known = next((part.kept for part in parts if part.kept), [])
        for n, like in enumerate(known):
            own = [part.kept[n] if part.kept else like.new_zeros(len(part.counts_B3), *like.shape[1:])
                   for part in parts]  # fmt: skip
            out.kept.append(torch.cat([F.pad(part, (0, 0, width - part.shape[1], 0)) for part in own]))
        return out


class _Rows(Memory):
    """Rows of another memory."""

    def __init__(self, whole: Memory, row_E: Tensor) -> None:
        super().__init__()
        self._whole, self._row_E, self.counts_B3 = whole, row_E, whole.counts_B3[row_E]

    def write(self, n: int, new: Tensor, column_BN: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Puts [E, N, D] of a pass there, and returns a copy of the rows."""
        whole_BLD, at_EN = self._whole.kept[n], (self._row_E[:, None], column_BN)
        self._whole.writes += 1
        whole_BLD[at_EN] = new if valid_BN is None else torch.where(valid_BN[..., None], new, whole_BLD[at_EN])
        return whole_BLD[self._row_E]


def side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values [B, heads, N, d] each, those of a column together: [B, N, 2 heads d]."""
    return torch.stack([k.transpose(1, 2), v.transpose(1, 2)], 2).flatten(2)


def apart(known: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The two again, views."""
    k, v = known.unflatten(-1, (2, -1, head_dim)).transpose(1, 3).unbind(2)
    return k, v


def at_columns(h_BLD: Tensor, column_BN: Tensor) -> Tensor:
    """States of some columns: [B, N, D]."""
    return h_BLD.gather(1, column_BN[..., None].expand(-1, -1, h_BLD.shape[-1]))


def renew(old: Tensor, new: Tensor, column_BN: Tensor, valid_BN: Tensor | None = None) -> Tensor:
    """Writes [B, N, D] over the columns of [B, L, D] that they stand for, in place, and returns these.

    The columns of a row are all different; they stay as they are where `valid_BN` is False.
    """
    if len(new) == 1 and not new.is_cuda:  # where a question to the device costs less than a whole scatter
        column_N = column_BN[0]
        if valid_BN is not None and not bool(valid_BN.all()):
            new, column_N = new[:, valid_BN[0]], column_N[valid_BN[0]]
        return old.index_copy_(1, column_N, new)
    at_BN = torch.arange(len(new), device=new.device)[:, None] if len(new) > 1 else 0, column_BN.to(new.device)
    if valid_BN is not None:
        new = torch.where(valid_BN.to(new.device)[..., None], new, old[at_BN])
    old[at_BN] = new
    return old
