"""Certainty of rows of logits and a draw from them: one read of each row, some fifteen more under top_p or top_k.

The plain form is `sampling` (`process`, `negative_entropy`, `margin`, `confidence`, `draw`). One program has one row;
logits keep the head's dtype, stand at -inf where a token is forbidden, and are never written back. What the filters
keep is a prefix of the tokens by falling probability, then rising id: e = exp((logit - top) / T) above `cut`, and the
first `ties` of those equal to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_KINDS = (torch.float32, torch.float64, torch.float32, torch.float32, torch.long, torch.float32, torch.int32)
_BLOCK, _WARPS = 8192, 16  # one program has a row to itself: large blocks, so that it waits for memory less often
_SCAN, _STAGES = 4096, 4  # of kernels that keep several numbers in each lane; statistics ask for blocks ahead of time


class Stats(NamedTuple):
    """Of each row, all [R]: of the logits divided by the temperature, fp32.

    Attributes:
        top: the largest logit, before the temperature.
        total: sum of exp((logit - top) / T), float64.
        entropy: minus the entropy of the softmax.
        margin: p1 - p2 of the two likeliest tokens.
        token: the likeliest token, the lowest of several: int64.
        cut: e of the last token that the filters keep; means nothing without filters.
        ties: how many tokens of that e they keep: int32; means nothing without filters.
    """

    top: Tensor
    total: Tensor
    entropy: Tensor
    margin: Tensor
    token: Tensor
    cut: Tensor
    ties: Tensor

    @property
    def confidence(self) -> Tensor:
        """Probability of the likeliest token."""
        return (1 / self.total).float()


@triton.jit  # type: ignore[untyped-decorator]
def _stats_kernel(  # type: ignore[no-untyped-def]
    logits, top, total, entropy, margin, token, width, stride, inverse, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    # Of what each lane saw: the best and the second best, where the best stood, sums of e and of e * log e. e is
    # relative to the best so far; finite at first, so that no -inf - -inf arises.
    first = tl.full((BLOCK,), -1.0e30, tl.float32)
    second = first
    where = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    weighted = mass
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        column = start + lane
        x = tl.load(logits + row * stride + column, column < width, other=float("-inf")).to(tl.float32)
        higher = x > first
        below = -tl.abs(x - first) * inverse
        e = tl.exp(below)
        below = tl.maximum(below, -1e4)  # 0 * -inf would be NaN
        weighted = tl.where(higher, e * (weighted + mass * below), weighted + e * below)
        mass = tl.where(higher, e * mass + 1.0, mass + e)
        second = tl.maximum(second, tl.minimum(first, x))
        where = tl.where(higher, column, where)
        first = tl.maximum(first, x)
    best = tl.max(first, 0)
    chosen = tl.min(tl.where(first == best, where, width), 0)
    runner = tl.max(tl.where(where == chosen, second, first), 0)
    below = (first - best) * inverse
    e = tl.exp(below)
    weighted = e * (weighted + mass * tl.maximum(below, -1e4))
    total_mass = tl.sum((e * mass).to(tl.float64), 0)
    mass_all = total_mass.to(tl.float32)
    tl.store(top + row, best)
    tl.store(total + row, total_mass)
    tl.store(entropy + row, tl.sum(weighted, 0) / mass_all - tl.log(mass_all))
    tl.store(margin + row, (1.0 - tl.exp((runner - best) * inverse)) / mass_all)
    tl.store(token + row, chosen.to(tl.int64))


@triton.jit
def _load_e(logits, row, column, width, stride, best, inverse):  # type: ignore[no-untyped-def]
    x = tl.load(logits + row * stride + column, column < width, other=float("-inf")).to(tl.float32)
    below = (x - best) * inverse
    return tl.exp(below), below


@triton.jit  # type: ignore[untyped-decorator]
def _cut_kernel(  # type: ignore[no-untyped-def]
    logits, top, total, entropy, margin, cut, ties, width, stride, inverse, top_p, top_k, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.load(top + row)
    goal = (tl.load(total + row) * top_p).to(tl.float32)  # infinite without top_p
    low = tl.full([], 0, tl.int32)  # fp32 numbers >= 0 order like their bits; e <= 1
    high = tl.full([], 0x3F800001, tl.int32)
    while high - low > 1:  # the largest e from which on there is enough mass, or enough tokens
        step = tl.maximum((high - low) // 4, 1)
        first = (low + step).to(tl.float32, bitcast=True)
        second = (low + 2 * step).to(tl.float32, bitcast=True)
        third = (low + 3 * step).to(tl.float32, bitcast=True)
        mass1 = tl.zeros((BLOCK,), tl.float32)
        mass2 = mass1
        mass3 = mass1
        count1 = tl.zeros((BLOCK,), tl.int32)
        count2 = count1
        count3 = count1
        for start in range(0, width, BLOCK):
            e, _ = _load_e(logits, row, start + lane, width, stride, best, inverse)
            mass1 += tl.where(e >= first, e, 0.0)
            mass2 += tl.where(e >= second, e, 0.0)
            mass3 += tl.where(e >= third, e, 0.0)
            count1 += (e >= first).to(tl.int32)
            count2 += (e >= second).to(tl.int32)
            count3 += (e >= third).to(tl.int32)
        enough1 = (tl.sum(mass1, 0) >= goal) | (tl.sum(count1, 0) >= top_k)
        enough2 = (tl.sum(mass2, 0) >= goal) | (tl.sum(count2, 0) >= top_k)
        enough3 = (tl.sum(mass3, 0) >= goal) | (tl.sum(count3, 0) >= top_k)
        base = low
        low = tl.where(
            enough3, base + 3 * step, tl.where(enough2, base + 2 * step, tl.where(enough1, base + step, base))
        )
        high = tl.where(enough3, high, tl.minimum(high, low + step))
    edge = low.to(tl.float32, bitcast=True)
    above = tl.zeros((BLOCK,), tl.float64)
    bigger = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        e, _ = _load_e(logits, row, start + lane, width, stride, best, inverse)
        above += tl.where(e > edge, e, 0.0).to(tl.float64)
        bigger += (e > edge).to(tl.int32)
    over = tl.sum(bigger, 0)
    missing = (goal - tl.sum(above, 0).to(tl.float32)) / tl.maximum(edge, 1e-38)
    kept = tl.minimum(tl.ceil(tl.minimum(missing, 1e9)).to(tl.int32), top_k - over)
    kept = tl.where(edge > 0, kept, 0)  # tokens without mass are never drawn
    sums = tl.zeros((BLOCK,), tl.float64)
    weighted = tl.zeros((BLOCK,), tl.float32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, width, BLOCK):
        e, below = _load_e(logits, row, start + lane, width, stride, best, inverse)
        tie = (e == edge).to(tl.int32)
        stays = (e > edge) | ((tie > 0) & (seen + tl.cumsum(tie, 0) <= kept))
        seen += tl.sum(tie, 0)
        sums += tl.where(stays, e, 0.0).to(tl.float64)
        weighted += tl.where(stays, e * tl.maximum(below, -1e4), 0.0)
    total_mass = tl.sum(sums, 0)
    mass = total_mass.to(tl.float32)
    whole = tl.load(total + row).to(tl.float32)
    alone = over + kept <= 1
    tl.store(margin + row, tl.where(alone, 1.0, tl.load(margin + row) * whole / mass))
    tl.store(total + row, total_mass)
    tl.store(entropy + row, tl.sum(weighted, 0) / mass - tl.log(mass))
    tl.store(cut + row, edge)
    tl.store(ties + row, kept)


def row_stats(logits_RV: Tensor, temperature: float, *, top_p: float = 1.0, top_k: int = 0) -> Stats:
    """Statistics of every row at a temperature above 0, after the filters if there are any.

    Rows are contiguous, of any floating dtype; forbidden tokens stand at -inf, and some token of each row does not.
    """
    rows, width = logits_RV.shape
    stats = Stats(*(torch.empty(rows, dtype=kind, device=logits_RV.device) for kind in _KINDS))
    inverse = _inverse(temperature)
    _stats_kernel[(rows,)](
        logits_RV, *stats[:5], width, logits_RV.stride(0), inverse, STAGES=_STAGES, **_shape(width, _SCAN)
    )
    if _filters(width, top_p, top_k):
        share = max(top_p, 1e-30) if top_p < 1 else 1e30  # as in `sampling.process`
        _cut_kernel[(rows,)](
            logits_RV, stats.top, stats.total, stats.entropy, stats.margin, stats.cut, stats.ties, width,
            logits_RV.stride(0), inverse, share, top_k or width, **_shape(width, _SCAN),
        )  # fmt: skip
    return stats


@triton.jit  # type: ignore[untyped-decorator]
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits, row_of, top, total, cut, ties, uniform, token, bad, width, stride, inverse, FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = tl.load(row_of + program)
    best = tl.load(top + row)
    whole = tl.load(total + row)
    tl.store(bad, True, (whole > 0) == 0)  # NaN of an infinite logit, 0 of nothing but -inf
    goal = tl.load(uniform + program) * whole
    if FILTERED:
        edge = tl.load(cut + row)
        kept = tl.load(ties + row)
    seen = tl.full([], 0, tl.int32)
    lane = tl.arange(0, BLOCK)
    below = tl.full([], 0.0, tl.float64)  # mass of all blocks before
    start = tl.full([], 0, tl.int32)
    drawn = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)  # the last token with any mass, for a goal that rounding put behind it
    while (start < width) & (drawn < 0):
        column = start + lane
        e, _ = _load_e(logits, row, column, width, stride, best, inverse)
        if FILTERED:
            tie = (e == edge).to(tl.int32)
            e = tl.where((e > edge) | ((tie > 0) & (seen + tl.cumsum(tie, 0) <= kept)), e, 0.0)
            seen += tl.sum(tie, 0)
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
    logits_RV: Tensor, row_N: Tensor, stats: Stats, u_N: Tensor, bad: Tensor, temperature: float, *,
    top_p: float = 1.0, top_k: int = 0,
) -> Tensor:  # fmt: skip
    """Inverse CDF at u, float64 in [0, 1), for some rows: int64 [N].

    `stats` are those of all rows under the same settings; `bad` becomes True where one of these rows has no softmax.
    """
    token_N, width = torch.empty_like(row_N), logits_RV.shape[1]
    _draw_kernel[(len(row_N),)](
        logits_RV, row_N, stats.top, stats.total, stats.cut, stats.ties, u_N, token_N, bad, width, logits_RV.stride(0),
        _inverse(temperature), FILTERED=_filters(width, top_p, top_k), **_shape(width, _BLOCK),
    )  # fmt: skip
    return token_N


def _filters(width: int, top_p: float, top_k: int) -> bool:
    return top_p < 1 or 0 < top_k < width


def _shape(width: int, block: int) -> dict[str, int]:
    return {"BLOCK": min(block, triton.next_power_of_2(width)), "num_warps": _WARPS if width > 1024 else 4}


def _inverse(temperature: float) -> float:
    """1 / T, within fp32 as in `sampling.process`."""
    return 1 / min(max(float(temperature), 1e-30), 1e30)
