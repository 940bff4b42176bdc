"""Certainty of rows of logits and a draw from them, in two reads of each row.

The plain form is `sampling` (`process`, `negative_entropy`, `margin`, `confidence`, `draw`) without top_p and top_k.
One program reads one row; logits stay in the head's dtype and are never written back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 8192, 16  # one program has a row to itself: large blocks, so that it waits for memory less often


class Stats(NamedTuple):
    """Of each row, all [R]: of the logits divided by the temperature, fp32.

    Attributes:
        top: the largest logit, before the temperature.
        total: sum of exp((logit - top) / T), float64.
        entropy: minus the entropy of the softmax.
        margin: p1 - p2 of the two likeliest tokens.
        token: the likeliest token, the lowest of several: int64.
    """

    top: Tensor
    total: Tensor
    entropy: Tensor
    margin: Tensor
    token: Tensor

    @property
    def confidence(self) -> Tensor:
        """Probability of the likeliest token."""
        return (1 / self.total).float()

    def at(self, row_R: Tensor) -> Stats:
        """Those of some rows."""
        return Stats(*(part[row_R] for part in self))


@triton.jit
def _stats_kernel(  # type: ignore[no-untyped-def]
    logits, forbidden, top, total, entropy, margin, token, width, stride, temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    first = tl.full((BLOCK,), float("-inf"), tl.float32)  # the best and the second best that each lane saw
    second = first
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        column = start + lane
        banned = tl.load(forbidden + column, column < width, other=1)
        x = tl.load(logits + row * stride + column, column < width, other=0.0).to(tl.float32)
        x = tl.where(banned != 0, float("-inf"), x)
        where = tl.where(x > first, column, where)
        second = tl.maximum(second, tl.minimum(first, x))
        first = tl.maximum(first, x)
    best = tl.max(first, 0)
    chosen = tl.min(tl.where(first == best, where, width), 0)
    runner = tl.max(tl.where(where == chosen, second, first), 0)
    sums = tl.zeros((BLOCK,), tl.float64)  # the draw adds up the same numbers
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        banned = tl.load(forbidden + column, column < width, other=1)
        x = tl.load(logits + row * stride + column, column < width, other=0.0).to(tl.float32)
        below = tl.where(banned != 0, float("-inf"), (x - best) / temperature)
        e = tl.exp(below)
        sums += e.to(tl.float64)
        weighted += e * tl.maximum(below, -1e4)  # 0 * -inf would be NaN
    total_mass = tl.sum(sums, 0)
    mass = total_mass.to(tl.float32)
    tl.store(top + row, best)
    tl.store(total + row, total_mass)
    tl.store(entropy + row, tl.sum(weighted, 0) / mass - tl.log(mass))
    tl.store(margin + row, (1.0 - tl.exp((runner - best) / temperature)) / mass)
    tl.store(token + row, chosen.to(tl.int64))


def row_stats(logits_RV: Tensor, forbidden_V: Tensor, temperature: float) -> Stats:
    """Statistics of every row.

    Args:
        logits_RV: of the head, any floating dtype, contiguous rows; nothing forbidden yet.
        forbidden_V: uint8, 1 for tokens that must not be drawn.
        temperature: above 0.
    """
    rows, width = logits_RV.shape
    kinds = (torch.float32, torch.float64, torch.float32, torch.float32, torch.long)
    stats = Stats(*(torch.empty(rows, dtype=kind, device=logits_RV.device) for kind in kinds))
    _stats_kernel[(rows,)](
        logits_RV, forbidden_V, *stats, width, logits_RV.stride(0), _in_range(temperature), **_shape(width)
    )
    return stats


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits, forbidden, row_of, top, total, uniform, token, width, stride, temperature, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    row = tl.load(row_of + program)
    best = tl.load(top + program)
    goal = tl.load(uniform + program) * tl.load(total + program)
    lane = tl.arange(0, BLOCK)
    below = tl.full([], 0.0, tl.float64)  # mass of all blocks before
    start = tl.full([], 0, tl.int32)
    drawn = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)  # the last token with any mass, for a goal that rounding put behind it
    while (start < width) & (drawn < 0):
        column = start + lane
        banned = tl.load(forbidden + column, column < width, other=1)
        x = tl.load(logits + row * stride + column, column < width, other=0.0).to(tl.float32)
        e = tl.where(banned != 0, 0.0, tl.exp((x - best) / temperature))
        last = tl.maximum(last, tl.max(tl.where(e > 0, column, 0), 0))
        mass = tl.sum(e.to(tl.float64), 0)
        if below + mass > goal:
            cdf = below + tl.cumsum(e.to(tl.float64), 0)
            drawn = start + tl.sum((cdf <= goal).to(tl.int32), 0)
            drawn = tl.minimum(drawn, last)
        below += mass
        start += BLOCK
    tl.store(token + program, tl.where(drawn < 0, last, drawn).to(tl.int64))


def draw_rows(
    logits_RV: Tensor, forbidden_V: Tensor, row_N: Tensor, stats: Stats, u_N: Tensor, temperature: float
) -> Tensor:
    """Inverse CDF at u for some rows: int64 [N].

    Args:
        logits_RV: as for `row_stats`.
        forbidden_V: as for `row_stats`.
        row_N: which rows, int64.
        stats: of these rows [N], at the temperature of the draw.
        u_N: float64 uniforms in [0, 1).
        temperature: above 0.
    """
    token_N, width = torch.empty_like(row_N), logits_RV.shape[1]
    _draw_kernel[(len(row_N),)](
        logits_RV, forbidden_V, row_N, stats.top, stats.total, u_N, token_N, width, logits_RV.stride(0),
        _in_range(temperature), **_shape(width),
    )  # fmt: skip
    return token_N


def _shape(width: int) -> dict[str, int]:
    return {"BLOCK": min(_BLOCK, triton.next_power_of_2(width)), "num_warps": _WARPS if width > 1024 else 4}


def _in_range(temperature: float) -> float:
    """Within fp32, as in `sampling.process`."""
    return min(max(float(temperature), 1e-30), 1e30)
