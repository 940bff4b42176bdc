"""joint, parallel, adjust, verified on fixed buffers: the same results, without waiting for the device in a round.

The reference (`parallel.py`, `adjust.py`) asks the device how many positions are open and gathers exactly
those. Here the host knows an upper bound instead: a row that has not ended has committed what its schedule says, in
`verified` one token a round at least. So every step has a fixed shape, is captured once as a CUDA graph, and is
replayed; rows that ended early are found out one round late, and their slots are given to rows that wait.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import weakref
from collections import OrderedDict, deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.bases.layers import join_projections
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders.fast.blocks import Waiting
from adjust_dlm.decoders.fast.graphs import Graphs
from adjust_dlm.decoders.fast.lane import Lane
from adjust_dlm.decoders.fast.work import COMPACT as COMPACT
from adjust_dlm.decoders.fast.work import Work, length_bucket, slot_bucket
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.options import AdjustOptions, VerifiedOptions
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import DecodeConfig

COVERED = ("joint", "parallel", "adjust", "verified")
_WITH_G = ("adjust", "verified")
MOST_LANES = 16  # as prompts of very different lengths have, with those that their last rows move to
MOST_BYTES = 8 << 30  # of buffers beside the latest ones
_PAYS = 32  # masks of a row that are worth new graphs
logger = logging.getLogger(__name__)


def wanted(base: Base, eager: bool | None) -> bool:
    """Whether the fast form is to be taken where there is one: see `decode`."""
    return base.device.type == "cuda" if eager is None else not eager


def why_not(base: Base, decoder: str, config: DecodeConfig, sampler: Any, watch: Any) -> str | None:
    """Why this decode has no fast form; None where it has one."""
    if decoder not in COVERED:
        return f"decoder {decoder} has no fast form"
    if not isinstance(base, TransformerBase):
        return f"base {base.spec.name} is no transformer"
    if config.cache_period is not None:
        return "cache_period needs passes of changing shapes"
    if watch is not None:
        return "a watched canvas is looked at after every commit"
    if decoder in _WITH_G and not isinstance(sampler, Sampler):
        return f"the sampler is a {type(sampler).__name__}"
    if len({parameter.device for parameter in base.model.parameters()} | {base.device}) > 1:
        return "the layers of the base are spread over devices"
    return None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a card the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def log_fallback(reason: str) -> None:
    """Says once that the reference decoders run."""
    logger.warning("eager decoding: %s", reason)


def run_fast(
    base: Base, sampler: Sampler | None, canvas: Canvas, *, decoder: str,
    options: AdjustOptions | VerifiedOptions | None = None, slots: int | None = None,
) -> None:  # fmt: skip
    """Fills the canvas as the decoder of that name does: see `why_not` for what may be.

    Buffers and graphs are kept with the base, not with its twin for features. Rows are computed `slots` at a time, by
    default all; each is given its slot as soon as a row before it is done.

    Raises:
        FloatingPointError: the states gave NaN.
        InputError: options that go with no such g, or with no such order.
    """
    sampler, options = heeds(decoder, sampler, options, canvas)
    with on_device(base.device):
        engine_of(base, sampler).fill(canvas.base, sampler, canvas, _Plan(decoder, canvas, options), slots)


def heeds(
    decoder: str, sampler: Sampler | None, options: AdjustOptions | VerifiedOptions | None, canvas: Canvas
) -> tuple[Sampler | None, AdjustOptions | VerifiedOptions]:
    """The sampler where the decoder takes one, and its options, checked."""
    options = options or (VerifiedOptions() if decoder == "verified" else AdjustOptions())
    if isinstance(options, AdjustOptions):
        options.check(sampler, canvas.config.candidates)
    return sampler if decoder in _WITH_G else None, options


def captures(base: Base) -> int:
    """How many functions of a base were captured so far."""
    return 0 if base.workspace is None else base.workspace.graphs.captures


def engine_of(base: Base, sampler: Sampler | None) -> Engine:
    """What is kept with the base; made anew once weights lie elsewhere."""
    if base.workspace is None or base.workspace.weights != _weights(base):
        assert isinstance(base, TransformerBase)
        if base.device.type == "cuda":
            join_projections(base.model)
        base.workspace = Engine(base.device, _weights(base))
    base.workspace.meet(sampler, compiled=base.compiled)
    return base.workspace


def _weights(base: Base) -> tuple[Any, ...]:
    """What graphs hold on to."""
    assert isinstance(base, TransformerBase)
    return base.compiled, base.dtype, base.head_matrix.data_ptr(), _places(base.model)


def _places(model: torch.nn.Module) -> tuple[int, ...]:
    """Where the weights lie; quantized ones have no address of their own."""
    return tuple(p.data_ptr() if type(p.data) is Tensor else id(p) for p in model.parameters())


@dataclass
class _Row:
    """What the host knows of a row in a slot: all of it, unless the row ended early; of `verified` the least."""

    number: int
    left: list[int]  # masks of each block
    per: int = 1  # of these in a block of a block base
    since: int = 0  # the round it came in
    rounds: int = 0
    enters: bool = False  # whether it has entered a block since its last pass
    at: int = field(default=0, init=False)  # the first block with masks: of one token each there are many
    rest: int = field(default=0, init=False)  # masks of all blocks

    def __post_init__(self) -> None:
        self.rest = sum(self.left)
        self.commit(0)

    @property
    def open(self) -> int:
        """Masks of its block."""
        return self.left[self.at] if self.rest else 0

    def commit(self, count: int) -> None:
        """So many masks of its block less."""
        self.left[self.at] -= count
        self.rest -= count
        while self.rest and not self.left[self.at]:
            self.at += 1


class _Plan:
    """How many commits the next round of each row has; of `verified`, how many at least."""

    def __init__(self, decoder: str, canvas: Canvas, options: AdjustOptions | VerifiedOptions) -> None:
        self.decoder, self.options, config = decoder, options, canvas.config
        self.candidates = config.candidates
        self._exact = decoder != "verified"
        schedule = canvas.schedule if self._exact else 1
        self._schedule = schedule if isinstance(schedule, int) else schedule.tolist()
        size, causal = canvas.base.spec.block, canvas.base.spec.causal
        length = config.block_length or size or config.max_new_tokens
        self._per = (size or length) // length
        self._most = length if causal else canvas.tokens_BL.shape[1]  # masks that a pass looks at
        if size is None:
            column_L = torch.arange(canvas.tokens_BL.shape[1], device=canvas.tokens_BL.device)
            place_BL = (column_L - (len(column_L) - config.max_new_tokens)).clamp_min(0).expand_as(canvas.tokens_BL)
        else:
            place_BL = canvas.positions_BL
        number_BL = torch.zeros_like(place_BL) if causal else place_BL // length
        left_BN = number_BL.new_zeros(len(number_BL), int(number_BL.max()) + 1)
        self._left = left_BN.scatter_add_(1, number_BL, canvas.masked_BL.long()).tolist()
        self.may_end = not self._exact or (bool(canvas.base.spec.end_ids) and not config.suppress_eos)

    def rows(self) -> deque[_Row]:
        """All rows with something to fill, before their first round."""
        return deque(_Row(number, list(left), self._per) for number, left in enumerate(self._left) if any(left))

    def commits(self, row: _Row) -> int:
        """Of its next round."""
        if isinstance(self._schedule, int):
            wanted = self._schedule
        else:
            steps = self._schedule[row.number]
            wanted = steps[min(row.rounds, len(steps) - 1)]
        return min(wanted, row.open, self._most, self.candidates + 1 if self.candidates else row.open)

    def bounds(self, living: list[_Row | None]) -> tuple[int, int, list[int]]:
        """Of the next round: what `Work.round` takes. A row that may be in any later block has its longest open."""
        rows = [row for row in living if row]
        most = min(self._most, max(row.open if self._exact else max(row.left) for row in rows))
        enters = [b for b, row in enumerate(living) if row and row.enters and self._exact]
        return max(self.commits(row) for row in rows), most, enters

    def advance(self, row: _Row) -> None:
        """The round is over."""
        block = row.at // row.per
        row.commit(self.commits(row))
        row.rounds, row.enters = row.rounds + 1, row.at // row.per > block

    def over(self, living: list[_Row | None], news: tuple[int, list[bool]] | None) -> list[int]:
        """Slots whose rows are done after this round: by count, or as the news of an earlier round has it."""
        out = []
        for b, row in enumerate(living):
            if row is None:
                continue
            self.advance(row)
            ended = news is not None and news[0] >= row.since and not news[1][b]
            if ended or not row.rest:
                out.append(b)
        return out


class Engine:
    """Lanes and graphs of one base.

    Attributes:
        weights: where they lay when it was made.
        graphs: captured functions.
        most_lanes: shapes whose buffers and graphs are kept.
        most_cells: slots times columns of all of them together; the latest is kept however large.
        most_bytes: of all of them but the latest.
    """

    def __init__(self, device: torch.device, weights: tuple[Any, ...]) -> None:
        self.weights, self.graphs = weights, Graphs(device)
        self.most_lanes, self.most_cells, self.most_bytes = MOST_LANES, math.inf, float(MOST_BYTES)
        self._lanes: OrderedDict[tuple[Any, ...], Lane] = OrderedDict()
        self._sampler: tuple[Any, tuple[int, ...]] = (lambda: None, ())

    def meet(self, sampler: Sampler | None, *, compiled: bool) -> None:
        """Forgets the graphs of another sampler than this one; beside a compiled base, g is compiled too."""
        if sampler is None:
            return
        if sampler.mix.weight.is_cuda:
            join_projections(sampler)
        where = _places(sampler)
        if self._sampler[0]() is not sampler or self._sampler[1] != where:
            self._sampler = weakref.ref(sampler), where
            self.graphs.drop(lambda key: key[1][0] == "step")
            for layer in sampler.layers:
                layer.compiled = compiled

    def lane(self, base: Base, slots: int, length: int, *, padded: bool, config: DecodeConfig) -> Lane:
        """Buffers of a shape."""
        key = (slots, length, padded, base.keep, base.spec.block)
        if key not in self._lanes:
            self._lanes[key] = Lane(base, slots, length, padded=padded, config=config)
            self._evict()
        self._lanes.move_to_end(key)
        lane = self._lanes[key]
        lane.start(config)
        return lane

    def _evict(self) -> None:
        """Drops the shapes not used for longest, until the rest is within bounds."""
        while len(self._lanes) > 1:
            cells = sum(slots * length for slots, length, *_ in self._lanes)
            *others, _ = (lane.held for lane in self._lanes.values())
            few = len(self._lanes) <= self.most_lanes and cells <= self.most_cells
            if few and sum(others) <= self.most_bytes:
                return
            old, _ = self._lanes.popitem(last=False)
            self.graphs.drop(lambda key: key[0] == old)  # noqa: B023 - called at once
            bounds = f"{self.most_lanes} shapes"
            if self.most_cells < math.inf:
                bounds += f" of {self.most_cells} positions"
            logger.info("dropped buffers and graphs of %d x %d: %s are kept at most", *old[:2], bounds)

    @property
    def lanes(self) -> list[Lane]:
        """Those that are kept, the one not used for longest first."""
        return list(self._lanes.values())

    def fill(self, base: Base, sampler: Sampler | None, canvas: Canvas, plan: _Plan, slots: int | None) -> None:
        """All rows of the canvas, `slots` at a time."""
        waiting = plan.rows()
        count, length = min(len(waiting), slots or len(waiting)), canvas.tokens_BL.shape[1]
        if count == 0:
            return
        size, columns = slot_bucket(count), length_bucket(length, count, base.spec.context)
        padded = canvas.padded or (size, columns) != (count, length)
        lane = self.lane(base, size, columns, padded=padded, config=canvas.config)
        living: list[_Row | None] = [waiting.popleft() for _ in range(count)]
        work, mail = self._work(base, sampler, lane, plan), _Mail(lane)
        news = Waiting(base, sampler, canvas, [row.number for row in (*living, *waiting) if row])
        news.load(lane, list(range(count)))
        for number in itertools.count():
            count, most, enters = plan.bounds(living)
            work.round(count, most, enters=enters)
            over = plan.over(living, mail.exchange(number) if plan.may_end else None)
            if over:
                lane.store(canvas, [row.number for b in over if (row := living[b])], over)
                fresh = over[: len(waiting)]
                for b in over:
                    living[b] = None
                for b in fresh:
                    living[b] = row = waiting.popleft()
                    row.since = number + 1
                news.load(lane, fresh)
            if not any(living):
                break
            if over and _worth_moving(living, lane):
                kept, larger = [b for b, row in enumerate(living) if row], lane
                lane, living = self._smaller(base, larger, len(kept)), [living[b] for b in kept]
                work, mail = self._work(base, sampler, lane, plan), _Mail(lane)
                lane.take(larger, kept)
        lane.refuse_nan()

    def _work(self, base: Base, sampler: Sampler | None, lane: Lane, plan: _Plan) -> Work:
        return Work(self.graphs, base, sampler, lane, decoder=plan.decoder, options=plan.options)

    def _smaller(self, base: Base, lane: Lane, rows: int) -> Lane:
        """A lane for the rows that are left."""
        size, (_, columns, padded, *_) = slot_bucket(rows), lane.shape
        return self.lane(base, size, columns, padded=padded or size > rows, config=lane.config)


def _worth_moving(living: list[_Row | None], lane: Lane) -> bool:
    """Whether a pass over the living rows alone is so much cheaper that it pays for new graphs."""
    rows = [row for row in living if row]
    tokens = lane.tokens_BL.numel()
    longest = max(row.rest for row in rows)
    return tokens >= COMPACT and 2 * slot_bucket(len(rows)) <= len(living) and longest >= _PAYS


class _Mail:
    """Which slots are open, from the device to the host: a round late on CUDA, so that nobody waits."""

    def __init__(self, lane: Lane) -> None:
        self.lane, self._cuda = lane, lane.report_N.is_cuda
        if self._cuda:
            self._pages = [torch.empty(lane.report_N.shape, dtype=torch.bool, pin_memory=True) for _ in "ab"]
            self._events = [torch.cuda.Event() for _ in "ab"]
        self._posted = -1

    def exchange(self, number: int) -> tuple[int, list[bool]] | None:
        """Posts the report of a round; returns the round and the slots of the report before, if there is one.

        Raises:
            FloatingPointError: it told of a NaN.
        """
        if not self._cuda:
            return self._read(number, self.lane.report_N)
        page = number % 2
        self._pages[page].copy_(self.lane.report_N, non_blocking=True)
        self._events[page].record()
        before, self._posted = self._posted, number
        if before < 0:
            return None
        self._events[before % 2].synchronize()
        return self._read(before, self._pages[before % 2])

    def _read(self, number: int, report_N: Tensor) -> tuple[int, list[bool]]:
        *open_, bad = report_N.tolist()
        if bad:
            self.lane.refuse_nan()
        return number, open_
