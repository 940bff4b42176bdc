"""States in fp8 with a scale for each row, in one kernel instead of five: `bases.fp8.in_fp8`, bit by bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _fp8_kernel(  # type: ignore[no-untyped-def]
    x, out, scales, width, stride, smallest, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * stride + column, inside, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(value), 0), smallest)
    tl.store(scales + row, most * (1.0 / LARGEST))
    scaled = value * tl.math.div_rn(LARGEST * 1.0, most)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), inside)


def in_fp8(x_RD: Tensor, smallest: float, largest: float) -> tuple[Tensor, Tensor]:
    """q [R, D] in e4m3 and its scale [R, 1], as `bases.fp8.in_fp8`; the numbers of a row are neighbours in memory."""
    rows, width = x_RD.shape
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x_RD.device)
    scale_R1 = torch.empty(rows, 1, dtype=torch.float32, device=x_RD.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x_RD):
        _fp8_kernel[(rows,)](
            x_RD, out, scale_R1, width, x_RD.stride(0), smallest, LARGEST=largest, BLOCK=block,
            num_warps=min(max(block // 1024, 1), 16),
        )  # fmt: skip
    return out, scale_R1
