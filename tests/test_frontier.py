"""The frontier: its numbers against their own texts, its curves by hand, and list answers judged one by one."""

from __future__ import annotations

import csv
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from adjust_dlm.bases.autoregressive import load_ar
from adjust_dlm.bases.family import dream_base
from adjust_dlm.bases.partner import CausalPartner
from adjust_dlm.data.lists import KINDS, ListTask, list_tasks, write_list
from adjust_dlm.decoders import decode
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.eval import frontier, plots, table
from adjust_dlm.eval.frontier import FrontierConfig, compare, is_right, kind_of, label_of, make_frontier, value_at
from adjust_dlm.eval.generation import generate_rows
from adjust_dlm.sampler import Sampler, SamplerConfig
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.types import DecodeConfig, InputError
from helpers import Counted, tiny_config, words
from tiny_ar import BOS, chat_base, save_tiny

# Lists ---------------------------------------------------------------------------------------------------------

PEOPLE = ["Ada Long", "Ben Ray", "Cleo Park"]


@pytest.mark.parametrize(
    ("kind", "text", "right"),
    [
        ("copy", '["Ada Long", "Ben Ray", "Cleo Park"]', True),
        ("copy", ' ["Ada Long", "Ben Ray", "Cleo Park"]\n', True),
        ("copy", '["Ada Long", "Cleo Park", "Ben Ray"]', False),
        ("copy", '["Ada Long","Ben Ray","Cleo Park"]', False),
        ("copy", "", False),
        ("shuffle", '["Cleo Park", "Ada Long", "Ben Ray"]', True),
        ("shuffle", '["Ada Long", "Ben Ray", "Cleo Park"]', False),  # the given order
        ("shuffle", '["Cleo Park", "Ada Long"]', False),
        ("shuffle", '["Cleo Park", "Ada Long", "Ada Long", "Ben Ray"]', False),
        ("shuffle", '["Cleo Park", "Ada Long", 3]', False),
        ("shuffle", '{"Cleo Park": 1}', False),
        ("shuffle", "Cleo Park, Ada Long", False),
    ],
)
def test_an_answer_is_right_or_not(kind: str, text: str, right: bool) -> None:
    assert is_right(ListTask(kind, f"Do it: {write_list(PEOPLE)}", write_list(PEOPLE)), text) == right


def test_gold_answers_are_right_and_empty_ones_are_not() -> None:
    tasks = list(islice(list_tasks(1, held_out=True), 200))
    assert {task.kind for task in tasks} == set(KINDS)
    assert all(is_right(task, task.answer) and not is_right(task, "") for task in tasks)


# Curves --------------------------------------------------------------------------------------------------------


def test_variants_of_one_form_share_a_curve() -> None:
    assert label_of("adjust:tokens_per_step=4") == label_of("adjust:tokens_per_step=8") == "adjust"
    assert label_of("parallel:order=margin,tokens_per_step=2") == "parallel order=margin"
    assert label_of("adaptive:gamma=2,block_length=32") == "adaptive block_length=32"
    assert [kind_of(v) for v in ("joint", "adjust", "threshold", "apd")] == ["joint", "sampler", "free", "partner"]


def row(label: str, kind: str, x: float, nll: float) -> dict[str, Any]:
    nothing = dict.fromkeys(frontier.COLUMNS)
    return nothing | {"task": "t", "label": label, "kind": kind, "tokens_per_pass": x, "nll": nll}


def test_the_best_of_each_kind_is_read_off_the_curves() -> None:
    """By hand: joint (1, 4). free a: (3, 6); b: (5, 6), too far from joint. with g: (2, 5), (4, 5.5)."""
    rows = [
        row("joint", "joint", 1, 4.0), row("a", "free", 3, 6.0), row("b", "free", 5, 6.0),
        row("g", "sampler", 2, 5.0), row("g", "sampler", 4, 5.5),
    ]  # fmt: skip
    assert value_at(rows[:2], "nll", 2) == 5.0
    assert value_at(rows[:2], "nll", 3.5) is None
    assert value_at([rows[0], rows[2]], "nll", 2) is None  # from 1 to 5 nothing was measured
    lines = {line["tokens_per_pass"]: line for line in compare(rows, (2.0, 4.0, 5.0, 6.0))}
    assert lines[2.0]["free"] == "a" and lines[2.0]["free_value"] == 5.0
    assert lines[2.0]["sampler_value"] == 5.0 and lines[4.0]["sampler_value"] == 5.5
    assert lines[4.0]["free"] is None
    assert set(lines) == {2.0, 4.0}


