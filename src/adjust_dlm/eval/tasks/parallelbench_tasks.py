"""What ParallelBench asks: rows of this project, each a pure function of task, seed and number, or the public ones.

Our rows have the benchmark's kinds, sizes and metrics (arXiv 2510.04767), none of its rows or prompts. Lists use the
held-out names of `data/lists.py`, which no training task contains. Indices count from 0; `sort` orders whole strings,
first names first, and its prompt says so (the benchmark's says last name, while its answers are in order of first
names). Sentences: easy takes all words from one everyday scene, medium from four, hard two from two scenes and two from
two fields of knowledge that have nothing to do with them; no word is part of another, so each has to be written.

The public rows carry no licence, so they are read from the user's folder.
"""

from __future__ import annotations

import itertools
import random
import string
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from adjust_dlm.data.lists import ANSWERS, FIRST_NAMES, HELD_OUT_EVERY, LAST_NAMES, write_list
from adjust_dlm.data.texts import read_text
from adjust_dlm.eval.tasks.task_files import Problem, read_rows
from adjust_dlm.types import InputError, refusing, require

LISTS = (
    "copy", "reverse", "sort", "shuffle", "insert_index", "insert_random", "remove_index", "remove_random",
    "replace_index", "replace_random",
)  # fmt: skip
GROUPS: dict[str, tuple[str, ...]] = {
    "waiting_line": LISTS,
    "puzzle": ("latin_square", "sudoku"),
    "words_to_sentence": ("easy", "medium", "hard"),
}
FIRST, LAST = FIRST_NAMES[::HELD_OUT_EVERY], LAST_NAMES[::HELD_OUT_EVERY]
SIZE = 4  # of squares and grids
BLANKS = 4  # open cells of a Sudoku; 12 are given
CONFIG = "task_config.yaml"  # of a group, in the public folder
FILES = {"latin_square": "latin_square_n4", "sudoku": "sudoku_n4_12"}  # where a public file is not called as its task
Row = tuple[str, dict[str, Any], str]  # prompt, facts, a right reply

_WORDS = tomllib.loads(Path(__file__).with_name("parallelbench.toml").read_text(encoding="utf-8"))
SCENES, FIELDS = (tuple(tuple(words.split()) for words in _WORDS[name].values()) for name in ("scenes", "fields"))


def make_problem(task: str, number: int, *, seed: int, people: Sequence[int] = (3, 4, 5, 6), shots: int = 1) -> Problem:
    """Row `number` of a task, behind `shots` worked examples; rows go on for ever, and sizes of lists take turns."""
    group = group_of(task)
    rng = random.Random(f"parallelbench {task} {seed} {number}")
    shots = 0 if group == "words_to_sentence" else shots
    rows = [_make(task, rng, people[number % len(people)])]
    for _ in range(shots):
        size = rng.choice(people)
        row = _make(task, rng, size)
        while any(row[2] == other[2] for other in rows):  # an example that gives the answer away
            row = _make(task, rng, size)
        rows.append(row)
    prompt, facts, example = rows[0]
    turns = tuple(text for shown, _, reply in rows[1:] for text in (shown, reply))
    return Problem(f"{group}/{task}/{number:04}", prompt, facts | {"example": example}, f"{group}/{task}", turns)


def group_of(task: str) -> str:
    """The group a task is counted in."""
    return next(group for group, tasks in GROUPS.items() if task in tasks)


