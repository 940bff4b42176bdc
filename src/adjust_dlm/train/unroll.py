"""ADJUST training: the unrolled loss on stored trajectories (the paper's Algorithm 2)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.losses import Delta, Student, kl_and_delta, row_weights, weighted_kl
from adjust_dlm.types import MASKED, NEXT_DECAY, NEXT_SHARE, RowWeights, State

NEVER = 1 << 20  # stands for the order of a position that the trajectory never revealed
Step = Callable[[Tensor, State], Tensor]
Depths = int | Sequence[int] | Mapping[int, float]


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
    """

    tokens_NL: Tensor
    order_NL: Tensor
    real_NL: Tensor
    start_N: Tensor
    length: int
    padded: bool = True

    @property
    def t_SN(self) -> Tensor:
        """Commits before each state."""
        return self.start_N + torch.arange(self.length, device=self.start_N.device)[:, None]

    @property
    def text_SN(self) -> Tensor:
        """0, or -1 where there is no state yet."""
        return torch.where(self.t_SN >= 0, 0, -1)

    @property
    def rank_BL(self) -> Tensor:
        """Commits from each state (state-major) until a position is revealed; negative once it is.

        Positions never revealed rank very high while the text goes on, and do not count after its end.
        """
        t_SN1 = self.t_SN[..., None]
        never_NL = self.order_NL == MASKED
        rank_SNL = torch.where(never_NL, NEVER, self.order_NL) - t_SN1
        goes_on_SN1 = ((rank_SNL >= 0) & ~never_NL).any(-1, keepdim=True)
        return torch.where(goes_on_SN1 | ~never_NL, rank_SNL, -NEVER).flatten(0, 1)

    def frames(self, base: Base) -> Frames:
        """See `observe`."""
        return observe(base, self)

    def states(self, mask_id: int) -> State:
        """The canvases before commits start .. start+S-1, as one batch of S*N rows (state-major)."""
        t_SN1 = self.t_SN[..., None]
        masked_SNL = (self.order_NL >= t_SN1) | (self.order_NL == MASKED)
        tokens_SNL = torch.where(masked_SNL, mask_id, self.tokens_NL)
        real_SNL = self.real_NL.expand_as(masked_SNL)
        return State(tokens_SNL.flatten(0, 1), real_SNL.flatten(0, 1), masked_SNL.flatten(0, 1), self.padded)


@dataclass
class Frames:
    """S consecutive states of N texts and what the base says about them, state-major: row s * N + n is state s of n.

    Attributes:
        x: the canvases; of causal blocks the finished texts, at which no step looks.
        h: f(x), in pieces of whole rows.
        rank_BL: commits until a position is revealed; negative where it is not masked or the state does not count.
        text_SN: which text a state belongs to; -1 is filler. A window stays within one text.
        around: of a block base: makes the sampler a step on its rows (see `train.blocks` and `train.causal`).
        stale: what parallel decoding uses at each depth, where that is not h_0: of causal blocks (`train.causal`).
    """

    x: State
    h: Sequence[Tensor]
    rank_BL: Tensor
    text_SN: Tensor
    around: Callable[[Any], Step] | None = None
    stale: list[Tensor] | None = None


def observe(base: Base, slices: Slices) -> Frames:
    """Algorithm 2, lines 3-7: the states of stored trajectories, and one base pass for each."""
    x = slices.states(base.spec.mask_id)
    return Frames(x, [base.hidden(x)], slices.rank_BL, slices.text_SN)


def states_compared(seen: Any, rollout: int) -> Tensor:
    """How many states the windows of slices or frames compare at depths 1 .. rollout; int64 [rollout]."""
    masked_SN = (seen.rank_BL >= 0).any(-1).view_as(seen.text_SN)
    windows = len(masked_SN) - rollout
    return torch.stack(
        [(_begun(seen.text_SN, k, windows) & masked_SN[k : k + windows]).sum() for k in range(1, rollout + 1)]
    )


def _begun(text_SN: Tensor, k: int, windows: int) -> Tensor:
    """[windows, N]: whether a window has begun, and its state k is of the same text."""
    return (text_SN[:windows] == text_SN[k : k + windows]) & (text_SN[:windows] >= 0)


