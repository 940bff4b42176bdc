"""The Triton kernels of the draw, interpreted on the CPU (or compiled on a card), against `sampling`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adjust_dlm.sampling import confidence, draw, margin, negative_entropy, process
from adjust_dlm.types import DecodeConfig

pytest.importorskip("triton")
from adjust_dlm.kernels.draw import draw_rows, row_stats

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fine() -> Tensor:
    """A flag that nothing is wrong."""
    return torch.zeros((), dtype=torch.bool, device=DEVICE)


def rows(width: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(`Base.plain_logits`, what is forbidden, `Base.logits`), with ties and a forbidden favourite."""
    generator = torch.Generator().manual_seed(seed)
    raw_RV = (3 * torch.randn(6, width, generator=generator)).to(dtype)
    raw_RV[0] = 0  # all alike
    raw_RV[1, [2, width - 1]] = 9  # two likeliest ones
    raw_RV[2, width // 2] = 60  # certain
    forbidden_V = torch.zeros(width, dtype=torch.uint8)
    forbidden_V[[1, width // 3]] = 1
    raw_RV[:, 1] = 80
    raw_RV = raw_RV.masked_fill(forbidden_V.bool(), -torch.inf)
    seen_RV = raw_RV.float()
    return raw_RV.to(DEVICE), forbidden_V.to(DEVICE), seen_RV.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 4096, 9001])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 2.5, 1e-40])
def test_statistics_are_those_of_the_plain_rules(dtype: torch.dtype, width: int, temperature: float) -> None:
    raw_RV, _, seen_RV = rows(width, dtype)
    stats = row_stats(raw_RV, temperature)
    processed_RV = process(seen_RV, DecodeConfig(temperature=temperature))
    likeliest_R = processed_RV.argmax(-1)
    assert torch.equal(stats.token, likeliest_R)
    torch.testing.assert_close(stats.entropy, negative_entropy(processed_RV), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(stats.margin, margin(processed_RV), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(stats.confidence, confidence(processed_RV, likeliest_R), rtol=2e-6, atol=2e-6)
    assert torch.equal(stats.top, seen_RV.amax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 9001])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_draws_are_those_of_the_plain_form(dtype: torch.dtype, width: int, temperature: float) -> None:
    """Every row at many uniforms."""
    raw_RV, _, seen_RV = rows(width, dtype, seed=1)
    u_N = torch.tensor([0.0, 0.1, 0.25, 0.5, 0.87, 0.999], dtype=torch.float64, device=DEVICE)
    row_N = torch.arange(6, device=DEVICE).repeat_interleave(len(u_N))
    u_N = u_N.repeat(6)
    stats = row_stats(raw_RV, temperature)
    got_N = draw_rows(raw_RV, row_N, stats, u_N, fine(), temperature)
    processed_RV = process(seen_RV, DecodeConfig(temperature=temperature))
    assert torch.equal(got_N, draw(processed_RV[row_N], u_N, temperature))


def test_draws_follow_the_distribution() -> None:
    """A grid of uniforms gives every token its share, to one cell; forbidden ones none."""
    raw_RV, forbidden_V, seen_RV = rows(40, torch.float32, seed=2)
    cells = 500
    u_N = (torch.arange(cells, dtype=torch.float64, device=DEVICE) + 0.5) / cells
    row_N = torch.full((cells,), 4, device=DEVICE)
    stats = row_stats(raw_RV, 1.0)
    got_N = draw_rows(raw_RV, row_N, stats, u_N, fine(), 1.0)
    share_V = torch.bincount(got_N, minlength=40) / cells
    assert float((share_V - seen_RV[4].softmax(-1)).abs().max()) <= 1.01 / cells
    assert int(got_N.bincount(minlength=40)[forbidden_V.bool()].sum()) == 0


def test_nan_is_seen() -> None:
    raw_RV, _, _ = rows(40, torch.float32)
    raw_RV[3, 7] = torch.nan
    stats = row_stats(raw_RV, 1.0)
    assert stats.total.isnan().tolist() == [False, False, False, True, False, False]
    assert bool(stats.entropy.isnan()[3])


def test_rows_without_a_softmax_are_seen() -> None:
    raw_RV, _, _ = rows(40, torch.float32)
    raw_RV[3, 7], raw_RV[4] = torch.inf, -torch.inf
    stats = row_stats(raw_RV, 1.0)
    assert (stats.total > 0).tolist() == [True, True, True, False, False, True]
    for chosen, wrong in (([0, 1, 2, 5], False), ([0, 3], True), ([4], True)):
        bad, row_N = fine(), torch.tensor(chosen, device=DEVICE)
        draw_rows(raw_RV, row_N, stats, torch.full(row_N.shape, 0.5, dtype=torch.float64, device=DEVICE), bad, 1.0)
        assert bool(bad) == wrong


FILTERS = [(0.9, 0), (0.3, 0), (0.999, 5), (1.0, 1), (1.0, 7), (0.5, 30), (1e-6, 0), (1e-50, 0)]


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.4), (torch.bfloat16, 1.0)])
@pytest.mark.parametrize(("top_p", "top_k"), FILTERS)
def test_filters_are_those_of_the_plain_form(dtype: torch.dtype, top_p: float, top_k: int, temperature: float) -> None:
    """Statistics and draws; row 0 is all ties, of which the filters keep the lowest ids."""
    raw_RV, _, seen_RV = rows(300, dtype, seed=3)
    config = DecodeConfig(temperature=temperature, top_p=top_p, top_k=top_k)
    processed_RV = process(seen_RV, config)
    stats = row_stats(raw_RV, temperature, top_p=top_p, top_k=top_k)
    torch.testing.assert_close(stats.entropy, negative_entropy(processed_RV), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(stats.margin, margin(processed_RV), rtol=2e-6, atol=2e-6)
    best_R = processed_RV.argmax(-1)
    torch.testing.assert_close(stats.confidence, confidence(processed_RV, best_R), rtol=2e-6, atol=2e-6)
    u_N = torch.tensor([0.0, 0.1, 0.25, 0.51, 0.87, 0.999], dtype=torch.float64, device=DEVICE)
    row_N = torch.arange(6, device=DEVICE).repeat_interleave(len(u_N))
    u_N = u_N.repeat(6)
    got_N = draw_rows(raw_RV, row_N, stats, u_N, fine(), temperature, top_p=top_p, top_k=top_k)
    assert torch.equal(got_N, draw(processed_RV[row_N], u_N, temperature))


def test_filters_over_several_blocks() -> None:
    raw_RV, _, seen_RV = rows(9001, torch.bfloat16, seed=4)
    processed_RV = process(seen_RV, DecodeConfig(top_p=0.8))
    stats = row_stats(raw_RV, 1.0, top_p=0.8)
    torch.testing.assert_close(stats.entropy, negative_entropy(processed_RV), rtol=2e-6, atol=2e-6)
    row_N = torch.arange(6, device=DEVICE)
    u_N = torch.full((6,), 0.77, dtype=torch.float64, device=DEVICE)
    got_N = draw_rows(raw_RV, row_N, stats, u_N, fine(), 1.0, top_p=0.8)
    assert torch.equal(got_N, draw(processed_RV, u_N, 1.0))
