"""The fast form of joint, parallel and adjust: the reference's results, for every setting and in every company."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from adjust_dlm.bases import layers, load_base
from adjust_dlm.bases.fp8 import in_fp8_layers
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import _groups, decode, decode_many
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.fast import lane
from adjust_dlm.decoders.fast import pick as static_pick
from adjust_dlm.decoders.fast.graphs import Graphs
from adjust_dlm.types import DecodeConfig, DecodeResult, InputError
from helpers import (
    BOS,
    CORE,
    FAMILIES,
    MASK,
    RULES,
    count_passes,
    exact_base,
    left_pad,
    oracle,
    row_of,
    tiny_base,
    tiny_sampler,
)
from test_checkpoint import write
from test_properties import configs, heeded, prompts

BOTH = [[BOS, 5], [BOS, MASK, 9]]
PROMPTS = [[BOS, 5, 6], [BOS, 9, 7, 4, 11, MASK, 8], [BOS], [BOS, 3, 3, 3, MASK, MASK]]
CALLS = ("base_calls_B", "sampler_calls_B", "partner_calls_B", "rounds_B")


class Replayed(Graphs):
    """Graphs without a card: what ran first under a key runs again, with the settings that it then saw."""

    def run(self, key: Any, function: Callable[[], None], buffers: Callable[[], list[Tensor]]) -> None:
        canvas = buffers.__self__  # type: ignore[attr-defined]
        if key not in self._graphs:
            self._graphs[key] = function, canvas.config
            self.captures += 1
        now = canvas.config
        function, canvas.config = self._graphs[key]
        function()
        canvas.config = now


@pytest.fixture(autouse=True)
def _replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "Graphs", Replayed)


BASES = {family: tiny_base(family, end_ids=(1, 5)) for family in FAMILIES}
SAMPLERS = {family: tiny_sampler(base) for family, base in BASES.items()}
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {}, "two layers": {"layers": 2}, "three narrow layers": {"layers": 3, "mlp": 0.5},
    "feature": {"features": (1,)}, "features": {"features": (1, 2), "layers": 2},
    "everything": {"features": (2,), "layers": 3, "mlp": 1.5},
}  # fmt: skip
DEEP = {family: tiny_base(family, end_ids=(1, 5), num_hidden_layers=3) for family in FAMILIES}
ALL = {(family, form): tiny_sampler(DEEP[family], **FORMS[form]) for family in FAMILIES for form in FORMS}


def both(base: Any, given_: list[list[int]], config: DecodeConfig, decoder: str, **options: Any) -> DecodeResult:
    """The fast result, after it was compared with the reference's."""
    slots = options.pop("slots", None)
    slow = decode(base, given_, config, decoder=decoder, eager=True, **options)
    quick = decode(base, given_, config, decoder=decoder, eager=False, slots=slots, **options)
    for name in ("tokens_BL", "order_BL", "real_BL", *CALLS):
        assert torch.equal(getattr(slow, name), getattr(quick, name)), name
    return quick


@settings(max_examples=60)
@given(
    family=st.sampled_from(FAMILIES), decoder=st.sampled_from(CORE), config=configs, given_=prompts(MASK, 12, [BOS]),
    slots=st.sampled_from([None, 1, 2]), sparse=st.booleans(),
)  # fmt: skip
def test_the_same_results_whatever_the_settings(
    family: str, decoder: str, config: DecodeConfig, given_: list[list[int]], slots: int | None, sparse: bool
) -> None:  # fmt: skip
    config = heeded(config, decoder)
    options = {"sparse": sparse and config.candidates != 0} if decoder == "adjust" else {}
    both(BASES[family], given_, config, decoder, sampler=SAMPLERS[family], slots=slots, **options)


