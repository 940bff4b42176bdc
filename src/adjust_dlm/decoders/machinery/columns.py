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


def best_columns(score_BL: Tensor, real_BL: Tensor, count_B: Tensor) -> Tensor:
    """The `count_B` best columns of each row; of -inf are those that are not open, which fill it up, the last first."""
    count_B1 = count_B[:, None]
    rank_BL = score_BL.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    open_BL = (rank_BL < count_B1) & (score_BL > -torch.inf)
    other_BL = real_BL & ~open_BL
    from_right_BL = other_BL.flip(-1).long().cumsum(-1).flip(-1)
    return open_BL | (other_BL & (from_right_BL <= count_B1 - open_BL.sum(-1, keepdim=True)))