def select(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Tasks by group, in the order of `GROUPS`; raises InputError for what is no task, group, `group/task` or `all`."""
    every = {f"{group}/{task}": (group, task) for group, tasks in GROUPS.items() for task in tasks}
    chosen: set[str] = set()
    for name in names:
        found = {kind for kind, pair in every.items() if name in ("all", kind, *pair)}
        require(bool(found), f"unknown task {name!r}; known are all, {', '.join(GROUPS)}, {', '.join(every)}")
        chosen |= found
    by_group = {group: tuple(t for t in tasks if f"{group}/{t}" in chosen) for group, tasks in GROUPS.items()}
    return {group: tasks for group, tasks in by_group.items() if tasks}


def _make(task: str, rng: random.Random, size: int) -> Row:
    if task in LISTS:
        return _line(task, rng, size)
    if task == "latin_square":
        return _latin(rng)
    return _sudoku(rng) if task == "sudoku" else _words(rng, task)


def _line(task: str, rng: random.Random, size: int) -> Row:
    """A list task; the number of people is that of the list in the prompt."""
    every = rng.sample(range(len(FIRST) * len(LAST)), size + 1)
    *people, word = [f"{FIRST[n // len(LAST)]} {LAST[n % len(LAST)]}" for n in every]
    index = rng.randrange(size + task.startswith("insert"))
    order = _WORDS["orders"][task].format(word=word, index=index, where=_WORDS["index"])
    answer = ANSWERS[task.partition("_")[0]](people, index, word, rng)
    free = task == "shuffle" or task.endswith("_random")
    facts = {"input": people, "word": word} if free else {"answer": answer}
    return _WORDS["frame"].format(people=write_list(people), order=order), facts, write_list(answer)


def _latin(rng: random.Random) -> Row:
    symbols = rng.sample(string.ascii_uppercase + string.digits, SIZE)
    rows: list[tuple[str, ...]] = []
    for _ in range(SIZE):  # some row always fits under a Latin rectangle
        fits = [
            row
            for row in itertools.permutations(symbols)
            if all(a != b for other in rows for a, b in zip(row, other, strict=True))
        ]
        rows.append(rng.choice(fits))
    prompt = _WORDS["latin_square"].format(size=SIZE, symbols=", ".join(symbols))
    return prompt, {"symbols": symbols}, "\n".join(",".join(row) for row in rows)


@cache
def grids() -> tuple[str, ...]:
    """All 288 full Sudoku grids of size 4, as 16 digits each."""
    found = [""]
    for cell in range(SIZE * SIZE):
        found = [grid + digit for grid in found for digit in "1234" if digit not in {grid[n] for n in _seen(cell)}]
    return tuple(found)


def _seen(cell: int) -> list[int]:
    """Earlier cells in the row, column or box of a cell."""
    row, column = divmod(cell, SIZE)
    places = [(n, *divmod(n, SIZE)) for n in range(cell)]
    return [n for n, r, c in places if r == row or c == column or (r // 2, c // 2) == (row // 2, column // 2)]


def _sudoku(rng: random.Random) -> Row:
    """A grid with four open cells and one solution."""
    full = rng.choice(grids())
    while True:
        blanks = set(rng.sample(range(SIZE * SIZE), BLANKS))
        given = [n for n in range(SIZE * SIZE) if n not in blanks]
        if sum(all(grid[n] == full[n] for n in given) for grid in grids()) == 1:
            break
    shown = "".join("0" if n in blanks else digit for n, digit in enumerate(full))
    answer = _lines(full)
    return _WORDS["sudoku"].format(grid=_lines(shown)), {"answer": answer}, answer


def _lines(grid: str) -> str:
    return "\n".join(grid[at : at + SIZE] for at in range(0, SIZE * SIZE, SIZE))


def _words(rng: random.Random, level: str) -> Row:
    if level == "easy":
        words = rng.sample(rng.choice(SCENES), 4)
    else:
        groups = rng.sample(SCENES, 4) if level == "medium" else [*rng.sample(SCENES, 2), *rng.sample(FIELDS, 2)]
        words = rng.sample([rng.choice(group) for group in groups], 4)
    return _WORDS["sentence"].format(words=", ".join(words[:-1]) + f" and {words[-1]}"), {"words": words}, ""


def read_problems(folder: Path, group: str, task: str, *, n: int = 0, shots: int = 1) -> list[Problem]:
    """The public rows of one task.

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
    template = _template(folder / group / CONFIG, f"{group}/{name}")
    path = folder / group / f"{name}.jsonl"
    rows = read_rows(str(path))
    n, out = min(n, len(rows)) or len(rows), []
    for number in (at * len(rows) // n for at in range(n)):
        row = rows[number]
        try:
            shown = row["input"].get("icl_examples")
            pairs = [(_fill(template, one), _reply(one["answer"])) for one in (shown or [])[:shots]]
            facts, prompt = {"example": _reply(row["answer"])} | _facts(task, row["answer"]), _fill(template, row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}, row {number + 1} is no row of {task}: {error!r}") from error
        few = shown is not None and len(pairs) < shots
        require(not few, f"{path} has {len(pairs)} examples a row; shots is {shots}")
        turns = tuple(text for pair in pairs for text in pair)
        out.append(Problem(f"{group}/{task}/{number:04}", prompt, facts, f"{group}/{task}", turns))
    return out


def _template(path: Path, task: str) -> str:
    with refusing(f"{path} has no prompt of {task}", yaml.YAMLError, KeyError, TypeError):
        entry = yaml.safe_load(read_text(path))[task]["prompt"]
    require(isinstance(entry, str), f"{path}: the prompt of {task} is no text")
    return str(entry)


def _fill(template: str, row: dict[str, Any]) -> str:
    """A row's fields in their places; a backslash with an n behind it is a line break."""
    return template.format(**row["input"]).replace("\\n", "\n")


def _reply(answer: str | dict[str, Any]) -> str:
    """A right reply; some sentences have none."""
    if isinstance(answer, dict):
        return str(answer.get("example", "") if "words" in answer else answer["example"])
    return str(answer)


def _facts(task: str, answer: str | dict[str, Any]) -> dict[str, Any]:
    """What scoring needs."""
    if isinstance(answer, dict):
        free = ("input", "word") if task in ("insert_random", "replace_random") else ("input",)
        names = {"latin_square": ("symbols",), **dict.fromkeys(GROUPS["words_to_sentence"], ("words",))}.get(task, free)
        return {name: answer[name] for name in names}
    people = read_list(answer, strict=True) if task in LISTS else answer
    require(people is not None, f"{answer!r} is no list")
    return {"answer": people}


def read_list(text: str, *, strict: bool = False) -> list[str] | None:
    """The items of the last list in a reply; None where the strict form is missed.

    Strict: both brackets, items apart by a comma and one space, each in double quotes with none inside. Lenient:
    everything behind the last `[` and before the next `]`, where there are any; items apart by commas, spaces and
    double quotes around them dropped, items of nothing but white space left out.
    """
    _, opened, inside = text.rpartition("[")
    inside, closed, _ = inside.partition("]")
    if not strict:
        return [item.strip(' "') for item in inside.split(",") if item.strip()]
    items = inside.split(", ")
    quoted = all(len(item) >= 2 and item[0] == item[-1] == '"' and item.count('"') == 2 for item in items)
    return [item[1:-1] for item in items] if opened and closed and quoted else None
