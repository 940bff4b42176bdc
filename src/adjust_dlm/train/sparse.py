"""g in training as sparse decoding calls it: at a window's candidates and at the columns that see its tokens.

Decoding chooses a round's candidates by certainty and nearness (`decoders/columns.py`); a stored text knows what went
next, so here they are those that its own order reveals first. All else is the decoder's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjust_dlm.decoders.adjust import step_at
from adjust_dlm.decoders.columns import best_columns
from adjust_dlm.sampler import Keys, Sampler
from adjust_dlm.types import State, require


class Sparse:
    """What `unroll` takes in place of g.

    Args:
        sampler: g.
        candidates: M of decoding.
        compiled: compile the two functions of a step, one form for every depth.

    Raises:
        InputError: a function that is no `Sampler`.
    """

    def __init__(self, sampler: Sampler, candidates: int, *, compiled: bool = False) -> None:
        able = isinstance(sampler, Sampler)
        require(able, f"a {type(sampler).__name__} knows no sparse steps; they take a Sampler")
        self.sampler, self.candidates = sampler, candidates
        self.keys: Any = torch.compile(Sampler.keys, dynamic=False) if compiled else Sampler.keys
        self.step: Any = torch.compile(step_at, dynamic=False) if compiled else step_at

    def begin(self, x_0: State, rank_BL: Tensor) -> SparseWindows:
        """Windows that start at x_0, where a position's rank says how many commits later it is revealed."""
        return SparseWindows(self, x_0, rank_BL)


class SparseWindows:
    """A function of states and canvas as g is, to be called once for each commit behind the windows' start.

    Attributes:
        candidate_BL: the M + 1 masked columns that the text reveals first; the others are filled up as in decoding.
    """

    def __init__(self, g: Sparse, x_0: State, rank_BL: Tensor) -> None:
        score_BL = torch.where(rank_BL >= 0, -rank_BL.float(), -torch.inf)
        self.candidate_BL = best_columns(score_BL, x_0.real_BL, g.candidates + 1)
        self._g, self._masked_BL, self._k = g, x_0.masked_BL, 0
        self._keys: Keys = ()

    def __call__(self, h_BLD: Tensor, x_k: State) -> Tensor:
        """The next states; as wide as g gives them."""
        g, self._k = self._g, self._k + 1
        if self._k == 1:
            self._keys = g.keys(g.sampler, h_BLD, x_k)
        elif not h_BLD.requires_grad:  # cut off from the steps before, to which these keys belong as well
            self._keys = tuple((k.detach(), v.detach()) for k, v in self._keys)
        active_BL = self.candidate_BL | g.sampler.carriers(self._masked_BL & ~x_k.masked_BL, x_k)
        out: Tensor = g.step(g.sampler, h_BLD, x_k, active_BL, self._keys, g.candidates + 1 + self._k)
        return out