@settings(max_examples=40)
@given(
    family=st.sampled_from(FAMILIES), form=st.sampled_from(sorted(FORMS)), config=configs,
    given_=prompts(MASK, 12, [BOS]), slots=st.sampled_from([None, 1, 2]), sparse=st.booleans(),
)  # fmt: skip
def test_the_same_results_whatever_g_sees(
    family: str, form: str, config: DecodeConfig, given_: list[list[int]], slots: int | None, sparse: bool
) -> None:  # fmt: skip
    """All forms of g in turn on one base, which keeps buffers and graphs for them."""
    options = {"sparse": sparse and config.candidates != 0}
    both(DEEP[family], given_, config, "adjust", sampler=ALL[family, form], slots=slots, **options)


@pytest.mark.parametrize("decoder", CORE)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_wait_for_a_slot_are_what_they_are_alone(decoder: str, temperature: float) -> None:
    base, g = BASES["dream"], SAMPLERS["dream"]
    config = DecodeConfig(max_new_tokens=9, tokens_per_step=2, temperature=temperature, seed=3)
    rows = PROMPTS * 3
    together = both(base, rows, config, decoder, sampler=g, slots=3)
    for b, prompt in enumerate(rows):
        alone = decode(base, [prompt], config, decoder=decoder, sampler=g, rows=[b], eager=True)
        assert row_of(alone, 0) == row_of(together, b)


@pytest.mark.parametrize("decoder", CORE)
@pytest.mark.parametrize("slots", [None, 1])
def test_a_round_that_commits_nothing_ends_no_row(decoder: str, slots: int | None) -> None:
    """Dream's own schedule of 12 steps for 12 tokens begins with a pass and no commit."""
    base, g = tiny_base("dream", end_ids=(1, 5)), SAMPLERS["dream"]
    assert base.reference_schedule(12, 12)[:2] == [0, 1]
    config = DecodeConfig(max_new_tokens=12, tokens_per_step=1, schedule="reference", temperature=1.0)
    for _ in range(2):  # the second one finds what the first one left in the buffers
        both(base, [[BOS, 5, 6], [BOS], [BOS, 9]], config, decoder, sampler=g, slots=slots)


def test_a_slot_is_given_on_as_soon_as_its_row_is_done() -> None:
    """Rows of 8, 2, 2, 2 and 2 masks in two slots, one token a pass: 8 passes, not 8 + 2 + 2."""
    base = tiny_base("dream", end_ids=(23,))
    rows = [[BOS, *[MASK] * 7], *[[BOS, 4, 4, 4, 4, 4, 4, MASK]] * 4]
    counted = count_passes(base)
    result = decode(base, rows, DecodeConfig(max_new_tokens=1), decoder="joint", eager=False, slots=2)
    assert counted.calls == 8
    assert result.base_calls_B.tolist() == [8, 2, 2, 2, 2]


