"""Paired comparison: p-values by hand and by scipy, intervals by scipy and by their coverage, files by their ids."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from adjust_dlm import cli
from adjust_dlm.eval import paired
from adjust_dlm.eval.paired import PairedConfig, aligned, compare, mcnemar, read_scores, run
from adjust_dlm.types import InputError


def samples(file: Path, scores: dict[str, Any], metric: str = "strict") -> Path:
    """A list of scores is several completions of a problem."""
    lines = [
        {"id": name, "text": "t\u2028\x85\x0bx", "scores": {metric: one}}
        for name, value in scores.items()
        for one in (value if isinstance(value, list) else [value])
    ]
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return file


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [
        (0, 0, 1.0),  # nothing differs
        (1, 0, 1.0),  # 2 * 1/2
        (0, 5, 2 / 32),
        (1, 5, 2 * (1 + 6) / 64),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
        (3, 3, 1.0),  # 2 * 42/64 is above 1
    ],
)
def test_mcnemar_by_hand(only_a: int, only_b: int, p: float) -> None:
    assert mcnemar(only_a, only_b) == pytest.approx(p, abs=1e-15)
    assert mcnemar(only_b, only_a) == mcnemar(only_a, only_b)


def test_mcnemar_is_scipys_binomial_test() -> None:
    for a in range(12):
        for b in range(12):
            expected = stats.binomtest(a, a + b).pvalue if a + b else 1.0
            assert mcnemar(a, b) == pytest.approx(expected, rel=1e-12)
    assert mcnemar(700, 820) == pytest.approx(stats.binomtest(700, 1520).pvalue, rel=1e-9)
    assert 0 < mcnemar(0, 1000) < 1e-300  # far below what 2**-n in floats would survive on the way


def test_counts_and_difference_by_hand() -> None:
    a = [1, 1, 1, 0, 0, 0, 0, 0]
    b = [1, 1, 0, 1, 1, 1, 0, 0]
    got = compare(a, b)
    assert (got["n"], got["both"], got["only_a"], got["only_b"], got["neither"]) == (8, 2, 1, 3, 2)
    assert (got["mean_a"], got["mean_b"], got["difference"]) == (3 / 8, 5 / 8, 2 / 8)
    assert got["mcnemar_p"] == 2 * (1 + 4) / 16
    back = compare(b, a)
    assert (back["difference"], back["mcnemar_p"]) == (-got["difference"], got["mcnemar_p"])
    assert (back["low"], back["high"]) == pytest.approx((-got["high"], -got["low"]), abs=1e-12)


def test_scores_that_are_no_votes_have_an_interval_and_no_mcnemar() -> None:
    got = compare([0.0, 0.5, 1.0], [0.5, 0.5, 1.0])
    assert got["difference"] == pytest.approx(1 / 6)
    assert (got["both"], got["only_a"], got["only_b"], got["neither"], got["mcnemar_p"]) == (None,) * 5
    # All means of 3 draws of (1/2, 0, 0): 0 .. 1/2 with P(0) = 8/27 and P(1/2) = 1/27 > 2.5 %.
    assert (got["low"], got["high"]) == (0, 0.5)


def test_the_interval_is_scipys_and_repeats() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.random(150) < 0.5, rng.random(150) < 0.65
    got = compare(a.tolist(), b.tolist())
    assert got == compare(a.tolist(), b.tolist())
    theirs = stats.bootstrap(
        (b.astype(float) - a.astype(float),), np.mean, n_resamples=10_000, method="percentile", rng=1
    ).confidence_interval
    assert (got["low"], got["high"]) == pytest.approx((theirs.low, theirs.high), abs=0.01)  # steps of a mean are 1/150
    least = np.mean(b * 1.0 - a * 1.0) - 1.645 * np.std(b * 1.0 - a * 1.0) / math.sqrt(150)
    assert got["least"] == pytest.approx(least, abs=0.01)
    assert got["high"] - got["low"] == pytest.approx(2 * 1.96 * np.std(b * 1.0 - a * 1.0) / math.sqrt(150), rel=0.05)


def test_the_interval_covers_the_truth_about_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "DRAWS", 400)
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        hard = rng.random(80)  # what both share
        a, b = rng.random(80) < hard, rng.random(80) < np.minimum(hard + 0.1, 1)
        got = compare(a.tolist(), b.tolist())
        hits += got["low"] <= 0.1 - 0.1**2 / 2 <= got["high"]  # E min(h + .1, 1) - E h = .1 - .005
    assert 0.90 <= hits / 300 <= 0.98


def test_what_pairs_share_cancels() -> None:
    # The same flip of 3 of 200 problems is clear in pairs; apart, the two shares' intervals overlap by far.
    a = [1.0] * 100 + [0.0] * 100
    b = [1.0] * 106 + [0.0] * 94
    got = compare(a, b)
    assert got["low"] > 0
    assert got["mcnemar_p"] == 2 / 64


def test_files_are_matched_by_id_and_completions_averaged(tmp_path: Path) -> None:
    a = samples(tmp_path / "a.jsonl", {"p1": 1, "p2": [1, 0], "p3": 0})
    b = samples(tmp_path / "b.jsonl", {"p3": 1, "p2": [1, 1], "p1": 1})
    assert read_scores(str(a), "strict") == {"p1": 1.0, "p2": 0.5, "p3": 0.0}
    got = run(PairedConfig(files=(str(a), str(b), str(a)), metric="strict"))
    assert [(got["a"], pair["b"], pair["difference"]) for pair in got["pairs"]] == [
        (str(a), str(b), 0.5), (str(a), str(a), 0.0)
    ]  # fmt: skip
    assert (got["pairs"][0]["n"], got["metric"]) == (3, "strict")
    assert aligned(read_scores(str(a), "strict"), read_scores(str(b), "strict")) == ([1, 0.5, 0], [1, 1, 1])
    assert run(PairedConfig(files=(str(a), str(b))))["metric"] == "strict"  # the only one


def test_the_command_prints_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    a = samples(tmp_path / "a.jsonl", {str(n): int(n < 3) for n in range(10)})
    b = samples(tmp_path / "b.jsonl", {str(n): int(n < 9) for n in range(10)})
    folder = tmp_path / "out"
    assert cli.main(["eval", "paired", str(a), str(b), "--metric", "strict", "--output", str(folder)]) == 0
    shown = capsys.readouterr().out
    (results,) = json.loads((folder / "result.json").read_text())["results"]["pairs"]
    assert (results["difference"], results["only_a"], results["only_b"], results["n"]) == (0.6, 0, 6, 10)
    assert results["mcnemar_p"] == 2 / 64
    heads, values = re.findall(r"^[\u2503\u2502](.*)[\u2503\u2502]$", shown.split("pairs")[1], re.MULTILINE)
    cells = zip(heads.split("\u2503"), values.split("\u2502"), strict=True)
    table = {key.strip(): value.strip() for key, value in cells}
    assert (table["B - A"], table["McNemar p"], table["solved by B alone"]) == ("0.6", "0.03125", "6")
    assert float(table["95 % interval from"]) <= float(table["one-sided 95 % bound"]) < 0.6
    assert float(table["95 % interval to"]) > 0.6


def test_bad_files_are_named(tmp_path: Path) -> None:
    a, b = samples(tmp_path / "a.jsonl", {"p1": 1, "p2": 0}), samples(tmp_path / "b.jsonl", {"p1": 1, "p3": 0, "p4": 0})

    def fails(first: Path, second: Path, message: str, metric: str = "strict") -> None:
        with pytest.raises(InputError, match=message):
            run(PairedConfig(files=(str(first), str(second)), metric=metric))

    fails(a, b, "problem 'p2' is in A alone; A has 2 problems, .*b.jsonl 3")
    fails(samples(tmp_path / "c.jsonl", {"p1": 1}), b, "problem 'p3' is in .*b.jsonl alone")
    fails(a, tmp_path / "none.jsonl", "no file .*none")
    fails(a, b, "row 1 has no metric 'exact'; it has strict", metric="exact")
    (tmp_path / "empty.jsonl").write_text("")
    fails(tmp_path / "empty.jsonl", b, "empty.jsonl holds no rows")
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    fails(tmp_path / "text.jsonl", b, "row 1 has no id, scores")
    (tmp_path / "broken.jsonl").write_text('{"id"')
    fails(tmp_path / "broken.jsonl", b, "line 1 is not JSON")
    fails(samples(tmp_path / "words.jsonl", {"p1": "yes"}), b, "strict is 'yes'; a number is wanted")
    two = tmp_path / "two.jsonl"
    two.write_text(json.dumps({"id": "p1", "scores": {"strict": 1, "flexible": 1}}) + "\n")
    fails(two, two, r"has 2 metrics \(strict, flexible\); name one", metric="")
    with pytest.raises(InputError, match="1 files; name A"):
        PairedConfig(files=(str(a),))
    with pytest.raises(InputError, match="A has 1 scores and B 2"):
        compare([1], [1, 0])
    with pytest.raises(InputError, match="nothing to compare"):
        compare([], [])
    with pytest.raises(InputError, match="finite"):
        compare([math.nan], [1])
