"""The kernels between a layer's matrices, interpreted on the CPU (or compiled on a card), against their plain forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from adjust_dlm.bases import attention, layers
from adjust_dlm.bases.layers import Norm
from flash import by_runs
from helpers import BOS, FAMILIES, MASK, left_pad, tiny_base

pytest.importorskip("triton")
from adjust_dlm.kernels.layer import add_rms_norm, rms_norm, silu_mul, turn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [torch.bfloat16, torch.float16, torch.float32]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """One number in 200 may lie on the other side of a rounding, or of two in a row: two steps at most. A card's exp is
    good to some 1e-6.

    Triton's interpreter cuts bf16 off where it should round it: there every rounding may cost a step.
    """
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-18}[wanted.dtype]
    cut = wanted.dtype == torch.bfloat16 and DEVICE == "cpu"
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    near = torch.isclose(got, wanted, rtol=3 * step if cut else 2 * step, atol=0.05 if cut else step * 1e-3)
    assert near.all()
    if wanted.dtype != torch.float32 and not cut:
        assert int((got != wanted).sum()) <= 2 + wanted.numel() // 200


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", [24, 576, 3584])
def test_norm_and_norm_of_a_sum(dtype: torch.dtype, width: int) -> None:
    norm = Norm(width, 1e-6).to(DEVICE, dtype)
    norm.weight.data = drawn(width, dtype=dtype, seed=1)
    norm.requires_grad_(False)
    h, delta = drawn(2, 5, width, dtype=dtype), drawn(2, 5, width, dtype=dtype, seed=2)
    h[1, 2] = 0  # eps alone
    h[1, 3] *= 1e-4
    assert_same(rms_norm(h, norm.weight, 1e-6), norm(h))
    total, normed = add_rms_norm(h, delta, norm.weight, 1e-6)
    if dtype == torch.bfloat16:
        assert_same(total, h + delta)
    else:
        assert torch.equal(total, h + delta)
    assert_same(normed, norm(h + delta))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("angles", ["fp32", "own"])
@pytest.mark.parametrize(("queries", "keys", "width"), [(4, 2, 8), (28, 4, 128), (3, 3, 24)])
def test_rotation_of_joined_and_of_separate_projections(
    dtype: torch.dtype, angles: str, queries: int, keys: int, width: int
) -> None:
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]], device=DEVICE)
    angle = positions[:, None, :, None] * 0.7 ** torch.arange(width // 2, device=DEVICE).float()
    kind = torch.float32 if angles == "fp32" else dtype
    cos, sin = (f(torch.cat([angle, angle], -1)).to(kind) for f in (torch.cos, torch.sin))
    joined = drawn(2, 5, (queries + 2 * keys) * width, dtype=dtype)
    parts = joined.split([queries * width, keys * width, keys * width], -1)
    q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
    before, kept = (q.clone(), k.clone()), v.clone()
    other_q, other_k = q.clone(), k.clone()  # strides of their own
    turn(q, k, cos, sin)
    turn(other_q, other_k, cos, sin)
    assert torch.equal(v, kept) and torch.equal(q, other_q) and torch.equal(k, other_k)
    for x, got in zip(before, (q, k), strict=True):
        # A card may leave out the rounding of a product (an fma), so a sum that cancels is off by a step of its terms.
        terms = x.double().abs() * cos.double().abs() + x.double().roll(width // 2, -1).abs() * sin.double().abs()
        step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}[kind]
        last = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}[dtype]
        room = 2 if DEVICE == "cpu" else 1  # the interpreter cuts bf16 off
        plain, exact = attention.turn(x, cos, sin), attention.turn(x.double(), cos.double(), sin.double())
        off, plainly = (got.double() - exact).abs(), (plain.double() - exact).abs()
        bound = room * (step * terms + (step + last) * exact.abs()) * 1.01 + 1e-30
        assert (off <= bound).all() and (room > 1 or off.mean() <= 1.1 * plainly.mean() + 1e-30)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", [24, 1024, 2500])
def test_gated_mlp_of_joined_and_of_separate_projections(dtype: torch.dtype, width: int) -> None:
    joined = drawn(2, 3, 2 * width, dtype=dtype, scale=6.0)
    gate, up = joined.split(width, -1)
    gate[0, 0, :4] = torch.tensor([-80.0, 80.0, 0.0, -0.0])
    wanted = F.silu(gate) * up
    assert_same(silu_mul(gate, up), wanted)
    assert_same(silu_mul(gate.contiguous(), up.contiguous()), wanted)


@pytest.mark.parametrize("family", [*FAMILIES, "sdar"])
@pytest.mark.parametrize("joined", [False, True])
def test_states_are_those_of_the_plain_forms(monkeypatch: pytest.MonkeyPatch, family: str, joined: bool) -> None:
    """In fp32, where nothing but the order of sums differs; pads, and rows without any, by runs instead of a mask."""
    base = tiny_base(family)
    base.model.to(DEVICE)
    state = left_pad([[BOS, 5, MASK, 7], [MASK, MASK], [BOS, 9, 4, MASK, 3]])
    state = type(state)(state.tokens_BL.to(DEVICE), state.real_BL.to(DEVICE), state.masked_BL.to(DEVICE))
    wanted = base.hidden(state)
    if joined:
        layers.join_projections(base.model)
    for module in (layers, attention):
        monkeypatch.setattr(module, "fuses", lambda h: True)
    monkeypatch.setattr(attention, "_flash", lambda h, shape: False)
    torch.testing.assert_close(base.hidden(state)[state.real_BL], wanted[state.real_BL], rtol=1e-4, atol=1e-5)
    seen = by_runs(monkeypatch)
    torch.testing.assert_close(base.hidden(state)[state.real_BL], wanted[state.real_BL], rtol=1e-4, atol=1e-5)
    assert len(seen) == len(base.model.layers)


def test_only_half_precision_on_a_card_takes_them() -> None:
    assert not attention.fuses(torch.zeros(2, dtype=torch.float32))
    assert not attention.fuses(torch.zeros(2, dtype=torch.bfloat16))
