"""Which columns of a canvas a step looks at: sets of a fixed size, so that shapes do not depend on the texts."""

from __future__ import annotations

import torch
from torch import Tensor


class Candidates:
    """The only columns that a round may still go to, once it has its first pick (see `DecodeConfig.candidates`).

    What was just written tells most about its neighbours: often it makes certain what was not. So half of them are
    neighbours, and those follow the commits of the round. All tensors are written in place.

    Attributes:
        only_BL: where commits may go: everywhere until the round is narrowed.
        certain_BL: those that the order rule was most certain of at the first pick, and that pick itself.
        narrowed: whether the round has its candidates.
        follow: choose neighbours anew after each commit.
    """

    def __init__(self, real_BL: Tensor) -> None:
        """None yet; `real_BL` is for its shape."""
        self.only_BL, self.certain_BL = torch.ones_like(real_BL), torch.zeros_like(real_BL)
        self.narrowed, self.follow = False, True

    def release(self) -> None:
        """A round begins: everything may be picked."""
        self.only_BL.fill_(True)
        self.narrowed = False

    def narrow(self, score_BL: Tensor, real_BL: Tensor, count: int, *, near: bool) -> None:
        """From the scores of the round's first pick: that one and `count` others.

        Args:
            score_BL: of the order rule; -inf where a column is not open.
            real_BL: no pads.
            count: M; where fewer are open, others fill them up as in `best_columns`.
            near: half of the M are neighbours; else all go by their scores.
        """
        certain = 1 + (count - count // 2 if near else count)
        best = score_BL.sort(dim=-1, descending=True, stable=True)
        self.certain_BL.zero_().scatter_(1, best.indices[:, :certain], best.values[:, :certain] > -torch.inf)
        first_BL = torch.zeros_like(real_BL).scatter_(1, score_BL.argmax(-1, keepdim=True), True)
        self.renew(score_BL > -torch.inf, first_BL, real_BL, count + 1)
        self.narrowed = True

    def renew(self, open_BL: Tensor, written_BL: Tensor, real_BL: Tensor, count: int) -> None:
        """Certain columns that are still open, then the open ones nearest to those written, `count` in all."""
        length = open_BL.shape[1]
        column_L = torch.arange(length, device=open_BL.device)
        left_BL = torch.where(written_BL, column_L, -2 * length).cummax(-1).values
        right_BL = torch.where(written_BL, column_L, 3 * length).flip(-1).cummin(-1).values.flip(-1)
        away_BL = torch.minimum(column_L - left_BL, right_BL - column_L)
        score_BL = torch.where(self.certain_BL, length, -away_BL).float()
        self.only_BL.copy_(best_columns(torch.where(open_BL, score_BL, -torch.inf), real_BL, count))


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
