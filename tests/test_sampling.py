"""Uniforms, filters, draws and order rules against plain references and numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from adjust_dlm.decoders import decode
from adjust_dlm.sampling import (
    DRAW,
    ORDER,
    _nucleus,
    _top_k,
    confidence,
    draw,
    margin,
    negative_entropy,
    process,
    score_rows,
    uniform,
)
from adjust_dlm.types import DecodeConfig
from helpers import TableBase

INF = math.inf


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def log(*p: float) -> torch.Tensor:
    return torch.tensor([p], dtype=torch.float64).log().float()


def kept(processed_RV: torch.Tensor) -> list[int]:
    """Ids that survive in the first row."""
    return (processed_RV[0] > -INF).nonzero()[:, 0].tolist()


# Uniforms ------------------------------------------------------------------------------------------------------


def splitmix(x: int) -> int:
    """The published finaliser on Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def reference_uniform(seed: int, row: int, commit: int, position: int, stream: int) -> float:
    state = splitmix((seed + stream * 0x632BE59BD9B4E019) % 2**64)
    for key in (row, commit, position):
        state = splitmix(state ^ (key * 0x9E3779B97F4A7C15 % 2**64))
    return (state >> 32) / 2**32


@pytest.mark.parametrize(
    ("key", "draw_bits", "order_bits"),
    [
        # 32-bit numerators: every trajectory and every result in print hangs on these.
        ((0, 0, 0, 0), 2077070237, 754168363),
        ((1, 2, 3, 4), 3154084281, 1826404690),
        ((2**63 - 1, 10**12, 127, 511), 3288363058, 166689339),
    ],
)
def test_uniforms_never_change(key: tuple[int, int, int, int], draw_bits: int, order_bits: int) -> None:
    seed, *where = key
    for stream, bits in ((DRAW, draw_bits), (ORDER, order_bits)):
        assert float(uniform(seed, *(ints(n) for n in where), stream)) == bits / 2**32
        assert reference_uniform(seed, *where, stream) == bits / 2**32


def test_uniforms_equal_the_published_hash_on_python_integers() -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 2**40, size=(200, 3))
    for seed in (0, 17, -1, 2**63 - 1, 2**63, 2**64 - 5):
        for stream in (DRAW, ORDER):
            got = uniform(seed, *torch.from_numpy(keys.T.copy()), stream)
            assert got.tolist() == [reference_uniform(seed, *map(int, key), stream) for key in keys]


def test_uniforms_broadcast_and_do_not_see_their_neighbours() -> None:
    all_ = uniform(3, ints(0, 1, 2)[:, None], ints(4), torch.arange(5))
    assert (all_.shape, all_.dtype) == ((3, 5), torch.float64)
    alone = [[float(uniform(3, ints(r), ints(4), ints(p))) for p in range(5)] for r in range(3)]
    assert all_.tolist() == alone


AXES = ("seed", "row", "commit", "position")


def along(axis: str, n: int, stream: int = DRAW) -> np.ndarray:
    """n uniforms that differ in one key alone."""
    if axis == "seed":
        return np.array([float(uniform(s, ints(5), ints(6), ints(7), stream)) for s in range(n)])
    keys = {name: torch.full((n,), 5) for name in AXES[1:]} | {axis: torch.arange(n)}
    return uniform(9, *keys.values(), stream).numpy()


@pytest.mark.parametrize("axis", AXES)
def test_uniforms_are_uniform_and_independent_along_every_key(axis: str) -> None:
    n = 2000 if axis == "seed" else 50_000
    u = along(axis, n)
    assert (u.min() >= 0, u.max() < 1, bool((u * 2**32 % 1 == 0).all())) == (True, True, True)
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    for a, b in ((u[:-1], u[1:]), (u[:-7], u[7:]), (u, along(axis, n, ORDER))):  # neighbours, lag 7, the other stream
        cells = np.histogram2d(a, b, bins=8, range=((0, 1), (0, 1)))[0].ravel()
        assert stats.chisquare(cells).pvalue > 1e-3


