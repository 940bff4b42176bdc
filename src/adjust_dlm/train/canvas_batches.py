"""Which canvases a step sees: a pure function of (corpus, seed, step), so resuming needs no state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from adjust_dlm.data.corpus import KINDS, Corpus
from adjust_dlm.train.masked_ce import MaskedBatch, draw_masks, masked_batch, stratified_times
from adjust_dlm.types import require


class CanvasBatches:
    """Global batches in fixed proportions of the kinds; each kind walks through its own permutations.

    All ranks draw the whole batch, masks and times with it, and keep each world-th row: together they train on exactly
    what a single process would.
    """

    def __init__(
        self, corpus: Corpus, shares: Mapping[str, float], *, batch_size: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        """Splits the batch over the kinds.

        Args:
            corpus: all canvases of the training split.
            shares: weight of each kind; those without canvases are left out and the rest scaled up.
            batch_size: B, canvases of a global batch.
            seed: names the order, the times and the masks.
            rank: this process.
            world: number of processes.
        """
        require(batch_size % world == 0, f"batch_size {batch_size} is not a multiple of the {world} processes")
        self.corpus, self.seed, self.rank, self.world = corpus, seed, rank, world
        self.members = {k: (corpus.kind_N == n).nonzero()[:, 0] for n, k in enumerate(KINDS)}
        present = {k: shares[k] for k in KINDS if len(self.members[k]) and shares[k] > 0}
        require(bool(present), f"every kind of canvas in the corpus has share 0: {dict(shares)}")
        self.counts = largest_remainder(present, batch_size)
        self._orders: dict[str, tuple[int, Tensor]] = {}

    def step(self, step: int, micro: int) -> list[MaskedBatch]:
        """This rank's part of global batch `step`, in passes of `micro` canvases; the weights sum over all passes."""
        generator = torch.Generator().manual_seed(_mixed(self.seed, 0, step))
        members = [self._take(kind, step * count, count) for kind, count in self.counts.items()]
        index_B = torch.cat(members)
        index_B = index_B[torch.randperm(len(index_B), generator=generator)]
        prompt_B, tokens_BL = self.corpus.prompt_len_N[index_B], self.corpus.tokens_NL[index_B]
        length = tokens_BL.shape[1]
        t_B = stratified_times(len(index_B), generator)
        masked_BL = draw_masks(prompt_B, t_B, length, generator)
        mine = slice(self.rank, None, self.world)
        local = len(index_B) // self.world
        weights_B = 1 / (t_B * (length - prompt_B.double()).clamp_min(1) * local)
        parts = (x[mine].split(micro) for x in (tokens_BL, masked_BL, weights_B))
        return [masked_batch(*part) for part in zip(*parts, strict=True)]

    def _take(self, kind: str, start: int, count: int) -> Tensor:
        """Canvases start..start+count of a kind's endless stream of permutations."""
        size, out = len(self.members[kind]), []
        while count:
            epoch, offset = divmod(start, size)
            part = self._order(kind, epoch)[offset : offset + count]
            out.append(part)
            start, count = start + len(part), count - len(part)
        return torch.cat(out) if out else torch.empty(0, dtype=torch.long)

    def _order(self, kind: str, epoch: int) -> Tensor:
        known = self._orders.get(kind)
        if known is None or known[0] != epoch:
            generator = torch.Generator().manual_seed(_mixed(self.seed, 1 + KINDS.index(kind), epoch))
            members = self.members[kind]
            self._orders[kind] = (epoch, members[torch.randperm(len(members), generator=generator)])
        return self._orders[kind][1]


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
