"""Algorithm 2 on a block base: one pass gives the states of all blocks of a text, each at a moment of its own.

A text is looked at as [clean | view_0 .. view_{C-1}]: in view c every block b stands at its own moment s_b + c, sees
itself and the clean blocks before it. Rows are then blocks: row c * (N J) + n J + j is state c of block j of text n.

Shapes beside the usual ones: N texts, J blocks of a text, S positions of a block, C states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from adjust_dlm.bases import Base
from adjust_dlm.bases.blocks import before_and_own
from adjust_dlm.bases.memory import Memory
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.sampler import Sampler
from adjust_dlm.train.batches import random_start, random_texts, to_device
from adjust_dlm.train.unroll import NEVER, Frames, Slices, Step
from adjust_dlm.types import GIVEN, MASKED, State, Trajectory


@dataclass
class BlockSlices:
    """C consecutive states of every block of N texts, padded on the right to whole blocks.

    Attributes:
        texts: the texts' final tokens [N, J S]; real up to the edge of a text's last block.
        inside_NL: real without those surplus positions: what g sees.
        views: the blocks [N J, S]; commit numbers count from the first commit of each block.
        lag: of the base. With 1 a row is the column that scores a position, and a block's first position, which the
            clean block before scores, is no row.
    """

    texts: State
    inside_NL: Tensor
    views: Slices
    lag: int

    @property
    def text_SN(self) -> Tensor:
        """0, or -1 where there is no state."""
        return torch.where(self.views.start_N < NEVER, self.views.text_SN, -1)

    @property
    def rank_BL(self) -> Tensor:
        """Commits from each state until the position that a row scores is revealed (see `Slices.rank_BL`)."""
        return F.pad(self.views.rank_BL, (0, self.lag), value=-NEVER)[:, self.lag :]

    def frames(self, base: TransformerBase) -> Frames:
        """Algorithm 2, lines 3-7 for all blocks at once: one pass over the clean texts, one over views beside them."""
        size, count = base.spec.block or 1, self.views.length
        x = self.views.states(base.spec.mask_id)
        n, width = self.texts.tokens_BL.shape
        every_NL = torch.arange(width, device=base.device).expand(n, -1)
        clean = Memory()
        h_NLD = base.hidden_again(self.texts, clean, every_NL, self.texts.real_BL)
        tokens_VL, mask = x.tokens_BL.view(count * n, width), views_mask(self.texts.real_BL, size, count)
        h_VLD = base.hidden_beside(tokens_VL, every_NL.repeat(count, 1), clean, mask)
        h_BSD = h_VLD.unflatten(1, (-1, size)).flatten(0, 1)
        finished = State(self.texts.tokens_BL, self.inside_NL, self.texts.masked_BL)

        def around(sampler: Sampler) -> Step:
            """g on rows of blocks; its own step over the finished texts is made once, with gradients."""
            keys = sampler.keys(h_NLD, finished)

            def g(h_RSD: Tensor, x: State) -> Tensor:
                h_VLD, tokens_VL = h_RSD.view(-1, width, h_RSD.shape[-1]), x.tokens_BL.view(-1, width)
                mask = views_mask(finished.real_BL, size, len(h_VLD) // n)
                return sampler.beside(h_VLD, tokens_VL, every_NL[:1].expand_as(tokens_VL), keys, mask).view_as(h_RSD)

            return g

        return Frames(x, [h_BSD], self.rank_BL, self.text_SN, around)

    def to(self, device: torch.device) -> BlockSlices:
        """A copy there."""
        parts = (self.texts.tokens_BL, self.texts.real_BL, self.texts.masked_BL, self.inside_NL)
        tokens_BL, real_BL, masked_BL, inside_NL = (part.to(device, non_blocking=True) for part in parts)
        return BlockSlices(State(tokens_BL, real_BL, masked_BL), inside_NL, to_device(self.views, device), self.lag)


def random_blocks(
    trajectories: Sequence[Trajectory], rows: Sequence[int], *, count: int, length: int, rollout: int,
    key: tuple[int, ...], base: Base, first: int = 0,
) -> BlockSlices:  # fmt: skip
    """`count` random texts with a random start for every block.

    A slice that holds all windows of its block begins at 0. Else starts run from -(C - rollout - 1) to T_b - 2, T_b the
    commits of the block, so every window start 0..T_b - 2 is equally likely; what hangs over does not count, and
    neither do blocks without commits. Arguments are those of `batches.random_slices`, `length` is C.
    """
    chosen, generators = random_texts(trajectories, rows, count, key, first)
    return pack_blocks(chosen, lambda n, commits: random_start(generators[n], commits, length - rollout), length, base)


def pack_blocks(chosen: Sequence[Trajectory], start: Callable[[int, int], int], length: int, base: Base) -> BlockSlices:
    """Lays texts out in blocks; `start` says where the slice of text n's block with so many commits begins."""
    size, spec = base.spec.block or 1, base.spec
    count = max(-(-len(x.tokens_L) // size) for x in chosen)
    tokens_NL = torch.full((len(chosen), count * size), spec.mask_id)
    order_NL = torch.full(tokens_NL.shape, GIVEN)  # surplus masks are no rows
    inside_NL, real_NL = (torch.zeros(tokens_NL.shape, dtype=torch.bool) for _ in range(2))
    for n, x in enumerate(chosen):
        long = len(x.tokens_L)
        tokens_NL[n, :long], order_NL[n, :long] = x.tokens_L, x.order_L
        inside_NL[n, :long], real_NL[n, : -(-long // size) * size] = True, True
    order_MS, tokens_MS = order_NL.view(-1, size), tokens_NL.view(-1, size)
    first_M1 = torch.where(order_MS >= 0, order_MS, NEVER).amin(-1, keepdim=True)
    time_MS = torch.where(order_MS >= 0, order_MS - first_M1, order_MS)
    commits_M = (order_MS >= 0).sum(-1).tolist()
    # A block without commits is filler: its slice lies behind its end.
    starts = [start(m // count, commits) if commits else NEVER for m, commits in enumerate(commits_M)]
    views = Slices(tokens_MS, time_MS, real_NL.view(-1, size), torch.tensor(starts), length)
    return BlockSlices(State(tokens_NL, real_NL, order_NL == MASKED), inside_NL, views, base.lag)


def views_mask(real_NL: Tensor, size: int, count: int) -> Tensor:
    """[C N, 1, L, 2 L]: a view's column sees the clean blocks before its own, and its own block in the view."""
    before_LL, own_LL = before_and_own(real_NL.shape[1], size, real_NL.device)
    mask_NLM = torch.cat([before_LL, own_LL], 1) & torch.cat([real_NL, real_NL], 1)[:, None]
    return mask_NLM.repeat(count, 1, 1)[:, None]
