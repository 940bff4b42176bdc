"""Which columns of a canvas a step looks at: sets of a fixed size, so that shapes do not depend on the texts."""

from __future__ import annotations

import torch
from torch import Tensor


def columns_of(marked_BL: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` marked columns of each row, lowest first, and which of these [B, N] are marked at all."""
    length = marked_BL.shape[1]
    column_L = torch.arange(length, device=marked_BL.device)
    ranked_BN = torch.where(marked_BL, column_L, column_L + length).sort(-1).values[:, :count]
    return ranked_BN % length, ranked_BN < length


def best_columns(score_BL: Tensor, real_BL: Tensor, count: int) -> Tensor:
    """The `count` best columns of each row; of -inf are those that are not open, which fill it up, the last first."""
    best = score_BL.sort(dim=-1, descending=True, stable=True)
    open_BL = torch.zeros_like(real_BL)
    open_BL.scatter_(1, best.indices[:, :count], best.values[:, :count] > -torch.inf)
    other_BL = real_BL & ~open_BL
    from_right_BL = other_BL.flip(-1).long().cumsum(-1).flip(-1)
    return open_BL | (other_BL & (from_right_BL <= count - open_BL.sum(-1, keepdim=True)))


def certain_columns(score_BL: Tensor, count: int, *, near: bool) -> Tensor:
    """What a round's candidates by certainty are, behind its first pick: [B, L].

    Args:
        score_BL: of the order rule; -inf where a column is not open.
        count: M.
        near: half of the M candidates are neighbours instead (`candidate_columns`).
    """
    certain = count - count // 2 if near else count
    best = score_BL.sort(dim=-1, descending=True, stable=True)
    out_BL = torch.zeros(score_BL.shape, dtype=torch.bool, device=score_BL.device)
    chosen_BN = best.indices[:, : certain + 1]
    return out_BL.scatter_(1, chosen_BN, best.values[:, : certain + 1] > -torch.inf)


def candidate_columns(certain_BL: Tensor, open_BL: Tensor, written_BL: Tensor, real_BL: Tensor, count: int) -> Tensor:
    """Certain columns that are still open, then the open ones nearest to what was written, `count` in all: [B, L].

    What was just written tells most about its neighbours: often it makes certain what was not.

    Args:
        certain_BL: from `certain_columns`.
        open_BL: columns that may be picked.
        written_BL: columns written in this round.
        real_BL: no pads.
        count: where fewer columns are open, others fill it up as in `best_columns`.
    """
    length = open_BL.shape[1]
    column_L = torch.arange(length, device=open_BL.device)
    left_BL = torch.where(written_BL, column_L, -2 * length).cummax(-1).values
    right_BL = torch.where(written_BL, column_L, 3 * length).flip(-1).cummin(-1).values.flip(-1)
    away_BL = torch.minimum(column_L - left_BL, right_BL - column_L)
    score_BL = torch.where(certain_BL, length, -away_BL).float()
    return best_columns(torch.where(open_BL, score_BL, -torch.inf), real_BL, count)
