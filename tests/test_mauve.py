"""MAUVE: closed forms, limits, exact repetition, and the numbers of the authors' own package."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adjust_dlm.eval import mauve as module
from adjust_dlm.eval.mauve import area, divergence_curve, features, mauve, reduce_features
from adjust_dlm.types import InputError


def gaussians(shift: float, n: int = 1000, d: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two sets of standard normal features, the second one moved along the first axis."""
    rng = np.random.default_rng(seed)
    p, q = rng.standard_normal((n, d)), rng.standard_normal((n, d))
    q[:, 0] += shift
    return p, q


def test_curve_of_disjoint_histograms_is_a_closed_form() -> None:
    # No common bucket: KL(q || r) = -log(1 - w) and KL(p || r) = -log w, so the curve is ((1-w)^c, w^c).
    curve = divergence_curve(np.array([1.0, 0.0]), np.array([0.0, 1.0]), scale=5)
    w = np.linspace(1e-6, 1 - 1e-6, 25)
    assert curve[0].tolist() == [1, 0]
    assert curve[-1].tolist() == [0, 1]
    assert curve[1:-1, 0] == pytest.approx((1 - w) ** 5, abs=1e-12)
    assert curve[1:-1, 1] == pytest.approx(w**5, abs=1e-12)


def test_area_of_disjoint_histograms_is_a_beta_function() -> None:
    # The integral of y dx over ((1-w)^c, w^c) is c B(c + 1, c) = 5 * 5! 4! / 10! at c = 5.
    exact = 5 * math.factorial(5) * math.factorial(4) / math.factorial(10)
    disjoint = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert area(divergence_curve(*disjoint, scale=5, points=4001)) == pytest.approx(exact, abs=1e-6)
    assert area(divergence_curve(*disjoint, scale=5)) == pytest.approx(exact, abs=5e-3)
    # At c = 1 the curve is the straight line x + y = 1.
    assert area(divergence_curve(*disjoint, scale=1)) == pytest.approx(0.5, abs=1e-5)


def test_curve_of_overlapping_histograms() -> None:
    p, q = [0.5, 0.3, 0.2, 0.0], [0.1, 0.3, 0.2, 0.4]
    curve = divergence_curve(np.array(p), np.array(q), scale=2, points=3)
    for w, (x, y) in zip((1e-6, 0.5, 1 - 1e-6), curve[1:-1], strict=True):
        r = [w * a + (1 - w) * b for a, b in zip(p, q, strict=True)]
        kl_q = sum(b * math.log(b / c) for b, c in zip(q, r, strict=True) if b)
        kl_p = sum(a * math.log(a / c) for a, c in zip(p, r, strict=True) if a)
        assert (x, y) == pytest.approx((math.exp(-2 * kl_q), math.exp(-2 * kl_p)), rel=1e-12)


def test_area_over_x_and_over_y_agree_and_ties_do_not_matter() -> None:
    curve = divergence_curve(np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.3, 0.2, 0.4]))
    x, y = curve.T
    assert area(curve) == pytest.approx(np.trapezoid(y[::-1], x[::-1]), rel=1e-12)
    assert area(curve) == pytest.approx(np.trapezoid(x, y), rel=1e-12)
    # mauve-text 0.4.0, its divergence curve and sklearn.metrics.auc both ways on these two histograms.
    assert area(curve) == pytest.approx(0.29269685703322657, rel=1e-12)
    equal = np.full(7, 1 / 7)
    assert area(divergence_curve(equal, equal)) == pytest.approx(1, abs=1e-12)


def test_h23_same_sets_score_one() -> None:
    p, _ = gaussians(0, n=200)
    got = mauve(p, p, seeds=(0, 1))
    assert got["mauve"] == pytest.approx(1, abs=1e-9)
    assert got["per_seed"] == pytest.approx([1, 1], abs=1e-9)
    assert mauve(p, np.random.default_rng(5).permutation(p), seeds=(0,))["mauve"] == pytest.approx(1, abs=1e-9)


