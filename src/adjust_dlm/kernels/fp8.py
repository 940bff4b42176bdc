"""States in fp8 with a scale for each row, in one kernel instead of five: `bases.fp8.in_fp8`, bit by bit.

A gated MLP's product goes the same way without being written in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjust_dlm.kernels import two_powers
from adjust_dlm.kernels.layer import gated

_WIDE = 24_576  # numbers of a row that 16 warps have registers for


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


@triton.jit
def _largest(z, smallest):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.max(tl.abs(z.to(tl.float32)), 0), smallest)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_fp8_kernel(  # type: ignore[no-untyped-def]
    gate, up, out, scales, width, gate_stride, up_stride, smallest,
    LARGEST: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    gate += row * gate_stride
    up += row * up_stride
    column = tl.arange(0, HEAD)
    head = gated(gate, up, column, width)  # a row stays in registers, rounded as it is, so that each exp is taken once
    most = _largest(head, smallest)
    if TAIL > 0:
        behind = HEAD + tl.arange(0, TAIL)
        tail = gated(gate, up, behind, width)
        most = tl.maximum(most, _largest(tail, smallest))
    tl.store(scales + row, most * (1.0 / LARGEST))
    inverse = tl.math.div_rn(LARGEST * 1.0, most)
    tl.store(out + row * width + column, (head.to(tl.float32) * inverse).to(out.dtype.element_ty), column < width)
    if TAIL > 0:
        scaled = (tail.to(tl.float32) * inverse).to(out.dtype.element_ty)
        tl.store(out + row * width + behind, scaled, behind < width)


def silu_mul_in_fp8(gate: Tensor, up: Tensor, smallest: float, largest: float) -> tuple[Tensor, Tensor]:
    """`in_fp8` of `layer.silu_mul`: q [R, N] and its scale [R, 1] for inputs [..., N] of R rows."""
    gate_RN, up_RN = gate.flatten(0, -2), up.flatten(0, -2)  # views
    rows, width = gate_RN.shape
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=gate.device)
    scale_R1 = torch.empty(rows, 1, dtype=torch.float32, device=gate.device)
    head, tail = two_powers(width)
    with torch.cuda.device_of(gate):
        _gated_fp8_kernel[(rows,)](
            gate_RN, up_RN, out, scale_R1, width, gate_RN.stride(0), up_RN.stride(0), smallest, LARGEST=largest,
            HEAD=head, TAIL=tail, num_warps=32 if head + tail > _WIDE else min(max(head // 1024, 4), 16),
        )  # fmt: skip
    return out, scale_R1
