"""Linear layers that multiply in fp8: the rounding, the product, and whole bases with such layers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adjust_dlm.bases import load_base
from adjust_dlm.bases.fp8 import LARGEST, SMALLEST, Fp8Linear, in_fp8, in_fp8_layers
from adjust_dlm.bases.layers import Linear, join_projections
from adjust_dlm.kernels import HAS_TRITON, two_powers
from adjust_dlm.types import InputError
from helpers import left_pad
from test_checkpoint import END, MASK, ROWS, write

INTERPRETED = HAS_TRITON and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
CODES = CODES[CODES.isfinite()].unique()


def states(*shape: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, one of them zero."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x = x * 10.0 ** torch.arange(-3, shape[0] - 3)[:, None]
    x[1] = 0
    return x


def linear(width: int, outputs: int, *, bias: bool = True) -> Linear:
    layer = Linear(width, outputs, bias=bias)
    generator = torch.Generator().manual_seed(width)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_goes_to_the_nearest_of_its_rows_grid(dtype: torch.dtype) -> None:
    x_RD = states(6, 64).to(dtype)
    q_RD, scale_R1 = in_fp8(x_RD)
    most_R = x_RD.double().abs().amax(-1)
    assert torch.allclose(scale_R1[:, 0].double() * LARGEST, most_R.clamp_min(SMALLEST), rtol=1e-6)
    grid_RDC = CODES.double() * scale_R1.double()[..., None]
    nearest_RD = (grid_RDC - x_RD.double()[..., None]).abs().amin(-1)
    got_RD = (q_RD.double() * scale_R1 - x_RD.double()).abs()
    assert (got_RD <= nearest_RD + 1e-6 * most_R[:, None]).all()
    assert q_RD[1].float().eq(0).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_rounded_numbers(dtype: torch.dtype, bias: bool) -> None:
    plain = linear(48, 32, bias=bias).to(dtype)
    layer, h = Fp8Linear(plain), states(5, 48, seed=1).to(dtype)
    got = layer(h.view(1, 5, 48))
    assert got.shape == (1, 5, 32) and got.dtype == dtype
    (q, a), (w, b) = in_fp8(h), in_fp8(plain.weight.data)
    want = (q.double() @ w.double().T) * a.double() * b.double().T
    room = want.abs() * 2**-8 + (q.double().abs() @ w.double().abs().T) * a.double() * b.double().T * 1e-3
    if bias:
        shift = plain.bias.double()
        want, room = want + shift, room + (want + shift).abs() * 2**-7 + shift.abs() * 2**-8
    assert ((got[0].double() - want).abs() <= room).all()


def test_offloaded_weights_are_asked_for_by_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate keeps them on the meta device, and brings them in a hook of the layer's call."""
    layer, gate = Fp8Linear(linear(48, 32)), states(3, 48)
    want = layer(F.silu(gate) * gate)
    kept = layer.weight.data
    layer.weight = nn.Parameter(kept.to("meta"), requires_grad=False)
    monkeypatch.setattr("adjust_dlm.bases.fp8.fuses", lambda h: h is gate)  # as on a card, where `gated` asks

    def bring(module: nn.Module, _given: object) -> None:
        module.weight = nn.Parameter(kept, requires_grad=False)

    layer.register_forward_pre_hook(bring)
    assert torch.equal(layer.gated(gate, gate), want)


def test_widths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="a linear layer of 40 to 32 cannot be in fp8: both must be multiples of 16"):
        Fp8Linear(linear(40, 32))
    with pytest.raises(InputError, match="a linear layer of 32 to 40"):
        in_fp8_layers(nn.Sequential(linear(32, 40)))


