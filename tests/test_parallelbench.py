"""ParallelBench: what counts as right, enumerated; what is asked, solved again; what comes out of a run."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adjust_dlm.bases import Base
from adjust_dlm.data.lists import FIRST_NAMES, LAST_NAMES, list_tasks, write_list
from adjust_dlm.eval import generation
from adjust_dlm.eval.downstream import Problem
from adjust_dlm.eval.tasks import parallelbench, parallelbench_tasks
from adjust_dlm.eval.tasks.parallelbench import (
    ParallelBenchConfig,
    is_latin,
    is_right,
    open_grammar,
    read_grid,
    run_parallelbench,
    score_reply,
)
from adjust_dlm.eval.tasks.parallelbench_tasks import (
    FIELDS,
    FIRST,
    GROUPS,
    LAST,
    SCENES,
    grids,
    make_problem,
    read_list,
    read_problems,
    select,
)
from adjust_dlm.types import InputError
from tiny_ar import chat_base

TASKS = [task for tasks in GROUPS.values() for task in tasks]
LISTS, SENTENCES = GROUPS["waiting_line"], GROUPS["words_to_sentence"]


# What is right ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [
        ('["A B", "C D"]', ["A B", "C D"], ["A B", "C D"]),
        ('Sure [1]: ["A B", "C D"] and so on]', ["A B", "C D"], ["A B", "C D"]),
        ('[A B,"C D"]', ["A B", "C D"], None),
        ('["A B","C D"]', ["A B", "C D"], None),
        ('["A B",  "C D"]', ["A B", "C D"], None),
        ('["A B", "C D"', ["A B", "C D"], None),
        ('"A B", "C D"]', ["A B", "C D"], None),
        ("A B, C D", ["A B", "C D"], None),
        ('["A B", "C D", ]', ["A B", "C D"], None),
        ('["A "x" B"]', ['A "x" B'], None),
        ('["A B\n", "C D"]', ["A B\n", "C D"], ["A B\n", "C D"]),
        ('["A B", ""]', ["A B", ""], ["A B", ""]),
        ('["]', [""], None),
        ("[]", [], None),
        ("", [], None),
    ],
)
def test_two_readings_of_a_list(text: str, lenient: list[str], strict: list[str] | None) -> None:
    assert read_list(text) == lenient
    assert read_list(text, strict=True) == strict


def right_lists(task: str) -> set[tuple[str, ...]]:
    """All right replies for the people a, b, c and the new one w, written down by hand."""
    return {
        "shuffle": {tuple(x) for x in ("acb", "bac", "bca", "cab", "cba")},
        "insert_random": {tuple(x) for x in ("wabc", "awbc", "abwc", "abcw")},
        "remove_random": {tuple(x) for x in ("bc", "ac", "ab")},
        "replace_random": {tuple(x) for x in ("wbc", "awc", "abw")},
    }.get(task, {("c", "a")})


@pytest.mark.parametrize("task", LISTS)
def test_of_all_short_lists_exactly_the_right_ones_count(task: str) -> None:
    facts = {"input": ["a", "b", "c"], "word": "w", "answer": ["c", "a"]}
    every = [line for size in range(6) for line in itertools.product("abcwx", repeat=size)]
    assert len(every) == 3906
    for strict in (False, True):
        found = {line for line in every if is_right(task, write_list(list(line)), facts, strict=strict)}
        assert found == right_lists(task)


def test_exactly_the_latin_squares_count() -> None:
    """24 squares of order 4 have a given first row (576 in all); nothing else of 24 ** 3 ways to go on does."""
    rows = ["".join(row) for row in itertools.permutations("H4CA")]
    found = 0
    for rest in itertools.product(rows, repeat=3):
        lines = [rows[0], *rest]
        right = all(len({line[n] for line in lines}) == 4 for n in range(4))
        assert is_latin("\n".join(",".join(line) for line in lines), list("H4CA")) == right
        found += right
    assert found == 24


def test_what_stands_around_a_latin_square() -> None:
    square = "A,B\nB,A"
    assert is_latin("Here:\n\n A , B \nno,line\nB,A\nA,B", ["A", "B"])  # the first two that fit, spaces aside
    assert is_latin(square, ["A", "B"]) and not is_latin("A,B", ["A", "B"])
    assert not is_latin("A,B\nA,B\nB,A", ["A", "B"])  # the first two that fit are no square
    assert not is_latin("AB\nBA", ["A", "B"]) and not is_latin("", ["A", "B"])
    assert is_latin("A,B,A\nB,A,B", ["A", "B"]) and not is_latin("A,B,A\nB,A,A", ["A", "B"])  # as the benchmark has it


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [
        ("1234\n3412\n2143\n4321", True, True),
        ("\n 1234\n\n3412\n2143 \n4321\n", True, True),
        ("1 2 3 4\n3,4,1,2\n[2, 1, 4, 3]\n4321", True, False),
        ("The grid:\n1234\n3412\n2143\n4321", True, False),
        ("Row 1: 1234\n3412\n2143\n4321", False, False),
        ("1234\n3412\n2143", False, False),
        ("1234\n3412\n2143\n4321\n4321", False, False),
        ("1234\n3412\n2143\n4312", False, False),
        ("1234341221434321", False, False),
        ("", False, False),
    ],
)
def test_two_readings_of_a_grid(text: str, lenient: bool, strict: bool) -> None:
    facts = {"answer": "1234\n3412\n2143\n4321"}
    assert is_right("sudoku", text, facts) is lenient
    assert is_right("sudoku", text, facts, strict=True) is strict
    assert read_grid("1\n22\n333") is None and read_grid("1234\n" * 5, strict=True) is None


def test_sentences() -> None:
    three = Problem("p", "", {"words": ["oven", "soup", "cover"]}, "words_to_sentence/easy")
    assert score_reply(three, "The oven is hot; uncovered soup.") == {"inclusion": 1.0}
    assert score_reply(three, "Soup in the oven, cover it") == score_reply(three, "") == {"inclusion": 0.0}
    problem = Problem("p", "", {"words": ["cow"]}, "words_to_sentence/easy")
    assert score_reply(problem, "A cow.") == {"inclusion": 1.0}

    class Tool:
        def __init__(self) -> None:
            self.asked: list[str] = []

        def check(self, text: str) -> list[str]:
            self.asked.append(text)
            return ["error"] if "a cow is" not in text else []

    tool = Tool()
    check = functools.cache(tool.check)
    assert score_reply(problem, " Here a cow is. ", check=check) == {"score": 1.0, "inclusion": 1.0, "grammar": 1.0}
    assert score_reply(problem, "cow cow", check=check) == {"score": 0.0, "inclusion": 1.0, "grammar": 0.0}
    assert score_reply(problem, " ", check=check) == {"score": 0.0, "inclusion": 0.0, "grammar": 0.0}
    other = Problem("p", "", {"words": ["goat"]}, "words_to_sentence/hard")
    assert score_reply(other, "Here a cow is.", check=check) == {"score": 0.0, "inclusion": 0.0, "grammar": 1.0}
    assert tool.asked == ["Here a cow is.", "cow cow"]  # stripped, never an empty text, each once


def stand_in(monkeypatch: pytest.MonkeyPatch, tool: Any) -> None:
    module: Any = ModuleType("language_tool_python")
    module.LanguageTool = tool
    monkeypatch.setitem(sys.modules, "language_tool_python", module)
    monkeypatch.setattr(parallelbench, "find_spec", lambda name: name)
    monkeypatch.setattr(parallelbench, "version", lambda name: "9.9")


def test_the_grammar_check_starts_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    languages = []
    stand_in(monkeypatch, lambda language: languages.append(language) or "tool")
    for mode in ("auto", "languagetool"):
        tool, said = open_grammar(mode)
        assert tool == "tool"
        assert said == "LanguageTool en-US, default rules, by language_tool_python 9.9"
    assert languages == ["en-US", "en-US"]
    assert open_grammar("off") == (None, "off: inclusion only") and len(languages) == 2

    def fails(language: str) -> None:
        raise ModuleNotFoundError("No java\n install detected.")

    stand_in(monkeypatch, fails)
    assert open_grammar("auto") == (
        None, "not available, inclusion only: language_tool_python: No java install detected."
    )  # fmt: skip
    with pytest.raises(InputError, match=r"does not start: language_tool_python: No java install.*--grammar off"):
        open_grammar("languagetool")
    monkeypatch.setattr(parallelbench, "find_spec", lambda name: None)
    assert "pip install language_tool_python" in open_grammar("auto")[1]


# What is asked ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [task for task in TASKS if task not in SENTENCES])
def test_the_right_reply_of_every_row_is_right_and_an_empty_one_is_not(task: str) -> None:
    for number in range(200):
        problem = make_problem(task, number, seed=1)
        assert score_reply(problem, problem.facts["example"]) == {"score": 1.0, "lenient": 1.0, "strict": 1.0}
        assert score_reply(problem, "") == {"score": 0.0, "lenient": 0.0, "strict": 0.0}
        assert len(problem.turns) == 2 and problem.turns[1] != problem.facts["example"]


def parts(prompt: str) -> tuple[list[str], list[str], list[int]]:
    """List, quoted names outside of it, and indices of a prompt."""
    found = re.search(r"\[.*\]", prompt)
    assert found is not None
    outside = prompt.replace(found.group(), "")
    return (
        json.loads(found.group()),
        re.findall('"([^"]+)"', outside),
        [int(n) for n in re.findall(r"index (\d+), where", outside)],
    )


@pytest.mark.parametrize("task", LISTS)
def test_every_list_answer_follows_from_its_prompt(task: str) -> None:
    for number, shown in itertools.product(range(100), (True, False)):
        problem = make_problem(task, number, seed=3)
        prompt, reply = problem.turns if shown else (problem.prompt, problem.facts["example"])
        people, words, places = parts(prompt)
        made = json.loads(reply)
        if task in ("insert_index", "remove_index", "replace_index"):
            (at,) = places
            kept = people[:at], people[at + (task != "insert_index") :]
            assert made == [*kept[0], *words, *kept[1]] and len(words) == (task != "remove_index")
        elif task.endswith("_random") or task == "shuffle":
            assert is_right(task, reply, {"input": people, "word": (words or [""])[0]}, strict=True) and not places
        else:
            assert made == {"copy": people, "reverse": people[::-1], "sort": sorted(people)}[task]


def test_lists_have_sizes_in_turn_and_people_of_no_training_task() -> None:
    sizes = Counter(len(parts(make_problem("copy", n, seed=0).prompt)[0]) for n in range(100))
    assert sizes == {3: 25, 4: 25, 5: 25, 6: 25}
    long = [make_problem("insert_random", n, seed=0, people=(15,)) for n in range(20)]
    assert all(len(problem.facts["input"]) == 15 and len(json.loads(problem.turns[1])) == 16 for problem in long)
    assert all(len(set(problem.facts["input"])) == 15 for problem in long)
    trained = [task.prompt + task.answer for task in itertools.islice(list_tasks(0), 2000)]
    names = {name for text in trained for person in re.findall('"([^"]+)"', text) for name in person.split()}
    people = {name for n in range(200) for name in " ".join(parts(make_problem("copy", n, seed=5).prompt)[0]).split()}
    both = set(FIRST_NAMES) & set(LAST_NAMES)  # a few first names are last names, too
    assert len(people) >= 40 and people <= set(FIRST) | set(LAST) and not (people - both) & names


def test_every_sudoku_has_one_solution() -> None:
    def is_full(grid: list[int]) -> bool:
        units = [[4 * r + c for c in range(4)] for r in range(4)]
        units += [[4 * r + c for r in range(4)] for c in range(4)]
        units += [[4 * r + c for r in (a, a + 1) for c in (b, b + 1)] for a in (0, 2) for b in (0, 2)]
        return all(sorted(grid[n] for n in unit) == [1, 2, 3, 4] for unit in units)

    assert len(set(grids())) == 288 and all(is_full([int(c) for c in grid]) for grid in grids())
    for number in range(100):
        problem = make_problem("sudoku", number, seed=2)
        for prompt, reply in ((problem.prompt, problem.facts["example"]), problem.turns):
            given = [int(c) for c in "".join(re.findall("^[0-4]{4}$", prompt, re.MULTILINE))]
            blanks = [n for n, digit in enumerate(given) if digit == 0]
            assert len(given) == 16 and len(blanks) == 4
            solved = []
            for digits in itertools.product((1, 2, 3, 4), repeat=4):
                filled = dict(zip(blanks, digits, strict=True))
                grid = [filled.get(n, digit) for n, digit in enumerate(given)]
                solved += [grid] if is_full(grid) else []
            assert ["".join(map(str, grid)) for grid in solved] == [reply.replace("\n", "")]


def test_a_sudoku_with_two_solutions_is_drawn_again() -> None:
    full, other = "1234341221434321", "2134341212434321"  # they differ in four cells, so these open are two solutions
    twofold = [n for n in range(16) if full[n] != other[n]]
    assert {full, other} <= set(grids()) and len(twofold) == 4

    class Rigged(random.Random):
        draws = iter([twofold, [0, 1, 2, 3]])

        def choice(self, seq: Any) -> Any:
            return full

        def sample(self, population: Any, k: int, **_: Any) -> Any:
            return next(self.draws)

    prompt, _, reply = parallelbench_tasks._sudoku(Rigged())
    assert "\n0000\n3412\n2143\n4321\n" in prompt and reply == "1234\n3412\n2143\n4321"


def test_indices_reach_both_ends() -> None:
    for task, last in (("insert_index", 6), ("remove_index", 5), ("replace_index", 5)):
        places = {parts(make_problem(task, 4 * n + 3, seed=0).prompt)[2][0] for n in range(100)}
        assert places == set(range(last + 1))


def test_words_get_harder_by_rule() -> None:
    scene = {word: n for n, words in enumerate(SCENES) for word in words}
    field = {word: n for n, words in enumerate(FIELDS) for word in words}
    every = [*itertools.chain(*SCENES), *itertools.chain(*FIELDS)]
    assert len(every) == len(set(every)) and not [(a, b) for a in every for b in every if a != b and a in b]
    for number in range(100):
        easy, medium, hard = (make_problem(level, number, seed=0) for level in SENTENCES)
        assert len({scene[word] for word in easy.facts["words"]}) == 1 and len(set(easy.facts["words"])) == 4
        assert len({scene[word] for word in medium.facts["words"]}) == 4
        kinds = [("scene", scene[w]) if w in scene else ("field", field[w]) for w in hard.facts["words"]]
        assert len(set(kinds)) == 4 and Counter(kind for kind, _ in kinds) == {"scene": 2, "field": 2}
        for problem in (easy, medium, hard):
            assert all(word in problem.prompt for word in problem.facts["words"]) and problem.turns == ()


@pytest.mark.parametrize("task", TASKS)
def test_a_row_depends_on_task_seed_and_number_alone(task: str) -> None:
    made = [make_problem(task, number, seed=4) for number in range(60)]
    random.seed(1)
    assert [make_problem(task, number, seed=4) for number in reversed(range(60))] == made[::-1]
    assert len({problem.id for problem in made}) == 60
    assert len({problem.prompt for problem in made}) >= 57
    assert make_problem(task, 7, seed=5).prompt != made[7].prompt
    assert make_problem(task, 7, seed=4, shots=0).prompt == made[7].prompt


def test_names_of_tasks_and_groups() -> None:
    assert select(["all"]) == GROUPS
    assert select(["easy", "puzzle", "sort", "waiting_line/copy", "copy"]) == {
        "waiting_line": ("copy", "sort"), "puzzle": ("latin_square", "sudoku"), "words_to_sentence": ("easy",),
    }  # fmt: skip
    with pytest.raises(InputError, match=r"unknown task 'juggle'; known are all, waiting_line, .*puzzle/sudoku"):
        select(["copy", "juggle"])


# The public files ---------------------------------------------------------------------------------------------------


def write_public(folder: Path) -> None:
    """Files of the public form with rows of our own."""
    rows: dict[str, list[dict[str, Any]]] = {
        "waiting_line/sort": [
            {
                "input": {
                    "context": f'["B {n}", "A X"]', "icl_examples": [{"input": {"context": '["Q"]'}, "answer": '["Q"]'}]
                },
                "answer": f'["A X", "B {n}"]',
            }
            for n in range(8)
        ],
        "waiting_line/remove_random": [
            {
                "input": {
                    "context": '["A", "B"]', "icl_examples": [{"input": {"context": "x"}, "answer": {"example": "y"}}]
                },
                "answer": {"input": ["A", "B"], "example": '["B"]'},
            }
        ],
        "words_to_sentence/hard": [{"input": {"words": "a and b"}, "answer": {"words": ["a", "b"], "example": "b a."}}],
    }  # fmt: skip
    for name, lines in rows.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = path.parent / "task_config.yaml"
        text = config.read_text() if config.is_file() else ""
        field = "words" if "words" in name else "context"
        config.write_text(text + f"{name}:\n  prompt: 'Do\\nthis: {{{field}}}.'\n")


def test_files_fill_prompts_and_spread_rows(tmp_path: Path) -> None:
    write_public(tmp_path)
    rows = read_problems(tmp_path, "waiting_line", "sort", n=3)
    assert [row.id for row in rows] == [f"waiting_line/sort/{n:04}" for n in (0, 2, 5)]
    assert rows[1].prompt == 'Do\nthis: ["B 2", "A X"].' and rows[1].turns == ('Do\nthis: ["Q"].', '["Q"]')
    assert rows[1].facts == {"example": '["A X", "B 2"]', "answer": ["A X", "B 2"]}
    assert len(read_problems(tmp_path, "waiting_line", "sort")) == 8
    (removed,) = read_problems(tmp_path, "waiting_line", "remove_random", n=5)
    assert removed.turns == ("Do\nthis: x.", "y") and removed.facts["input"] == ["A", "B"]
    assert read_problems(tmp_path, "waiting_line", "remove_random", shots=0)[0].turns == ()
    (words,) = read_problems(tmp_path, "words_to_sentence", "hard", shots=1)
    assert words.facts["words"] == ["a", "b"] and words.turns == ()


def test_only_line_feeds_end_a_row_and_blank_lines_are_none(tmp_path: Path) -> None:
    write_public(tmp_path)
    file = tmp_path / "words_to_sentence" / "hard.jsonl"
    line = {"input": {"words": "a\u2028b"}, "answer": {"words": ["a", "b"], "example": "b a."}}
    file.write_text("\n" + json.dumps(line, ensure_ascii=False) + "\n\n")
    (row,) = read_problems(tmp_path, "words_to_sentence", "hard")
    assert (row.id, row.prompt) == ("words_to_sentence/hard/0000", "Do\nthis: a\u2028b.")


def test_broken_files_are_named(tmp_path: Path) -> None:
    write_public(tmp_path)
    with pytest.raises(InputError, match=r"cannot read .*puzzle.task_config.yaml: No such file"):
        read_problems(tmp_path, "puzzle", "sudoku")
    with pytest.raises(InputError, match=r"has no prompt of waiting_line/copy"):
        read_problems(tmp_path, "waiting_line", "copy")
    with pytest.raises(InputError, match="has 1 examples a row; shots is 2"):
        read_problems(tmp_path, "waiting_line", "sort", shots=2)
    with (tmp_path / "waiting_line" / "sort.jsonl").open("a") as file:
        file.write('{"input": {}}\n')
    with pytest.raises(InputError, match=r"sort.jsonl, row 9 is no row of sort: KeyError"):
        read_problems(tmp_path, "waiting_line", "sort")


@pytest.mark.skipif("ADJUST_DATA" not in os.environ, reason="want the published data (ADJUST_DATA=FOLDER)")
@pytest.mark.parametrize("task", TASKS)
def test_every_public_answer_is_right_and_an_empty_reply_is_not(task: str) -> None:
    folder = Path(os.environ["ADJUST_DATA"]) / "parallelbench"
    group = next(group for group, tasks in GROUPS.items() if task in tasks)
    problems = read_problems(folder, group, task)
    assert len(problems) == (108 if task == "sudoku" else 100)
    zero = {"inclusion": 0.0} if task in SENTENCES else {"score": 0.0, "lenient": 0.0, "strict": 0.0}
    for problem in problems:
        reply = problem.facts["example"] or " ".join(problem.facts["words"])  # few sentences are given
        assert score_reply(problem, reply) == dict.fromkeys(zero, 1.0), problem.id
        assert score_reply(problem, "") == zero
        assert len(problem.turns) == (0 if task in SENTENCES else 2)
        if task in SENTENCES:
            words = problem.facts["words"]
            assert all(score_reply(problem, " ".join(words[:n] + words[n + 1 :])) == zero for n in range(len(words)))
            continue
        assert score_reply(problem, problem.turns[1])["lenient"] == (task == "latin_square" and same_symbols(problem))
        for reply in right_replies(task, problem.facts):
            assert score_reply(problem, reply)["strict"] == 1.0
        for reply in wrong_replies(problem.facts):
            assert score_reply(problem, reply)["lenient"] == 0.0


def same_symbols(problem: Problem) -> bool:
    return set(re.findall("[^,\n]", problem.turns[1])) == set(problem.facts["symbols"])


def right_replies(task: str, facts: dict[str, Any]) -> list[str]:
    """All right replies to a random kind, written down from the row."""
    people, word = facts.get("input", []), facts.get("word", "")
    lists = {
        "insert_random": [[*people[:n], word, *people[n:]] for n in range(len(people) + 1)],
        "remove_random": [[*people[:n], *people[n + 1 :]] for n in range(len(people))],
        "replace_random": [[*people[:n], word, *people[n + 1 :]] for n in range(len(people))],
        "shuffle": [people[n:] + people[:n] for n in range(1, len(people))],
    }
    return [write_list(line) for line in lists.get(task, [])]


def wrong_replies(facts: dict[str, Any]) -> list[str]:
    """Near misses of a list: a person twice, and the unchanged input of a random kind."""
    people = facts.get("input") or facts.get("answer")
    if not isinstance(people, list):
        return []
    return [write_list([*people, people[0]]), *([write_list(people)] if "input" in facts else [])]


# A run --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def base() -> Base:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant:"
    )
    return chat_base(context=2048, template=template)


def settings(tmp_path: Path, **changes: Any) -> ParallelBenchConfig:
    plain = {"output": str(tmp_path), "decoders": ("parallel",), "tokens_per_step": (8,), "n": 3, "device": "cpu"}
    return ParallelBenchConfig(**{**plain, **changes})


def test_a_run_counts_by_task_and_averages_tasks(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder is replaced by one that knows some answers: the first two rows of copy, and every sudoku."""
    asked: list[tuple[str, int]] = []

    def replies(base: Base, helpers: Any, variant: str, prompts: Any, config: Any, **_: Any) -> list[Any]:
        out = []
        for row, ids in enumerate(prompts):
            text = base.tokenizer.decode(ids)
            asked.append((text, config.max_new_tokens))
            prompt = text.rpartition("user:")[2].partition("<|im_end|>")[0]
            known = {p.prompt: p for t in ("copy", "sudoku") for p in (make_problem(t, n, seed=6) for n in range(2))}
            reply = known[prompt].facts["example"].replace('"', "") if prompt in known else "[]"
            out.append(generation.Generated(row, base.tokenizer.encode(reply), 4, 4, 0, 0, 0.5))
        return out

    monkeypatch.setattr("adjust_dlm.eval.downstream.generate_rows", replies)
    for group in ("waiting_line", "puzzle"):
        (tmp_path / group).mkdir()  # the real one keeps its texts there
    config = settings(tmp_path, tasks=("copy", "reverse", "sudoku"), n=2, task_seed=6)
    out = run_parallelbench(config, base)
    rows = {(row["group"], row["task"]): row for row in out["rows"]}
    assert list(rows) == [("waiting_line", "copy"), ("waiting_line", "reverse"), ("puzzle", "sudoku")]
    copied, wilson = rows["waiting_line", "copy"], 1 - 1 / (1 + 1.96**2 / 2)  # 1 - its lower end
    assert (copied["n"], copied["score"], copied["lenient"], copied["strict"]) == (2, 1.0, 1.0, 0.0)  # no quotes
    assert copied["score_ci95"] == pytest.approx(wilson)
    lists, puzzle = out["macro_averages"]
    assert (lists["group"], lists["tasks"], lists["macro_score"], lists["macro_strict"]) == (
        "waiting_line",
        2,
        0.5,
        0.0,
    )
    assert lists["macro_score_ci95"] == pytest.approx(wilson / 2**0.5)
    assert (puzzle["macro_score"], puzzle["macro_strict"]) == (1.0, 1.0) and puzzle["base_calls"] == 4
    assert [most for _, most in asked] == [32] * 4 + [64] * 2  # each group has its canvas
    example = make_problem("copy", 0, seed=6)
    shown = "".join(f"<|im_start|>{role}:{text}<|im_end|>" for role, text in zip(
        ("user", "assistant", "user"), (*example.turns, example.prompt), strict=True))  # fmt: skip
    assert asked[0][0] == f"{shown}<|im_start|>assistant:"
    assert copied["too_long"] == 2 and rows["puzzle", "sudoku"]["too_long"] == 0  # a letter is a token here
    assert out["about"] == {"grammar": "not needed"}
    lines = (tmp_path / "waiting_line" / "samples-parallel-tokens_per_step=8.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [
        f"waiting_line/{t}/{n:04}" for t in ("copy", "reverse") for n in (0, 1)
    ]


