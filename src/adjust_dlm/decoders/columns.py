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


def candidate_columns(score_BL: Tensor, real_BL: Tensor, count: int, *, near: bool) -> Tensor:
    """A round's first pick, which is the best column, and its `count` candidates: [B, L].

    Args:
        score_BL: of the order rule; -inf where a column is not open.
        real_BL: no pads.
        count: M; where fewer columns are open, others fill it up as in `best_columns`.
        near: half of them are the open columns nearest to the first pick. What was just written tells most about its
            neighbours: often it makes certain what was not. The others, or all, are the best by score.
    """
    if not near:
        return best_columns(score_BL, real_BL, count + 1)
    best_BL = score_BL.sort(dim=-1, descending=True, stable=True).indices
    column_BL = torch.arange(score_BL.shape[1], device=score_BL.device).expand_as(best_BL)
    rank_BL = torch.empty_like(best_BL).scatter_(1, best_BL, column_BL)
    away_BL = (column_BL - best_BL[:, :1]).abs()
    mixed_BL = torch.where(rank_BL <= count - count // 2, score_BL.shape[1] - rank_BL, -away_BL).float()
    return best_columns(torch.where(score_BL > -torch.inf, mixed_BL, -torch.inf), real_BL, count + 1)
