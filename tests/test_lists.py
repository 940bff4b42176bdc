"""List tasks: every answer recomputed from its prompt, disjoint held-out names, one stream per seed."""

import json
import random
import re
from collections import Counter
from itertools import islice

import pytest

from adjust_dlm.data.lists import FIRST_NAMES, KINDS, LAST_NAMES, ListTask, list_tasks, make_task, write_list

TASKS = list(islice(list_tasks(7), 1400))


def people_of(task: ListTask) -> list[str]:
    found = re.search(r"\[.*\]", task.prompt)
    assert found is not None
    people = json.loads(found.group())
    assert isinstance(people, list)
    return people


def expected(task: ListTask) -> list[str]:
    """The answer, from the words of the prompt alone."""
    people = people_of(task)
    outside = task.prompt.replace(write_list(people), "")
    numbers = [int(n) for n in re.findall(r"index (\d)", outside)]
    person = re.findall(r'"([^"]+)"', outside)
    if task.kind == "insert":
        people.insert(numbers[0], person[0])
    elif task.kind == "remove":
        del people[numbers[0]]
    elif task.kind == "replace":
        people[numbers[0]] = person[0]
    elif task.kind == "reverse":
        people.reverse()
    elif task.kind == "sort":
        people.sort()
    return people


def test_every_answer_follows_from_its_prompt() -> None:
    for task in TASKS:
        answer = json.loads(task.answer)
        if task.kind == "shuffle":
            assert sorted(answer) == sorted(people_of(task))
            assert answer != people_of(task)
        else:
            assert answer == expected(task), task
        assert write_list(answer) == task.answer


def test_lists_have_three_to_six_different_people() -> None:
    sizes = Counter(len(people_of(task)) for task in TASKS)
    assert sorted(sizes) == [3, 4, 5, 6]
    assert all(len(set(people_of(task))) == len(people_of(task)) for task in TASKS)


def test_all_kinds_come_equally_often() -> None:
    counts = Counter(task.kind for task in TASKS)
    assert set(counts) == set(KINDS)
    # 200 expected of each, standard deviation 13
    assert all(abs(n - 200) < 60 for n in counts.values())


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_worded_in_several_ways(kind: str) -> None:
    tasks = (task for task in TASKS if task.kind == kind)
    frames = {re.sub(r"\d", "N", re.sub(r'"[^"]+"', "P", re.sub(r"\[.*\]", "L", task.prompt))) for task in tasks}
    assert len(frames) >= 3


def test_a_seed_names_its_stream() -> None:
    assert list(islice(list_tasks(7), 50)) == TASKS[:50]
    assert list(islice(list_tasks(8), 50)) != TASKS[:50]


def test_held_out_tasks_use_other_names() -> None:
    def words(held_out: bool) -> tuple[set[str], set[str]]:
        people = [p for task in islice(list_tasks(7, held_out=held_out), 1400) for p in people_of(task)]
        return {p.split()[0] for p in people}, {p.split()[1] for p in people}

    (first, last), (held_first, held_last) = words(False), words(True)
    assert not first & held_first
    assert not last & held_last
    assert len(held_first) >= 20
    assert len(held_last) >= 20


def test_the_name_lists_hold_no_name_twice() -> None:
    assert len(set(FIRST_NAMES)) == len(FIRST_NAMES) >= 100
    assert len(set(LAST_NAMES)) == len(LAST_NAMES) >= 100


def test_insert_reaches_both_ends() -> None:
    rng = random.Random(0)
    tasks = [make_task(rng, "insert", FIRST_NAMES, LAST_NAMES) for _ in range(200)]
    places = {json.loads(t.answer).index((set(json.loads(t.answer)) - set(people_of(t))).pop()) for t in tasks}
    assert places == {0, 1, 2, 3, 4, 5, 6}
