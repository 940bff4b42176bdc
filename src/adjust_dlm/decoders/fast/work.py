"""The functions of a round on a lane: a base pass, steps of g and picks, each captured once and replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adjust_dlm.bases import Base
from adjust_dlm.bases.memory import renew
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders.adjust import sparse_step
from adjust_dlm.decoders.fast import blocks, verified
from adjust_dlm.decoders.fast.graphs import Graphs
from adjust_dlm.decoders.fast.lane import Lane
from adjust_dlm.decoders.fast.pick import pick
from adjust_dlm.decoders.machinery.cache import passes_open
from adjust_dlm.decoders.verified import couples
from adjust_dlm.options import AdjustOptions, VerifiedOptions
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import DecodeConfig

COMPACT = 1024  # columns of a pass from which on fewer make it faster
FEW = 8  # rows that enter a block are counted in powers of two from here on: each is a capture


class Work:
    """The rounds of one decoder on one lane."""

    def __init__(
        self, graphs: Graphs, base: Base, sampler: Sampler | None, lane: Lane, *, decoder: str,
        options: AdjustOptions | VerifiedOptions,
    ) -> None:  # fmt: skip
        """Captures nothing yet; `options` are those of adjust for decoders that have none.

        Raises:
            InputError: see `decoders.verified.couples`.
        """
        self.graphs, self.base, self.sampler, self.lane = graphs, base, sampler, lane
        self.decoder, config = decoder, lane.config
        self._sparse_steps = isinstance(options, AdjustOptions) and options.sparse
        self._verified = (options.depth, couples(options, lane)) if isinstance(options, VerifiedOptions) else None
        self._blocks = config.block_length, config.candidates  # all that passes and steps heed
        self._settings = heeded(config)
        self._size, self._slides = base.spec.block, base.spec.causal and passes_open(base)
        if sampler is not None and (self._sparse_steps or self._size is not None):
            lane.need_keys(sampler)

    def _run(self, key: tuple[Any, ...], function: Callable[[], None]) -> None:
        self.graphs.run((self.lane.shape, (*key, self._blocks)), function, self.lane.buffers)

    def _pick(self, width: int, count: int, *, first: bool = False) -> None:
        lane = self.lane
        key = lane.shape, ("pick", width, count, first, lane.noting, self._settings)
        self.graphs.run(key, lambda: pick(self.base, lane, width, count, first=first), lane.buffers)

    def round(self, count: int, most: int, *, enters: Sequence[int] = ()) -> None:
        """One base pass and its commits, launched; nothing waits for them.

        Args:
            count: no row commits more; `verified` finds out on the device.
            most: no row has more open positions.
            enters: on a block base, the slots whose rows may have entered a block since their last pass; of `verified`
                any may.
        """
        lane = self.lane
        width = width_bucket(most, lane.tokens_BL.shape[1])
        if self._verified is not None:
            width = min(1 << (width - 1).bit_length(), lane.tokens_BL.shape[1])  # each is a capture of a whole round
            key = ("step", "verified", width, *self._verified, lane.noting, self._settings)
            self._run(key, functools.partial(self._play_verified, width, *self._verified))
            return
        enters = enters if passes_open(self.base) and not self._slides else ()  # at one token what is final is all
        columns, first = (self._size or 0) * (1 + bool(enters or self._slides)), self._first(enters)
        self._run(("base", columns, first), functools.partial(self._base_pass, columns, first))
        if self.decoder == "parallel":
            if count:
                self._pick(width, count)
            return
        lane.wide = lane.config.candidates + 1 if lane.config.candidates else count
        for k in range(count):
            if k and lane.config.candidates != 0:
                width = min(width, width_bucket(lane.wide - 1, lane.tokens_BL.shape[1]))
            if k:
                own = 1 if self.sampler is not None and self.sampler.causal else self._size or 0
                self._step(k, width, columns if k == 1 else own, last=k == count - 1)
            self._pick(width, 1, first=k == 0 and count > 1 and lane.config.candidates != 0)

    def _first(self, enters: Sequence[int]) -> int:
        """How many rows have a pass of their own over the block before, because it is cheaper; notes which."""
        slots, size = len(self.lane.slot_B), self._size or 0
        few = max(FEW, 1 << (len(enters) - 1).bit_length()) if enters else 0
        if not few or 2 * few > slots or slots * size < COMPACT:
            return 0
        others = sorted(set(range(slots)) - set(enters))
        self.lane.enters_B.copy_(torch.tensor([*enters, *others]), non_blocking=True)
        return few

    def _base_pass(self, columns: int, first: int) -> None:
        if columns and isinstance(self.base, TransformerBase):
            if first:
                blocks.enter(self.base, self.lane, first)
            blocks.pass_over(self.base, self.lane, self.lane.memory, self._size if first else columns)
        else:
            self.lane.h_BLD.copy_(self.base.hidden(self.lane))
        self.lane.begin_round()

    def _play_verified(self, width: int, depth: int, law: bool) -> None:
        assert self.sampler is not None
        verified.play(self.base, self.sampler, self.lane, width, depth=depth, law=law)

    def _step(self, k: int, width: int, columns: int, *, last: bool) -> None:
        """g after commit k; the last call of a round only where something may still be picked."""
        if self._sparse_steps:
            self._run(("step", "sparse", k, self.lane.wide, columns), lambda: self._sparse(k, columns))
        elif columns:
            self._run(("step", "block", columns), lambda: blocks.step(self._begin_step(), self.lane, columns))
        elif last and width < self.lane.tokens_BL.shape[1]:
            self._run(("step", "last", width), lambda: self._last(width))
        else:
            self._run(("step", "whole"), self._whole)

    def _begin_step(self) -> Sampler:
        assert self.sampler is not None
        self.lane.sampler_calls_B += self.lane.busy_B
        return self.sampler

    def _whole(self) -> None:
        sampler = self._begin_step()
        self.lane.h_BLD.copy_(sampler(self.lane.h_BLD, self.lane))

    def _last(self, width: int) -> None:
        sampler, lane = self._begin_step(), self.lane
        column_BN, _ = lane.open_columns(width)
        renew(lane.h_BLD, sampler(lane.h_BLD, lane, column_BN), column_BN)

    def _sparse(self, k: int, columns: int) -> None:
        sampler, lane = self._begin_step(), self.lane
        if k == 1 and columns:
            blocks.step(sampler, lane, columns, keys_only=True)
        elif k == 1:
            for kept, new in zip(lane.sampler_memory.kept, sampler.keys(lane.h_BLD, lane).kept, strict=True):
                kept.copy_(new)
        lane.h_BLD.copy_(sparse_step(sampler, lane.h_BLD, lane, lane.sampler_memory, k))


@functools.lru_cache(64)
def heeded(config: DecodeConfig) -> DecodeConfig:
    """What picks heed: the rest of the settings is each row's own."""
    return config.but(seed=0, tokens_per_step=1, schedule="exact", max_new_tokens=1)


def slot_bucket(rows: int) -> int:
    """Slots for a number of rows: 1 to 4, then multiples of 4, of 8 from 32 on."""
    step = 1 if rows <= 4 else 4 if rows <= 32 else 8
    return -(-rows // step) * step


def length_bucket(length: int, rows: int, most: int) -> int:
    """Columns for a canvas: a single row's pass reads weights, so pads cost little; those of many rows compute."""
    step = 32 if rows == 1 else 8 if length <= 256 else 16 if length <= 512 else 32
    return max(length, min(-(-length // step) * step, most))


def width_bucket(count: int, length: int) -> int:
    """Positions of a row that are scored, for a number of open ones."""
    step = 8 if count <= 64 else 16
    return min(-(-max(count, 1) // step) * step, length)
