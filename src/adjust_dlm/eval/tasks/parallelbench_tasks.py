"""The tasks of ParallelBench in rows and words of this project: each row a pure function of task, seed and number.

The benchmark's kinds, sizes and metrics (arXiv 2510.04767), none of its rows or prompts. Lists use the held-out names
of `data/lists.py`, which no training task contains. Indices count from 0; `sort` orders whole strings, first names
first, and its prompt says so (the benchmark's says last name, while its answers are in order of first names).
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Sequence
from functools import cache
from typing import Any

from adjust_dlm.data.lists import FIRST_NAMES, HELD_OUT_EVERY, LAST_NAMES, write_list
from adjust_dlm.eval.downstream import Problem
from adjust_dlm.eval.tasks.parallelbench_metrics import LISTS
from adjust_dlm.eval.tasks.parallelbench_words import LEVELS, draw_words
from adjust_dlm.types import require

GROUPS: dict[str, tuple[str, ...]] = {
    "waiting_line": tuple(LISTS),
    "puzzle": ("latin_square", "sudoku"),
    "words_to_sentence": LEVELS,
}
FIRST, LAST = FIRST_NAMES[::HELD_OUT_EVERY], LAST_NAMES[::HELD_OUT_EVERY]
SIZE = 4  # of squares and grids
BLANKS = 4  # open cells of a Sudoku; 12 are given
Row = tuple[str, dict[str, Any], str]  # prompt, facts, a right reply

_FRAME = (
    "A clinic calls its patients by this list:\n{people}\n{order}\nAnswer with the list alone, written the same way."
)
_INDEX = "where the front of the list has index 0"
_ORDERS = {
    "copy": "Write it out once more without any change.",
    "reverse": "It was taken down back to front. Turn it around, so that whoever is at its end comes first.",
    "sort": "Rearrange it from A to Z by the names as they are written, so by first name.",
    "shuffle": "Draw lots for a new order of these patients. It must differ from the order above.",
    "insert_index": 'Also call "{word}", who goes to index {index}, {where}.',
    "insert_random": 'Also call "{word}", anywhere you like. The others stay in order.',
    "remove_index": "Whoever has index {index}, {where}, went home. Strike out that name.",
    "remove_random": "One of them, whoever you like, went home. Strike out one name. The others stay in order.",
    "replace_index": 'Whoever has index {index}, {where}, gave the place to "{word}". Exchange the names.',
    "replace_random": 'One of them, whoever you like, gave the place to "{word}". Exchange the names.',
}
_LATIN = (
    "Build a Latin square from the {size} symbols {symbols}: {size} lines of {size} symbols, where every line and "
    "every column has each symbol once. Put commas between the symbols of a line and write nothing else."
)
_SUDOKU = (
    "In this small Sudoku, 0 marks an open cell. Every row, every column and every one of the four 2x2 boxes has each "
    "of 1, 2, 3 and 4 once.\n{grid}\nWrite the whole grid, four lines of four digits, and nothing else."
)
_SENTENCE = "Write one sentence that makes sense and has all of these words in it, spelled as here: {words}."


def make_problem(task: str, number: int, *, seed: int, people: Sequence[int] = (3, 4, 5, 6), shots: int = 1) -> Problem:
    """Row `number` of a task; rows go on for ever.

    Args:
        task: a name in `GROUPS`.
        number: from 0. The sizes of lists take turns.
        seed: of the rows.
        people: sizes of lists.
        shots: worked examples before a list or puzzle, with people or grids of their own.
    """
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
    """Tasks by group, in the order of `GROUPS`.

    Args:
        names: tasks, groups, `group/task`, or `all`.

    Raises:
        InputError: a name that is none of these.
    """
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
    order = _ORDERS[task].format(word=word, index=index, where=_INDEX)
    answer = _answer(task, people, index, word, rng)
    free = task == "shuffle" or task.endswith("_random")
    facts = {"input": people, "word": word} if free else {"answer": answer}
    return _FRAME.format(people=write_list(people), order=order), facts, write_list(answer)


def _answer(task: str, people: list[str], index: int, word: str, rng: random.Random) -> list[str]:
    """A right list; for tasks with many, the one at a random place."""
    if task == "shuffle":
        while (mixed := rng.sample(people, len(people))) == people:
            pass
        return mixed
    before, here, behind = people[:index], people[index : index + 1], people[index + 1 :]
    made = {
        "copy": people,
        "reverse": people[::-1],
        "sort": sorted(people),
        "insert": [*before, word, *here, *behind],
        "remove": [*before, *behind],
        "replace": [*before, word, *behind],
    }
    return made[task.partition("_")[0]]


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
    prompt = _LATIN.format(size=SIZE, symbols=", ".join(symbols))
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
    return _SUDOKU.format(grid=_lines(shown)), {"answer": answer}, answer


def _lines(grid: str) -> str:
    return "\n".join(grid[at : at + SIZE] for at in range(0, SIZE * SIZE, SIZE))


def _words(rng: random.Random, level: str) -> Row:
    words = draw_words(rng, level)
    return _SENTENCE.format(words=", ".join(words[:-1]) + f" and {words[-1]}"), {"words": words}, ""