def test_dull_text_is_no_candidate() -> None:
    rows = [row("joint", "joint", 1, 4.0), row("a", "free", 3, 2.0), row("b", "free", 3, 6.0)]
    for line, variety in zip(rows, (0.6, 0.29, 0.31), strict=True):
        line["distinct_2"] = variety
    assert [line["free"] for line in compare(rows, (2.0,))] == ["b"]


# The whole -----------------------------------------------------------------------------------------------------


def test_every_row_is_what_its_texts_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ar, _ = load_ar(str(save_tiny(tmp_path / "ar")))
    monkeypatch.setattr(table, "load_ar", lambda *_, **__: (ar, words(BOS)))
    base = chat_base(context=512, template="{{ messages[0].content }}")
    sampler = Sampler(base).eval()
    partner = CausalPartner(ar, base.spec, name="tiny")
    flags = FrontierConfig(
        output=str(tmp_path / "out"), n=12, temperatures=(1.0,), max_new_tokens=8, batch_size=5, buckets=3,
        divergence=3, device="cpu",
        variants=("adjust:tokens_per_step=4", "threshold:tau=0.5", "apd:mixture=0.9", "verified"),
        list_variants=("parallel:tokens_per_step=4", "joint", "parallel:tokens_per_step=4"), list_n=3,
        list_max_new_tokens=6,
    )  # fmt: skip
    helpers = {"sampler": sampler, "partner": partner}
    monkeypatch.setattr(frontier, "open_helpers", lambda *_, **__: helpers)
    out = make_frontier(flags, base, sampler)
    rows = {(r["task"], r["variant"]): r for r in out["rows"]}
    assert len(rows) == len(out["rows"])  # none twice
    assert [v for t, v in rows if t == "text T=1"] == ["joint", *flags.variants]
    assert [v for t, v in rows if t == "lists T=0"] == ["joint", "parallel:tokens_per_step=4"]
    settings = DecodeConfig(max_new_tokens=8, seed=1, suppress_eos=True, tokens_per_step=4)
    alone = decode(base, [[BOS]] * 12, settings, decoder="adjust", sampler=sampler)
    adjusted = rows["text T=1", "adjust:tokens_per_step=4"]
    assert (adjusted["base_calls"], adjusted["sampler_calls"], adjusted["tokens_per_pass"]) == (2, 6, 4)
    assert adjusted["n"] == 12 and alone.base_calls_B.tolist() == [2] * 12
    assert rows["text T=1", "joint"]["speedup"] == 1
    assert rows["text T=1", "apd:mixture=0.9"]["partner_calls"] > 0
    assert adjusted["rounds"] == 2 and rows["text T=1", "joint"]["rounds"] == 8
    exact = rows["text T=1", "verified"]
    assert exact["nll"] == rows["text T=1", "joint"]["nll"] and exact["rounds"] < 8 < exact["base_calls"]
    assert rows["lists T=0", "joint"]["accuracy"] == 0
    written = list(csv.DictReader((tmp_path / "out" / "frontier.csv").open()))
    assert [(r["task"], r["variant"]) for r in written] == list(rows)
    assert float(written[1]["nll"]) == pytest.approx(adjusted["nll"], rel=1e-5)
    assert (tmp_path / "out" / "frontier.png").stat().st_size > 10_000
    json.dumps(out)


def test_throughput_counts_nothing_behind_the_end() -> None:
    """Rows that end early: tokens are those before the first end token, and seconds are shares of their batch."""
    torch.manual_seed(0)
    base = dream_base(tiny_config("dream"), mask_id=20, end_ids=(1, 3, 5), bos_id=2, token_limit=20)
    settings = DecodeConfig(max_new_tokens=8, seed=3)
    lines = generate_rows(base, {}, "parallel:tokens_per_step=2", [[2]] * 9, settings, batch_size=4)
    rows = list(range(EVALUATION_ROWS, EVALUATION_ROWS + 9))
    whole = decode(base, [[2]] * 9, settings.but(tokens_per_step=2), decoder="parallel", rows=rows)
    for line, ids, calls in zip(lines, whole.tokens_BL[:, 1:].tolist(), whole.base_calls_B.tolist(), strict=True):
        end = next((n for n, token in enumerate(ids) if token in (1, 3, 5)), 8)
        assert (line.tokens, line.base_calls) == (ids[:end], calls)
    assert [line.row for line in lines] == rows and all(line.seconds > 0 for line in lines)
    assert any(len(line.tokens) < 8 for line in lines)