def test_uniforms_collide_no_more_than_chance() -> None:
    grid = torch.meshgrid(torch.arange(50), torch.arange(40), torch.arange(50), indexing="ij")
    u = torch.cat([uniform(s, *grid, stream).flatten() for s in (0, 1) for stream in (DRAW, ORDER)])
    repeats = len(u) - len(u.unique())
    # 400,000 numbers of 32 bits: n^2 / 2^33 = 18.6 repeats expected (Poisson); 45 is six sigma.
    assert repeats < 45


# Temperature, top-p, top-k -------------------------------------------------------------------------------------


def sorted_nucleus(p_V: np.ndarray, top_p: float) -> set[int]:
    """The definition: sort down (ties by lowest id), keep while the mass before is below top_p."""
    order = np.argsort(-p_V, kind="stable")
    before = p_V[order].cumsum() - p_V[order]
    return set(order[(before < top_p) & (p_V[order] > 0)].tolist())


def test_nucleus_equals_the_sorted_definition_on_exact_sums_and_ties() -> None:
    generator = np.random.default_rng(1)
    for _ in range(400):
        words = int(generator.integers(1, 40))
        parts = generator.multinomial(256, generator.dirichlet(np.full(words, generator.choice([0.1, 1.0, 20.0]))))
        p_V, top_p = parts / 256, int(generator.integers(1, 256)) / 256  # all sums exact in fp32, ties everywhere
        got = _nucleus(torch.tensor(p_V[None], dtype=torch.float32), top_p)[0].nonzero()[:, 0]
        assert set(got.tolist()) == sorted_nucleus(p_V, top_p)


def test_nucleus_equals_the_sorted_definition_on_logits() -> None:
    generator = np.random.default_rng(2)
    for _ in range(300):
        words = int(generator.integers(2, 300))
        temperature = float(generator.choice([0.3, 1.0, 2.0]))
        logits_V = generator.normal(size=words) * generator.choice([0.1, 1.0, 5.0])
        p_V = np.exp(logits_V / temperature - logits_V.max() / temperature)
        p_V /= p_V.sum()
        mass = np.sort(p_V)[::-1].cumsum()
        j = int(generator.integers(0, words))
        top_p = float((mass[j] + (mass[j - 1] if j else 0)) / 2)  # half-way through the j-th: j + 1 tokens
        if mass[j] - top_p < 1e-5 or top_p >= 1:  # too near the edge for fp32 to have an opinion
            continue
        config = DecodeConfig(temperature=temperature, top_p=top_p)
        got = kept(process(torch.tensor(logits_V[None]), config))
        assert len(got) == j + 1
        assert set(got) == sorted_nucleus(p_V, top_p)


@pytest.mark.parametrize(
    ("p", "top_p", "count"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.6, 2),
        ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
        ([0.7, 0.2, 0.1], 0.8, 2),
        ([0.25, 0.25, 0.25, 0.25], 0.5, 2),
        ([0.25, 0.25, 0.25, 0.25], 0.51, 3),
        ([0.1, 0.2, 0.7], 1e-9, 1),
        ([0.1, 0.2, 0.7], 1e-50, 1),  # 0 in fp32
    ],
)
def test_h9_the_token_that_crosses_is_kept(p: list[float], top_p: float, count: int) -> None:
    likeliest = sorted(sorted(range(len(p)), key=lambda i: (-p[i], i))[:count])
    assert kept(process(log(*p), DecodeConfig(top_p=top_p))) == likeliest


