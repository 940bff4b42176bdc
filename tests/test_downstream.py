"""The runner of downstream tasks: what reaches the model, what reaches the scorer, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm.bases import Base
from adjust_dlm.decoders import decode
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.eval import downstream
from adjust_dlm.eval.downstream import (
    DownstreamConfig,
    Problem,
    Task,
    cut_at_stop,
    encode,
    evaluate,
    half_width,
    summarize,
)
from adjust_dlm.sampler import Sampler
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.types import InputError
from helpers import Counted
from tiny_ar import chat_base


@pytest.fixture
def base() -> Base:
    return chat_base(context=64)


def letters(seen: list[Any]) -> Task:
    """Two problems; a completion scores by its letters, and everything scored is written down."""

    def score(problems: Any, groups: Any, config: Any) -> list[list[dict[str, float]]]:
        seen.append(groups)
        return [[{"has_e": float("e" in text), "length": min(len(text), 9) / 9} for text in group] for group in groups]

    problems = [Problem("p0", "one", {}, "odd"), Problem("p1", "two", {}, "even", turns=("q", "a"))]
    return Task("letters", lambda config: problems, score, stop=("!",), about={"rule": "e"})


def settings(tmp_path: Path, **changes: Any) -> DownstreamConfig:
    plain = {"output": str(tmp_path), "max_new_tokens": 8, "temperature": 1.0, "tokens_per_step": (1, 4)}
    return DownstreamConfig(**{**plain, "batch_size": 2, "device": "cpu", **changes})


def test_a_run_scores_every_variant_and_writes_its_samples(base: Base, tmp_path: Path) -> None:
    seen: list[Any] = []
    out = evaluate(letters(seen), settings(tmp_path, num_samples=3, seed=1), base, Sampler(base).eval())
    assert [row["variant"] for row in out["rows"]] == [
        "joint",
        "parallel:tokens_per_step=4",
        "adjust:tokens_per_step=4",
    ]
    assert (out["task"], out["n"], out["about"]) == ("letters", 2, {"rule": "e"})
    for row, groups in zip(out["rows"], seen, strict=True):
        assert [len(group) for group in groups] == [3, 3] and not any("!" in text for g in groups for text in g)
        lines = [json.loads(x) for x in (tmp_path / f"samples-{downstream.slug(row['variant'])}.jsonl").open()]
        assert [line["text"] for line in lines] == [text for group in groups for text in group]
        assert [line["id"] for line in lines] == ["p0"] * 3 + ["p1"] * 3
        means = [sum("e" in text for text in group) / 3 for group in groups]
        assert row["metrics"]["has_e"]["mean"] == pytest.approx(sum(means) / 2)
        assert row["kinds"]["odd"]["has_e"] == {
            "mean": pytest.approx(means[0]),
            "ci95": row["kinds"]["odd"]["has_e"]["ci95"],
            "n": 1,
        }
        assert row["base_calls"] == (8 if row["variant"] == "joint" else 2)
    assert [(line["variant"], line["kind"], line["n"]) for line in out["kinds"]] == [
        (row["variant"], kind, 1) for row in out["rows"] for kind in ("even", "odd")
    ]
    assert out["kinds"][1]["has_e"] == out["rows"][0]["kinds"]["odd"]["has_e"]["mean"]
    json.dumps(out)


@pytest.mark.parametrize("eager", [False, True])
def test_eager_refuses_the_fast_form(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, eager: bool
) -> None:
    """As on a card: three variants in the fast form, or none."""
    monkeypatch.setattr(fast, "wanted", lambda base, eager: not eager)
    quick = Counted(fast.run_fast)
    monkeypatch.setattr(fast, "run_fast", quick)
    out = evaluate(letters([]), settings(tmp_path, eager=eager), base, Sampler(base).eval())
    assert quick.calls == (0 if eager else 3) and len(out["rows"]) == 3


def test_texts_are_kept_so_that_scoring_again_costs_no_pass(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate(letters([]), settings(tmp_path, decoders=("parallel",)), base)
    monkeypatch.setattr("adjust_dlm.decoders.decode", None)
    again = evaluate(letters([]), settings(tmp_path, decoders=("parallel",)), base)
    assert json.dumps(again) == json.dumps(first)


def test_prompts_and_chats(base: Base, tmp_path: Path) -> None:
    plain, chat = Problem("a", "one", {}), Problem("b", "two", {}, turns=("q", "a"))

    def asked(problem: Problem, *, chat: bool) -> str:
        return base.tokenizer.decode(encode(base, problem, chat=chat))

    assert asked(plain, chat=False) == "<|endoftext|>one"
    assert asked(chat, chat=False) == "<|endoftext|>q\n\na\n\ntwo"
    assert asked(plain, chat=True) == "<|im_start|>u:one<|im_end|><|im_start|>a:"
    shown = "<|im_start|>u:q<|im_end|><|im_start|>a:a<|im_end|><|im_start|>u:two<|im_end|><|im_start|>a:"
    assert asked(chat, chat=True) == shown


def test_what_runs(tmp_path: Path) -> None:
    decoders = ("parallel", "adjust", "threshold:tau=0.5", "adjust:candidates=4", "parallel:tokens_per_step=3")
    assert settings(tmp_path, decoders=decoders).variants() == [
        "joint", "parallel:tokens_per_step=4", "adjust:tokens_per_step=4", "threshold:tau=0.5",
        "adjust:candidates=4,tokens_per_step=4", "parallel:tokens_per_step=3",
    ]  # fmt: skip
    decoders = ("parallel:block_length=16", "adjust:order=margin,candidates=2", "guided:cfg_scale=1")
    assert settings(tmp_path, decoders=decoders).variants() == [
        "joint:block_length=16", "parallel:block_length=16,tokens_per_step=4", "joint:order=margin",
        "adjust:order=margin,candidates=2,tokens_per_step=4", "guided:cfg_scale=1,tokens_per_step=1",
        "guided:cfg_scale=1,tokens_per_step=4",
    ]  # fmt: skip


def test_a_prompt_that_does_not_fit_is_named(base: Base, tmp_path: Path) -> None:
    task = Task("long", lambda config: [Problem("p7", "x" * 60, {})], lambda *_: [])
    with pytest.raises(InputError, match=r"prompt 0 of task long has 61 tokens; with 8 new ones that is more than 64"):
        evaluate(task, settings(tmp_path), base)
    with pytest.raises(InputError, match="has no problems"):
        evaluate(Task("none", lambda config: [], lambda *_: []), settings(tmp_path), base)
    with pytest.raises(InputError, match="num_samples is 0"):
        settings(tmp_path, num_samples=0)
    with pytest.raises(InputError, match="unknown decoder 'magic'"):
        settings(tmp_path, decoders=("magic",))


def test_words_and_intervals() -> None:
    assert cut_at_stop("ab\n\nQ: cd", ("Q:", "\n\n")) == "ab"
    assert cut_at_stop("ab", ("Q:",)) == "ab"
    assert half_width([1.0] * 5 + [0.0] * 5) == pytest.approx(0.2634, abs=1e-4)  # Wilson, n = 10, p = 1/2
    for same in (0.0, 1.0):
        assert half_width([same] * 250) == pytest.approx(0.01513, abs=1e-5)  # the far end of Wilson's interval
    assert half_width([0.2, 0.4, 0.6]) == pytest.approx(1.96 * (0.04 / 3) ** 0.5)
    problems = [Problem(str(n), "", {}, kind) for n, kind in enumerate("aab")]
    made = summarize(problems, [[{"x": 1.0}, {"x": 0.0}], [{"x": 1.0}], [{"x": 0.0}]])
    assert made["metrics"]["x"]["mean"] == pytest.approx(0.5) and made["metrics"]["x"]["n"] == 3
    assert made["kinds"]["a"]["x"]["mean"] == pytest.approx(0.75)


def test_a_run_that_stopped_goes_on(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in its third batch of five: the next run decodes what is missing, whatever its batches, and no more."""
    config = settings(tmp_path, decoders=("parallel:tokens_per_step=4",), num_samples=5, batch_size=2)
    whole = evaluate(letters([]), settings(tmp_path / "whole", decoders=config.decoders, num_samples=5), base)
    decoded: list[int] = []
    real = decode

    def stops(*args: Any, rows: list[int], **more: Any) -> Any:
        if len(decoded) == 4:
            raise KeyboardInterrupt
        decoded.extend(rows)
        return real(*args, rows=rows, **more)

    monkeypatch.setattr("adjust_dlm.decoders.decode", stops)
    with pytest.raises(KeyboardInterrupt):
        evaluate(letters([]), config, base)
    part = next((tmp_path / "texts").glob("*.part"))
    part.write_text(part.read_text() + '{"row": 4, "tok')  # a line that was never finished
    decoded.clear()

    def counts(*args: Any, rows: list[int], **more: Any) -> Any:
        decoded.extend(rows)
        return real(*args, rows=rows, **more)

    monkeypatch.setattr("adjust_dlm.decoders.decode", counts)
    again = evaluate(letters([]), settings(tmp_path, decoders=config.decoders, num_samples=5, batch_size=4), base)
    assert sorted(decoded) == [EVALUATION_ROWS + n for n in (4, 5, 6, 7, 8, 9)]
    assert [row["metrics"] for row in again["rows"]] == [row["metrics"] for row in whole["rows"]]
    assert not list((tmp_path / "texts").glob("*.part"))
    line = json.loads(next((tmp_path / "texts").glob("*.jsonl")).read_text().splitlines()[0])
    assert (line["decoder"], line["temperature"]) == ("parallel:tokens_per_step=4", 1.0)
