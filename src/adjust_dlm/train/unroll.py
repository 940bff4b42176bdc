"""ADJUST training: the unrolled loss on stored trajectories (the paper's Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.losses import NEXT_DECAY, NEXT_SHARE, Delta, RowWeights, kl_and_delta, row_weights, weighted_kl
from adjust_dlm.types import MASKED, State

_NEVER = 1 << 20  # stands for the order of a position that the trajectory never revealed
Step = Callable[[Tensor, State], Tensor]


@dataclass
class Slices:
    """S consecutive states of each of N trajectories, left-padded to one length.

    Attributes:
        tokens_NL: final tokens.
        order_NL: commit numbers; `GIVEN` for prompt and pads, `MASKED` where the text ended before.
        real_NL: False on pads.
        start_N: t of each slice's first state; states before 0 or past the end are filler and do not count.
        length: S.
        padded: False promises that `real_NL` is all True.
        temperature_N: of the decodes that made them; None is 1.
    """

    tokens_NL: Tensor
    order_NL: Tensor
    real_NL: Tensor
    start_N: Tensor
    length: int
    padded: bool = True
    temperature_N: Tensor | None = None

    def rank(self) -> Tensor:
        """[S, N, L] commits from each state until a position is revealed; negative once it is.

        Positions never revealed rank very high while the text goes on, and do not count after its end.
        """
        t_SN1 = (self.start_N + torch.arange(self.length, device=self.start_N.device)[:, None])[..., None]
        never_NL = self.order_NL == MASKED
        rank_SNL = torch.where(never_NL, _NEVER, self.order_NL) - t_SN1
        goes_on_SN1 = ((rank_SNL >= 0) & ~never_NL).any(-1, keepdim=True)
        return torch.where(goes_on_SN1 | ~never_NL, rank_SNL, -_NEVER)

    def states(self, mask_id: int) -> State:
        """The canvases before commits start .. start+S-1, as one batch of S*N rows (state-major)."""
        t_SN1 = (self.start_N + torch.arange(self.length, device=self.start_N.device)[:, None])[..., None]
        masked_SNL = (self.order_NL >= t_SN1) | (self.order_NL == MASKED)
        tokens_SNL = torch.where(masked_SNL, mask_id, self.tokens_NL)
        real_SNL = self.real_NL.expand_as(masked_SNL)
        return State(tokens_SNL.flatten(0, 1), real_SNL.flatten(0, 1), masked_SNL.flatten(0, 1), self.padded)


@dataclass
class Unrolled:
    """States of Algorithm 2 for all windows of some slices: row s*N + n is window s of trajectory n.

    Attributes:
        stale_BLD: h_0 = f(x) of each window.
        student: h^_1 .. h^_rollout.
        teacher: f(x_1) .. f(x_rollout), same rows.
        rank: per depth, [B, L] commits until revealed (see `Slices.rank`).
    """

    stale_BLD: Tensor
    student: list[Tensor]
    teacher: list[Tensor]
    rank: list[Tensor]


def unroll(base: Base, sampler: Step, slices: Slices, *, rollout: int = 3, detach_every: int = 0) -> Unrolled:
    """Algorithm 2, lines 3-10: the S - rollout windows of a slice share its S base passes.

    Args:
        base: f and W.
        sampler: g, or any function of states and canvas.
        slices: consecutive states of stored trajectories.
        rollout: K - 1, the number of unrolled g steps.
        detach_every: g steps through which a gradient flows back; 0 is all.
    """
    x, n = slices.states(base.spec.mask_id), len(slices.start_N)
    windows = slices.length - rollout
    rank_BL = slices.rank().flatten(0, 1)
    begun_B1 = (slices.start_N + torch.arange(windows, device=slices.start_N.device)[:, None] >= 0).flatten()[:, None]
    h_BLD = base.hidden(x)  # lines 5-7: f of every state, h_0 = f(x) of every window among them
    out = Unrolled(h_BLD[: windows * n], [], [], [])
    h_k = out.stale_BLD
    for k in range(1, rollout + 1):  # line 8
        rows = slice(k * n, (k + windows) * n)
        x_k = State(x.tokens_BL[rows], x.real_BL[rows], x.masked_BL[rows], x.padded)
        h_k = sampler(cut(h_k, k, detach_every), x_k)  # line 9
        out.student.append(h_k)
        out.teacher.append(h_BLD[rows])
        out.rank.append(torch.where(begun_B1, rank_BL[rows], -_NEVER))
    return out


def cut(h_BLD: Tensor, k: int, every: int) -> Tensor:
    """What g step k starts from: without its history after each `every` steps."""
    return h_BLD.detach() if every and (k - 1) % every == 0 else h_BLD


def unrolled_kl(
    base: Base, run: Unrolled, k: int, *, weights: RowWeights = "next", next_decay: float = NEXT_DECAY,
    next_share: float = NEXT_SHARE, suppress_eos: bool = False, stale: bool = False, delta: Delta = kl_and_delta,
) -> Tensor:  # fmt: skip
    """Line 11 at depth k: mean over states of the weighted KL(W h_k || W h^_k) on rows masked in x_k.

    Args:
        base: f and W.
        run: from `unroll`.
        k: 1..rollout.
        weights: row weights, 1 in total per state; a state without masked rows does not count.
        next_decay: of "next", see `row_weights`.
        next_share: likewise.
        suppress_eos: must say what decoding will say.
        stale: measure h_0 in place of h^_k (what parallel decoding would use).
        delta: `kl_and_delta` or its compiled twin.
    """
    rank_BL = run.rank[k - 1]
    masked_BL = rank_BL >= 0
    weight_BL = row_weights(rank_BL, masked_BL, weights, decay=next_decay, share=next_share)
    weight_BL = weight_BL / masked_BL.any(-1).sum().clamp_min(1)
    rows = masked_BL.nonzero(as_tuple=True)
    student_BLD = run.stale_BLD if stale else run.student[k - 1]
    return weighted_kl(
        run.teacher[k - 1][..., : base.width][rows],
        student_BLD[..., : base.width][rows],
        weight_BL[rows],
        lambda h_RD: base.logits(h_RD, suppress_eos=suppress_eos),
        base.head_matrix,
        delta=delta,
    )
