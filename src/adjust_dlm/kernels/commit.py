"""The bookkeeping of a commit: a dozen numbers for each row, which as plain tensor code take a hundred small kernels.

The plain forms are `decoders.columns.columns_of`, `sampling.uniform` and `decoders.lane.Lane.commit`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FIRST = tl.constexpr(-0x61C8864680B583EB)  # the numbers of `sampling.uniform`
_SECOND = tl.constexpr(-0x40A7B892E31B1A47)
_THIRD = tl.constexpr(-0x6B2FB644ECCEEE15)


@triton.jit  # type: ignore[untyped-decorator]
def _columns_kernel(marked, column, valid, length, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    here = tl.load(marked + row * length + lane, lane < length, other=0) != 0
    inside = lane < length
    yes = (here & inside).to(tl.int32)
    no = ((here == 0) & inside).to(tl.int32)
    total = tl.sum(yes, 0)
    rank = tl.where(here, tl.cumsum(yes, 0) - 1, total + tl.cumsum(no, 0) - 1)
    wanted = inside & (rank < width)
    tl.store(column + row * width + rank, lane.to(tl.int64), wanted)
    tl.store(valid + row * width + rank, rank < total, wanted)


def first_columns(marked_BL: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `columns_of`: the first `count` <= L marked columns of each row, and which of them are marked at all."""
    rows, length = marked_BL.shape
    column_BN = torch.empty(rows, count, dtype=torch.long, device=marked_BL.device)
    valid_BN = torch.empty(rows, count, dtype=torch.bool, device=marked_BL.device)
    block = triton.next_power_of_2(length)
    _columns_kernel[(rows,)](marked_BL.contiguous(), column_BN, valid_BN, length, count, BLOCK=block)
    return column_BN, valid_BN


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _SECOND
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _THIRD
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _uniform_kernel(  # type: ignore[no-untyped-def]
    seeds, offset, rows, commits, firsts, row_of, position, out, count, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(row_of + at, inside, other=0)
    place = tl.load(position + at, inside, other=0) - tl.load(firsts + row, inside, other=0)
    state = _mix(tl.load(seeds + row, inside, other=0) + tl.load(offset))
    state = _mix(state ^ (tl.load(rows + row, inside, other=0) * _FIRST))
    state = _mix(state ^ (tl.load(commits + row, inside, other=0) * _FIRST))
    state = _mix(state ^ (place * _FIRST))
    tl.store(out + at, ((state >> 32) & 0xFFFFFFFF).to(tl.float64) * 2.3283064365386963e-10, inside)


def uniforms(
    seeds_B: Tensor,
    offset: Tensor,
    rows_B: Tensor,
    commits_B: Tensor,
    first_B: Tensor,
    row_N: Tensor,
    position_N: Tensor,
) -> Tensor:
    """`sampling.uniform` of the next commit at (row index, position index): float64 [N].

    Args:
        seeds_B: int64, wrapped.
        offset: int64, the stream's.
        rows_B: row ids.
        commits_B: commit numbers.
        first_B: each row's first real column.
        row_N: which row, int64.
        position_N: which column, int64.
    """
    out_N = torch.empty(row_N.numel(), dtype=torch.float64, device=seeds_B.device)
    grid = (triton.cdiv(len(out_N), 256),)
    _uniform_kernel[grid](
        seeds_B, offset, rows_B, commits_B, first_B, row_N.contiguous(), position_N.contiguous(), out_N, len(out_N),
        BLOCK=256,
    )  # fmt: skip
    return out_N


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
    """Commits picks and closes finished rows, in place: see `Lane.commit`.

    Args:
        tokens_BL: of the canvases.
        order_BL: of the canvases.
        masked_BL: of the canvases.
        commits_B: so far.
        quota_B: left in this round.
        ends_E: end tokens.
        position_BN: of the picks.
        token_BN: of the picks.
        valid_BN: of the picks.
        report_N: out: which rows are open [B], then `bad`.
        bad: whether a NaN was seen.
        filler: token behind an end.
    """
    rows, length = tokens_BL.shape
    _commit_kernel[(rows,)](
        tokens_BL, order_BL, masked_BL, commits_B, quota_B, ends_E, position_BN.contiguous(), token_BN.contiguous(),
        valid_BN.contiguous(), report_N, bad, length, filler, COUNT=position_BN.shape[1], ENDS=len(ends_E),
        BLOCK=triton.next_power_of_2(length),
    )  # fmt: skip
