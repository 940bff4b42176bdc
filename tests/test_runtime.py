"""`adjust bench runtime`: what it counts, what it divides by what, and what a stopped run leaves."""

from __future__ import annotations

import csv
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from adjust_dlm.bases import family
from adjust_dlm.bases.fp8 import in_fp8_layers
from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bench import measure, runtime
from adjust_dlm.bench import work as bench_work
from adjust_dlm.bench.clock import Ceilings, Clock, ceilings, gemm_ceiling, spread
from adjust_dlm.bench.measure import (
    COMPONENTS,
    Bench,
    Cell,
    cell_of,
    component_cell,
    decode_cell,
    eager_parts,
    grid,
    half_filled,
    require_graphs,
    run,
    shares,
)
from adjust_dlm.bench.public_loop import public_loop
from adjust_dlm.bench.runtime import RuntimeConfig, make_runtime, open_bench
from adjust_dlm.bench.shapes import SHAPES, random_base, random_sampler
from adjust_dlm.bench.speed_tables import markdown, with_ratios
from adjust_dlm.bench.waits import wait_cell
from adjust_dlm.bench.work import (
    Work,
    base_work,
    decode_work,
    head_work,
    layer_flops,
    public_work,
    sampler_work,
)
from adjust_dlm.cli import main
from adjust_dlm.decoders import decode, read_variant
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.fast.graphs import Graphs
from adjust_dlm.sampler import Sampler, SamplerConfig
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import BOS, END, FAMILIES, Counted, count_passes, tiny_base, tiny_sampler, writer
from test_fast import Replayed

CPU = torch.device("cpu")
MOST = Ceilings(flops=1e9, bytes=1e9)
Row = dict[str, Any]


def bench_on(base: Any, sampler: Any = None, *, runs: int = 3, seconds: float = 100.0, **settings: Any) -> Bench:
    helpers = {} if sampler is None else {"sampler": sampler}
    return Bench(base, helpers, DecodeConfig(**settings), [BOS, 5], runs, seconds, MOST)


def clock_of(bench: Bench, seconds: Iterable[float]) -> None:
    """Every part that is timed takes the next of these seconds."""
    moments = itertools.chain.from_iterable((0.0, s) for s in seconds)
    bench.clock = Clock(CPU, now=lambda: next(moments))


# Arithmetic ----------------------------------------------------------------------------------------------------

FORMS: list[dict[str, Any]] = [
    {}, {"layers": 2, "mlp": 0.5}, {"features": (1,)}, {"layers": 3, "features": (1,)},
]  # fmt: skip


