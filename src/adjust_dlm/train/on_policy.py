"""Algorithm 2 on canvases that g fills itself: what it meets when decoding, with the teacher on the same canvases.

The first commit of a window stays the stored one, which the base drew from the window's own start. Each later one is
chosen as in decoding: the base's order rule on g's logits, the token drawn from g at the trajectory's temperature.

Shapes beside the usual ones: R windows that follow g.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders.canvas import rows_at_once
from adjust_dlm.sampling import draw, score_rows
from adjust_dlm.train.unroll import Slices, Step, Unrolled, rows_of
from adjust_dlm.types import CERTAINTY, GIVEN, DecodeConfig, State, require

_COLDEST = 1e-4  # stands for T = 0


def unroll_on_policy(
    base: Base, sampler: Step, slices: Slices, *, rollout: int = 3, share: float,
    suppress_eos: bool = False, key: tuple[int, ...] = (0,),
) -> Unrolled:  # fmt: skip
    """As `unroll`, but the windows of the first `share` of the slices follow g behind their first commit.

    Their rows rank by g's certainty, the order in which decoding would reveal them. Costs rollout - 1 more base passes
    for each such window, and the head on its masked rows. Draws are not filtered (top-p, top-k).

    Args:
        base: f and W.
        sampler: g, or any function of states and canvas.
        slices: consecutive states of stored trajectories.
        rollout: K - 1, the number of unrolled g steps.
        share: of the slices, rounded; the others stay as stored.
        suppress_eos: must say what decoding will say.
        key: integers that decide the draws.

    Raises:
        InputError: the base's order rule does not look at logits.
    """
    require(base.spec.order in CERTAINTY, f"on-policy states need an order of {CERTAINTY}; it is {base.spec.order!r}")
    x, n = slices.states(base.spec.mask_id), len(slices.start_N)
    windows, device = slices.length - rollout, x.tokens_BL.device
    own_R = torch.arange(windows * n, device=device).view(windows, n)[:, : round(share * n)].flatten()
    rank_BL = slices.rank().flatten(0, 1)
    begun_B1 = (slices.start_N + torch.arange(windows, device=device)[:, None] >= 0).flatten()[:, None]
    policy = _policy(base, slices, rows_of(x, own_R + n), own_R % n, rollout, suppress_eos, key)
    policy.counts_R = begun_B1[own_R, 0] & (rank_BL[own_R + n] >= 0).any(-1)
    stored_BLD = base.hidden(x)  # lines 5-7
    h_k = stored_BLD[: windows * n]
    states, students, ranks = [h_k], [], []
    for k in range(1, rollout + 1):  # line 8
        rows = slice(k * n, (k + windows) * n)
        x_k, teacher_BLD = rows_of(x, rows), stored_BLD[rows]
        if k > 1:
            policy.commit(h_k[own_R])
            x_k.tokens_BL = x_k.tokens_BL.index_copy(0, own_R, policy.state.tokens_BL)
            x_k.masked_BL = x_k.masked_BL.index_copy(0, own_R, policy.state.masked_BL)
            teacher_BLD = teacher_BLD.index_copy(0, own_R, base.hidden(policy.state))
        h_k = sampler(h_k, x_k)  # line 9
        students.append(h_k)
        states.append(teacher_BLD)
        ranks.append(torch.where(begun_B1, rank_BL[rows], -1).index_copy(0, own_R, policy.rank(h_k[own_R])))
    # Windows share no states any more: each is a text of its own.
    all_ranks_BL = torch.cat([torch.full_like(ranks[0], -1), *ranks])
    return Unrolled(torch.cat(states), all_ranks_BL, windows * n, 1, students, ranks)


@dataclass
class _Policy:
    """The canvases of the windows that follow g, and what g would do next on each.

    Attributes:
        base: f and W.
        state: their canvases, R rows.
        given_RL: True on prompts and pads, whose end tokens end nothing.
        temperature_R: of the draws.
        u_KRL: uniforms of every depth.
        suppress_eos: forbid end tokens.
        counts_R: False for windows that do not count.
        k: commits so far.
        score_RL: g's certainty on open positions, -inf elsewhere.
    """

    base: Base
    state: State
    given_RL: Tensor
    temperature_R: Tensor
    u_KRL: Tensor
    suppress_eos: bool
    counts_R: Tensor
    k: int = 0
    score_RL: Tensor | None = None

    @torch.no_grad()
    def rank(self, h_RLD: Tensor) -> Tensor:
        """Commits until g would reveal each position, by its present certainty; negative where it does not count."""
        self.score_RL = self._certainty(h_RLD)
        rank_RL = self.score_RL.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        counts_RL = (self.score_RL > -torch.inf) & (self.counts_R & ~self._ended())[:, None]
        return torch.where(counts_RL, rank_RL, -1)

    @torch.no_grad()
    def commit(self, h_RLD: Tensor) -> None:
        """Reveals the position that g, which gave these states to `rank`, is most certain of."""
        assert self.score_RL is not None
        row_R, at_R = torch.arange(len(h_RLD), device=h_RLD.device), self.score_RL.argmax(-1)
        logits_RV = self.base.logits(h_RLD[row_R, at_R], suppress_eos=self.suppress_eos) / self.temperature_R[:, None]
        token_R = draw(logits_RV, self.u_KRL[self.k][row_R, at_R], 1.0)
        open_R = self.state.masked_BL[row_R, at_R]  # False only where nothing is left
        token_R = torch.where(open_R, token_R, self.state.tokens_BL[row_R, at_R])
        tokens_RL = self.state.tokens_BL.index_put((row_R, at_R), token_R)
        masked_RL = self.state.masked_BL.index_put((row_R, at_R), torch.zeros_like(open_R))
        self.state = State(tokens_RL, self.state.real_BL, masked_RL, self.state.padded)
        self.k += 1

    def _certainty(self, h_RLD: Tensor) -> Tensor:
        """The base's own rule on g's logits, chunk by chunk."""
        spec, settings = self.base.spec, DecodeConfig()
        score_RL = torch.full(self.state.tokens_BL.shape, -torch.inf, device=h_RLD.device)
        processed = spec.order_on == "processed"
        for part in self.state.masked_BL.nonzero().split(rows_at_once(self.base)):
            row, at = part.T
            raw = self.base.logits(h_RLD[row, at], suppress_eos=self.suppress_eos)
            tempered = raw / self.temperature_R[row, None]
            u = self.u_KRL[self.k][row, at]
            if spec.order == "confidence" and not processed:  # that of the drawn token, un-tempered
                token = draw(tempered, u, 1.0)
                score_RL[row, at] = raw.softmax(-1).gather(-1, token[:, None])[:, 0]
            else:
                seen = tempered if processed else raw
                score_RL[row, at] = score_rows(seen, u, spec.order, on_processed=False, config=settings)
        return score_RL

    def _ended(self) -> Tensor:
        """Rows with nothing masked left of their first committed end token."""
        ends = torch.tensor(self.base.spec.end_ids, device=self.state.tokens_BL.device, dtype=torch.long)
        end_RL = torch.isin(self.state.tokens_BL, ends) & ~self.given_RL & ~self.state.masked_BL
        ended_RL = end_RL.long().cumsum(-1) > 0
        return ended_RL.any(-1) & ~(self.state.masked_BL & ~ended_RL).any(-1)


def _policy(
    base: Base, slices: Slices, state: State, trajectory_R: Tensor, rollout: int, suppress_eos: bool,
    key: tuple[int, ...],
) -> _Policy:  # fmt: skip
    """At the first commit of every window; a number for every possible draw, from the key alone."""
    device, shape = state.tokens_BL.device, state.tokens_BL.shape
    u_KRL = torch.from_numpy(np.random.default_rng((*key, 11)).random((rollout, *shape))).to(device)
    temperature_N = slices.temperature_N
    if temperature_N is None:
        temperature_N = torch.ones(len(slices.start_N), device=device)
    temperature_R = temperature_N[trajectory_R].float().clamp_min(_COLDEST)
    given_RL = slices.order_NL[trajectory_R] == GIVEN
    return _Policy(base, state, given_RL, temperature_R, u_KRL, suppress_eos, torch.ones_like(trajectory_R).bool())
