"""Short tasks on lists of people: what an adapted base learns to do beyond writing text.

Every task is a user prompt and its one right answer, a list written `["Ada Long", "Ben Ray"]` (for `shuffle`, any
other order is right and one is drawn). Names and wording are this project's own; indices count from 0; `sort`
orders whole strings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_FIRST = """
    Aaron Abigail Adam Alan Alice Amanda Amy Andrea Andrew Angela Anna Anthony Arthur Ashley Barbara Benjamin Betty
    Brandon Brian Bruce Carl Carol Catherine Charles Christine Daniel David Deborah Dennis Diana Donald Donna Dorothy
    Douglas Dylan Edward Elizabeth Emily Emma Eric Ethan Eugene Frances Frank Gary George Gloria Grace Gregory Hannah
    Harold Heather Helen Henry Jack Jacob James Janet Jason Jean Jennifer Jeremy Jessica Joan John Jordan Joseph Joyce
    Judith Julia Karen Keith Kenneth Kevin Kyle Larry Laura Lauren Linda Lisa Logan Louis Madison Margaret Maria Mark
    Martha Mary Matthew Megan Michael Nancy Nathan Nicole Olivia Pamela Patrick Paul Peter Philip Rachel Ralph Randy
    Rebecca Richard Robert Roger Rose Ruth Samuel Sandra Sarah Scott Sharon Sophia Stephen Susan Teresa Thomas Tyler
    Victoria Vincent Virginia Walter Wayne William
"""
_LAST = """
    Adams Allen Alvarez Anderson Bailey Baker Bennett Brooks Brown Butler Campbell Carter Castillo Chavez Clark
    Collins Cook Cooper Cox Cruz Davis Diaz Edwards Evans Fisher Flores Ford Foster Garcia Gibson Gomez Gonzalez Gray
    Green Griffin Hall Hamilton Harris Hayes Henderson Hernandez Hill Howard Hughes Hunter Jackson James Jenkins
    Johnson Jones Jordan Kelly Kennedy Kim King Lee Lewis Long Lopez Marshall Martin Martinez Mason McDonald Mendoza
    Miller Mitchell Moore Morales Morgan Morris Murphy Murray Myers Nelson Nguyen Ortiz Owens Parker Patel Perez Perry
    Peterson Phillips Powell Price Ramirez Ramos Reed Reyes Reynolds Richardson Rivera Roberts Robinson Rogers Ross
    Ruiz Russell Sanchez Sanders Scott Simmons Smith Stevens Stewart Sullivan Taylor Thomas Thompson Torres Turner
    Walker Wallace Ward Watson West White Williams Wilson Wood Wright Young
"""
FIRST_NAMES, LAST_NAMES = tuple(_FIRST.split()), tuple(_LAST.split())
HELD_OUT_EVERY = 5  # each fifth first and last name is kept for held-out tasks

_WORDING: dict[str, tuple[str, ...]] = {
    "copy": (
        "Repeat this list without any change: {people}",
        "{people}\nWrite this list again, just as it stands.",
        "Give me an exact copy of the list {people}",
        "Echo the following list of people: {people}",
    ),
    "reverse": (
        "Write this list backwards: {people}",
        "{people}\nTurn the order around, last person first.",
        "Reverse the list {people}",
        "Here are some people: {people}. List them from the last to the first.",
    ),
    "sort": (
        "Sort this list alphabetically: {people}",
        "{people}\nPut these names in alphabetical order.",
        "Arrange the list from A to Z: {people}",
        "Order these people by name: {people}",
    ),
    "insert": (
        'Insert "{person}" at index {index} (counting from 0): {people}',
        '{people}\nAdd "{person}" so that it gets index {index}, where the first index is 0.',
        'Put "{person}" into the list at index {index}, starting at 0: {people}',
    ),
    "remove": (
        "Remove the person at index {index} (counting from 0): {people}",
        "{people}\nDelete the entry with index {index}, where the first index is 0.",
        "Take out the name at index {index}, starting at 0: {people}",
    ),
    "replace": (
        'Replace the person at index {index} (counting from 0) by "{person}": {people}',
        '{people}\nChange the entry with index {index} to "{person}", where the first index is 0.',
        'Put "{person}" in place of the name at index {index}, starting at 0: {people}',
    ),
    "shuffle": (
        "Shuffle this list: {people}",
        "{people}\nWrite these people in another, random order.",
        "Mix up the order of the list {people}",
        "Bring these names into a random new order: {people}",
    ),
}
KINDS = tuple(_WORDING)


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
    prompt = rng.choice(_WORDING[kind]).format(people=write_list(people), person=person, index=index)
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