def test_bad_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="unknown decoder 'magic'"):
        FrontierConfig(list_variants=("magic",), variants=())
    with pytest.raises(InputError, match="list_n is -1"):
        FrontierConfig(list_n=-1, variants=(), list_variants=())
    with pytest.raises(InputError, match="n and list_n are both 0"):
        FrontierConfig(n=0, list_n=0)
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="--no-plot"):
        FrontierConfig(variants=(), list_variants=())


def test_finished_calls_are_read_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call is read back whole; another g, seed, prompt or setting is another call."""
    base = dream_base(tiny_config("dream"), mask_id=20, end_ids=(1,), bos_id=2, token_limit=20)
    g, other = Sampler(base).eval(), Sampler(base).eval()
    calls = Counted(decode)
    monkeypatch.setattr("adjust_dlm.decoders.decode", calls)

    def make(sampler: Sampler = g, variant: str = "adjust", row: int = EVALUATION_ROWS, **changes: Any) -> list[Any]:
        settings = DecodeConfig(**{"max_new_tokens": 6, "tokens_per_step": 3, "seed": 1, **changes})
        return generate_rows(base, {"sampler": sampler}, variant, [[2]] * 3, settings, first_row=row, keep=tmp_path)

    first = make()
    assert make() == first and calls.calls == 1
    make(other)
    make(seed=2)
    make(row=EVALUATION_ROWS + 3)
    make(variant="parallel")
    assert calls.calls == 5
    assert make(other, variant="parallel") == make(variant="parallel") and calls.calls == 5  # it takes no g
    assert len(list(tmp_path.glob("*.jsonl"))) == 5


def test_texts_of_a_refused_fast_form_are_another_call_only_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU `eager` changes nothing; where the fast form would be taken it names other texts, and is heeded."""
    base = dream_base(tiny_config("dream"), mask_id=20, end_ids=(1,), bos_id=2, token_limit=20)
    quick, calls = Counted(fast.run_fast), Counted(decode)
    monkeypatch.setattr(fast, "run_fast", quick)
    monkeypatch.setattr("adjust_dlm.decoders.decode", calls)

    def seen(variant: str, *, eager: bool) -> tuple[int, int, int]:
        folder = tmp_path / device
        generate_rows(base, {}, variant, [[2]], DecodeConfig(max_new_tokens=4), keep=folder, eager=eager)
        return calls.calls, quick.calls, len(list(folder.glob("*.jsonl")))

    device = "cpu"
    assert [seen("joint", eager=eager) for eager in (True, False)] == [(1, 0, 1)] * 2
    monkeypatch.setattr(fast, "wanted", lambda base, eager: not eager)  # as on a card
    device = "card"
    assert [seen("joint", eager=eager) for eager in (True, False, True, False)] == [
        (2, 0, 1), (3, 1, 2), (3, 1, 2), (3, 1, 2),
    ]  # fmt: skip
    assert [seen("threshold:tau=0.5", eager=eager) for eager in (True, False)] == [(4, 1, 3)] * 2


@pytest.mark.parametrize("eager", [False, True])
def test_every_cell_heeds_eager(*, eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, MAUVE's reference and lists; a result says which form made it."""
    ar, _ = load_ar(str(save_tiny(tmp_path / "ar")))
    monkeypatch.setattr(table, "load_ar", lambda *_, **__: (ar, words(BOS)))
    base = chat_base(context=512, template="{{ messages[0].content }}")
    flags = FrontierConfig(
        output=str(tmp_path), n=3, temperatures=(1.0,), max_new_tokens=4, buckets=2, device="cpu", plot=False,
        variants=("parallel:tokens_per_step=2",), list_variants=("parallel:tokens_per_step=4",), list_n=2,
        list_max_new_tokens=4, divergence=0, eager=eager,
    )  # fmt: skip
    monkeypatch.setattr(fast, "wanted", lambda base, eager: not eager)
    quick = Counted(fast.run_fast)
    monkeypatch.setattr(fast, "run_fast", quick)
    make_frontier(flags, base)
    assert quick.calls == (0 if eager else 5)


def test_a_sampler_with_another_config_is_another_call(tmp_path: Path) -> None:
    """Two samplers whose tensors are equal and that pair rows and embeddings differently."""
    base = dream_base(tiny_config("dream"), mask_id=20, end_ids=(1,), bos_id=2, token_limit=20)
    one, two = Sampler(base).eval(), Sampler(base, SamplerConfig(pairing="token")).eval()
    two.load_state_dict(one.state_dict())
    assert one.config != two.config
    for sampler in (one, two):
        generate_rows(base, {"sampler": sampler}, "adjust", [[2]], DecodeConfig(max_new_tokens=4), keep=tmp_path)
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
