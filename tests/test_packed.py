"""W h through oneDNN's layout: the product, row by row the same, and never an old W."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adjust_dlm.bases import layers, packed
from adjust_dlm.bases.layers import Linear
from adjust_dlm.bases.packed import frozen_linear

BIG = (4096, 576)


def _matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocabulary, width", [BIG, (33, 16), (7, 3)])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 3), (130,)])
def test_it_is_the_product(vocabulary: int, width: int, shape: tuple[int, ...]) -> None:
    """Against float64: within what fp32 sums of that length can be off."""
    weight_VD, h_RD = _matrix(vocabulary, width), torch.randn(*shape, width)
    out_RV = frozen_linear(h_RD, weight_VD)
    assert out_RV.shape == (*shape, vocabulary) and out_RV.dtype == torch.float32
    bound_RV = width * 2.0**-23 * (h_RD.double().abs() @ weight_VD.double().abs().T)
    assert ((out_RV - h_RD.double() @ weight_VD.double().T).abs() <= bound_RV).all()


@pytest.mark.skipif(not packed._X86, reason="other processors take torch's own product")
@pytest.mark.parametrize("count", [1, 2, 3, 8, 31, 72])
def test_a_row_does_not_depend_on_the_others(count: int) -> None:
    """To the last bit: what decoding in batches promises for rows, the head keeps for logits."""
    weight_VD, h_RD = _matrix(*BIG), _matrix(129, BIG[1], seed=1)
    whole_RV = frozen_linear(h_RD, weight_VD)
    parts = [frozen_linear(part, weight_VD) for part in h_RD.split(count)]
    assert torch.equal(torch.cat(parts), whole_RV)
    strided_RD = torch.cat([h_RD, h_RD], -1)[:, : BIG[1]]  # features stand behind the D columns
    assert torch.equal(frozen_linear(strided_RD, weight_VD), whole_RV)


def test_a_matrix_changed_in_place_is_laid_out_anew() -> None:
    weight_VD, h_RD = _matrix(33, 16), torch.ones(1, 16)
    before_RV = frozen_linear(h_RD, weight_VD)
    weight_VD[3] = 2.0
    after_RV = frozen_linear(h_RD, weight_VD)
    assert after_RV[0, 3] == 32.0
    assert torch.equal(after_RV[0, :3], before_RV[0, :3]) and torch.equal(after_RV[0, 4:], before_RV[0, 4:])


@torch.no_grad()
def test_layers_keep_copies_of_frozen_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never of a weight that is trained, that is large, or that a cast has given other memory."""
    layer, h_RD, kept = Linear(16, 33), torch.randn(5, 16), len(packed._packed)
    nn.Linear.reset_parameters(layer)
    assert torch.equal(layer(h_RD), F.linear(h_RD, layer.weight, layer.bias)) and len(packed._packed) == kept
    layer.requires_grad_(False)
    torch.testing.assert_close(layer(h_RD), F.linear(h_RD, layer.weight, layer.bias))
    assert len(packed._packed) == kept + packed._X86
    layer.bfloat16().float()
    assert len(packed._packed) == kept
    torch.testing.assert_close(layer(h_RD), F.linear(h_RD, layer.weight, layer.bias))
    monkeypatch.setattr(layers, "_PACKED", 16)
    assert torch.equal(layer(h_RD), F.linear(h_RD, layer.weight, layer.bias))


def test_a_layer_that_was_trained_meanwhile_is_laid_out_anew() -> None:
    """A fused optimizer changes weights and not their versions."""
    layer, h_RD = Linear(16, 33), torch.randn(5, 16)
    nn.Linear.reset_parameters(layer)
    layer.requires_grad_(False)(h_RD)
    layer.requires_grad_(True)(h_RD).sum().backward()
    torch.optim.AdamW(layer.parameters(), lr=1.0, fused=True).step()
    layer.requires_grad_(False)
    torch.testing.assert_close(layer(h_RD), F.linear(h_RD, layer.weight, layer.bias))


def test_a_copy_dies_with_its_matrix() -> None:
    kept, weight_VD = len(packed._packed), _matrix(33, 16)
    frozen_linear(torch.ones(1, 16), weight_VD)
    frozen_linear(torch.ones(2, 16), weight_VD)
    assert len(packed._packed) == kept + packed._X86
    del weight_VD
    gc.collect()
    assert len(packed._packed) <= kept


def test_a_wanted_gradient_and_other_dtypes_are_torchs_own() -> None:
    weight_VD, h_RD = _matrix(33, 16), torch.ones(2, 16, requires_grad=True)
    frozen_linear(h_RD, weight_VD)[0].sum().backward()
    assert h_RD.grad is not None and torch.equal(h_RD.grad[1], torch.zeros(16))
    torch.testing.assert_close(h_RD.grad[0], weight_VD.sum(0))
    for dtype in (torch.bfloat16, torch.float64):
        h_RD, weight = torch.ones(2, 16, dtype=dtype), weight_VD.to(dtype)
        assert torch.equal(frozen_linear(h_RD, weight), F.linear(h_RD, weight))