def test_a_base_computes_with_rounded_weights_and_states(tmp_path: Path) -> None:
    """Its states are those of a plain base whose weights, and what goes into each layer, are rounded to fp8."""
    exact = load_base(str(write(tmp_path, "dream")))
    small = load_base(str(tmp_path), quantize="fp8-dynamic")
    rounded = load_base(str(tmp_path))
    assert small.fingerprint == exact.fingerprint and small.quantized == "fp8-dynamic"
    layers = [part for part in rounded.model.modules() if type(part) is Linear]
    assert len(layers) == sum(isinstance(part, Fp8Linear) for part in small.model.modules()) > 0

    def back(x: Tensor) -> Tensor:
        q, scale = in_fp8(x.reshape(-1, x.shape[-1]))
        return (q.float() * scale).view(x.shape)

    class Rounded(Linear):
        def __init__(self, plain: Linear) -> None:
            nn.Module.__init__(self)
            self.weight, self.bias, self.out_features = back(plain.weight.data), plain.bias, plain.out_features

        def forward(self, h: Tensor) -> Tensor:
            bias = None if self.bias is None else self.bias.bfloat16().float()
            return F.linear(back(h), self.weight, bias).bfloat16().float()

    for part in list(rounded.model.modules()):
        for name, child in list(part.named_children()):
            if type(child) is Linear:
                setattr(part, name, Rounded(child))
    state = left_pad(ROWS, mask_id=MASK, pad_id=END)
    plain, want, got = (base.hidden(state)[state.real_BL] for base in (exact, rounded, small))
    size = plain.norm()
    assert (got - want).norm() < 0.05 * (got - plain).norm()
    assert 1e-3 * size < (got - plain).norm() < 0.3 * size


def test_joined_projections_are_views_that_give_the_same_states(tmp_path: Path) -> None:
    base = load_base(str(write(tmp_path, "dream")), quantize="fp8-dynamic")
    state = left_pad(ROWS, mask_id=MASK, pad_id=END)
    before = base.hidden(state)
    join_projections(base.model)
    attention = base.model.layers[0].self_attn
    assert torch.equal(base.hidden(state), before)
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        for name in ("weight", "scale", "bias"):
            kept = getattr(part, name).untyped_storage().data_ptr()
            assert kept == attention._joined[name].untyped_storage().data_ptr()


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton, on a card or interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 100, 4096])
def test_the_kernel_is_the_plain_form(dtype: torch.dtype, width: int) -> None:
    """Numbers of the grid, which must stay as they are: Triton's interpreter does not round halves as cards do."""
    from adjust_dlm.kernels import fp8

    device = "cuda" if torch.cuda.is_available() else "cpu"
    pick = torch.randint(len(CODES), (5, width + 3), generator=torch.Generator().manual_seed(width))
    x = CODES[pick] * 2.0 ** torch.arange(-2, 3)[:, None]
    x[:, 0], x[3] = LARGEST * 2.0 ** torch.arange(-2, 3), 0
    x_RD = x.to(device, dtype)[:, :width]  # a view of wider rows
    if device == "cuda":
        x_RD = torch.cat([x_RD, states(5, width).to(device, dtype)])
    want, got = in_fp8(x_RD.float()), fp8.in_fp8(x_RD, SMALLEST, LARGEST)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton, on a card or interpreted")
