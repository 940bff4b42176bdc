"""W h in fp8 where both have few rows, as one row of a batch and a projection back to the states have.

Libraries give such a product whole tiles of W, of which there are fewer than a card has processors, and compute 256
rows of h for 160. Here the rows of h are the narrow side of a tile, split into a power of 2 and a rest; W is cut along
its columns as well, and a second kernel adds the parts up, always in the same order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from adjust_dlm.kernels import two_powers

_OUTPUTS, _COLUMNS, _STAGES, _WARPS = 64, 128, 5, 4  # of a tile of W; the best of those tried on an H200
_SPARE = 1024  # bytes of shared memory beside the tiles
_BLOCK = 1024  # outputs that a program of the sum looks at


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(acc, x_scale, w_scale, bias, n, row, rows, outputs, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    acc *= tl.load(x_scale + row, row < rows, other=0.0) * tl.load(w_scale + n, n < outputs, other=0.0)
    if BIAS:
        acc += tl.load(bias + n, n < outputs, other=0.0).to(tl.float32)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    acc, out, x_scale, w_scale, bias, n, row, part, rows, outputs, SPLITS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    if SPLITS == 1:
        acc = _scaled(acc, x_scale, w_scale, bias, n, row, rows, outputs, BIAS)
    place = out + (part * rows + row).to(tl.int64) * outputs + n
    tl.store(place, acc.to(out.dtype.element_ty), (n < outputs) & (row < rows))


@triton.jit  # type: ignore[untyped-decorator]
def _product_kernel(  # type: ignore[no-untyped-def]
    x_head, x_tail, w, out, x_scale, w_scale, bias, rows, outputs, width,
    HEAD: tl.constexpr, TAIL: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    first, part = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    steps = tl.cdiv(width, COLUMNS)
    each = tl.cdiv(steps, SPLITS)
    head = tl.zeros([OUTPUTS, HEAD], tl.float32)
    if TAIL > 0:
        tail = tl.zeros([OUTPUTS, TAIL], tl.float32)
    for step in range(part * each, tl.minimum((part + 1) * each, steps)):  # what lies outside is loaded as 0
        tile = w.load([first, step * COLUMNS])
        head = tl.dot(tile, x_head.load([0, step * COLUMNS]).T, head)
        if TAIL > 0:
            tail = tl.dot(tile, x_tail.load([HEAD, step * COLUMNS]).T, tail)
    n = (first + tl.arange(0, OUTPUTS))[:, None]
    row = tl.arange(0, HEAD)[None, :]
    _store(head, out, x_scale, w_scale, bias, n, row, part, rows, outputs, SPLITS, BIAS)
    if TAIL > 0:
        row = HEAD + tl.arange(0, TAIL)[None, :]
        _store(tail, out, x_scale, w_scale, bias, n, row, part, rows, outputs, SPLITS, BIAS)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    parts, out, x_scale, w_scale, bias, rows, outputs, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + (part * rows + row) * outputs + n, n < outputs, other=0.0)
    total = _scaled(total, x_scale, w_scale, bias, n, row, rows, outputs, BIAS)
    tl.store(out + row * outputs + n, total.to(out.dtype.element_ty), n < outputs)


def _heights(rows: int) -> tuple[int, int]:
    """Rows of h in the two parts of a tile."""
    return two_powers(rows, least=16, most=128)


@functools.cache
def _card(number: int) -> tuple[int, int]:
    """Processors, and bytes of shared memory for tiles: none before Hopper, where no unit loads them."""
    facts = triton.runtime.driver.active.utils.get_device_properties(number)
    hopper = torch.cuda.get_device_capability(number) >= (9, 0)
    return facts["multiprocessor_count"], facts["max_shared_mem"] if hopper else 0


def is_narrow(rows: int, outputs: int, card: int) -> bool:
    """Whether libraries leave half of a card or more idle in such a product, and its tiles fit: 256 rows on an H100."""
    processors, memory = _card(card)
    if rows < 1 or triton.cdiv(outputs, _OUTPUTS) > processors:
        return False
    return _STAGES * _COLUMNS * (_OUTPUTS + sum(_heights(rows))) + _SPARE <= memory


def narrow_product(
    x_RD: Tensor, x_scale: Tensor, weight_ND: Tensor, w_scale: Tensor, bias_N: Tensor | None, *, splits: int = 0
) -> Tensor:
    """As `bases.fp8.scaled_product`: [R, N] in bf16; W is cut into `splits`, 0 for as many as fill the card."""
    (rows, width), outputs = x_RD.shape, len(weight_ND)
    head, tail = _heights(rows)
    tiles = triton.cdiv(outputs, _OUTPUTS)
    splits = splits or max(1, min(_card(x_RD.get_device())[0] // tiles, triton.cdiv(width, _COLUMNS)))
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x_RD.device)
    parts = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x_RD.device)
    columns = [TensorDescriptor.from_tensor(x_RD, [size, _COLUMNS]) for size in (head, tail or head)]
    weights = TensorDescriptor.from_tensor(weight_ND, [_OUTPUTS, _COLUMNS])
    scales = (x_scale, w_scale, out if bias_N is None else bias_N)
    with torch.cuda.device_of(x_RD):
        _product_kernel[(tiles, splits)](
            *columns, weights, parts, *scales, rows, outputs, width, HEAD=head, TAIL=tail, OUTPUTS=_OUTPUTS,
            COLUMNS=_COLUMNS, SPLITS=splits, BIAS=bias_N is not None, num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip
        if splits > 1:
            _sum_kernel[(rows, triton.cdiv(outputs, _BLOCK))](
                parts, out, *scales, rows, outputs, SPLITS=splits, BIAS=bias_N is not None, BLOCK=_BLOCK, num_warps=4
            )
    return out