def test_h9_top_p_one_keeps_a_whole_vocabulary_in_bf16() -> None:
    logits_RV = 3 * torch.randn(2, 150_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    processed_RV = process(logits_RV, DecodeConfig(top_p=1.0))
    assert processed_RV.dtype == torch.float32
    assert bool(processed_RV.isfinite().all())


def test_nucleus_mass_over_a_whole_vocabulary() -> None:
    """150,000 tokens: enough mass is kept, and without the least likely kept token it would not be."""
    logits_RV = 3 * torch.randn(3, 150_000, generator=torch.Generator().manual_seed(1))
    kept_RV = process(logits_RV, DecodeConfig(top_p=0.95)) > -INF
    p_RV = logits_RV.double().softmax(-1)
    for p_V, kept_V in zip(p_RV, kept_RV, strict=True):
        inside = p_V[kept_V]
        assert inside.sum() > 0.95 - 1e-4
        assert inside.sum() - inside.min() < 0.95 + 1e-4
        assert inside.min() >= p_V[~kept_V].max()


def test_top_k_equals_the_sorted_definition() -> None:
    generator = np.random.default_rng(3)
    for _ in range(200):
        words = int(generator.integers(2, 30))
        logits_V = generator.integers(-3, 4, size=words).astype(np.float32)  # ties everywhere
        logits_V[generator.random(words) < 0.2] = -np.inf
        logits_V[generator.integers(words)] = 5.0
        k = int(generator.integers(1, words))
        wanted = set(np.argsort(-logits_V, kind="stable")[:k].tolist())
        got = _top_k(torch.tensor(logits_V[None]), k)[0].nonzero()[:, 0].tolist()
        assert set(got) == wanted
        survivors = kept(process(torch.tensor(logits_V[None]), DecodeConfig(top_k=k)))
        assert set(survivors) == {i for i in wanted if logits_V[i] > -np.inf}


def test_top_k_zero_or_large_keeps_all() -> None:
    for k in (0, 4, 99):
        assert kept(process(log(0.4, 0.3, 0.2, 0.1), DecodeConfig(top_k=k))) == [0, 1, 2, 3]


def test_temperature_comes_first_then_top_p_then_top_k() -> None:
    # Nucleus of .5: {.4, .3}; top-k of 2 first would leave .57 and .43, of which .57 alone passes.
    assert kept(process(log(0.4, 0.3, 0.2, 0.1), DecodeConfig(top_p=0.5, top_k=2))) == [0, 1]
    # At T=1/2 the squares are .533, .3, .133, .033: one token reaches .5; at T=1 it takes two.
    assert kept(process(log(0.4, 0.3, 0.2, 0.1), DecodeConfig(top_p=0.5, temperature=0.5))) == [0]
    p = process(log(0.4, 0.3, 0.2, 0.1), DecodeConfig(temperature=0.5)).softmax(-1)
    assert p[0].tolist() == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30], abs=1e-6)
    p = process(log(0.4, 0.3, 0.2, 0.1), DecodeConfig(top_p=0.8)).softmax(-1)
    assert p[0].tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0], abs=1e-6)


def test_temperature_zero_leaves_the_distribution_alone() -> None:
    assert torch.equal(process(log(0.5, 0.3, 0.2), DecodeConfig(temperature=0)), log(0.5, 0.3, 0.2))


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_argmax_and_never_nan(temperature: float) -> None:
    logits_RV = torch.tensor([[9000.0, 9001.0, -INF, 3.0]])
    processed_RV = process(logits_RV, DecodeConfig(temperature=temperature))
    assert processed_RV.softmax(-1).tolist() == [[0, 1, 0, 0]]
    assert draw(processed_RV, torch.tensor([0.999]), temperature).tolist() == [1]


def test_a_huge_temperature_is_uniform_over_what_is_allowed() -> None:
    processed_RV = process(torch.tensor([[9.0, -INF, 1.0, -50.0]]), DecodeConfig(temperature=1e300))
    assert processed_RV.softmax(-1)[0].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


# Drawing -------------------------------------------------------------------------------------------------------


def test_draw_is_the_inverse_cdf() -> None:
    u_R = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-32], dtype=torch.float64)
    assert draw(log(0.25, 0.5, 0.25).expand(6, 3), u_R, 1.0).tolist() == [0, 0, 1, 1, 2, 2]


def test_draw_follows_the_distribution() -> None:
    n, config = 100_000, DecodeConfig(temperature=0.8, top_p=0.9, top_k=4)
    processed_RV = process(torch.randn(1, 8, generator=torch.Generator().manual_seed(2)), config)
    u_R = uniform(1, torch.arange(n), ints(0), ints(0))
    counts = draw(processed_RV.expand(n, 8), u_R, 0.8).bincount(minlength=8).numpy()
    p_V = processed_RV[0].double().softmax(-1).numpy()
    assert set(counts.nonzero()[0]) == set(p_V.nonzero()[0])
    assert stats.chisquare(counts[p_V > 0], n * p_V[p_V > 0] / p_V[p_V > 0].sum()).pvalue > 1e-3


