"""recipes/serve_load.py: some seconds of load and of mixed traffic against a tiny server."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest

from adjust_dlm.serve import guard
from adjust_dlm.serve.engine import Engine
from helpers import load_recipe, tiny_sampler
from serving import serving, typing_engine
from tiny_ar import chat_base

recipe = load_recipe("serve_load")


def test_seconds_of_load_and_of_mixed_traffic(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "REQUEST_SECONDS", 4.0)
    base = chat_base(context=256)
    engine = Engine(base, sampler=tiny_sampler(base))
    with serving(engine) as served:
        flags = ["--url", served.url, "--clients", "1", "4", "16", "--seconds", "0.5", "--max-tokens", "16"]
        code = recipe.main(
            [*flags, "--soak-minutes", "0.08", "--soak-patience", "6", "--pid", str(os.getpid()), "--growth", "0.2"]
        )  # type: ignore[attr-defined]
        assert served.client.get("/health").json() == {"status": "ok", "waiting": 0, "running": 0}
    results = json.loads(capsys.readouterr().out)
    assert code == 0 and results["soak"]["faults"] == []
    for clients, row in zip((1, 4, 16), results["load"], strict=True):
        assert row["clients"] == clients and row["statuses"] == {"200": row["requests"]}
        assert row["requests"] >= clients and 0 < row["p50"] <= row["p95"] <= row["p99"]
    outcomes = results["soak"]["outcomes"]
    kinds = {"plain", "chat", "stream", "canvas", "slow"}
    assert {f"{kind}: 200" for kind in kinds} | {"bad: 400"} <= outcomes.keys()
    assert {"huge: 431", "huge: 413"} & outcomes.keys() and {"hung up", "hung up too late"} & outcomes.keys()
    assert results["soak"]["health"]["asked"] > 5 and results["soak"]["health"]["worst"] < 10
    assert len(results["soak"]["memory_mib"]) >= 6


def test_streams_are_timed_by_their_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    """On a block base text comes block by block: the first before the answer ends, others behind it."""
    base = chat_base(context=256, block=4)
    with serving(Engine(base, sampler=tiny_sampler(base))) as served:
        flags = ["--url", served.url, "--clients", "3", "--seconds", "1", "--max-tokens", "24", "--stream"]
        assert recipe.main(flags) == 0  # type: ignore[attr-defined]
    (row,) = json.loads(capsys.readouterr().out)["load"]
    assert row["statuses"] == {"200": row["requests"]} and row["tokens_per_second"] > 0
    assert 0 < row["first_text"]["p50"] < row["p50"] and 0 < row["between_texts"]["p50"] < row["p50"]


def test_what_is_no_request_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Too much of it is refused, what never ends is closed, and a connection that may stay open says so."""
    monkeypatch.setattr(guard, "REQUEST_SECONDS", 0.6)
    with serving(typing_engine(chat_base(context=256))) as served:
        flags = ["--url", served.url, "--clients", "--max-tokens", "4", "--header-mib", "1", "--patience", "3"]
        assert recipe.main(flags) == 0  # type: ignore[attr-defined]
    results = json.loads(capsys.readouterr().out)
    *headers, chunks = [row["answer"].split()[1] for row in results["floods"]]
    assert headers == ["431", "431"] and chunks in ("400", "408")  # it is no JSON, or too slow
    assert all(0 < row["worst_health"] < 10 for row in results["floods"])
    ends = {row["slow"]: (row["closed_after"], row["statuses"]) for row in results["slow"]}
    assert ends.pop("says nothing") == (None, [])
    assert all(after is not None and after >= 0.5 for after, _ in ends.values())
    assert [statuses for _, statuses in ends.values()] == [["408"], ["408"], ["404"], ["200", "408"]]


def test_what_counts_as_a_fault() -> None:
    faults = recipe._faults  # type: ignore[attr-defined]
    fine = Counter({"plain: 200": 3, "bad: 413": 1, "hung up": 2, "stream: 429": 1, "huge: 431": 1, "slow: 200": 1})
    assert faults(Counter({"never ends: closed": 1, "never ends: open": 2}), [], 0.02) == ["never ends: open"]
    assert faults(fine, [100, 200, 210, 205, 211, 208], 0.02) == []
    assert faults(fine, [100, 100, 100, 100, 103, 103], 0.02) == ["memory grew from 100 to 103 MiB"]
    wrong = ["bad: 500", "bad: 200", "plain: 504", "stream: 200 cut off", "huge: 200"]
    assert faults(Counter(wrong), [], 0.02) == wrong


def test_quantiles() -> None:
    assert recipe.quantiles([n / 100 for n in range(100)]) == {"p50": 0.5, "p95": 0.95, "p99": 0.99}  # type: ignore[attr-defined]
