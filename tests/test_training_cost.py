"""The recipe that measures training's cost, on a tiny shape: what it counts and what it leaves out."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from adjust_dlm.bases.layers import BidirectionalLayer, Body
from helpers import load_recipe

ROOT = Path(__file__).parents[1]
SIZES = {"states": 5, "slices": 2, "rollout": 2, "new-tokens": 8, "rows": 3, "runs": 2}
FLAGS = [f"--{name}={value}" for name, value in SIZES.items()]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("training_cost")


def run(recipe: ModuleType, output: Path, *flags: str) -> dict[str, Any]:
    recipe.main(["tiny", "--output", str(output), *FLAGS, *flags])
    return dict(json.loads(output.read_text()))


def watched(forward: Any, shapes: set[Any], name: str) -> Any:
    def seen(self: Any, x: Any, *rest: Any, **more: Any) -> Any:
        shapes.add((name, *x.shape[:2]))
        return forward(self, x, *rest, **more)

    return seen


def test_arithmetic_and_hours_of_every_form(recipe: ModuleType, tmp_path: Path) -> None:
    """L = 9, D = 32, V = 96: a layer does 2 L (D 96 + 3 D 64) + 4 L L D, g also 4 L D D, the head 2 D V a row."""
    result = run(recipe, tmp_path / "cost.json", "--no-compile")
    assert result["left_out"] == [] and result["gemm_tflops"] > 0
    layer = 2 * 9 * (32 * 96 + 3 * 32 * 64) + 4 * 9 * 9 * 32
    g = layer + 4 * 9 * 32 * 32
    seen = {(form["form"], form["rows"], form["kernel"]): form for form in result["forms"]}
    assert seen.keys() == {
        ("one-pass", None, "auto"), ("one-pass", 3, "auto"), ("sliced", None, "auto"), ("plain", None, "auto"),
        ("plain", None, "torch"),
    }  # fmt: skip
    passes = {"plain": 3, "sliced": 10 / 6, "one-pass": 0}  # base passes of a window, its data apart
    for (name, rows, _), form in seen.items():
        assert form["data_tflop_per_window"] * 1e12 == pytest.approx(2 * layer + 8 / 2 * 2 * 32 * 96)
        body = passes[name] * 2 * layer + 2 * 3 * g
        head = form["training_tflop_per_window"] * 1e12 - body
        back = head / (2 * 32 * 96) - form["head_rows_per_window"]  # rows of the gradient: the student's
        assert back > 0
        if rows is not None:
            assert back <= 2 * rows
        alone, everything = form["windows_per_second_without_data"], form["windows_per_second"]
        epoch, again = (12_700_000 / rate / 3600 for rate in (everything, everything if name == "one-pass" else alone))
        assert form["hours_one_epoch"] == pytest.approx(epoch)
        assert form["hours_two_epochs"] == pytest.approx(epoch + again)
        training = form["micro_batch_seconds"] / 6 + form["update_seconds"] / 256  # 2 slices of 3 windows
        assert form["windows_per_second_without_data"] == pytest.approx(1 / training)
        data = form["decode_ms_per_state"] / 1000 * 8 / 7  # 8 states begin 7 windows
        assert form["windows_per_second"] == pytest.approx(1 / (training + data))
        whole = (form["training_tflop_per_window"] + form["data_tflop_per_window"]) * form["windows_per_second"]
        assert form["tflops"] == pytest.approx(whole)
        assert form["share_of_ceiling"] == pytest.approx(whole / result["gemm_tflops"])
    few, all_rows = seen["one-pass", 3, "auto"], seen["one-pass", None, "auto"]
    assert few["head_rows_per_window"] < all_rows["head_rows_per_window"]


def test_the_papers_windows_are_those_of_its_files(recipe: ModuleType) -> None:
    """A text of T tokens has T - 1 windows; two epochs of all texts, in batches of 32."""
    for base, texts, length in (
        ("dream-base", 100_000, 128), ("llada-base", 100_000, 128), ("dream-instruct", 20_000, 256),
        ("dream-coder", 20_000, 256),
    ):  # fmt: skip
        folder = ROOT / "paper" / base
        made, trained = (yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("trajectories", "train"))
        assert (made["num"], made["max_new_tokens"]) == (texts, length)
        assert trained["steps"] * 32 == 2 * texts * (length - 1)
        if length == 128:
            assert trained["steps"] * 32 == recipe.EPOCHS * recipe.WINDOWS


def test_the_hours_of_the_document_follow_from_its_rates() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (ROOT / "docs" / "results" / "training-cost.md").read_text().splitlines()
        if line.startswith(("| plain", "| sliced", "| one-pass"))
    ]
    assert len(rows) == 18
    for form, _, _, _, training, everything, *_, one, two in rows:
        epoch = 100_000 * 127 / int(everything) / 3600
        again = epoch if form == "one-pass" else 100_000 * 127 / int(training) / 3600
        assert (float(one), float(two)) == pytest.approx((epoch, epoch + again), abs=0.051), (form, everything)


def test_compiled_forms_share_two_shapes(recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the base for decoding and for slices, one of g: a 7B model would take minutes for each more."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    shapes: set[tuple[int, ...]] = set()
    monkeypatch.setattr(Body, "forward", watched(Body.forward, shapes, "f"))
    monkeypatch.setattr(BidirectionalLayer, "forward", watched(BidirectionalLayer.forward, shapes, "g"))
    result = run(recipe, tmp_path / "cost.json", "--forms", "one-pass", "sliced")
    compiled = [(form["form"], form["rows"]) for form in result["forms"] if form["compiled"]]
    assert compiled == [("one-pass", None), ("one-pass", 3), ("sliced", None), ("sliced", 3)]
    assert shapes == {("f", 10, 9), ("g", 6, 9)}


def test_the_pool_stands_at_all_moments_of_a_text(recipe: ModuleType) -> None:
    """Ten places over eight commits; the next passes go on from there."""
    import argparse

    from adjust_dlm.sampler import Sampler

    base = recipe.build("tiny", torch.device("cpu"))
    options = argparse.Namespace(shape="tiny", states=5, slices=2, rollout=2, new_tokens=8)
    pool = recipe.running_pool(recipe.Bench(base, Sampler(base), options))
    masked = [8, 8, 7, 6, 5, 4, 4, 3, 2, 1]
    assert pool.lanes[0].canvas.masked_BL.sum(-1).tolist() == masked
    pool.advance()
    assert pool.lanes[0].canvas.masked_BL.sum(-1).tolist() == [m - 1 for m in masked]
    assert pool.lanes[0].canvas.commits_B.tolist() == [9 - m for m in masked]


def test_what_takes_too_long_is_left_out(recipe: ModuleType, tmp_path: Path) -> None:
    result = run(recipe, tmp_path / "cost.json", "--forms", "sliced", "--no-compile", "--seconds", "0")
    assert result["forms"] == [] and result["left_out"] == [["sliced", False, None, "TimeoutError"]]
    with pytest.raises(TimeoutError), recipe.limit(0.05):
        time.sleep(10)
    with pytest.raises(SystemExit):
        run(recipe, tmp_path / "cost.json", "--runs", "4")