def test_far_clusters_score_near_zero() -> None:
    rng = np.random.default_rng(2)
    p, q = rng.normal(0, 0.01, (300, 8)), rng.normal(0, 0.01, (300, 8))
    p[:, 0] += 1
    q[:, 1] += 1
    # No bucket holds both: the closed form of disjoint histograms on 25 points, whatever the buckets.
    floor = area(divergence_curve(np.array([1.0, 0.0]), np.array([0.0, 1.0])))
    assert mauve(p, q)["per_seed"] == pytest.approx([floor] * 5, abs=1e-9)
    assert floor < 0.01


def test_score_falls_with_distance_and_hardly_moves_with_direction() -> None:
    scores = [mauve(*gaussians(shift, n=400), seeds=(0,))["mauve"] for shift in (0, 1, 2, 4)]
    assert scores == sorted(scores, reverse=True)
    p, q = gaussians(1, n=400)
    there, back = mauve(p, q), mauve(q, p)
    assert there["mauve"] == pytest.approx(
        back["mauve"], abs=2 * (np.std(there["per_seed"], ddof=1) + np.std(back["per_seed"], ddof=1))
    )


def test_h23_same_seed_repeats_exactly_and_seeds_differ() -> None:
    p, q = gaussians(1, n=300)
    first, again = mauve(p, q, seeds=(3, 4)), mauve(p, q, seeds=(3, 4))
    assert first == again
    assert first["per_seed"][0] != first["per_seed"][1]
    assert mauve(p, q, seeds=(4, 3))["per_seed"] == first["per_seed"][::-1]
    assert first["mauve"] == pytest.approx(sum(first["per_seed"]) / 2)


def test_h23_settings_travel_with_the_score() -> None:
    p, q = gaussians(0, n=120)
    settings = mauve(p, q, seeds=(0,), about={"embedder": "smol", "max_length": 128})["settings"]
    assert {k: settings[k] for k in ("n_p", "n_q", "buckets", "scale", "seeds", "embedder", "max_length")} == {
        "n_p": 120,
        "n_q": 120,
        "buckets": 12,
        "scale": 5.0,
        "seeds": [0],
        "embedder": "smol",
        "max_length": 128,
    }
    assert mauve(p, q[:14], seeds=(0,))["settings"]["buckets"] == 2
    assert mauve(p, q, seeds=(0,), buckets=7, scale=1)["settings"]["buckets"] == 7


def test_h23_small_and_unequal_sets_are_warned_about(caplog) -> None:
    p, q = gaussians(0, n=1000, d=2)
    with caplog.at_level(logging.WARNING):
        assert mauve(p, q, seeds=(0,), buckets=2)["settings"]["warnings"] == []
        assert caplog.messages == []
        small = mauve(p[:50], q[:50], seeds=(0,))["settings"]["warnings"]
        both = mauve(p, q[:999], seeds=(0,), buckets=2)["settings"]["warnings"]
    assert [line.split(" is ")[0] for line in small] == ["MAUVE of 50 and 50 texts"]
    assert len(both) == 2
    assert "unequal size (1000 and 999)" in both[1]
    assert caplog.messages == small + both


def test_scale_of_a_row_does_not_matter_and_components_are_few() -> None:
    p, q = gaussians(1, n=200)
    stretch = np.random.default_rng(6).uniform(0.1, 10, (200, 1))
    assert mauve(p * stretch, q, seeds=(0,))["mauve"] == pytest.approx(mauve(p, q, seeds=(0,))["mauve"], abs=1e-9)
    # Unit rows in a plane: variance 80 % and 20 % on two axes, so 90 % takes both; 95 and 5 % takes one.
    for angle, dimensions in ((math.atan(math.sqrt(0.25)), 2), (math.atan(math.sqrt(0.05 / 0.95)), 1)):
        x, y = math.cos(angle), math.sin(angle)
        rows = np.array([[x, y, 0], [x, -y, 0], [-x, y, 0], [-x, -y, 0]])
        reduced = reduce_features(rows)
        assert reduced.shape == (4, dimensions)
        assert np.abs(reduced[:, 0]) == pytest.approx([x] * 4)
    assert reduce_features(np.ones((5, 3))) == pytest.approx(np.zeros((5, 1)))