def test_zero_probability_is_never_drawn_not_even_at_the_ends() -> None:
    """Forbidden first and last ids, and a token 300 below the best (its fp32 probability is 0)."""
    logits_RV = torch.tensor([[-INF, 0.0, -300.0, 0.0, -INF, -INF]])
    ends = torch.tensor([0.0, 2.0**-32, 0.5 - 2.0**-32, 0.5, 1 - 2.0**-32], dtype=torch.float64)
    u_R = torch.cat([ends, uniform(0, torch.arange(20_000), ints(0), ints(0))])
    drawn = draw(logits_RV.expand(len(u_R), 6), u_R, 1.0)
    assert set(drawn.tolist()) == {1, 3}
    assert drawn[:5].tolist() == [1, 1, 1, 3, 3]


def test_the_last_token_of_a_large_vocabulary_can_be_drawn_and_none_behind_it() -> None:
    flat_RV = torch.zeros(1, 150_000)
    u_R = torch.tensor([1 - 2.0**-32], dtype=torch.float64)
    assert draw(flat_RV, u_R, 1.0).tolist() == [149_999]
    flat_RV[:, 140_000:] = -INF
    assert draw(flat_RV, u_R, 1.0).tolist() == [139_999]


def test_temperature_zero_takes_the_lowest_of_equals() -> None:
    logits_RV = torch.zeros(3, 4000)
    logits_RV[1, [1234, 77, 3999]] = 2.0
    logits_RV[2, [3999, 3998]] = 1.0
    assert draw(logits_RV, torch.full((3,), 0.9), 0).tolist() == [0, 77, 3998]


# Order rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits_RV", "entropy"),
    [
        (process(log(0.6, 0.35, 0.05), DecodeConfig(top_p=0.9)), 0.6581),
        (torch.tensor([[0, -INF]]), 0.0),
        (torch.tensor([[0, 0, -INF]]), 0.6931),
        (torch.tensor([[65504, -65504]], dtype=torch.float16), 0.0),
    ],
)
def test_h3_entropy_is_safe_at_probability_zero(logits_RV: torch.Tensor, entropy: float) -> None:
    certainty = negative_entropy(logits_RV)
    assert certainty.dtype == torch.float32
    assert -float(certainty) == pytest.approx(entropy, abs=5e-5)


def test_h3_no_position_is_chosen_for_a_nan() -> None:
    """Top-p leaves zeros in every row; the certain row comes first and not the one a NaN would have raised."""
    table_LV = torch.cat([log(0.6, 0.35, 0.05), log(0.34, 0.33, 0.33), log(0.98, 0.01, 0.01)])
    config = DecodeConfig(max_new_tokens=3, top_p=0.9, temperature=0.0)
    assert decode(TableBase(table_LV), [[]], config, decoder="joint").order_BL.tolist() == [[1, 2, 0]]


H1 = torch.tensor([[5, 3.5, 0], [5, 2.5, 0], [5, 1, 0]])


def test_h1_entropies() -> None:
    assert (-negative_entropy(H1)).tolist() == pytest.approx([0.5064, 0.3045, 0.1291], abs=5e-5)


@pytest.mark.parametrize(
    ("order_on", "temperature", "order"),
    [
        ("raw", 0.0, [2, 1, 0]),
        ("raw", 0.1, [2, 1, 0]),
        ("raw", 1.0, [2, 1, 0]),
        # At T=0 and T=1 top_p=.9 leaves two tokens at position 0 and one at the others: entropies .4751, 0, 0.
        ("processed", 0.0, [2, 0, 1]),
        ("processed", 1.0, [2, 0, 1]),
        # One token survives everywhere: an exact tie at entropy 0, and ties go to the lowest position.
        ("processed", 0.1, [0, 1, 2]),
    ],
)
def test_h1_order_on_raw_or_processed(order_on: str, temperature: float, order: list[int]) -> None:
    config = DecodeConfig(max_new_tokens=3, temperature=temperature, top_p=0.9, order="entropy", order_on=order_on)
    for decoder in ("joint", "parallel"):
        result = decode(TableBase(H1), [[]], config, decoder=decoder)
        assert result.order_BL.tolist() == [order]


