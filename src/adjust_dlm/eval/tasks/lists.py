"""Exact match on short list tasks with held-out names: the default base's own downstream table."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from adjust_dlm.data.lists import ListTask, list_tasks
from adjust_dlm.eval.generation import half_width
from adjust_dlm.types import require


@dataclass(frozen=True)
class ListScore:
    """Share of right answers.

    Attributes:
        accuracy: right answers / n.
        ci95: half-width of the 95 % interval (Wilson).
        n: tasks.
        by_kind: (right, n) of every kind of task.
    """

    accuracy: float
    ci95: float
    n: int
    by_kind: dict[str, tuple[int, int]]


def held_out_tasks(n: int, seed: int) -> list[ListTask]:
    """n tasks with names that no training task contains."""
    return list(itertools.islice(list_tasks(seed, held_out=True), n))


def is_right(task: ListTask, text: str) -> bool:
    """Whether a reply is the answer, spaces around it aside; for `shuffle` any other order of the same people is."""
    if task.kind != "shuffle":
        return text.strip() == task.answer
    try:
        people = json.loads(text)
    except ValueError:
        return False
    given = json.loads(re.findall(r"\[.*\]", task.prompt)[0])
    whole = isinstance(people, list) and all(isinstance(person, str) for person in people)
    return whole and people != given and sorted(people) == sorted(given)


def score_lists(tasks: Sequence[ListTask], texts: Sequence[str]) -> ListScore:
    """Exact match of every reply with its task.

    Raises:
        InputError: no tasks, or not one text for each.
    """
    require(len(tasks) == len(texts) > 0, f"{len(texts)} texts for {len(tasks)} tasks; give one each")
    right = [is_right(task, text) for task, text in zip(tasks, texts, strict=True)]
    by_kind: dict[str, tuple[int, int]] = {}
    for task, good in zip(tasks, right, strict=True):
        hits, count = by_kind.get(task.kind, (0, 0))
        by_kind[task.kind] = hits + good, count + 1
    return ListScore(sum(right) / len(right), half_width(right), len(right), dict(sorted(by_kind.items())))
