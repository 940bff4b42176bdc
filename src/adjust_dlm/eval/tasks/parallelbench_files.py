"""The public rows of ParallelBench, read from a folder: they carry no licence, so this project ships none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from adjust_dlm.eval.downstream import Problem
from adjust_dlm.eval.tasks.parallelbench_metrics import LISTS, read_list
from adjust_dlm.eval.tasks.task_files import read_text
from adjust_dlm.types import InputError, require

FILES = {"latin_square": "latin_square_n4", "sudoku": "sudoku_n4_12"}  # where a file is not called as its task


def read_problems(folder: Path, group: str, task: str, *, n: int = 0, shots: int = 1) -> list[Problem]:
    """The rows of one task.

    Args:
        folder: holds `<group>/<file>.jsonl` and `<group>/task_config.yaml`.
        group: a folder in it: `waiting_line`, `waiting_line_n15`, `puzzle` or `words_to_sentence`.
        task: a task of that group.
        n: rows, spread evenly over the file (which is in order of length); 0 is all.
        shots: worked examples, at most as many as a row has. Sentences have none.

    Raises:
        InputError: a file that is missing or holds something else.
    """
    name = FILES.get(task, task)
    template = _template(folder / group / "task_config.yaml", f"{group}/{name}")
    path = folder / group / f"{name}.jsonl"
    lines = [line for line in read_text(path).split("\n") if line.strip()]  # JSON may hold other line ends
    require(bool(lines), f"{path} is empty")
    n = min(n, len(lines)) or len(lines)
    chosen = [number * len(lines) // n for number in range(n)]
    out = []
    for number in chosen:
        try:
            row = json.loads(lines[number])
            shown = row["input"].get("icl_examples", [])
            shots_here = shots if "icl_examples" in row["input"] else 0
            require(len(shown) >= shots_here, f"{path} has {len(shown)} examples a row; shots is {shots}")
            pairs = [(_prompt(template, one), _example(one["answer"])) for one in shown[:shots_here]]
            facts = _facts(task, row["answer"])
            out.append(
                Problem(
                    f"{group}/{task}/{number:04}", _prompt(template, row), facts, f"{group}/{task}",
                    tuple(text for pair in pairs for text in pair),
                )
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}, row {number + 1} is no row of {task}: {error!r}") from error
    return out


def _template(path: Path, task: str) -> str:
    try:
        entry = yaml.safe_load(read_text(path))[task]["prompt"]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise InputError(f"{path} has no prompt of {task}: {' '.join(repr(error).split())}") from error
    require(isinstance(entry, str), f"{path}: the prompt of {task} is no text")
    return str(entry)


def _prompt(template: str, row: dict[str, Any]) -> str:
    """A row's fields in their places; a backslash with an n behind it is a line break."""
    return template.format(**row["input"]).replace("\\n", "\n")


def _example(answer: str | dict[str, Any]) -> str:
    """A right reply; some sentences have none."""
    if isinstance(answer, dict):
        return str(answer.get("example", "") if "words" in answer else answer["example"])
    return str(answer)


def _facts(task: str, answer: str | dict[str, Any]) -> dict[str, Any]:
    """What scoring needs, as `parallelbench_tasks` says it."""
    facts: dict[str, Any] = {"example": _example(answer)}
    if isinstance(answer, dict):
        wanted = {"latin_square": ("symbols",), "easy": ("words",), "medium": ("words",), "hard": ("words",)}
        names = wanted.get(task, ("input", "word") if task in ("insert_random", "replace_random") else ("input",))
        return facts | {name: answer[name] for name in names}
    if task not in LISTS:
        return facts | {"answer": answer}
    people = read_list(answer, strict=True)
    require(people is not None, f"{answer!r} is no list")
    return facts | {"answer": people}