def packed_flops(h_shape: torch.Size, weight_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Of a product that the counter does not know (`bases/packed.py`)."""
    return 2 * math.prod(h_shape) * weight_shape[0]


def counter_of(run: Callable[[], Any]) -> FlopCounterMode:
    own = {torch.ops.mkldnn._linear_pointwise: packed_flops} if torch.backends.mkldnn.is_available() else {}
    counter = FlopCounterMode(display=False, custom_mapping=own)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        run()
    return counter


def counted(run: Callable[[], Any]) -> int:
    return counter_of(run).get_total_flops()


@pytest.mark.parametrize(("family", "causal"), [*((family, False) for family in FAMILIES), ("dream", True)])
def test_arithmetic_of_passes_is_what_torch_counts(family: str, causal: bool) -> None:
    base = tiny_base(family, block=7 if causal else None, causal=causal)
    tokens_BL = torch.full((3, 7), 5)
    state = State(tokens_BL, torch.ones_like(tokens_BL).bool(), tokens_BL == 0, padded=False)
    h_BLD = base.hidden(state)
    assert base_work(base, 3, 7).flops == counted(lambda: base.hidden(state))
    assert head_work(base, 5).flops == counted(lambda: base.head(h_BLD[0, :5]))
    for config in () if causal else FORMS:  # a causal g has no step of a whole canvas
        g = tiny_sampler(base, **config)
        seen = g.on(base)
        h_BLD = seen.hidden(state)
        assert base_work(seen, 3, 7).flops == counted(lambda: seen.hidden(state))  # noqa: B023
        assert sampler_work(base, g, 3, 7).flops == counted(lambda: g(h_BLD, state))  # noqa: B023


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize(
    "variant",
    [
        "joint",
        "parallel",
        "adjust",
        "adjust:candidates=3",
        "parallel:block_length=5",
        "joint:order=left_to_right",
        "parallel:order=random",
        "adjust:order=left_to_right",
    ],
)
def test_arithmetic_of_a_decode_is_what_torch_counts(variant: str, form: int) -> None:
    base = tiny_base("dream")
    sampler, prompts, read = tiny_sampler(base, **FORMS[form]), [[BOS, 5], [BOS, 7]], read_variant(variant)
    config = DecodeConfig(tokens_per_step=4, max_new_tokens=11, suppress_eos=True).but(**read.settings)
    work = decode_work(base, sampler, read, config, 2, 2)
    assert work is not None
    seen = counted(lambda: decode(base, prompts, config, decoder=read.name, sampler=sampler, **read.options))
    assert sum(part.flops for part in work) == seen
    assert decode_work(base, sampler, read_variant("adjust:sparse=true"), config, 2, 2) is None
    causal = tiny_base("dream", block=4, causal=True)
    assert decode_work(causal, tiny_sampler(causal), read_variant("adjust"), config, 2, 2) is None
    assert decode_work(causal, None, read_variant("parallel"), config, 2, 2) is None


@pytest.mark.parametrize("form", [0, 3])
@pytest.mark.parametrize("prompt", [4, 7])
@pytest.mark.parametrize("variant", [
    "joint", "parallel", "adjust", "adjust:candidates=3", "parallel:block_length=2", "adjust:order=left_to_right",
    "joint causal", "joint:block_length=2 causal",
])  # fmt: skip
def test_arithmetic_of_a_decode_in_blocks_is_what_torch_counts(variant: str, prompt: int, form: int) -> None:
    """Up to attention, whose mask looks at keys that a column does not see: queries times keys times 4 D a layer."""
    variant, causal = variant.removesuffix(" causal"), variant.endswith(" causal")
    base, read = tiny_base("sdar", block=4, causal=causal), read_variant(variant)
    sampler, config = tiny_sampler(base, **FORMS[form]), DecodeConfig(tokens_per_step=3, max_new_tokens=16 - prompt)
    config = config.but(suppress_eos=True, **read.settings)
    work = decode_work(base, sampler, read, config, 2, prompt)
    assert work is not None
    how: dict[str, Any] = {"decoder": read.name, "sampler": sampler, **read.options}
    counts = counter_of(lambda: decode(base, [[BOS, *[5] * (prompt - 1)]] * 2, config, **how)).get_flop_counts()
    attention = sum(count for op, count in counts["Global"].items() if "bmm" in str(op))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bench_work, "layer_flops", lambda shape, length, pairs=None: layer_flops(shape, length, 0))
        matrices = decode_work(base, sampler, read, config, 2, prompt)
    assert matrices is not None
    plain = sum(part.flops for part in matrices)
    assert plain == sum(counts["Global"].values()) - attention
    assert 0 < sum(part.flops for part in work) - plain <= attention


def test_a_step_in_causal_blocks_is_booked_at_its_one_column() -> None:
    """Behind text without a gap; up to attention, as above."""
    base = tiny_base("sdar", block=4, causal=True)
    g = tiny_sampler(base, layers=2)
    bench = bench_on(base, g, suppress_eos=True)
    bench.prompt = [BOS, 5, 6, 7, 8]
    canvas = measure.half_filled(bench, cell_of("eager", "adjust", 3, 2, 16))
    assert canvas.masked_BL[0].long().diff().abs().sum() == 1
    step, (work,) = measure.eager_parts(bench, canvas)["g step"]
    step()  # and g has read the text
    counts = counter_of(step).get_flop_counts()["Global"]
    attention = sum(count for op, count in counts.items() if "bmm" in str(op))
    assert 0 < work.flops - (sum(counts.values()) - attention) <= attention


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("decoder", ["parallel", "adjust"])
def test_arithmetic_of_the_public_loop_is_what_torch_counts(decoder: str, form: int) -> None:
    base = tiny_base("llada")
    sampler, config = tiny_sampler(base, **FORMS[form]), DecodeConfig(tokens_per_step=4, max_new_tokens=8)
    own = sampler if decoder == "adjust" else None
    work = public_work(base, own, config, 2, 2)
    assert sum(part.flops for part in work) == counted(lambda: public_loop(base, own, [[BOS, 5]] * 2, config))


def test_traffic_is_weights_once_and_states_twice() -> None:
    """D = 32, MLP 64, 4 query and 2 key heads of 8, two layers, V = 24, fp32."""
    base = tiny_base("dream")
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64
    assert base_work(base, 3, 7).bytes == 4 * (2 * layer + 2 * 3 * 7 * 32)
    assert head_work(base, 5).bytes == 4 * (24 * 32 + 5 * 32 + 2 * 5 * 24)
    assert sampler_work(base, tiny_sampler(base), 3, 7).bytes == 4 * (layer + 2 * 32 * 32 + 2 * 3 * 7 * 32)
    g = tiny_sampler(base, layers=2, features=(1,))  # mixes three states: e, h and a feature
    seen, weights = g.on(base), 2 * layer + 3 * 32 * 32
    assert base_work(seen, 3, 7).bytes == 4 * (2 * layer + 3 * 3 * 7 * 32)  # tokens' states in, h and a feature out
    assert sampler_work(base, g, 3, 7).bytes == 4 * (weights + 3 * 3 * 7 * 32)


def test_shares_refer_to_the_slower_ceiling_part_by_part() -> None:
    """1 s of arithmetic and .5 s of traffic, then .2 and 2: at least 3 s; 6 were taken."""
    parts = [Work(1e9, 0.5e9), Work(0.2e9, 2e9)]
    assert shares(parts, 6.0, MOST) == {
        "tflops": pytest.approx(0.2e-3), "share_of_gemm": pytest.approx(0.2),
        "share_of_copy": pytest.approx(2.5 / 6), "share_of_roofline": pytest.approx(0.5),
    }  # fmt: skip


def test_only_the_linear_layers_of_the_body_count_as_fp8() -> None:
    """D = 32, MLP 64, 4 query and 2 key heads of 8, two layers; one byte a weight, states in fp32."""
    base = tiny_base("dream")
    assert base_work(base, 3, 7).fp8 == 0
    in_fp8_layers(base.model)
    base.quantized = "fp8-dynamic"
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64
    work = base_work(base, 3, 7)
    assert work == Work(flops=work.flops, bytes=2 * layer + 4 * (2 * 3 * 7 * 32), fp8=2 * 3 * 7 * 2 * layer)
    assert work.flops - work.fp8 == 2 * 3 * 4 * 7 * 7 * 32  # the products of attention
    g = tiny_sampler(base)
    assert head_work(base, 5).fp8 == sampler_work(base, g, 3, 7).fp8 == 0


def test_fp8_counts_at_its_own_ceiling() -> None:
    """.4 s plain and .4 s in fp8 against .5 s of traffic, then .1 against 2: at least 2.8 s; 5.6 were taken."""
    parts = [Work(1.2e9, 0.5e9, fp8=0.8e9), Work(0.2e9, 2e9, fp8=0.2e9)]
    assert shares(parts, 5.6, Ceilings(flops=1e9, bytes=1e9, fp8=2e9)) == {
        "tflops": pytest.approx(0.25e-3), "share_of_gemm": pytest.approx(0.9 / 5.6),
        "share_of_copy": pytest.approx(2.5 / 5.6), "share_of_roofline": pytest.approx(0.5),
    }  # fmt: skip
    plain = shares(parts, 5.6, MOST)  # no such ceiling is known: 1.2 and 2 s
    assert (plain["share_of_gemm"], plain["share_of_roofline"]) == pytest.approx((1.4 / 5.6, 3.2 / 5.6))


def test_the_ceiling_of_fp8_is_that_of_a_large_product() -> None:
    """Two runs that do not count, then ten of half a second."""
    moments = itertools.chain.from_iterable((0.0, s) for s in [9.0] * 2 + [0.5] * 10)
    assert gemm_ceiling(CPU, clock=Clock(CPU, now=lambda: next(moments)), fp8=True) == 2 * 1024**3 / 0.5
    assert ceilings(CPU, torch.float32, fp8=True).fp8 is None


def test_the_head_of_the_table_names_each_ceiling() -> None:
    facts = {"card": "A card", "threads": 2, "torch": "2.11", "dtype": "bfloat16", "quantized": "fp8-dynamic"}
    most = {"gemm_tflops": 760.12, "fp8_tflops": 1234.56, "copy_gb_per_second": 4149.0}
    out = {"rows": [], "left_out": [], "machine": facts, "ceilings": most}
    line = markdown(out).splitlines()[0]
    assert "ceilings: 760.1 TFLOP/s of a large product, 1235 TFLOP/s of one in fp8, 4149 GB/s of a large copy." in line
    line = markdown(out | {"ceilings": most | {"fp8_tflops": None}}).splitlines()[0]
    assert "ceilings: 760.1 TFLOP/s of a large product, 4149 GB/s of a large copy." in line


# Waits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 4])
def test_a_wait_of_verified_gives_the_speed_that_follows_from_an_assumption(size: int | None) -> None:
    """A row of depth 3 is looked at three times in every round."""
    base = tiny_base("dream", block=size)
    bench, passes = bench_on(base, tiny_sampler(base), seconds=0.2), count_passes(base)
    bench.tokens_per_wait = 2.5
    cell = cell_of("fast", "verified:depth=3", 4, 2, 16)
    (row,) = wait_cell(bench, cell)
    assert row["part"] == "wait"
    assert row["assumed_tokens_per_second"] == pytest.approx(2 * 2.5 / row["seconds"])
    assert size or {len(state.tokens_BL) for state in passes.seen} == {6}
    row |= cell._asdict()
    facts = {"card": "A card", "threads": 2, "torch": "2.11", "dtype": "bfloat16", "quantized": None}
    most = {"gemm_tflops": 1.0, "fp8_tflops": None, "copy_gb_per_second": 1.0}
    _, _, head, _, line = markdown({"rows": [row], "left_out": [], "machine": facts, "ceilings": most}).splitlines()
    assert "| ms a wait | assumed tokens a wait | tokens/s if so |" in head and "| 2.5 |" in line


def test_no_more_tokens_a_wait_are_assumed_than_can_be() -> None:
    RuntimeConfig(decoders=("joint", "verified:depth=5"), tokens_per_wait=5)
    for tokens in (0.5, 4.5):
        with pytest.raises(InputError, match=f"tokens_per_wait is {tokens}; verified commits 1 to 4 tokens a round"):
            RuntimeConfig(decoders=("joint", "verified"), tokens_per_wait=tokens)


def test_a_wait_is_timed_in_place_of_a_decode(tmp_path: Path) -> None:
    config = RuntimeConfig(
        base="tiny-shape", device="cpu", decoders=("joint", "verified"), new_tokens=(8,), tokens_per_wait=2,
        output=str(tmp_path), cell_seconds=1, runs=1, forms=("fast", "eager"),
    )  # fmt: skip
    out = make_runtime(config)
    assert not out["left_out"]
    assert [(row["form"], row["decoder"], row["part"]) for row in out["rows"]] == [
        ("fast", "joint", "decode"), ("fast", "verified", "wait"), ("eager", "joint", "decode"),
        ("eager", "verified", "decode"),
    ]  # fmt: skip


# Clock ---------------------------------------------------------------------------------------------------------


def test_quartiles() -> None:
    assert list(spread([4.0, 1.0, 2.0, 3.0, 5.0]).values()) == [3.0, 2.0, 4.0, 5]
    assert spread([7.0]) == {"seconds": 7.0, "seconds_low": 7.0, "seconds_high": 7.0, "n": 1}


def test_short_parts_are_timed_in_batches() -> None:
    """1 ms at the second warm run: six a batch; batches of 6, 12 and 18 ms."""
    moments = itertools.chain.from_iterable((0.0, s) for s in (0.9, 0.001, 0.006, 0.012, 0.018))
    runs: list[int] = []
    clock = Clock(CPU, now=lambda: next(moments))
    assert clock.samples(lambda: runs.append(1), runs=3, seconds=9.0) == pytest.approx([0.001, 0.002, 0.003])
    assert len(runs) == 2 + 3 * 6


# Decodes -------------------------------------------------------------------------------------------------------


def test_numbers_of_a_decode_follow_from_the_clock() -> None:
    base = tiny_base("dream")
    bench = bench_on(base, tiny_sampler(base), suppress_eos=True)
    clock_of(bench, [9.0, 2.0, 5.0, 3.0])
    cell = cell_of("eager", "adjust", 4, 3, 10)
    (row,) = decode_cell(bench, cell)
    assert (row["seconds"], row["seconds_low"], row["seconds_high"], row["n"]) == (3.0, 2.5, 4.0, 3)
    assert (row["tokens"], row["rounds"], row["sampler_passes"]) == (30, 3, 3 + 3 + 1)
    assert row["tokens_per_second"] == 10 and row["ms_per_round"] == 1000
    assert row["setup_seconds"] is None and row["captures"] == 0
    parts = decode_work(
        base, bench.sampler, read_variant("adjust"), bench.config(cell_of("eager", "adjust", 4, 3, 10)), 3, 2
    )
    assert parts is not None and row["share_of_gemm"] == pytest.approx(sum(p.flops for p in parts) / 3.0 / 1e9)


@pytest.mark.parametrize("decoder", ["joint", "parallel", "adjust", "verified"])
def test_in_blocks_the_time_of_the_prompts_stands_beside(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decodes of 5 s, then a prompt's passes of 1 s; g has features, which only decoders that take it compute."""
    monkeypatch.setattr(fast, "Graphs", Replayed)
    base = tiny_base("sdar", block=4)
    bench = bench_on(base, tiny_sampler(base, layers=2, features=(1,)), suppress_eos=True, runs=1)
    bench.prompt = [BOS, 5, 6, 7, 8]
    read = Counted(measure.Waiting)
    monkeypatch.setattr(measure, "Waiting", read)
    clock_of(bench, [9.0, 5.0, 1.0, 1.0])
    (row,) = decode_cell(bench, cell_of("fast", decoder, 2, 2, 8))
    assert (row["seconds"], row["prefill_seconds"]) == (5.0, 1.0) and read.calls >= 2
    assert row["tokens_per_second_behind"] == row["tokens"] / 4.0
    clock_of(bench, [9.0, 5.0])
    (row,) = decode_cell(bench, cell_of("eager", decoder, 2, 2, 8))
    assert "prefill_seconds" not in row

    def late(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(measure, "Waiting", late)
    clock_of(bench, [9.0, 5.0])
    (row,) = decode_cell(bench, cell_of("fast", decoder, 2, 2, 8))
    assert row["seconds"] == 5.0 and "prefill_seconds" not in row


def test_a_slow_cell_is_timed_fewer_times() -> None:
    base = tiny_base("dream")
    bench = bench_on(base, runs=5, seconds=10.0)
    clock_of(bench, [50.0, 4.0, 4.0, 4.0])
    assert decode_cell(bench, cell_of("eager", "joint", 1, 1, 4))[0]["n"] == 2
    clock_of(bench, [50.0, 40.0])
    assert decode_cell(bench, cell_of("eager", "joint", 1, 1, 4))[0]["n"] == 1


def test_decodes_that_capture_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base("dream")
    bench = bench_on(base, runs=2)
    known = iter([0, 7, 7, 9, 9, 9, 9, 9, 9])  # before and after each decode, and at the end
    monkeypatch.setattr(measure, "captures", lambda _base: next(known))
    clock_of(bench, [8.0, 6.0, 1.0, 3.0])
    (row,) = decode_cell(bench, cell_of("fast", "parallel", 2, 1, 4))
    assert (row["seconds"], row["n"], row["captures"], row["setup_seconds"]) == (2.0, 2, 9, 14.0 - 2 * 2.0)


def test_what_a_cell_captures_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 new tokens on 32 columns: a base pass, picks at widths 16 and 8, and a whole and two last steps of g."""
    monkeypatch.setattr(fast, "Graphs", Replayed)
    base = tiny_base("dream")
    bench = bench_on(base, tiny_sampler(base), suppress_eos=True, runs=2)
    expected = {("parallel", 4): 3, ("adjust", 4): 6, ("adjust", 2): 5, ("joint", 1): 3}  # K = 2: no whole step
    for (decoder, k), count in [*expected.items(), *expected.items()]:
        assert decode_cell(bench, cell_of("fast", decoder, k, 1, 16))[0]["captures"] == count
        assert decode_cell(bench, cell_of("eager", decoder, k, 1, 16))[0]["captures"] == 0

    def until_the_alarm() -> Iterator[float]:
        yield from (9.0, 2.0)
        raise TimeoutError

    clock_of(bench, until_the_alarm())
    (row,) = decode_cell(bench, cell_of("fast", "adjust", 4, 1, 16))
    assert (row["seconds"], row["n"], row["captures"], row["setup_seconds"]) == (2.0, 1, 6, 7.0)


def test_only_tokens_before_an_end_count() -> None:
    """Five positions, the end token at the third: two tokens of each row."""
    base = writer([3, 4, 1, 5, 6], [9.0, 8.0, 7.0, 6.0, 5.0], end_ids=(1,))
    bench = Bench(base, {}, DecodeConfig(temperature=0.0), [], 1, 9.0, MOST)
    (row,) = decode_cell(bench, cell_of("eager", "joint", 1, 2, 5))
    assert row["tokens"] == 4 and row["rounds"] == 3
    assert row["share_of_roofline"] is None  # nobody knows how long texts will be


@pytest.mark.parametrize("g", FORMS, ids=str)
@pytest.mark.parametrize("form", ["eager", "fast"])
def test_components_cover_a_round(form: Any, g: dict[str, Any]) -> None:
    base = tiny_base("dream")
    bench = bench_on(base, tiny_sampler(base, **g), suppress_eos=True)
    rows = {row["part"]: row for row in component_cell(bench, cell_of(form, COMPONENTS, 4, 2, 16))}
    extra = {"head, all rows"} if form == "eager" else set()
    names = {"base pass", "g step", "head", "head, scores and draw", "round"}
    assert rows.keys() == names | extra
    flops = {name: row["share_of_gemm"] * row["seconds"] * 1e9 for name, row in rows.items() if "tflops" in row}
    head = 2 * 32 * 24
    assert flops["head"] == pytest.approx(2 * 8 * head)  # half of the new positions are open
    assert flops["base pass"] == pytest.approx(base_work(base, 2, 18).flops)
    assert flops["g step"] == pytest.approx(sampler_work(base, tiny_sampler(base, **g), 2, 18).flops)
    whole = flops["base pass"] + 3 * flops["g step"] + 2 * head * (8 + 7 + 6 + 5)
    assert flops["round"] == pytest.approx(whole)


def test_a_timed_round_commits_all_its_tokens_again_and_again() -> None:
    """Also where the tokens around are end tokens: they were given, so they end nothing."""
    base = tiny_base("dream")
    bench = bench_on(base, tiny_sampler(base), suppress_eos=True)
    bench.prompt = [BOS, END]
    canvas = half_filled(bench, cell_of("eager", COMPONENTS, 4, 2, 16))
    assert canvas.masked_BL.sum(-1).tolist() == [8, 8]
    whole, _ = eager_parts(bench, canvas)["round"]
    for _ in range(2):
        whole()
        assert canvas.masked_BL.sum(-1).tolist() == [4, 4] and canvas.commits_B.tolist() == [4, 4]


def test_compiled_and_other_forms_do_not_mix() -> None:
    base = tiny_base("dream")
    bench = bench_on(base, tiny_sampler(base))
    for form in ("fast", "compiled"):
        base.workspace = object()
        bench.use(form)
        compiled = form == "compiled"
        assert base.workspace is None and base.compiled is compiled
        assert bench.sampler is not None and bench.sampler.layer.compiled is compiled
    bench.use("eager")
    assert not base.compiled and not bench.sampler.layer.compiled


# The public loop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("new", "k", "rounds"), [(12, 4, 3), (10, 4, 3), (8, 1, 8)])
def test_the_public_loop_calls_g_after_every_commit(new: int, k: int, rounds: int) -> None:
    base = tiny_base("dream")
    passes, config, g = count_passes(base), DecodeConfig(tokens_per_step=k, max_new_tokens=new), tiny_sampler(base)
    steps: list[Any] = []
    g.register_forward_hook(lambda *_: steps.append(None))
    tokens_BL = public_loop(base, g, [[BOS, 5], [BOS, 6]], config)
    assert passes.calls == rounds and len(steps) == new  # K a round where K - 1 would do
    assert not (tokens_BL == base.spec.mask_id).any()
    assert tokens_BL[:, :2].tolist() == [[BOS, 5], [BOS, 6]]
    made = run(bench_on(base, g), cell_of("public", "adjust", k, 2, new), config, [BOS, 5])
    assert (made["rounds"], made["sampler_passes"]) == (rounds, new)


@pytest.mark.parametrize("decoder", ["parallel", "adjust"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_public_loop_writes_what_the_decoders_write(family: str, decoder: str) -> None:
    """Greedy, entropy order: the same rule by another way."""
    base = tiny_base(family)
    sampler, prompts = tiny_sampler(base), [[BOS, 5, 9], [BOS, 6, 3]]
    config = DecodeConfig(
        tokens_per_step=3, max_new_tokens=10, temperature=0.0, order="entropy", order_on="processed",
        suppress_eos=True, candidates=0,
    )  # fmt: skip
    expected = decode(base, prompts, config, decoder=decoder, sampler=sampler).tokens_BL
    own = sampler if decoder == "adjust" else None
    assert public_loop(base, own, prompts, config).tolist() == expected.tolist()


def test_the_public_loop_draws_from_the_nucleus() -> None:
    """One position with p = (.5, .3, .2): top_p .6 leaves the first two."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    base = writer([0], [0.0], words=3)
    base._h_LD = torch.cat([logits, torch.full((1, 1), -9.0)], -1)
    config = DecodeConfig(max_new_tokens=1, top_p=0.6)
    seen = public_loop(base, None, [[]] * 400, config).flatten()
    assert set(seen.tolist()) == {0, 1}
    assert abs((seen == 0).float().mean().item() - 0.5 / 0.8) < 4 * (0.625 * 0.375 / 400) ** 0.5


# Cells ---------------------------------------------------------------------------------------------------------


def test_a_grid_has_each_cell_once_and_parallel_first() -> None:
    cells = grid(["compiled", "fast"], ["adjust", "joint", "parallel", "edlm"], [2, 4], [1], [8])
    assert [(c.form, c.decoder, c.tokens_per_step) for c in cells] == [
        (form, decoder, k)
        for form in ("fast", "compiled")
        for decoder, k in (("parallel", 2), ("adjust", 2), ("joint", 1), ("parallel", 4), ("adjust", 4))
    ]
    assert cell_of("eager", "adjust:tokens_per_step=8", 4, 1, 8).tokens_per_step == 8
    assert cell_of("eager", "threshold:tau=0.9", 4, 1, 8).tokens_per_step is None
    assert grid(["public"], ["joint", "adjust:candidates=4"], [4], [1], [8]) == []


def test_settings_without_a_cell_are_refused() -> None:
    with pytest.raises(InputError, match="none of edlm"):
        make_runtime(RuntimeConfig(decoders=("edlm",), forms=("fast",)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch_sizes": (0,)}, "batch_sizes is"), ({"runs": 0}, "runs is 0"), ({"seconds": 0.0}, "seconds is"),
        ({"forms": ("slow",)}, "it must be one of eager, fast"), ({"decoders": ("nothing",)}, "unknown decoder"),
        ({"layers": 2}, "layers can be set for"), ({"quantize": "int3"}, "quantize is"),
        ({"temperature": -1.0}, "temperature is"), ({"order": "alphabet"}, "order is"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(changes: Row, told: str) -> None:
    with pytest.raises(InputError, match=told):
        RuntimeConfig(**changes)


# Ratios --------------------------------------------------------------------------------------------------------


def line(form: str, decoder: str, k: int | None, seconds: float, **more: Any) -> Row:
    ends = {"seconds_low": 0.9 * seconds, "seconds_high": 1.2 * seconds}
    cell = {"form": form, "decoder": decoder, "tokens_per_step": k, "batch": 8, "new_tokens": 128}
    return {"part": "decode", "seconds": seconds, **ends, "tokens_per_second": 12 / seconds, **cell, **more}


def test_ratios_are_to_decodes_of_the_same_cell() -> None:
    rows = with_ratios([
        line("fast", "parallel", 4, 2.0), line("fast", "adjust", 4, 3.0), line("fast", "joint", 1, 6.0),
        line("public", "adjust", 4, 12.0), line("fast", "adjust", 8, 1.0), line("fast", "parallel", 8, 0.5),
        line("eager", "joint", 1, 1.0), line("fast", "parallel", 8, 99.0, batch=1), line("fast", "apd", None, 2.0),
    ])  # fmt: skip
    assert [row.get("over_parallel") for row in rows] == [1.0, 1.5, None, None, 2.0, 1.0, None, 1.0, None]
    assert rows[1]["over_parallel_low"] == pytest.approx(0.9 * 3 / (1.2 * 2))
    assert rows[1]["over_parallel_high"] == pytest.approx(1.2 * 3 / (0.9 * 2))
    assert [row.get("speed_over_joint") for row in rows] == [3.0, 2.0, 1.0, None, 6.0, 12.0, 1.0, None, 3.0]
    assert [row.get("speed_over_public") for row in rows] == [None, 4.0, None, 1.0, *[None] * 5]


# Whole runs ----------------------------------------------------------------------------------------------------


def tiny_run(folder: Path, **changes: Any) -> RuntimeConfig:
    given: Row = {"decoders": ("parallel", "adjust"), "new_tokens": (8,), "forms": ("eager",), "batch_sizes": (2,)}
    return RuntimeConfig(base="tiny-shape", device="cpu", output=str(folder), **(given | changes))


@pytest.fixture
def tiny_bench() -> Bench:
    base = random_base("tiny-shape", device=CPU, dtype=torch.float32)
    return Bench(base, {"sampler": random_sampler(base)}, DecodeConfig(suppress_eos=True), [93], 1, 5.0, MOST)


def test_the_files_grow_cell_by_cell(tmp_path: Path, tiny_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(bench: Bench, cell: Cell) -> list[Row]:
        if cell.decoder == "adjust":
            raise KeyboardInterrupt
        return decode_cell(bench, cell)

    monkeypatch.setattr(runtime, "decode_cell", killed)
    with pytest.raises(KeyboardInterrupt):
        make_runtime(tiny_run(tmp_path), tiny_bench)
    (row,) = csv.DictReader((tmp_path / "runtime.csv").read_text().splitlines())
    assert (row["decoder"], row["over_parallel"]) == ("parallel", "1")
    assert "| eager | `parallel` | 4 | 2 | 8 |" in (tmp_path / "runtime.md").read_text()


def test_what_does_not_fit_is_left_out_by_name(
    tmp_path: Path, tiny_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(bench: Bench, cell: Cell) -> list[Row]:
        if cell.decoder == "adjust":
            time.sleep(30)
        return decode_cell(bench, cell)

    monkeypatch.setattr(runtime, "decode_cell", slow)
    config = tiny_run(tmp_path, decoders=("parallel", "adjust", "joint"), cell_seconds=1.0)
    out = make_runtime(config, tiny_bench)
    assert out["left_out"] == [{"cell": "eager adjust K=4 B=2 L=8", "reason": "took longer than 3 s"}]
    assert [row["decoder"] for row in out["rows"]] == ["parallel", "joint"]
    assert "| eager adjust K=4 B=2 L=8 | took longer than 3 s |" in (tmp_path / "runtime.md").read_text()
    out = make_runtime(tiny_run(tmp_path / "late", seconds=1e-9), tiny_bench)
    assert out["rows"] == [] and [item["reason"] for item in out["left_out"]] == ["no time was left"] * 2

    def full(bench: Bench, cell: Cell) -> list[Row]:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(runtime, "decode_cell", full)
    out = make_runtime(tiny_run(tmp_path / "full"), tiny_bench)
    assert [item["reason"] for item in out["left_out"]] == ["out of memory"] * 2

    def broken(bench: Bench, cell: Cell) -> list[Row]:
        raise RuntimeError("no kernel\n for that")

    monkeypatch.setattr(runtime, "decode_cell", broken)
    out = make_runtime(tiny_run(tmp_path / "broken"), tiny_bench)
    assert [item["reason"] for item in out["left_out"]] == ["RuntimeError: no kernel for that"] * 2


def test_a_card_without_graphs_gives_no_time_of_the_fast_form() -> None:
    clock, graphs = Clock(torch.device("cpu")), Graphs(torch.device("cpu"))
    require_graphs(graphs, clock)
    clock.cuda = True
    for none in (None, graphs):
        with pytest.raises(RuntimeError, match="nothing is captured"):
            require_graphs(none, clock)
    graphs.works = True
    require_graphs(graphs, clock)


def test_the_command_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--base", "tiny-shape", "--device", "cpu", "--output", str(tmp_path), "--new-tokens", "8", "--batch-sizes", "1",
        "2", "--forms", "eager", "fast", "public", "--runs", "1", "--decoders", "parallel", "adjust", COMPONENTS,
    ]  # fmt: skip
    assert main(["bench", "runtime", *flags]) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "runtime.md").read_text().strip() in shown
    rows = list(csv.DictReader((tmp_path / "runtime.csv").read_text().splitlines()))
    decodes = [row for row in rows if row["part"] == "decode"]
    assert [(r["form"], r["decoder"], r["batch"]) for r in decodes] == [
        (form, decoder, batch)
        for form in ("eager", "fast", "public")
        for batch in ("1", "2")
        for decoder in ("parallel", "adjust")
    ]
    assert [int(r["tokens"]) for r in decodes] == [8, 8, 16, 16] * 3
    assert [int(r["sampler_passes"]) for r in decodes] == [0, 6, 0, 6] * 2 + [0, 8, 0, 8]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["results"]["left_out"] == [] and result["config"]["base"] == "tiny-shape"
    assert len(result["results"]["rows"]) == len(rows)


def test_a_shape_may_have_a_g_of_another_form(tmp_path: Path) -> None:
    form = SamplerConfig(layers=2, mlp=0.875, features=(1,))
    base = random_base("tiny-shape", device=CPU, dtype=torch.float32)
    Sampler(base, form).save(tmp_path / "g")
    opened = open_bench(tiny_run(tmp_path, sampler=str(tmp_path / "g")))
    assert opened.sampler is not None and opened.sampler.config == form
    with pytest.raises(InputError, match="nowhere holds no sampler"):
        open_bench(tiny_run(tmp_path, sampler="nowhere"))


def test_shapes_are_the_models() -> None:
    """On no memory: what Dream-7B and LLaDA-8B count (base and head, without the embedding)."""
    meta = torch.device("meta")
    for name, layers, width, vocab in (("dream-7b-shape", 28, 3584, 152064), ("llada-8b-shape", 32, 4096, 126464)):
        shape = Shape.of(getattr(family, f"{SHAPES[name][0]}_config")())
        with meta:
            body = Body(shape)
        assert (len(body.layers), shape.hidden_size, shape.vocab_size) == (layers, width, vocab)
    with pytest.raises(InputError, match="known are dream-7b-shape"):
        random_base("gpt-shape", device=CPU, dtype=torch.float32)
    one, two = (random_base("tiny-shape", device=CPU, dtype=torch.float32, num_hidden_layers=1) for _ in "ab")
    assert len(one.model.layers) == 1 and one.fingerprint == two.fingerprint
    assert random_sampler(one, SamplerConfig(layers=2)).config.layers == 2
