"""The bookkeeping of a round: a dozen numbers for each row, which as plain tensor code take a hundred small kernels.

The plain forms are those of `decoders.lane.Lane` (`begin_round`, `open_columns`, `choose`, `commit`), of
`decoders.columns.columns_of` and of `sampling.uniform`. One program has one row, but for the uniforms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_FIRST = tl.constexpr(-0x61C8864680B583EB)  # the numbers of `sampling.uniform`
_SECOND = tl.constexpr(-0x40A7B892E31B1A47)
_THIRD = tl.constexpr(-0x6B2FB644ECCEEE15)


@triton.jit  # type: ignore[untyped-decorator]
def _begin_kernel(  # type: ignore[no-untyped-def]
    marked, candidate, schedule, rounds_in, commits, before, quota, base_calls, rounds, length, steps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < length
    at = row * length + lane
    left = tl.sum((tl.load(marked + at, inside, other=0) != 0).to(tl.int64), 0)
    open_ = (left > 0).to(tl.int64)  # the block of a row has its first mask
    number = tl.load(rounds_in + row)
    wanted = tl.load(schedule + row * steps + tl.minimum(number, steps - 1))
    tl.store(candidate + at, inside, inside)
    tl.store(before + row, tl.load(commits + row))
    tl.store(quota + row, tl.minimum(wanted, left))
    tl.store(base_calls + row, tl.load(base_calls + row) + open_)
    tl.store(rounds + row, tl.load(rounds + row) + open_)
    tl.store(rounds_in + row, number + 1)


def begin(
    marked_BL: Tensor, candidate_BL: Tensor, schedule_BL: Tensor, round_B: Tensor,
    commits_B: Tensor, before_B: Tensor, quota_B: Tensor, base_calls_B: Tensor, rounds_B: Tensor,
) -> None:  # fmt: skip
    """Books a base pass and sets quotas, in buffers of the lane: see `Lane.begin_round`.

    `marked_BL` are the masks of each row's block; `candidate_BL`, `before_B` and `quota_B` are written only.
    """
    rows, length = marked_BL.shape
    _begin_kernel[(rows,)](
        marked_BL.contiguous(), candidate_BL, schedule_BL, round_B, commits_B, before_B, quota_B,
        base_calls_B, rounds_B, length, schedule_BL.shape[1], BLOCK=triton.next_power_of_2(length),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _columns_kernel(  # type: ignore[no-untyped-def]
    marked, candidate, quota, column, valid, length, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < length
    here = (tl.load(marked + row * length + lane, inside, other=0) != 0) & inside
    here = here & (tl.load(candidate + row * length + lane, inside, other=0) != 0) & (tl.load(quota + row) > 0)
    yes = here.to(tl.int32)
    no = ((here == 0) & inside).to(tl.int32)
    total = tl.sum(yes, 0)
    rank = tl.where(here, tl.cumsum(yes, 0) - 1, total + tl.cumsum(no, 0) - 1)
    wanted = inside & (rank < width)
    tl.store(column + row * width + rank, lane.to(tl.int64), wanted)
    tl.store(valid + row * width + rank, rank < total, wanted)


def open_columns(marked_BL: Tensor, candidate_BL: Tensor, quota_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `Lane.open_columns` and `columns_of`: masks of a row's block that are candidates, `count` <= L of them."""
    rows, length = marked_BL.shape
    column_BN = torch.empty(rows, count, dtype=torch.long, device=marked_BL.device)
    valid_BN = torch.empty(rows, count, dtype=torch.bool, device=marked_BL.device)
    block = triton.next_power_of_2(length)
    marked_BL = marked_BL.contiguous()
    _columns_kernel[(rows,)](marked_BL, candidate_BL, quota_B, column_BN, valid_BN, length, count, BLOCK=block)
    return column_BN, valid_BN


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _SECOND
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _THIRD
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniform(seeds, offset, rows, commits, firsts, row, place):  # type: ignore[no-untyped-def]
    state = _mix(tl.load(seeds + row) + tl.load(offset))
    state = _mix(state ^ (tl.load(rows + row) * _FIRST))
    state = _mix(state ^ (tl.load(commits + row) * _FIRST))
    state = _mix(state ^ ((place - tl.load(firsts + row)) * _FIRST))
    return ((state >> 32) & 0xFFFFFFFF).to(tl.float64) * 2.3283064365386963e-10


