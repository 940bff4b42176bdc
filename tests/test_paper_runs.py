"""Every run of the paper, for real but small: its own settings on a tiny base, with data of the right form."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.commands import COMMANDS, named
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.sampler import Sampler
from adjust_dlm.train.trainer import TrainConfig, train
from test_paper import FILES, command_of, load, name_of
from tiny_ar import chat_base, save_tiny

GSM8K, MATHS = {"answer": "It is 2.\n#### 2"}, {"solution": r"\boxed{2}", "answer": "2", "subject": "Algebra"}
CONSENT = {"allow_code_execution": True, "timeout": 5.0}
FUNCTION = {
    "task_id": "T/0", "prompt": "def one():\n", "entry_point": "one", "canonical_solution": "    return 1\n",
    "test": "def check(f):\n    assert f() == 1\n",
}  # fmt: skip
PROGRAM = {
    "text": "One.",
    "code": "def one():\n    return 1",
    "test_list": ["assert one() == 1"],
    "test_setup_code": "",
}


@pytest.fixture
def base() -> TransformerBase:
    return chat_base(context=8192)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data_of(command: str, folder: Path) -> dict[str, Any]:
    """Fields that name data, for each command; examples are never the problems."""
    questions = [{**GSM8K, "question": f"What is {n} and {n}?"} for n in range(12)]
    problems = [{**MATHS, "problem": f"Find ${n}$."} for n in range(12)]
    functions = [{**FUNCTION, "task_id": f"T/{n}", "prompt": f"def one_{n}():\n"} for n in range(6)]
    programs = [{**PROGRAM, "task_id": n, "text": f"One, as in {n}."} for n in (1, 2, 3, 4, 11, 12)]

    def halves(name: str, rows: list[dict[str, Any]], other: str) -> dict[str, Any]:
        shown = write(folder / f"{name}-shots.jsonl", rows[2:])
        return {"data": write(folder / f"{name}.jsonl", rows[:2]), other: shown}

    made: dict[str, Callable[[], dict[str, Any]]] = {
        "eval gsm8k": lambda: halves("gsm8k", questions, "shots_data"),
        "eval math": lambda: {**halves("math", problems, "shots_data"), "per_subject": 2},
        "eval humaneval": lambda: {**halves("humaneval", functions, "examples"), **CONSENT},
        "eval mbpp": lambda: {"data": write(folder / "mbpp.jsonl", programs), **CONSENT},
        "eval parallelbench": lambda: {"data": "", "grammar": "off", "n": 1, "tasks": ("copy", "sudoku")},
    }
    return made[command]()


@pytest.mark.parametrize("file", [file for file in FILES if command_of(file).startswith("eval")], ids=name_of)
def test_every_evaluation_runs(
    file: Path, base: TransformerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, config = command_of(file), load(file)
    partner = str(save_tiny(tmp_path / "ar"))
    small: dict[str, Any] = {"output": str(tmp_path / "out"), "partner": partner, "device": "cpu", "max_new_tokens": 8}
    if command == "eval table":
        small |= {"n": 4, "divergence": 2, "judge": partner, "buckets": 2}
    else:
        small |= {"limit": 2, **data_of(command, tmp_path)}
    if command == "eval parallelbench":
        small |= {"limit": 0}
    monkeypatch.setattr("adjust_dlm.eval.mauve.RESAMPLES", 10)
    sampler = Sampler(base).eval()
    for module in ("eval.downstream", "eval.table", "eval.generation", "eval.tasks.parallelbench"):
        loaded = importlib.import_module(f"adjust_dlm.{module}")
        for name, made in (("load_base", base), ("from_pretrained", sampler)):
            if hasattr(loaded, name):
                monkeypatch.setattr(loaded, name, lambda *_, made=made, **__: made)
    out = named(COMMANDS[command].function)(replace(config, **small))  # type: ignore[type-var]
    rows = out["cells" if command == "eval table" else "macro_averages" if "macro_averages" in out else "rows"]
    assert rows and all(row["base_calls"] > 0 for row in rows)
    names = {row.get("variant", row.get("decoder")) for row in rows}
    assert "joint" in names and len(names) > 2


@pytest.mark.parametrize("name", sorted({file.parent.name for file in FILES}))
def test_every_sampler_is_made(name: str, base: TransformerBase, tmp_path: Path) -> None:
    """Trajectories, and two steps of training on them."""
    folder = Path(FILES[0]).parents[1] / name
    made, trained = tmp_path / "made", tmp_path / "trained"
    config = load(folder / "trajectories.yaml")
    assert isinstance(config, TrajectoriesConfig)
    prompts = config.prompts
    if prompts.endswith(".jsonl"):
        prompts = write(tmp_path / "prompts.jsonl", [{"prompt": f"What is {n}?"} for n in range(8)])
    small = {"num": 8, "max_new_tokens": 12, "batch_size": 4, "shard_rows": 4, "device": "cpu", "prompts": prompts}
    make_trajectories(replace(config, output=str(made), **small), base)  # type: ignore[arg-type]
    config = load(folder / "train.yaml")
    assert isinstance(config, TrainConfig)
    small = {"steps": 2, "heldout": 2, "dtype": "float32"}
    out = train(replace(config, trajectories=(str(made),), output=str(trained), **small), base)  # type: ignore[arg-type]
    assert out["steps"] == 2 and (trained / "sampler" / "sampler.safetensors").is_file()
