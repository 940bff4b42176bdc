"""What passes and steps of a block base compute on a lane: the open block, and before it what has just become final.

A pass computes S columns of a row. The host knows which rows may have entered a block since their last pass, but not
which have ended. Where few of many have, a pass over their block before comes first (`enter`); else all compute 2 S.
Prompts are read in passes of their own, which are not captured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from adjust_dlm.bases import Base
from adjust_dlm.bases.blocks import to_edge
from adjust_dlm.bases.memory import Memory, renew
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders.fast.lane import Lane
from adjust_dlm.decoders.machinery.cache import columns_to_edge, grid, step_at_columns, surplus
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.rows import take
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import State

_AT_ONCE = 8192  # columns of a pass over prompts, unless a single one is longer
_KEPT = 2 * _AT_ONCE  # columns of their canvases, whose keys and values stand beside the lane's


def pass_over(base: TransformerBase, state: State, memory: Memory, count: int | None, *, final: bool = False) -> None:
    """Renews what the memory keeps of the base at `count` columns of each row, or at those alone that are `final`."""
    size, ahead = grid(base)
    whole, open_B = to_edge(state, size, base.spec.mask_id, surplus(base)), state.masked_BL.any(-1)
    width, ahead = whole.tokens_BL.shape[1], 0 if final else ahead
    column_BN, valid_BN, _ = columns_to_edge(state, memory, size, width, open_B, count=count, ahead=ahead)
    base.renew(whole, memory, column_BN, valid_BN)


def enter(base: TransformerBase, lane: Lane, count: int) -> None:
    """Renews the block before the open one, of the rows that stand first in `lane.enters_B`: no more of them enter."""
    row_E = lane.enters_B[:count]
    part = State(lane.tokens_BL[row_E], lane.real_BL[row_E], lane.masked_BL[row_E], lane.padded)
    memory = lane.memory.of_rows(row_E)
    pass_over(base, part, memory, base.spec.block, final=True)
    lane.memory.counts_B3[row_E] = memory.counts_B3


def step(sampler: Sampler, lane: Lane, count: int, *, keys_only: bool = False) -> None:
    """A step of g at `count` columns of each row, in place; `keys_only` leaves the states as they are."""
    new_BND, column_BN, own_BN = step_at_columns(sampler, lane.h_BLD, lane, count)
    if not keys_only:
        renew(lane.h_BLD, new_BND, column_BN, own_BN)


def read_prompts(base: TransformerBase, sampler: Sampler | None, canvas: Canvas, rows: list[int]) -> Iterator[Canvas]:
    """Rows before their first round, some at a time, with the blocks before their open one in their memories."""
    size, at_once = grid(base)[0], 1
    if len(rows) > 1:
        columns = (base.spec.block or 1) + int((canvas.real_BL & ~canvas.masked_BL)[rows].sum(-1).max())
        at_once = max(1, min(_AT_ONCE // columns, _KEPT // canvas.tokens_BL.shape[1]))
    for at in range(0, len(rows), at_once):
        part = take(canvas, rows[at : at + at_once])
        if bool((part.block_of(size) > 0).any()):
            pass_over(base, part, part.memory, None, final=True)
            if sampler is not None:
                h_BLD = part.memory.kept[-1][:, : part.tokens_BL.shape[1]]
                memory, open_B = part.sampler_memory, part.open_B
                column_BN, valid_BN, _ = columns_to_edge(part, memory, size, h_BLD.shape[1], open_B)
                sampler.rows(h_BLD, part, column_BN, memory, valid_BN)
        yield part


class Waiting:
    """Rows that wait for slots, in order; on a block base their prompts are read ahead, some in a pass."""

    def __init__(self, base: Base, sampler: Sampler | None, canvas: Canvas, rows: list[int]) -> None:
        self._part, self._left = canvas, rows  # of which canvas the next rows are, and which rows of it
        self._parts: Iterator[Canvas] = iter(())
        if base.spec.block is not None and isinstance(base, TransformerBase):
            self._left, self._parts = [], read_prompts(base, sampler, canvas, rows)

    def load(self, lane: Lane, slots: list[int]) -> None:
        """The next rows take these slots."""
        while slots:
            if not self._left:
                self._part = next(self._parts)
                self._left = list(range(len(self._part.rows_B)))
            count = min(len(slots), len(self._left))
            lane.load(self._part, self._left[:count], slots[:count])
            self._left, slots = self._left[count:], slots[count:]


def catch_up(base: TransformerBase, sampler: Sampler | None, canvas: Canvas, lane: Lane) -> list[int]:
    """Reads what rows of a canvas lack of more than one block, as prompts before a row's first round.

    Returns the rows that have entered a block since their last pass. A sampler is given where the round has steps of g.
    """
    size, memory, open_B, step = base.spec.block or 1, canvas.memory, canvas.open_B, grid(base)[0]
    before_B = canvas.block_of(step) * step
    lag_B = before_B - memory.counts_B3[:, 0]
    lag_of_g_B = before_B - canvas.sampler_memory.counts_B3[:, 0] if sampler is not None else torch.zeros_like(lag_B)
    far_B = lag_B.maximum(lag_of_g_B) > size + 2 * base.spec.causal  # see `verified.play`
    late_B = open_B & (far_B | ((canvas.rounds_B == 0) & (lag_B > 0)))
    late, waits = torch.stack([late_B, open_B & ~late_B & (lag_B.maximum(lag_of_g_B) > 0)]).tolist()
    for b in (b for b, is_late in enumerate(late) if is_late):
        lane.forget()
        for part in read_prompts(base, sampler, canvas, [b]):
            if base.spec.causal and bool(canvas.rounds_B[b]):  # g alone was late; it drafts from older states
                part.memory = take(canvas, [b]).memory
                part.sampler_memory.counts_B3.clamp_max_(part.memory.counts_B3[:, :1])
            for mine, theirs in ((memory, part.memory), (canvas.sampler_memory, part.sampler_memory)):
                mine.make_room(theirs, canvas.tokens_BL.shape[1] - part.tokens_BL.shape[1])
                mine.load(slice(b, b + 1), theirs, [0])
    return [b for b, waits_now in enumerate(waits) if waits_now]