def test_sentences_with_and_without_grammar(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Tool:
        def check(self, text: str) -> list[str]:
            return []

        def close(self) -> None:
            closed.append(1)

    config = settings(tmp_path, tasks=("easy",))
    monkeypatch.setattr(parallelbench, "open_grammar", lambda mode: (Tool(), f"tool {mode}"))
    out = run_parallelbench(config, base)
    assert out["about"]["grammar"] == "tool auto" and closed == [1]
    assert {"score", "inclusion", "grammar"} <= set(out["rows"][0]) and out["rows"][0]["n"] == 3
    monkeypatch.setattr(parallelbench, "open_grammar", lambda mode: (None, "no tool"))
    row = run_parallelbench(config, base)["rows"][0]
    assert "inclusion" in row and not {"score", "grammar", "too_long"} & set(row)
    monkeypatch.setattr(parallelbench, "evaluate", None)
    monkeypatch.setattr(parallelbench, "open_grammar", lambda mode: (Tool(), ""))
    with pytest.raises(TypeError):
        run_parallelbench(config, base)
    assert closed == [1, 1]  # the server ends whatever happens


def test_files_take_the_place_of_generated_rows(base: Base, tmp_path: Path) -> None:
    write_public(tmp_path / "data")
    config = settings(tmp_path, tasks=("sort",), data=str(tmp_path / "data"), n=0)
    out = run_parallelbench(config, base)
    assert out["rows"][0]["n"] == 8


def test_settings(tmp_path: Path) -> None:
    config = settings(tmp_path)
    assert config.for_group("puzzle").max_new_tokens == 64 and config.for_group("waiting_line").max_new_tokens == 32
    long = settings(tmp_path, people=(15,))
    assert long.group_name("waiting_line") == "waiting_line_n15" and long.group_name("puzzle") == "puzzle"
    assert long.for_group("waiting_line_n15").max_new_tokens == 128
    assert settings(tmp_path, max_new_tokens=48).for_group("puzzle").max_new_tokens == 48
    assert (config.temperature, config.chat, config.shots) == (0.0, True, 1)
    for changes, said in (
        ({"tasks": ("juggle",)}, "unknown task 'juggle'"),
        ({"tasks": ()}, "name at least one task"),
        ({"n": -1}, "n is -1"),
        ({"people": (1, 3)}, r"people is \[1, 3\]"),
        ({"shots": 9}, "shots is 9"),
        ({"decoders": ("magic",)}, "unknown decoder 'magic'"),
        ({"block_length": 0}, "block_length is 0"),
    ):
        with pytest.raises(InputError, match=said):
            settings(tmp_path, **changes)