@triton.jit  # type: ignore[untyped-decorator]
def _uniform_kernel(  # type: ignore[no-untyped-def]
    seeds, offset, rows, commits, firsts, row_of, position, out, count, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(row_of + at, inside, other=0)
    place = tl.load(position + at, inside, other=0)
    tl.store(out + at, _uniform(seeds, offset, rows, commits, firsts, row, place), inside)


class Draws(NamedTuple):
    """What the uniforms of a lane depend on, see `sampling.uniform`.

    Attributes:
        seeds_B: int64, wrapped.
        offset: int64, the stream's.
        rows_B: row ids.
        commits_B: commit numbers.
        first_B: each row's first real column.
    """

    seeds_B: Tensor
    offset: Tensor
    rows_B: Tensor
    commits_B: Tensor
    first_B: Tensor


def uniforms(draws: Draws, row_N: Tensor, position_N: Tensor) -> Tensor:
    """`sampling.uniform` of the next commit at (row index, position index), both int64: float64 [N]."""
    out_N = torch.empty(row_N.numel(), dtype=torch.float64, device=row_N.device)
    grid = (triton.cdiv(len(out_N), 256),)
    _uniform_kernel[grid](*draws, row_N.contiguous(), position_N.contiguous(), out_N, len(out_N), BLOCK=256)
    return out_N


@triton.jit  # type: ignore[untyped-decorator]
def _choose_kernel(  # type: ignore[no-untyped-def]
    score, valid, column, seeds, offset, rows, commits, firsts, bad, position, index, uniform, good, width, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    left = lane < width
    at = row * width + lane
    open_ = (tl.load(valid + at, left, other=0) != 0) & left
    x = tl.where(open_, tl.load(score + at, left, other=0.0), float("-inf"))
    nan = x != x
    tl.store(bad, True, tl.max(nan.to(tl.int32), 0) != 0)
    x = tl.where(nan, float("inf"), x)
    for n in range(count):
        top = tl.max(tl.where(left, x, float("-inf")), 0)
        best = tl.min(tl.where(left & (x == top), lane, BLOCK), 0)  # the first of equals
        left = left & (lane != best)
        place = tl.load(column + row * width + best)
        out = row * count + n
        tl.store(position + out, place)
        tl.store(index + out, (row * width + best).to(tl.int64))
        tl.store(uniform + out, _uniform(seeds, offset, rows, commits, firsts, row, place))
        tl.store(good + out, top > float("-inf"))


def choose(
    score_BN: Tensor, open_BN: Tensor, column_BN: Tensor, count: int, draws: Draws, bad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `count` <= N best open columns of each row, those that are not open behind them: see `Lane.choose`.

    `bad` becomes True if the fp32 score of an open column is NaN.
    """
    (rows, width), device = score_BN.shape, score_BN.device
    position_BC = torch.empty(rows, count, dtype=torch.long, device=device)
    index_BC, good_BC = torch.empty_like(position_BC), torch.empty_like(position_BC, dtype=torch.bool)
    out = position_BC, index_BC, torch.empty_like(position_BC, dtype=torch.float64), good_BC
    _choose_kernel[(rows,)](
        score_BN.contiguous(), open_BN, column_BN, *draws, bad, *out, width, count, BLOCK=triton.next_power_of_2(width)
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _commit_kernel(  # type: ignore[no-untyped-def]
    tokens, order, masked, commits, quota, ends, position, token, valid, report, bad, length, filler,
    COUNT: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < length
    at = row * length + lane
    words = tl.load(tokens + at, inside, other=0)
    numbers = tl.load(order + at, inside, other=-1)
    open_ = (tl.load(masked + at, inside, other=0) != 0) & inside
    before = tl.load(commits + row)
    left = tl.load(quota + row)
    rank = left * 0
    for n in range(COUNT):
        good = tl.load(valid + row * COUNT + n) != 0
        take = good & (rank < left)
        hit = (lane == tl.load(position + row * COUNT + n)) & take
        words = tl.where(hit, tl.load(token + row * COUNT + n), words)
        numbers = tl.where(hit, before + rank, numbers)
        open_ = open_ & (hit == 0)
        rank += take.to(tl.int64)
    end = lane < 0
    for n in range(ENDS):
        end = end | (words == tl.load(ends + n))
    end = end & (numbers >= 0) & inside
    first = tl.min(tl.where(end, lane, length), 0)
    waiting = tl.sum((open_ & (lane < first)).to(tl.int32), 0)
    over = (first < length) & (waiting == 0)
    words = tl.where(open_ & over, filler, words)
    open_ = open_ & (over == 0)
    tl.store(tokens + at, words, inside)
    tl.store(order + at, numbers, inside)
    tl.store(masked + at, open_, inside)
    tl.store(commits + row, before + rank)
    tl.store(quota + row, left - rank)
    tl.store(report + row, tl.max(open_.to(tl.int32), 0) != 0)
    if row == 0:
        tl.store(report + tl.num_programs(0), tl.load(bad) != 0)


def commit(
    tokens_BL: Tensor, order_BL: Tensor, masked_BL: Tensor, commits_B: Tensor, quota_B: Tensor, ends_E: Tensor,
    position_BN: Tensor, token_BN: Tensor, valid_BN: Tensor, report_N: Tensor, bad: Tensor, filler: int,
) -> None:  # fmt: skip
    """Commits picks (position, token, valid) and closes finished rows, in place: see `Lane.commit`.

    `report_N` is written only: which rows are open [B], then `bad`.
    """
    rows, length = tokens_BL.shape
    _commit_kernel[(rows,)](
        tokens_BL, order_BL, masked_BL, commits_B, quota_B, ends_E, position_BN.contiguous(), token_BN.contiguous(),
        valid_BN.contiguous(), report_N, bad, length, filler, COUNT=position_BN.shape[1], ENDS=len(ends_E),
        BLOCK=triton.next_power_of_2(length),
    )  # fmt: skip