# mauve-text 0.4.0 (faiss-cpu 1.15.1, one thread), compute_mauve(p_features, q_features, seed=0..4) with its defaults
# on gaussians(shift): mean and standard deviation (n - 1) over its five seeds.
RELEASED = {
    0.0: (0.9684089438735495, 0.009265531110139832),
    0.5: (0.9301634206401712, 0.019166789062416655),
    1.0: (0.7614756718631843, 0.03600389440659191),
    2.0: (0.2574130426390818, 0.021948903695582184),
}


@pytest.mark.parametrize("shift", RELEASED)
def test_within_the_seed_spread_of_the_authors_package(shift) -> None:
    mean, std = RELEASED[shift]
    got = mauve(*gaussians(shift))
    assert got["settings"]["buckets"] == 100
    assert got["mauve"] == pytest.approx(mean, abs=std)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_features_equal_one_text_at_a_time(llama, pooling) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.integers(61, size=n).tolist() for n in (3, 8, 1, 13, 1, 20)]
    with torch.no_grad():
        states = [llama(torch.tensor([t]), output_hidden_states=True).hidden_states[-1][0].numpy() for t in texts]
    expected = np.stack([s.mean(0) if pooling == "mean" else s[-1] for s in states])
    for batch_size in (1, 2, 4, 6):
        got = features(llama, texts, batch_size, pooling)
        assert got.dtype == np.float32
        assert got == pytest.approx(expected, abs=5e-6)


def test_bad_features_are_named(llama) -> None:
    p, q = gaussians(0, n=10, d=3)
    with pytest.raises(InputError, match=r"shapes \[10, 3\] and \[10, 2\]; both must be .n, D. of one D"):
        mauve(p, q[:, :2])
    with pytest.raises(InputError, match=r"\[10, 3\] and \[3\]; both must be"):
        mauve(p, q[0])
    with pytest.raises(InputError, match="something to compare"):
        mauve(p, q[:0])
    with pytest.raises(InputError, match="nan or infinity"):
        mauve(p, q * np.nan)
    with pytest.raises(InputError, match=r"buckets is 21; it must be 2..20"):
        mauve(p, q, buckets=21)
    with pytest.raises(InputError, match="seeds is empty"):
        mauve(p, q, seeds=())
    for seed in (-1, 2**32):
        with pytest.raises(InputError, match=r"seeds are \[0, -?\d+\]; all must lie in 0\.\.2\*\*32-1"):
            mauve(p, q, seeds=(0, seed))
    with pytest.raises(InputError, match="scale is 0"):
        mauve(p, q, scale=0)
    assert len(features(llama, [[1], []], 1)) == 1
    with pytest.raises(InputError, match="no texts to take features of"):
        features(llama, [[]], 1)
    with pytest.raises(InputError, match="pooling is 'max'"):
        features(llama, [[1]], 1, "max")


def test_missing_scikit_learn_is_one_clear_line(monkeypatch) -> None:
    monkeypatch.setattr("adjust_dlm.eval.settings.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install 'adjust-dlm\[eval\]'"):
        module.mauve(*gaussians(0, n=20))


def test_h23_interval_of_mauve_covers_new_draws_of_texts() -> None:
    # One-dimensional, two far clusters: MAUVE depends on two binomial shares alone, so fresh draws are cheap.
    rng = np.random.default_rng(0)

    def sample(share: float, n: int = 400) -> np.ndarray:
        return np.stack([rng.random(n) < share, np.zeros(n)], axis=1) + rng.normal(0, 1e-3, (n, 2))

    scores = [mauve(sample(0.5), sample(0.8), seeds=(0,), buckets=2) for _ in range(40)]
    spread = 1.96 * np.std([s["mauve"] for s in scores], ddof=1)
    assert np.mean([s["mauve_ci95"] for s in scores]) == pytest.approx(spread, rel=0.3)
    assert mauve(sample(0.5), sample(0.5), seeds=(0,), buckets=2)["mauve_ci95"] < spread
