"""Rows that come and go between rounds: what a server needs to decode requests together that did not start together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from adjust_dlm.bases.memory import Memory
from adjust_dlm.decoders.machinery.cache import surplus
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.types import require

_WIDE = {"tokens_BL": None, "real_BL": False, "masked_BL": False, "order_BL": -1}  # and what stands on more left pads
_LONG = (
    "rows_B", "seeds_B", "new_B", "commits_B", "base_calls_B", "sampler_calls_B", "partner_calls_B", "rounds_B",
    "quota_B",
)  # fmt: skip


C = TypeVar("C", bound=Canvas)


class RoundCanvas(Canvas):
    """A canvas that hands control back after every round.

    Decoders loop `while canvas.open`. Of those that keep nothing between rounds (`Decoder.resumable`) a round may be
    run at a time, and the rest of them never notices: same tokens, same order, same calls.
    """

    _started = False

    @property
    def open(self) -> bool:
        """Whether this call of the decoder still has its round to do (waits for the device)."""
        return not self._started and super().open

    def start_round(self, wanted_B: Tensor | None = None, *, same_pass: bool = False) -> int:
        """See `Canvas.start_round`."""
        self._started = True
        return super().start_round(wanted_B, same_pass=same_pass)

    def play(self, run: Callable[[Canvas], None]) -> None:
        """One round of a decoder."""
        self._started = False
        run(self)


def take(canvas: C, rows: Sequence[int]) -> C:
    """A copy with some rows only, in the given order, between rounds; columns that are pads in all of them go.

    Raises:
        InputError: a reference schedule, whose rows march in step.
    """
    require(canvas.config.schedule == "exact", "rows come and go with the exact schedule only")
    index_B = torch.tensor(rows, device=canvas.rows_B.device, dtype=torch.long)
    real_BL = canvas.real_BL[index_B]
    first = int(real_BL.any(0).long().argmax()) if len(rows) else 0
    out = copy.copy(canvas)
    for name in _wide(canvas):
        setattr(out, name, getattr(canvas, name)[index_B][:, first:])
    for name in _LONG:
        setattr(out, name, getattr(canvas, name)[index_B])
    out.memory, out.sampler_memory = (m.take(index_B, first) for m in (canvas.memory, canvas.sampler_memory))
    out.last_BLD = None if canvas.last_BLD is None else canvas.last_BLD[index_B][:, first:]
    return _settled(out)


def before(canvas: RoundCanvas) -> RoundCanvas:
    """All rows as they are now, for a round that may have to be played again."""
    every, kept = range(len(canvas.rows_B)), (canvas.memory, canvas.sampler_memory)
    if canvas.base.spec.block is None or not bool(canvas.real_BL[:, 0].any()):
        return take(canvas, every)
    bare = copy.copy(canvas)
    bare.memory, bare.sampler_memory = Memory(len(every)), Memory(len(every))
    out = take(bare, every)
    out.memory, out.sampler_memory = (memory.before() for memory in kept)
    return out


def join(parts: Sequence[RoundCanvas]) -> RoundCanvas:
    """All rows of canvases of one base and one config as one canvas, between rounds; short ones get left pads."""
    first, width = parts[0], max(part.tokens_BL.shape[1] for part in parts)
    require(all(part.config.schedule == "exact" for part in parts), "rows come and go with the exact schedule only")
    out = copy.copy(first)
    for name, pad in _wide(first).items():
        value = first.base.spec.pad_id if pad is None else pad
        pads = [(width - part.tokens_BL.shape[1], 0) for part in parts]
        wide = [F.pad(getattr(part, name), pad, value=value) for part, pad in zip(parts, pads, strict=True)]
        setattr(out, name, torch.cat(wide))
    for name in _LONG:
        setattr(out, name, torch.cat([getattr(part, name) for part in parts]))
    found = [part.last_BLD for part in parts if part.last_BLD is not None]
    if found:  # rows that were never looked at have drafts of nothing
        wide_BLD = found[0].new_zeros(len(out.rows_B), width, found[0].shape[-1])
        for h_BLD, part in zip(wide_BLD.split([len(part.rows_B) for part in parts]), parts, strict=True):
            if part.last_BLD is not None:
                h_BLD[:, width - part.last_BLD.shape[1] :] = part.last_BLD
        out.last_BLD = wide_BLD
    out.memory = Memory.join([part.memory for part in parts], width + surplus(first.base))
    out.sampler_memory = Memory.join([part.sampler_memory for part in parts], width)
    return _settled(out)


def _wide(canvas: Canvas) -> dict[str, float | None]:
    return {**_WIDE, **({} if canvas.chance_BL is None else {"chance_BL": torch.nan})}


def _settled(canvas: C) -> C:
    """What follows from the rows."""
    canvas._column_L = torch.arange(canvas.tokens_BL.shape[1], device=canvas.rows_B.device)
    canvas.only_BL, canvas._before_B = torch.ones_like(canvas.real_BL), canvas.commits_B.clone()
    canvas.padded = not bool(canvas.real_BL.all())
    return canvas
