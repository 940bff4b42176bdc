"""What stands between the matrices of a layer, one kernel each instead of four to six: RMSNorm, rotation, gated MLP.

The plain forms are `bases.layers.Norm`, `bases.attention.turn` and `silu(gate) * up`. Everything is rounded where they
round, so that results differ only by the order in which a row's squares are summed. Nothing here has a gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024  # of a gated MLP's program


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]
    h, delta, weight, total, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(h + first + column, inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta + first + column, inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(total + first + column, x, inside)
    kind = x.dtype
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    w = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + first + column, ((x * scale).to(kind).to(tl.float32) * w).to(kind), inside)


def rms_norm(h: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`Norm` of states [..., D], in their dtype."""
    h = h.contiguous()
    out = torch.empty_like(h)
    _launch_norm(h, h, weight_D, h, out, eps, add=False)
    return out


def add_rms_norm(h: Tensor, delta: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h + delta, and `Norm` of it: [..., D] each."""
    h, delta = h.contiguous(), delta.contiguous()
    total, out = torch.empty_like(h), torch.empty_like(h)
    _launch_norm(h, delta, weight_D, total, out, eps, add=True)
    return total, out


def _launch_norm(
    h: Tensor, delta: Tensor, weight_D: Tensor, total: Tensor, out: Tensor, eps: float, *, add: bool
) -> None:
    width = h.shape[-1]
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(h):
        _norm_kernel[(h.numel() // width,)](
            h, delta, weight_D, total, out, width, eps, ADD=add, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
        )


@triton.jit  # type: ignore[untyped-decorator]
def _turn_heads(  # type: ignore[no-untyped-def]
    x, head_stride, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):
    head = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    at = x + head * head_stride + d
    inside = (head < HEADS) & (d < HALF)
    kind = cos.dtype  # of the products and their sum
    c = cos.to(tl.float32)[None, :]
    s = sin.to(tl.float32)[None, :]
    low = tl.load(at, inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, inside, other=0.0).to(tl.float32)
    new_low = ((low * c).to(kind).to(tl.float32) - (high * s).to(kind).to(tl.float32)).to(kind)
    new_high = ((high * c).to(kind).to(tl.float32) + (low * s).to(kind).to(tl.float32)).to(kind)
    tl.store(at, new_low.to(x.dtype.element_ty), inside)
    tl.store(at + HALF, new_high.to(x.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _turn_kernel(  # type: ignore[no-untyped-def]
    q, k, cos, sin, length, q_row, q_head, q_column, k_row, k_head, k_column, Q: tl.constexpr, K: tl.constexpr,
    HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row, column = at // length, at % length
    d = tl.arange(0, BLOCK_D)
    c = tl.load(cos + at * 2 * HALF + d, d < HALF, other=0.0)  # the second half is the first one again
    s = tl.load(sin + at * 2 * HALF + d, d < HALF, other=0.0)
    _turn_heads(q + row * q_row + column * q_column, q_head, c, s, Q, HALF, BLOCK_Q, BLOCK_D)
    _turn_heads(k + row * k_row + column * k_column, k_head, c, s, K, HALF, BLOCK_K, BLOCK_D)


def turn(q: Tensor, k: Tensor, cos_B1LE: Tensor, sin_B1LE: Tensor) -> None:
    """`attention.turn` of queries and keys [B, heads, L, d], in place; d neighbours in memory, other strides any."""
    rows, queries, length, width = q.shape
    keys, half = k.shape[1], width // 2
    with torch.cuda.device_of(q):
        _turn_kernel[(rows * length,)](
            q, k, cos_B1LE.contiguous(), sin_B1LE.contiguous(), length, *q.stride()[:3], *k.stride()[:3], Q=queries,
            K=keys, HALF=half, BLOCK_Q=triton.next_power_of_2(queries), BLOCK_K=triton.next_power_of_2(keys),
            BLOCK_D=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip


@triton.jit
def gated(gate, up, column, width):  # type: ignore[no-untyped-def]
    """silu(gate) * up at some columns of a row, 0 behind its end; not rounded but where the plain form is."""
    inside = column < width
    x = tl.load(gate + column, inside, other=0.0)
    y = tl.load(up + column, inside, other=0.0).to(tl.float32)
    z = x.to(tl.float32)
    z = (z / (1.0 + tl.exp(-z))).to(x.dtype).to(tl.float32)
    return (z * y).to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_kernel(  # type: ignore[no-untyped-def]
    gate, up, out, width, gate_stride, up_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = gated(gate + row * gate_stride, up + row * up_stride, column, width)
    tl.store(out + row * width + column, value, column < width)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [..., N]; the inputs may be halves of wider rows."""
    gate_RN, up_RN = gate.flatten(0, -2), up.flatten(0, -2)  # views
    rows, width = gate_RN.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    with torch.cuda.device_of(gate):
        _silu_kernel[(rows, triton.cdiv(width, _COLUMNS))](
            gate_RN, up_RN, out, width, gate_RN.stride(0), up_RN.stride(0), BLOCK=_COLUMNS, num_warps=4
        )
    return out
