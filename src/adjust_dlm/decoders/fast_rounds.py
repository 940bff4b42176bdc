"""The fast form of a single round: for canvases whose rows come and go between rounds (`rows.py`)."""

from __future__ import annotations

import contextlib
import logging
from typing import NamedTuple

import torch

from adjust_dlm.bases import Base
from adjust_dlm.decoders.adjust import AdjustOptions
from adjust_dlm.decoders.canvas import Canvas
from adjust_dlm.decoders.fast import engine_of
from adjust_dlm.decoders.work import Work, slot_bucket
from adjust_dlm.sampler import Sampler

MOST_SHAPES = 24  # kept; each has some ten to thirty functions, of `graphs.MOST_GRAPHS`
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
    """Plays a round of `joint`, `parallel` or `adjust` on buffers of few shapes: see `fast.why_not` for what may.

    Rows are copied into the lane of the next larger shape, and back after their round: between rounds all there is to
    know stands in the canvas, which the reference could take over at any time.

    Attributes:
        held: buffers and captured functions after the latest round; may be read from any thread.
    """

    def __init__(self, base: Base, sampler: Sampler | None, *, most_cells: int) -> None:
        """Captures nothing yet.

        Args:
            base: the model, without the features that a sampler may want.
            sampler: of `adjust`.
            most_cells: slots times columns of all shapes kept, at most; a single one may be larger.
        """
        self.sampler, self.held = sampler, Held()
        self._engine = engine_of(base, sampler)
        self._engine.most_lanes, self._engine.most_cells = MOST_SHAPES, most_cells
        self._device, self._compiled = base.device, base.compiled

    @torch.no_grad()
    def play(self, canvas: Canvas, *, decoder: str, options: AdjustOptions | None = None) -> None:
        """One round of every open row, as the decoder of that name has it; after a failure the canvas is as before.

        Args:
            canvas: of the base, or of its twin with the features that the sampler wants; with an exact schedule.
            decoder: joint, parallel or adjust.
            options: of adjust.

        Raises:
            FloatingPointError: the states gave NaN.
            InputError: sparse steps that cannot be made.
        """
        options = options or AdjustOptions()
        options.check(self.sampler, canvas.config.candidates)
        most = int(canvas.open_BL.sum(-1).max())  # waits for the device
        if most == 0:
            return
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            self._play(canvas, most, decoder, options)
        self._look()

    def _play(self, canvas: Canvas, most: int, decoder: str, options: AdjustOptions) -> None:
        sampler = self.sampler if decoder == "adjust" else None
        self._engine.meet(sampler, compiled=self._compiled)  # someone else may decode with this base, too
        (rows, length), base, config = canvas.tokens_BL.shape, canvas.base, canvas.config
        slots, columns = slot_bucket(rows), column_bucket(length, base.spec.context)
        anchor = sampler is not None and sampler.config.anchor
        lane = self._engine.lane(base, slots, columns, padded=True, config=config, anchor=anchor)
        lane.noting = canvas.chance_BL is not None
        lane.load(canvas, list(range(rows)), 0)
        lane.clear(rows)
        count = min(config.tokens_per_step, most, config.candidates + 1 if config.candidates else most)
        Work(self._engine.graphs, base, sampler, lane, decoder=decoder, options=options).round(count, most)
        lane.refuse_nan()
        lane.give(canvas)

    def _look(self) -> None:
        """Says what is held once there are more shapes."""
        shapes, graphs = self._engine.lanes, self._engine.graphs
        if (len(shapes), graphs.captures) == (self.held.shapes, self.held.captures):
            return
        more = len(shapes) > self.held.shapes
        held = sum(buffer.nbytes for lane in shapes for buffer in lane.buffers())
        self.held = Held(len(shapes), len(graphs.items()), graphs.captures, held, graphs.reserved)
        if more:
            sizes = held / 2**20, graphs.reserved / 2**20
            logger.info("%d shapes of batches: %.1f MiB of buffers, %.1f MiB of graphs", len(shapes), *sizes)


def column_bucket(length: int, most: int) -> int:
    """Columns for a canvas, few whatever clients send: multiples of 32, of 64 above 256, of 128 above 1024."""
    step = 32 if length <= 256 else 64 if length <= 1024 else 128
    return max(length, min(-(-length // step) * step, most))