def test_rows_that_are_left_move_to_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long row among seven short ones: its last passes are over a single row."""
    monkeypatch.setattr(fast, "COMPACT", 0)
    monkeypatch.setattr(fast, "_PAYS", 1)
    base = tiny_base("dream", end_ids=(23,))
    rows = [[BOS, *[4] * 9]] * 3 + [[BOS, *[MASK] * 9]] + [[BOS, *[4] * 9]] * 4
    both(base, rows, DecodeConfig(max_new_tokens=2, tokens_per_step=2, temperature=0.0), "parallel")
    counted = count_passes(base)
    decode(base, rows, DecodeConfig(max_new_tokens=2, tokens_per_step=2), decoder="parallel", eager=False)
    sizes = [len(call.tokens_BL) for call in counted.seen]
    assert sizes == [8, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_the_kernels_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch, rule: Any, temperature: float) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(lane, "has_kernels", lambda device: True)
    base, g = tiny_base("dream"), SAMPLERS["dream"]
    for order_on, suppress, decoder in (("raw", True, "adjust"), ("processed", False, "parallel")):
        config = DecodeConfig(
            max_new_tokens=6, tokens_per_step=3, temperature=temperature, order=rule, order_on=order_on,
            suppress_eos=suppress,
        )  # fmt: skip
        both(base, PROMPTS[:2], config, decoder, sampler=tiny_sampler(base) if decoder == "adjust" else g)


@pytest.mark.parametrize("form", ["features", "everything"])
def test_the_kernels_read_states_with_others_behind_them(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(lane, "has_kernels", lambda device: True)
    base = tiny_base("dream", num_hidden_layers=3)
    g = tiny_sampler(base, **FORMS[form])
    for temperature, sparse in ((0.0, True), (0.8, False)):
        config = DecodeConfig(max_new_tokens=6, tokens_per_step=3, temperature=temperature, candidates=3)
        both(base, PROMPTS[:2], config, "adjust", sampler=g, sparse=sparse)


@settings(max_examples=3)
@given(
    family=st.sampled_from(FAMILIES), decoder=st.sampled_from(CORE), config=configs, given_=prompts(MASK, 12, [BOS]),
    new=st.integers(1, 3), slots=st.sampled_from([None, 1]),
)  # fmt: skip
@example("dream", "joint", DecodeConfig(temperature=1.7, top_p=0.5, order="entropy", order_on="processed"), BOTH, 3, 1)
@example("llada", "parallel", DecodeConfig(top_k=3, tokens_per_step=2, order_on="raw", seed=1), BOTH, 3, None)
@example("dream", "adjust", DecodeConfig(temperature=0.0, candidates=1, suppress_eos=True, block_length=3), BOTH, 3, 1)
def test_kernels_with_whatever_settings(
    family: str, decoder: str, config: DecodeConfig, given_: list[list[int]], new: int, slots: int | None
) -> None:
    """Two rows of few masks: a kernel without a card takes its time for each of them."""
    pytest.importorskip("triton")
    base = copy.copy(BASES[family])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "has_kernels", lambda device: True)
        base.workspace = None
        few = [[*row[:4]] for row in given_[:2]]
        config = heeded(config, decoder).but(max_new_tokens=new)
        both(base, few, config, decoder, sampler=SAMPLERS[family], slots=slots)


def test_kernels_score_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of two chunks are not kept; those of the chosen rows are computed again."""
    pytest.importorskip("triton")
    monkeypatch.setattr(lane, "has_kernels", lambda device: True)
    monkeypatch.setattr(static_pick, "_FUSED_BYTES", 24 * 4 * 10)
    both(tiny_base("dream"), PROMPTS, DecodeConfig(max_new_tokens=6, tokens_per_step=2, seed=2), "parallel")