@dataclass
class Unrolled:
    """What Algorithm 2 compares, for all windows of n texts: row w * n + i is window w of text i.

    Attributes:
        h_BLD: f of every state, h_0 of the windows among them; [S * n, L, D or more].
        rank_BL: of every state, see `Frames`.
        n: texts.
        windows: S - rollout.
        stale: per depth, what parallel decoding uses in place of h^_k: h_0 = f(x) of each window, but see `Frames`.
        student: h^_1 .. h^_rollout, each [windows * n, L, D or more].
        rank: per depth, [windows * n, L] commits until revealed; negative where nothing is to be compared.
    """

    h_BLD: Tensor
    rank_BL: Tensor
    n: int
    windows: int
    stale: list[Tensor]
    student: list[Tensor]
    rank: list[Tensor]

    def rows(self, k: int) -> slice:
        """Rows of the states that hold x_k of every window."""
        return slice(k * self.n, (k + self.windows) * self.n)

    @property
    def teacher(self) -> list[Tensor]:
        """f(x_1) .. f(x_rollout) of each window."""
        return [self.h_BLD[self.rows(k)] for k in range(1, len(self.student) + 1)]


def unroll(sampler: Step, frames: Frames, *, rollout: int = 3) -> Unrolled:
    """Algorithm 2, lines 8-10: the S - rollout windows of a slice share its S base passes; rollout is K - 1."""
    text_SN = frames.text_SN
    h_BLD = frames.h[0] if len(frames.h) == 1 else torch.cat([*frames.h])
    out = Unrolled(h_BLD, frames.rank_BL, text_SN.shape[1], len(text_SN) - rollout, [], [], [])
    h_k, g = h_BLD[out.rows(0)], sampler if frames.around is None else frames.around(sampler)
    out.stale = frames.stale or [h_k] * rollout
    for k in range(1, rollout + 1):  # line 8
        h_k = g(h_k, rows_of(frames.x, out.rows(k)))  # line 9
        out.student.append(h_k)
        begun_N1 = _begun(text_SN, k, out.windows).flatten()[:, None]
        out.rank.append(torch.where(begun_N1, frames.rank_BL[out.rows(k)], -NEVER))
    return out


def rows_of(x: State, rows: Tensor | slice) -> State:
    """Some of the canvases."""
    return State(x.tokens_BL[rows], x.real_BL[rows], x.masked_BL[rows], x.padded)


def unrolled_kl(
    base: Base, run: Unrolled, depths: Depths, *, weights: RowWeights = "next", next_decay: float = NEXT_DECAY,
    next_share: float = NEXT_SHARE, suppress_eos: bool = False, stale: bool = False, delta: Delta = kl_and_delta,
    share_BL: Tensor | None = None, states: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Line 11: mean over depths, and over states, of the weighted KL(W h_k || W h^_k) on rows masked in x_k.

    A state is the teacher of up to `rollout` depths; its logits are computed once for all of them.

    - `depths`, of 1..rollout, are equally weighted unless their shares of the loss are given.
    - Row weights are 1 in total per state (see `row_weights`); a state without masked rows does not count. `share_BL`
      are factors on them (`losses.row_shares`); rows of factor 0 are left out.
    - `suppress_eos` must say what decoding will say.
    - `stale` measures h_0 in place of h^_k (what parallel decoding would use).
    - `states` is what the mean over states divides by at depths 1 .. rollout; `states_compared` of all parts if `run`
      is a part of a step, whose losses then add up; the run's own unless given.
    """
    depths = (depths,) if isinstance(depths, int) else depths
    shares = dict(depths) if isinstance(depths, Mapping) else dict.fromkeys(depths, 1 / len(depths))
    weight_KBL = torch.zeros(len(shares), *run.rank_BL.shape, device=run.rank_BL.device)
    rank_KNL = torch.stack([run.rank[k - 1] for k in shares])
    masked_KNL = rank_KNL >= 0
    own_KNL = row_weights(rank_KNL, masked_KNL, weights, decay=next_decay, share=next_share)
    states_K = masked_KNL.any(-1).sum(-1) if states is None else torch.stack([states[k - 1] for k in shares])
    for i, (k, share) in enumerate(shares.items()):
        weight_KBL[i, run.rows(k)] = own_KNL[i] * share / states_K[i].clamp_min(1)
    if share_BL is not None:
        weight_KBL *= share_BL
    counts_BL = (weight_KBL > 0).any(0)
    before = [0, *counts_BL.sum(-1).cumsum(0).tolist()]  # rows of earlier states; the only wait for the device here
    row_R, at_R = counts_BL.nonzero_static(size=before[-1]).unbind(-1)  # sorted: those of a depth are neighbours
    students = []
    for i, k in enumerate(shares):
        first, last = before[run.rows(k).start], before[run.rows(k).stop]
        row, at = row_R[first:last], at_R[first:last]
        h_BLD = (run.stale if stale else run.student)[k - 1][..., : base.width]
        students.append(Student(h_BLD[row - run.rows(k).start, at], weight_KBL[i, row, at], first))
    head = functools.partial(base.plain_logits, suppress_eos=suppress_eos)
    return weighted_kl(run.h_BLD[..., : base.width][row_R, at_R], students, head, base.head_matrix, delta=delta)
