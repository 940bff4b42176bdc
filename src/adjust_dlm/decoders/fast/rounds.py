"""The fast form of a single round, and of passes alone: for canvases whose rows come and go (`rows.py`)."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders.fast.blocks import catch_up
from adjust_dlm.decoders.fast.engine import engine_of, heeds, on_device
from adjust_dlm.decoders.fast.lane import Lane
from adjust_dlm.decoders.fast.work import Work, slot_bucket
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.options import AdjustOptions, VerifiedOptions
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import DecodeConfig, State

MOST_SHAPES = 24  # kept; each has some ten to thirty functions, of `graphs.MOST_GRAPHS`
KEPT = 6  # 64 rows come in 15 numbers of slots, 358 together: all of them stay for canvases of about one length
_ANY = DecodeConfig()  # passes heed no settings
logger = logging.getLogger(__name__)


class Held(NamedTuple):
    """What is kept between rounds.

    Attributes:
        shapes: slots and columns that have buffers.
        functions: captured functions.
        captures: functions captured so far, those that were dropped included.
        buffer_bytes: of all shapes.
        graph_bytes: what captures have reserved beside them.
    """

    shapes: int = 0
    functions: int = 0
    captures: int = 0
    buffer_bytes: int = 0
    graph_bytes: int = 0


class Rounds:
    """Plays a round of a decoder that has a fast form (see `fast.why_not`) on buffers of few shapes.

    For other decoders there are `passes`, on bases that see whole canvases.

    Rows are copied into the lane of the next larger shape, and back after their round: between rounds all there is to
    know stands in the canvas, which the reference could take over at any time.

    Attributes:
        held: buffers and captured functions after the latest round; may be read from any thread.
    """

    def __init__(self, base: Base, sampler: Sampler | None, *, tokens: int) -> None:
        """Captures nothing yet; the base is without the features that the sampler may want.

        A batch has so many tokens at most. Shapes of `KEPT` times as many positions are kept; passes over more than
        that batch, as some decoders make them, are not captured.
        """
        self.sampler, self.held = sampler, Held()
        self._engine = engine_of(base, sampler)
        self._engine.most_lanes, self._engine.most_cells = MOST_SHAPES, KEPT * tokens
        self._engine.most_bytes = math.inf
        self._device, self._compiled, self._tokens = base.device, base.compiled, tokens

    @torch.no_grad()
    def play(self, canvas: Canvas, *, decoder: str, options: AdjustOptions | VerifiedOptions | None = None) -> None:
        """One round of every open row, as the decoder of that name has it; after a failure the canvas is as before.

        Raises:
            FloatingPointError: the states gave NaN.
            InputError: as `run_fast`.
        """
        sampler, options = heeds(decoder, self.sampler, options, canvas)
        # Waits for the device. A round of `verified` may come into the next sub-block, one of a causal base looks anew.
        ready_BL = canvas.masked_BL if decoder == "verified" or canvas.base.spec.causal else canvas.open_BL
        most = min(int(ready_BL.sum(-1).max()), canvas.base.spec.block or ready_BL.shape[1])
        if most == 0:
            return
        with on_device(self._device):
            self._play(canvas, most, decoder, sampler, options)
        self._look()

    def passes(self, base: Base) -> tuple[Base, Any]:
        """For decoders that have no fast form: a twin of their base, and the sampler, whose passes are captured."""
        twin = copy.copy(base)
        twin.hidden = functools.partial(self._hidden, base)  # type: ignore[method-assign]
        return twin, functools.partial(self._step, base) if self.sampler is not None else None

    def _lane(self, base: Base, state: State, config: DecodeConfig) -> Lane:
        rows, length = state.tokens_BL.shape
        slots, columns = slot_bucket(rows), column_bucket(length, base.spec.context)
        return self._engine.lane(base, slots, columns, padded=True, config=config)

    @torch.no_grad()
    def _hidden(self, base: Base, state: State) -> Tensor:
        """`base.hidden`."""
        if self._large(state):
            return base.hidden(state)
        with on_device(self._device):
            lane = self._lane(base, state, _ANY)
            lane.look(state)
            return self._run(lane, state, "base", base.hidden)

    @torch.no_grad()
    def _step(self, base: Base, h_BLD: Tensor, state: State) -> Tensor:
        """`sampler(h_BLD, state)`."""
        sampler = self.sampler
        assert sampler is not None
        if self._large(state):
            return sampler(h_BLD, state)
        with on_device(self._device):
            self._engine.meet(sampler, compiled=self._compiled)
            lane = self._lane(base, state, _ANY)
            lane.look(state)
            rows, length = state.tokens_BL.shape
            lane.h_BLD[:rows, -length:] = h_BLD
            return self._run(lane, state, "step", lambda lane: sampler(lane.h_BLD, lane))

    def _large(self, state: State) -> bool:
        """Whether this is a pass over many canvases, as some decoders make: long enough without a capture."""
        return state.tokens_BL.numel() > self._tokens

    def _run(self, lane: Lane, state: State, name: str, function: Callable[[Lane], Tensor]) -> Tensor:
        """What the function makes of a lane, for the rows of a state: a copy."""

        def work() -> None:
            lane.h_BLD.copy_(function(lane))

        self._engine.graphs.run((lane.shape, (name, "alone")), work, lane.buffers)
        self._look()
        rows, length = state.tokens_BL.shape
        return lane.h_BLD[:rows, -length:].clone()

    def _play(
        self, canvas: Canvas, most: int, decoder: str, sampler: Sampler | None,
        options: AdjustOptions | VerifiedOptions,
    ) -> None:  # fmt: skip
        self._engine.meet(sampler, compiled=self._compiled)  # someone else may decode with this base, too
        base, config, rows = canvas.base, canvas.config, len(canvas.tokens_BL)
        lane = self._lane(base, canvas, config)
        lane.noting = canvas.chance_BL is not None
        work = Work(self._engine.graphs, base, sampler, lane, decoder=decoder, options=options)
        enters: list[int] = []
        count = min(config.tokens_per_step, most, config.candidates + 1 if config.candidates else most)
        if base.spec.block is not None and isinstance(base, TransformerBase):
            steps = min(options.depth, base.spec.block) if isinstance(options, VerifiedOptions) else count
            enters = catch_up(base, sampler if steps > 1 else None, canvas, lane)
        lane.load(canvas, list(range(rows)), list(range(rows)))
        work.round(count, most, enters=enters)
        lane.refuse_nan()
        lane.give(canvas, drafts=isinstance(options, VerifiedOptions))

    def _look(self) -> None:
        """Says what is held once there are more shapes."""
        shapes, graphs = self._engine.lanes, self._engine.graphs
        if (len(shapes), graphs.captures) == (self.held.shapes, self.held.captures):
            return
        more = len(shapes) > self.held.shapes
        held = sum(lane.held for lane in shapes)
        self.held = Held(len(shapes), len(graphs.items()), graphs.captures, held, graphs.reserved)
        if more:
            sizes = held / 2**20, graphs.reserved / 2**20
            logger.info("%d shapes of batches: %.1f MiB of buffers, %.1f MiB of graphs", len(shapes), *sizes)


def column_bucket(length: int, most: int) -> int:
    """Columns for a canvas, few whatever clients send: multiples of 32, of 64 above 256, of 128 above 1024."""
    step = 32 if length <= 256 else 64 if length <= 1024 else 128
    return max(length, min(-(-length // step) * step, most))
