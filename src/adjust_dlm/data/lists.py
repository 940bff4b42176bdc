"""Short tasks on lists of people: what an adapted base learns to do beyond writing text.

Every task is a user prompt and its one right answer, a list written `["Ada Long", "Ben Ray"]` (for `shuffle`, any
other order is right and one is drawn). Names and wording are this project's own; indices count from 0; `sort`
orders whole strings.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_WORDS = tomllib.loads(Path(__file__).with_name("lists.toml").read_text(encoding="utf-8"))
FIRST_NAMES, LAST_NAMES = tuple(_WORDS["first"].split()), tuple(_WORDS["last"].split())
HELD_OUT_EVERY = 5  # each fifth first and last name is kept for held-out tasks
KINDS = tuple(_WORDS["wording"])


@dataclass(frozen=True)
class ListTask:
    """One task: what the user says and what the right reply is."""

    kind: str
    prompt: str
    answer: str


def write_list(people: list[str]) -> str:
    """`["A B", "C D"]`."""
    return "[" + ", ".join(f'"{person}"' for person in people) + "]"


def list_tasks(seed: int, *, held_out: bool = False) -> Iterator[ListTask]:
    """An endless, reproducible stream of tasks, all kinds equally often on average.

    Args:
        seed: names the stream; two seeds share no random number.
        held_out: use the reserved names, which no other task contains.
    """
    rng = random.Random(f"list tasks {seed} {held_out}")
    first, last = (
        tuple(name for n, name in enumerate(names) if (n % HELD_OUT_EVERY == 0) == held_out)
        for names in (FIRST_NAMES, LAST_NAMES)
    )
    while True:
        yield make_task(rng, rng.choice(KINDS), first, last)


def make_task(rng: random.Random, kind: str, first: tuple[str, ...], last: tuple[str, ...]) -> ListTask:
    """One task of a kind, on 3 to 6 people without repetition."""
    size = rng.randint(3, 6)
    *people, person = _people(rng, size + 1, first, last)
    index = rng.randint(0, size if kind == "insert" else size - 1)
    prompt = rng.choice(_WORDS["wording"][kind]).format(people=write_list(people), person=person, index=index)
    return ListTask(kind, prompt, write_list(ANSWERS[kind](people, index, person, rng)))


def _people(rng: random.Random, count: int, first: tuple[str, ...], last: tuple[str, ...]) -> list[str]:
    people: list[str] = []
    while len(people) < count:
        person = f"{rng.choice(first)} {rng.choice(last)}"
        if person not in people:
            people.append(person)
    return people


def _other_order(people: list[str], rng: random.Random) -> list[str]:
    while (mixed := rng.sample(people, len(people))) == people:
        pass
    return mixed


# Kind -> a right list, from the people, an index, a further person and the choice where there are several.
ANSWERS: dict[str, Callable[[list[str], int, str, random.Random], list[str]]] = {
    "copy": lambda people, index, person, rng: people,
    "reverse": lambda people, index, person, rng: people[::-1],
    "sort": lambda people, index, person, rng: sorted(people),
    "insert": lambda people, index, person, rng: [*people[:index], person, *people[index:]],
    "remove": lambda people, index, person, rng: [*people[:index], *people[index + 1 :]],
    "replace": lambda people, index, person, rng: [*people[:index], person, *people[index + 1 :]],
    "shuffle": lambda people, index, person, rng: _other_order(people, rng),
}