def test_rows_of_logits_are_scored_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels too those of one chunk are kept, and those of several computed again."""
    monkeypatch.setattr("adjust_dlm.decoders.machinery.pick.rows_at_once", lambda _: 5)
    both(tiny_base("dream"), PROMPTS, DecodeConfig(max_new_tokens=6, tokens_per_step=2, seed=2), "parallel")


def test_graphs_are_few_whatever_the_prompts_and_seeds() -> None:
    """H25: 20 prompts of 20 lengths, one after another."""
    base = tiny_base("llada")
    config = DecodeConfig(max_new_tokens=8, tokens_per_step=2)
    for length in range(1, 21):
        decode(base, [[BOS] * length], config.but(seed=length), decoder="joint", eager=False)
    assert fast.captures(base) == 2  # a base pass and a pick, at 32 columns
    decode(base, [[BOS] * 30], config, decoder="joint", eager=False)
    assert fast.captures(base) == 4


def test_lanes_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    base = tiny_base("llada")
    with caplog.at_level(logging.INFO):
        for rows, length in itertools.product(range(1, 40, 3), (1, 9)):
            decode(base, [[BOS] * length] * rows, DecodeConfig(max_new_tokens=1), decoder="joint", eager=False)
    assert "16 shapes are kept at most" in caplog.text and len(base.workspace._lanes) == fast.MOST_LANES


def test_another_sampler_is_not_mixed_up_with_the_one_before() -> None:
    base = tiny_base("dream")
    config = DecodeConfig(max_new_tokens=10, tokens_per_step=5, temperature=0.0)
    for seed in range(3):
        both(base, PROMPTS, config, "adjust", sampler=tiny_sampler(base, seed=seed))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "rule", ["entropy", "left_to_right"]
)  # one that looks at logits, one that leaves it to the draw
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_softmax_are_refused(value: float, rule: Any, temperature: float) -> None:
    base = tiny_base("dream")
    head = base.head
    base.head = lambda h_RD: head(h_RD).index_fill(-1, torch.tensor([7]), value)  # type: ignore[method-assign]
    config = DecodeConfig(max_new_tokens=4, order=rule, temperature=temperature)
    for eager in (True, False):
        with pytest.raises(FloatingPointError, match="gave NaN"):
            decode(base, PROMPTS, config, decoder="joint", eager=eager)


@pytest.mark.parametrize("decoder", CORE)
def test_a_row_that_gave_nan_is_forgotten(decoder: str) -> None:
    """Eight slots, of which the next decode of five rows leaves three idle."""
    base = tiny_base("dream")
    base.model.embed_tokens.weight[7] = torch.nan
    g, config = tiny_sampler(base), DecodeConfig(max_new_tokens=4, tokens_per_step=2)
    base.head_matrix[7] = 0
    with pytest.raises(FloatingPointError, match="gave NaN"):
        decode(base, [*[[BOS, 3]] * 7, [BOS, 7]], config, decoder=decoder, sampler=g, eager=False)
    both(base, [[BOS, 3]] * 5, config.but(temperature=0), decoder, sampler=g)


def test_what_has_no_fast_form_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    fast.log_fallback.cache_clear()
    base, table = tiny_base("dream"), exact_base()
    config = DecodeConfig(max_new_tokens=2)
    for _ in range(2):
        decode(base, [[BOS]], config, decoder="threshold", eager=False)
        decode(base, [[BOS]], config.but(cache_period=2), decoder="joint", eager=False)
        decode(table, [[]], config.but(max_new_tokens=4), decoder="joint", eager=False)
        decode(base, [[BOS]], config, decoder="adjust", sampler=oracle(base), eager=False)
        decode(base, [[BOS]], config, decoder="joint", eager=False, watch=lambda canvas: None)
    assert [record.getMessage() for record in caplog.records] == [
        "eager decoding: decoder threshold has no fast form",
        "eager decoding: cache_period needs passes of changing shapes",
        "eager decoding: base exact is no transformer",
        "eager decoding: the sampler is a function",
        "eager decoding: a watched canvas is looked at after every commit",
    ]


# Sparse steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "pairing"), [("dream", "state"), ("llada", "token")])
@pytest.mark.parametrize("form", FORMS)
def test_sparse_steps_with_all_columns_are_whole_steps(form: str, family: str, pairing: Any) -> None:
    base = DEEP[family]
    g = tiny_sampler(base, pairing=pairing, **FORMS[form])
    for temperature in (0.0, 0.8):
        config = DecodeConfig(max_new_tokens=9, tokens_per_step=4, temperature=temperature, candidates=0)
        whole = decode(base, PROMPTS, config, sampler=g)
        sparse = both(base, PROMPTS, config.but(candidates=16), "adjust", sampler=g, sparse=True)
        for b in range(len(PROMPTS)):
            assert row_of(whole, b) == row_of(sparse, b)


@pytest.mark.parametrize("form", FORMS)
def test_a_sparse_step_is_the_same_in_any_company(form: str) -> None:
    """What fills up a row's columns depends on its neighbours' prompts; what comes out does not."""
    base = DEEP["dream"]
    g = tiny_sampler(base, **FORMS[form])
    config = DecodeConfig(max_new_tokens=12, tokens_per_step=8, temperature=0.8, candidates=5)
    together = both(base, PROMPTS, config, "adjust", sampler=g, sparse=True)
    for b, prompt in enumerate(PROMPTS):
        alone = decode(base, [prompt], config, sampler=g, rows=[b], sparse=True)
        assert row_of(alone, 0) == row_of(together, b)


@pytest.mark.parametrize("pairing", ["state", "token"])
def test_a_sparse_step_computes_candidates_and_where_new_tokens_are_seen(pairing: Any) -> None:
    """One g call after one commit, everything else as the base left it; the states that it gives are exact."""
    base = tiny_base("dream", end_ids=(23,))
    g = tiny_sampler(base, pairing=pairing)
    seen: list[list[int]] = []
    rows = g.rows
    g.rows = lambda h, state, column_BN, *more: (  # type: ignore[method-assign]
        seen.append(column_BN[0].tolist()), rows(h, state, column_BN, *more)
    )[1]  # fmt: skip
    config = DecodeConfig(max_new_tokens=9, tokens_per_step=2, temperature=0.0, candidates=1, order="left_to_right")
    result = decode(base, [[BOS, MASK, 5]], config, sampler=g, sparse=True)
    assert seen[0] == ([1, 2, 3] if pairing == "state" else [1, 3, 0])  # 0 fills up, and stays as it was
    whole = decode(base, [[BOS, MASK, 5]], config, sampler=tiny_sampler(base, pairing=pairing))
    assert row_of(result, 0) == row_of(whole, 0)  # with one step a round nothing is left out


def test_sparse_steps_need_candidates_and_a_sampler_that_knows_them() -> None:
    base, config = tiny_base("dream"), DecodeConfig(max_new_tokens=2)
    for eager in (True, False):
        with pytest.raises(InputError, match="candidates must not be 0"):
            decode(base, [[BOS]], config.but(candidates=0), sampler=tiny_sampler(base), sparse=True, eager=eager)
        with pytest.raises(InputError, match="a function of this base knows no sparse steps; they take a Sampler"):
            decode(
                base,
                [[BOS]],
                DecodeConfig(max_new_tokens=2, candidates=2),
                sampler=oracle(base),
                sparse=True,
                eager=eager,
            )


# Many prompts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [True, False])
def test_many_prompts_come_back_whole_and_as_they_are_alone(eager: bool) -> None:
    base, g = BASES["llada"], SAMPLERS["llada"]
    config = DecodeConfig(max_new_tokens=6, tokens_per_step=2, seed=9)
    rows = [[BOS, *[7] * (n % 5)] for n in range(19)]
    seen: dict[int, Any] = {}
    for which, result in decode_many(base, rows, config, batch_size=2, sampler=g, eager=eager):
        assert len(which) == (min(2, 19 - len(seen)) if eager else min(16, 19 - len(seen)))
        seen |= {n: row_of(result, b) for b, n in enumerate(which)}
    assert sorted(seen) == list(range(19))
    for n, row in seen.items():
        assert row == row_of(decode(base, [rows[n]], config, sampler=g, rows=[n], eager=True), 0)


def test_a_long_prompt_does_not_lengthen_the_canvases_of_all_others() -> None:
    """Groups hold similar lengths once a pass computes more than it waits."""
    assert _groups([], 4) == []
    assert _groups([10, 40, 30, 20] * 4, 1) == [
        [1, 5, 9, 13, 2, 6, 10, 14],
        [3, 7, 11, 15, 0, 4, 8, 12],
    ]  # small passes
    assert _groups([200, 4000, 180, 3300, 150, 3100], 1) == [[1, 3], [5], [0, 2, 4]]
    assert _groups([500] * 8 + [300] * 8, 8) == [[*range(8)], [*range(8, 16)]]
    assert _groups([500] * 8 + [300] * 5, 8) == [[*range(13)]]  # 1,000 pads
    assert _groups([500] * 8 + [300] * 8, 1) == [[*range(8)], [*range(8, 16)]]  # as many as a group may have
    assert _groups([500] * 6 + [300] * 9, 1) == [[*range(8)], [*range(8, 15)]]  # passes of a single row are small
    lengths = [100 + n * n % 613 for n in range(300)]
    groups = _groups(lengths, 8)
    assert sorted(n for group in groups for n in group) == list(range(300))
    for at, group in enumerate(groups):
        sizes = [lengths[n] for n in group]
        assert len(group) <= 64 and sizes == sorted(sizes, reverse=True)
        later = sum(len(other) for other in groups[at:])
        for rank, size in enumerate(sizes):
            pads = (later - rank) * (sizes[0] - size)
            assert size >= 0.8 * sizes[0] or min(rank, 8) * sizes[0] < fast.COMPACT or pads < fast.COMPACT
    assert sum(len(group) * max(lengths[n] for n in group) for group in groups) < 1.15 * sum(lengths)


@pytest.mark.parametrize("decoder", ["joint", "adjust"])
def test_groups_of_lengths_change_no_row(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, g = BASES["dream"], SAMPLERS["dream"]
    monkeypatch.setattr(fast, "COMPACT", 8)
    config = DecodeConfig(max_new_tokens=4, tokens_per_step=1 if decoder == "joint" else 2, seed=3)
    rows = [[BOS, *[7] * (n * n % 23)] for n in range(9)]
    seen, groups = dict[int, Any](), list[list[int]]()
    for which, result in decode_many(base, rows, config, batch_size=2, decoder=decoder, sampler=g, eager=False):
        groups.append(which)
        seen |= {n: row_of(result, b) for b, n in enumerate(which)}
    assert len(groups) > 2 and sorted(seen) == list(range(9))
    for n, row in seen.items():
        assert row == row_of(decode(base, [rows[n]], config, decoder=decoder, sampler=g, rows=[n], eager=True), 0)


def test_slots_and_batch_sizes_are_checked() -> None:
    base = BASES["llada"]
    with pytest.raises(InputError, match="slots is 0"):
        decode(base, [[BOS]], DecodeConfig(max_new_tokens=2), decoder="joint", slots=0)
    with pytest.raises(InputError, match="slots is 'all'; it must be a whole number"):
        decode(base, [[BOS]], DecodeConfig(max_new_tokens=2), decoder="joint", slots="all")  # type: ignore[arg-type]
    for size in (0, 1.5):
        with pytest.raises(InputError, match=f"batch_size is {size}"):
            next(decode_many(base, [[BOS]], DecodeConfig(), batch_size=size))  # type: ignore[arg-type]
    for rows in ([4], [4, 5, 6]):
        with pytest.raises(InputError, match=f"{len(rows)} row ids for 2 prompts"):
            next(decode_many(base, [[BOS], [BOS]], DecodeConfig(), batch_size=2, rows=rows, decoder="joint"))


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_give_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo alone, without its code generator: a graph for one row and one for several, not one for each length."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    layers._compiled_layer.cache_clear()
    torch._dynamo.reset()
    base, plain = tiny_base(family), tiny_base(family)
    base.compile()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for rows in ([[BOS]], [[BOS, 4, 4]], PROMPTS[:2], PROMPTS):
        for new in (5, 14):
            config = DecodeConfig(max_new_tokens=new, tokens_per_step=3, seed=new)
            quick = decode(base, rows, config, sampler=tiny_sampler(base), eager=False)
            assert torch.equal(
                quick.tokens_BL, decode(plain, rows, config, sampler=tiny_sampler(plain), eager=True).tokens_BL
            )
    assert counters["unique_graphs"] - before <= 3
    layers._compiled_layer.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_projections_are_views_that_give_the_same_states(family: str) -> None:
    base, plain = tiny_base(family), tiny_base(family)
    state = left_pad([[BOS, 5, MASK], [BOS]])
    layers.join_projections(base.model)
    attention = base.model.layers[0].self_attn
    q, k = attention.q_proj.weight, attention.k_proj.weight
    assert q.data_ptr() + 4 * q.numel() == k.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(base.model.parameters(), plain.model.parameters(), strict=True))
    torch.testing.assert_close(base.hidden(state), plain.hidden(state))
    attention.k_proj.weight.data.zero_()  # a change of a part is a change of the whole
    plain.model.layers[0].self_attn.k_proj.weight.zero_()  # not through .data: see `frozen_linear`
    torch.testing.assert_close(base.hidden(state), plain.hidden(state))
    base.model.double()  # parts move one by one
    assert attention._joined is None
    torch.testing.assert_close(base.hidden(state).float(), plain.hidden(state))


@pytest.mark.parametrize("how", ["assigned", "given", "copied", "rounded"])
def test_projections_that_got_other_weights_are_no_longer_joined(how: str) -> None:
    base, other, state = tiny_base("dream"), tiny_base("dream", 1), left_pad([[BOS, 5, MASK], [BOS]])
    layers.join_projections(base.model)
    if how == "assigned":
        base.model.load_state_dict({k: w.clone() for k, w in other.model.state_dict().items()}, assign=True)
    elif how == "rounded":
        in_fp8_layers(base.model)
        other = tiny_base("dream")
        in_fp8_layers(other.model)
    else:
        base.model = copy.deepcopy(base.model) if how == "copied" else base.model
        for mine, theirs in zip(base.model.parameters(), other.model.parameters(), strict=True):
            if how == "copied":  # and trained further, in place
                mine.copy_(theirs)
            else:
                mine.data = theirs.data.clone()
    assert torch.equal(base.hidden(state), other.hidden(state))
    layers.join_projections(base.model)
    assert base.model.layers[0].self_attn._stands()
    torch.testing.assert_close(base.hidden(state), other.hidden(state))


def test_joined_projections_are_trained_like_plain_ones() -> None:
    """A g that has decoded on a card may be trained further: every matrix gets the gradient that it had apart."""
    base, state = BASES["dream"], left_pad([[BOS, 5, MASK], [BOS]])
    g, plain = (tiny_sampler(base).requires_grad_(True) for _ in range(2))
    layers.join_projections(g)
    for sampler in (g, plain):
        sampler(base.hidden(state), state).square().sum().backward()
    for (name, mine), (_, theirs) in zip(g.named_parameters(), plain.named_parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None, name
        assert torch.equal(mine.grad, theirs.grad), name


def test_weights_that_moved_are_captured_anew() -> None:
    base = tiny_base("dream")
    config = DecodeConfig(max_new_tokens=5, temperature=0.0)
    for seed in range(3):
        both(base, PROMPTS, config, "joint")
        other = tiny_base("dream", seed=seed + 1)
        base.model, base.head_matrix = other.model, other.head_matrix
        assert base.workspace.weights != fast._weights(base)


def test_steps_of_a_g_whose_weights_moved_are_captured_anew() -> None:
    base = tiny_base("dream")
    g, config = tiny_sampler(base), DecodeConfig(max_new_tokens=5, tokens_per_step=3)
    both(base, PROMPTS, config, "adjust", sampler=g)
    before = fast.captures(base)
    both(base, PROMPTS, config, "adjust", sampler=g)
    assert fast.captures(base) == before
    for parameter in g.parameters():
        parameter.data = parameter.data.clone()
    both(base, PROMPTS, config, "adjust", sampler=g)
    assert fast.captures(base) > before


def test_quantized_layers_have_a_fast_form(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    base = load_base(str(write(tmp_path, "dream")), quantize="int8")
    assert isinstance(base, TransformerBase)
    config = DecodeConfig(max_new_tokens=6, tokens_per_step=2)
    both(base, [[2, 5], [2, 5, 7]], config, "adjust", sampler=tiny_sampler(base))
    layers.join_projections(base.model)  # they stay as they are
    assert base.model.layers[0].self_attn._joined is None


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_g_is_fast_and_captured_once(form: str, caplog: pytest.LogCaptureFixture) -> None:
    fast.log_fallback.cache_clear()
    base = tiny_base("dream", num_hidden_layers=3)
    g = tiny_sampler(base, **FORMS[form])
    config, seen = DecodeConfig(max_new_tokens=9, tokens_per_step=3, candidates=2), []
    for _ in range(2):
        for temperature, sparse in itertools.product((0.0, 0.8), (False, True)):
            both(base, PROMPTS, config.but(temperature=temperature), "adjust", sampler=g, slots=3, sparse=sparse)
        seen.append(fast.captures(base))
    assert seen[0] == seen[1] > 0
    assert not caplog.records


def test_forms_of_g_do_not_share_what_differs() -> None:
    """States of other layers, keys of fewer layers; joint decoding in between."""
    base = tiny_base("dream", num_hidden_layers=3)
    config = DecodeConfig(max_new_tokens=5, tokens_per_step=4, temperature=0.0, candidates=3)
    shapes = [
        {"features": (1,)},
        {"features": (2,)},
        {"layers": 2, "features": (1,)},
        {"layers": 3},
        {},
    ]
    for _ in range(2):
        for shape in shapes:
            g = tiny_sampler(base, **shape)  # type: ignore[arg-type]
            for sparse in (False, True):
                both(base, PROMPTS, config, "adjust", sampler=g, sparse=sparse)
            both(base, PROMPTS, config, "joint", sampler=g)
    for decoder in ("joint", "parallel"):
        both(base.with_features((1, 2)), PROMPTS, config.but(candidates=0), decoder)


@pytest.mark.parametrize("form", FORMS)
def test_buffers_go_with_the_workspace(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """At once, since on a card nothing else would make room: no cycle leads back to them."""
    monkeypatch.setattr(fast, "Graphs", Graphs)
    base = tiny_base("dream", num_hidden_layers=3)
    decode(base, PROMPTS, DecodeConfig(max_new_tokens=4), sampler=tiny_sampler(base, **FORMS[form]), eager=False)
    (buffers,) = (weakref.ref(lane) for lane in base.workspace._lanes.values())
    gc.collect()
    gc.disable()
    try:
        assert buffers() is not None
        base.workspace = None
        assert buffers() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("form", ["features", "everything"])
def test_wide_states_move_to_a_smaller_batch(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(fast, "COMPACT", 0)
    monkeypatch.setattr(fast, "_PAYS", 1)
    base = tiny_base("dream", end_ids=(23,), num_hidden_layers=3)
    rows = [[BOS, *[4] * 9]] * 3 + [[BOS, *[MASK] * 9]] + [[BOS, *[4] * 9]] * 4
    both(
        base,
        rows,
        DecodeConfig(max_new_tokens=2, tokens_per_step=2),
        "adjust",
        sampler=tiny_sampler(base, **FORMS[form]),
    )
    sizes = {key[0] for key in base.workspace._lanes}
    assert sizes == {8, 1}


def test_many_prompts_with_a_g_that_sees_more() -> None:
    base, g = DEEP["dream"], ALL["dream", "everything"]
    config = DecodeConfig(max_new_tokens=6, tokens_per_step=2, seed=9)
    rows = [[BOS, *[7] * (n % 5)] for n in range(9)]
    for which, result in decode_many(base, rows, config, batch_size=2, sampler=g, eager=False):
        for b, n in enumerate(which):
            assert row_of(result, b) == row_of(decode(base, [rows[n]], config, sampler=g, rows=[n], eager=True), 0)


def test_a_card_takes_the_fast_form_unless_it_is_refused() -> None:
    on_card: Any = SimpleNamespace(device=torch.device("cuda"))
    for base, default in ((on_card, True), (tiny_base("dream"), False)):
        assert [fast.wanted(base, eager) for eager in (None, False, True)] == [default, True, False]
