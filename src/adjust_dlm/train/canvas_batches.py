"""The canvases of a step of adaptation: proportions of the kinds, what is masked in each, and passes over them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from adjust_dlm.data.corpus import Corpus
from adjust_dlm.data.settings import KINDS
from adjust_dlm.train.masked_ce import (
    MaskedBatch,
    behind_cuts,
    block_batch,
    cuts,
    draw_masks,
    group_batch,
    hidden_in_views,
    masked_batch,
    open_positions,
    stratified_times,
)
from adjust_dlm.types import require


class CanvasBatches:
    """Global batches in fixed proportions of the kinds; each kind walks through its own permutations.

    A batch is a pure function of (corpus, seed, step), so resuming needs no state.

    All ranks draw the whole batch, masks and times with it, and keep each world-th row: together they train on exactly
    what a single process would.
    """

    def __init__(
        self, corpus: Corpus, shares: Mapping[str, float], *, batch_size: int, seed: int, rank: int = 0, world: int = 1,
        block: int | None = None, causal: bool = False, end_ids: Sequence[int] = (), suffix: float = 0.0,
    ) -> None:  # fmt: skip
        """Splits the batch over the kinds.

        Args:
            corpus: all canvases of the training split.
            shares: weight of each kind; those without canvases are left out and the rest scaled up.
            batch_size: B, canvases of a global batch, a multiple of `world`.
            seed: names the order, the times and the masks.
            rank: this process.
            world: number of processes.
            block: S of a block base, whose canvases are looked at as [clean | A | B].
            causal: they are looked at as [clean | groups], see `group_batch`.
            end_ids: that end its texts.
            suffix: see `hidden_in_views`.
        """
        self.block, self.causal, self.end_ids, self.suffix = block, causal, end_ids, suffix
        self.corpus, self.seed, self.rank, self.world = corpus, seed, rank, world
        self.members = {k: (corpus.kind_N == n).nonzero()[:, 0] for n, k in enumerate(KINDS)}
        present = {k: shares[k] for k in KINDS if len(self.members[k]) and shares[k] > 0}
        require(bool(present), f"every kind of canvas in the corpus has share 0: {dict(shares)}")
        self.counts = largest_remainder(present, batch_size)
        self._orders: dict[str, tuple[int, Tensor]] = {}

    def step(self, step: int, micro: int) -> list[MaskedBatch]:
        """This rank's part of batch `step`, in passes of `micro` canvases; losses add up over passes and ranks."""
        generator = torch.Generator().manual_seed(_mixed(self.seed, 0, step))
        members = [self._take(kind, step * count, count) for kind, count in self.counts.items() if count]
        index_B = torch.cat(members)
        index_B = index_B[torch.randperm(len(index_B), generator=generator)]
        prompt_B, tokens_BL = self.corpus.prompt_len_N[index_B], self.corpus.tokens_NL[index_B]
        length = tokens_BL.shape[1]
        if self.block is not None:
            return (self._groups if self.causal else self._views)(tokens_BL, prompt_B, micro, generator, self.block)
        t_B = stratified_times(len(index_B), generator)
        masked_BL = draw_masks(prompt_B, t_B, length, generator)
        mine = slice(self.rank, None, self.world)
        weights_B = 1 / (t_B * (length - prompt_B.double()).clamp_min(1) * len(index_B))
        parts = (x[mine].split(micro) for x in (tokens_BL, masked_BL, weights_B))
        return [masked_batch(*part) for part in zip(*parts, strict=True)]

    def _views(
        self, tokens_BL: Tensor, prompt_B: Tensor, micro: int, generator: torch.Generator, size: int
    ) -> list[MaskedBatch]:
        """Every score weighs the same; with hidden suffixes there are some more than open positions."""
        count, length = tokens_BL.shape
        hidden_B2L = hidden_in_views(count, length, size, self.suffix, generator)
        open_BL = open_positions(tokens_BL, prompt_B, self.end_ids, size)
        weights_B3L = torch.full((count, 3, length), 1 / max(1, int(open_BL.sum())))
        passes = []
        for index, end in self._passes(ends_of(open_BL, size), micro):
            a, b, c, d = (part[index, ..., :end] for part in (tokens_BL, open_BL, hidden_B2L, weights_B3L))
            passes.append(block_batch(a, b, c, d, size))
        return passes

    def _groups(
        self, tokens_BL: Tensor, prompt_B: Tensor, micro: int, generator: torch.Generator, size: int
    ) -> list[MaskedBatch]:
        """As many masks as columns. The n-th of a group weighs 1 / n: a round of K tokens takes the first K - 1."""
        text_BL = open_positions(tokens_BL, prompt_B, self.end_ids, 1)
        end_B = ends_of(text_BL, size)
        u_BG = torch.rand(len(end_B), tokens_BL.shape[1] // size, generator=generator)
        cut_BG = cuts(text_BL, end_B // size, u_BG)
        harmonic_N = torch.cat([torch.zeros(1), 1 / torch.arange(1, size + 1)])
        share_BG = (text_BL.sum(-1) * size / end_B)[:, None] * (torch.arange(u_BG.shape[1]) < end_B[:, None] // size)
        weights_BGN = behind_cuts(text_BL, cut_BG, size) * harmonic_N * share_BG[..., None]
        weights_BGN /= weights_BGN.sum().clamp_min(1e-9)
        passes = []
        for index, end in self._passes(end_B, micro):
            of_pass = index, slice(0, end // size)
            passes.append(group_batch(tokens_BL[index, :end], cut_BG[of_pass], weights_BGN[of_pass], taught=True))
        return passes

    def _passes(self, end_B: Tensor, micro: int) -> Iterator[tuple[Tensor, int]]:
        """Rows of a pass and its length: short canvases share passes, which end where the longest does."""
        mine = torch.arange(self.rank, len(end_B), self.world)
        for index in mine[end_B[mine].argsort(stable=True)].split(micro):
            yield index, int(end_B[index].max())

    def _take(self, kind: str, start: int, count: int) -> Tensor:
        """Canvases start..start+count of a kind's endless stream of permutations."""
        size = len(self.members[kind])
        first, last = start // size, (start + count - 1) // size
        orders = [self._order(kind, epoch) for epoch in range(first, last + 1)]
        return torch.cat(orders)[start - first * size :][:count]

    def _order(self, kind: str, epoch: int) -> Tensor:
        known = self._orders.get(kind)
        if known is None or known[0] != epoch:
            generator = torch.Generator().manual_seed(_mixed(self.seed, 1 + KINDS.index(kind), epoch))
            members = self.members[kind]
            self._orders[kind] = (epoch, members[torch.randperm(len(members), generator=generator)])
        return self._orders[kind][1]


def ends_of(open_BL: Tensor, size: int) -> Tensor:
    """Where rows end, in quarters of the length (few shapes), which are whole blocks: int64 [B]."""
    length = open_BL.shape[1]
    quarter = -(-length // size // 4) * size
    used_B = (open_BL * torch.arange(1, length + 1)).amax(-1)
    return (-(-used_B // quarter)).clamp_min(1).mul(quarter).clamp_max(length)


def largest_remainder(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers in proportion to the shares that add up to `total`."""
    exact = {key: total * share / sum(shares.values()) for key, share in shares.items()}
    counts = {key: int(value) for key, value in exact.items()}
    by_remainder = sorted(exact, key=lambda key: counts[key] - exact[key])
    for key in by_remainder[: total - sum(counts.values())]:
        counts[key] += 1
    return counts


def _mixed(seed: int, stream: int, number: int) -> int:
    """A generator seed for each (seed, stream, number)."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {stream} {number}".encode(), digest_size=7).digest(), "big")