def test_h1_the_tie_at_low_temperature_is_exact() -> None:
    config = DecodeConfig(temperature=0.1, top_p=0.9)
    assert score_rows(H1, torch.zeros(3), "entropy", on_processed=True, config=config).tolist() == [0, 0, 0]
    raw = score_rows(H1, torch.zeros(3), "entropy", on_processed=False, config=config)
    assert raw.tolist() == pytest.approx([-0.5064, -0.3045, -0.1291], abs=5e-5)


def test_margin_is_the_gap_of_the_two_likeliest() -> None:
    rows = torch.cat([log(0.2, 0.5, 0.3), log(0.1, 0.45, 0.45), torch.tensor([[0, -INF, -INF]])])
    assert margin(rows).tolist() == pytest.approx([0.2, 0.0, 1.0], abs=1e-6)


def test_confidence_is_the_untempered_probability_of_the_drawn_token() -> None:
    p = log(0.2, 0.5, 0.3).expand(3, 3)
    assert confidence(p, ints(0, 1, 2)).tolist() == pytest.approx([0.2, 0.5, 0.3], abs=1e-6)
    config, u_R = DecodeConfig(temperature=0.5), torch.tensor([0.05, 0.5, 0.9], dtype=torch.float64)
    # Squared and normalised: 4/38, 25/38, 9/38, so these uniforms draw tokens 0, 1, 2.
    raw = score_rows(p, u_R, "confidence", on_processed=False, config=config)
    processed = score_rows(p, u_R, "confidence", on_processed=True, config=config)
    assert raw.tolist() == pytest.approx([0.2, 0.5, 0.3], abs=1e-6)
    assert processed.tolist() == pytest.approx([4 / 38, 25 / 38, 9 / 38], abs=1e-6)
    greedy = score_rows(p, u_R, "confidence", on_processed=False, config=DecodeConfig(temperature=0))
    assert greedy.tolist() == pytest.approx([0.5, 0.5, 0.5], abs=1e-6)


def test_confidence_scores_the_very_token_that_is_then_committed() -> None:
    """Order and tokens of a whole decode, recomputed from the uniforms alone."""
    table_LV = torch.randn(5, 7, generator=torch.Generator().manual_seed(4))
    config = DecodeConfig(max_new_tokens=5, temperature=0.7, order="confidence", order_on="raw", seed=11)
    result = decode(TableBase(table_LV), [[]] * 50, config, decoder="joint")
    raw_LV = table_LV.double().softmax(-1).numpy()
    cdf_LV = (table_LV.double() / 0.7).softmax(-1).numpy().cumsum(-1)
    for row in range(50):
        open_, tokens, order = set(range(5)), [-1] * 5, [-1] * 5
        for commit in range(5):
            u = {i: reference_uniform(11, row, commit, i, DRAW) for i in open_}
            drawn = {i: int((cdf_LV[i] <= u[i]).sum()) for i in open_}
            best = max(open_, key=lambda i: (raw_LV[i, drawn[i]], -i))
            tokens[best], order[best] = drawn[best], commit
            open_.remove(best)
        assert (result.tokens_BL[row].tolist(), result.order_BL[row].tolist()) == (tokens, order)


def test_random_order_is_a_uniform_permutation_that_ignores_the_draws() -> None:
    config = DecodeConfig(max_new_tokens=3, order="random", seed=2)
    n = 6000
    result = decode(TableBase(torch.zeros(3, 2)), [[]] * n, config, decoder="joint")
    code = (result.order_BL * torch.tensor([9, 3, 1])).sum(-1)
    counts = code.bincount()
    assert stats.chisquare(counts[counts > 0].numpy()).pvalue > 1e-3
    assert len(counts[counts > 0]) == 6
    table = np.array(
        [[int(((code == c) & (result.tokens_BL[:, 0] == t)).sum()) for t in (0, 1)] for c in code.unique()]
    )
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_left_to_right_is_left_to_right() -> None:
    config = DecodeConfig(max_new_tokens=6, order="left_to_right", tokens_per_step=4)
    result = decode(
        TableBase(torch.randn(6, 3, generator=torch.Generator().manual_seed(5))), [[]], config, decoder="parallel"
    )
    assert result.order_BL.tolist() == [[0, 1, 2, 3, 4, 5]]