@pytest.mark.parametrize("width", [16, 100, 9000])
def test_a_gated_product_is_scaled_and_rounded_without_a_stop(width: int) -> None:
    """The same bits as one kernel after the other, from halves of wider rows."""
    from adjust_dlm.kernels import fp8, layer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    both = states(6, 2 * width, seed=width).to(device, torch.bfloat16).view(2, 3, -1)
    gate, up = both.split(width, -1)
    inner = layer.silu_mul(gate, up).view(6, width)
    want = fp8.in_fp8(inner, SMALLEST, LARGEST)
    got = fp8.silu_mul_in_fp8(gate, up, SMALLEST, LARGEST)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton, on a card or interpreted")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "outputs", "width", "splits"),
    [(1, 48, 128, 1), (16, 64, 400, 2), (40, 200, 272, 3), (130, 80, 400, 1), (160, 16, 272, 2), (256, 64, 128, 1)],
)
def test_a_narrow_product_is_the_product(rows: int, outputs: int, width: int, splits: int, bias: bool) -> None:
    """Sums of whole numbers up to 256, times powers of 2: exact in bf16 in whatever order they are added."""
    from adjust_dlm.kernels.product import narrow_product

    device, generator = "cuda" if torch.cuda.is_available() else "cpu", torch.Generator().manual_seed(rows)
    x, w = (torch.randint(-1, 2, (n, width), generator=generator).float() for n in (rows, outputs))
    scales = [2.0 ** torch.randint(-3, 4, (n, 1), generator=generator) for n in (rows, outputs)]
    assert (x @ w.T).abs().max() < 200
    want = x @ w.T * scales[0] * scales[1].T
    made = [v.to(device) for v in (x.to(torch.float8_e4m3fn), scales[0], w.to(torch.float8_e4m3fn), scales[1])]
    shift = None
    if bias:
        shift = (8 * torch.randint(-2, 3, (outputs,), generator=generator) * scales[1][:, 0]).bfloat16()
        scales[0][:] = 1
        made[1], want = scales[0].to(device), x @ w.T * scales[1].T + shift.float()
        shift = shift.to(device)
    got = narrow_product(*made, shift, splits=splits)
    assert got.dtype == torch.bfloat16 and torch.equal(got.float().cpu(), want)


def test_narrow_products_have_no_more_tiles_than_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from adjust_dlm.kernels import product

    for memory, cases in {
        232_448: [
            (160, 3584, True),
            (256, 8448, True),
            (257, 3584, False),
            (160, 8512, False),
            (0, 64, False),
        ],  # an H100
        101_376: [(64, 3584, True), (128, 3584, False)],  # a small Blackwell's shared memory
        0: [(1, 16, False)],  # an Ada card
    }.items():
        monkeypatch.setattr(product, "_card", lambda card, memory=memory: (132, memory))
        for rows, outputs, narrow in cases:
            assert product.is_narrow(rows, outputs, 0) is narrow


def test_two_powers_cover_a_count() -> None:
    assert [two_powers(n) for n in (1, 2, 3, 16, 100, 18_944)] == [
        (1, 0), (2, 0), (2, 1), (16, 0), (64, 64), (16_384, 4096),
    ]  # fmt: skip
    assert [two_powers(n, least=16, most=128) for n in (1, 17, 128, 136, 160, 256, 300)] == [
        (16, 0), (16, 16), (128, 0), (128, 16), (128, 32), (128, 128), (128, 256),
    ]  # fmt: skip
    for count in range(1, 500):
        head, tail = two_powers(count)
        assert count <= head + tail < 2 * count + 1 and (count > head or tail == 0)


@pytest.mark.gpu
def test_a_gated_layer_is_that_of_its_parts() -> None:
    plain = linear(256, 128)
    gate, up = (states(6, 256, seed=seed).bfloat16().cuda() for seed in (3, 4))
    layer = Fp8Linear(plain.bfloat16()).cuda()
    with torch.no_grad():
        assert torch.equal(layer.gated(gate, up), layer(F.silu(gate) * up))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 300])  # our own product, and the library's
def test_the_card_gives_what_the_cpu_gives(rows: int) -> None:
    plain = linear(256, 128)
    h = states(5, 256, seed=2).bfloat16().repeat(rows // 5, 1)
    here = Fp8Linear(plain)(h)
    layer = Fp8Linear(plain).cuda()
    with torch.no_grad():
        there = layer(h.cuda()).cpu()
    off = (here.double() - there.double()).norm(dim=-1) / here.double().norm(dim=-1)
    assert bool((off < 2**-7).all()), off
    assert not torch.equal(there, linear(256, 128).bfloat16()(h))
