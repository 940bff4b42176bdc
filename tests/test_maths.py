r"""MATH: which answer a solution gives, which answers are the same, the harness' own scores, prompts and whole runs."""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm import cli
from adjust_dlm.eval.by_value import all_verified
from adjust_dlm.eval.downstream import Problem, cut_at_stop
from adjust_dlm.eval.tasks import maths
from adjust_dlm.eval.tasks.maths import STOP, MathConfig, final_answer, gold, last_boxed, make_task, problems
from adjust_dlm.eval.tasks.task_files import read_rows
from adjust_dlm.types import InputError
from scripted import answer_with

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "lm_eval" / "scores.json").read_text(encoding="utf-8"))
REAL = os.environ.get("ADJUST_DATA")
real = pytest.mark.skipif(REAL is None, reason="want the published data (ADJUST_DATA=FOLDER)")

SHORT = [  # the form of the 500
    {
        "problem": "What is $3 + 4$?", "solution": r"It is $\boxed{7}$.", "answer": "7", "subject": "Prealgebra",
        "level": 1, "unique_id": "test/prealgebra/1.json",
    },
    {
        "problem": "Halve $1$.", "solution": r"\[ \boxed{\dfrac{1}{2}} \]", "answer": r"\frac{1}{2}",
        "subject": "Algebra", "level": 1, "unique_id": "test/algebra/2.json",
    },
    {
        "problem": "Double $1$.", "solution": r"So $\boxed{2\text{ units}}$.", "answer": "2", "subject": "Algebra",
        "level": 2, "unique_id": "test/algebra/3.json",
    },
]  # fmt: skip
LONG = [  # the form of the 5,000
    {"problem": "Count to four.", "level": "Level 1", "type": "Algebra", "solution": r"First $\boxed{3}$, no, "
     r"$\boxed{4}$.", "idx": 0},
    {"problem": "Name it.", "level": "Level 2", "type": "Geometry", "solution": r"\fbox{\text{ellipse}}", "idx": 1},
]  # fmt: skip
SHOTS = [
    {"problem": "Half of $8$?", "solution": r"It is $\boxed{4}$."},
    {"problem": "Third of $9$?", "solution": "Three.\nFinal Answer: The final answer is $3$. I hope it is correct."},
]

# Case H16 first.
BOXES = [
    (r"\boxed{2} ... no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\[ \boxed{42} \]", "42"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\frac{1}{2", None),
    ("no box", None),
    (r"\boxed{\frac{1}{2}} and \boxed{\frac{1}{3}}", r"\frac{1}{3}"),
    (r"\boxed{2} then \boxed{3", None),  # what it took back does not come to life again
    (r"\boxed{\left\{ x \mid x > 0 \right.}", r"\left\{ x \mid x > 0 \right."),  # one brace alone, escaped
    (r"\boxed{a \\{b}}", r"a \\{b}"),  # two backslashes escape no brace
    (r"\fbox{9}", "9"),
    (r"\boxed{1} or \fbox{9}", "9"),
    (r"$\boxed 7$ is it", "7"),
    (r"\boxed  {8}", "8"),
    (r"\boxed", None),
    (r"\boxedsum{3}", None),
    (r"\boxed{\boxed{5}}", "5"),
]
FINAL_LINES = [
    ("Final Answer: The final answer is $5$. I hope it is correct.", "$5$"),
    ("Final Answer: The final answer is 0.5. I hope it is correct.", "0.5"),
    ("Final Answer: The final answer is $5$. I hope", "$5$"),
    ("Final Answer: The final answer is $5$.", "$5$"),
    ("Final Answer: The final answer is 4.\nFinal Answer: The final answer is 5. I hope it is correct.", "4"),
    ("Final Answer: The final answer is", None),
    ("The answer is 5.", None),
]

# Where lm-evaluation-harness' exact_match says something else than our `minerva`: completion -> (ours, why)
DIFFERENCES = {
    "cut off": (1.0, "without its last words the line counts here"),
    "left right": (1.0, r"\left and \right stay there, and its parser reads no tuples"),
    "leading point": (1.0, "its parser reads no .5"),
    "percent": (1.0, r"\% stays there"),
    "repeating decimal": (0.0, r"it drops \overline: 0.333... is 0.3 there"),
    "two equations": (0.0, "it keeps what follows the last =, so that x=1 and x=3 are the same"),
}
# math-verify reads 7\% as 0.07 with one parser version and not at all with another, and then 7 is right or wrong
BY_VERSION = {"percent"}


def grade(text: str, right: str) -> dict[str, float]:
    config = MathConfig(shots=0)
    return maths.score([Problem("", "", {"gold": right})], [[text]], config)[0][0]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, rows in (("short", SHORT), ("long", LONG), ("shots", SHOTS)):
        (tmp_path / f"{name}.jsonl").write_text(lines(rows))
    return {"data": str(tmp_path / "short.jsonl"), "shots_data": str(tmp_path / "shots.jsonl")}


@pytest.mark.parametrize(("text", "answer"), BOXES)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(("text", "answer"), FINAL_LINES)
def test_the_final_answer_line(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_the_line_is_the_only_answer_of_minerva() -> None:
    line = "Final Answer: The final answer is $5$. I hope it is correct."
    assert grade(r"\boxed{4}", "4") == {"math_verify": 1.0, "minerva": 0.0}
    assert grade(line, "5") == {"math_verify": 1.0, "minerva": 1.0}
    assert grade("nothing", "5") == grade("", "5") == {"math_verify": 0.0, "minerva": 0.0}
    assert grade(r"It is $\boxed{0.5}$.", r"\frac{1}{2}")["math_verify"] == 1.0
    assert grade(r"It is $\boxed{\frac{1}{2$.", r"\frac{1}{3}")["math_verify"] == 0.0


@pytest.mark.parametrize("piece", ["$", ".", " ", "{", "1,", "-", "x_{", "\\text{", "\\frac", "\\boxed{", "\\,", "a("])
def test_a_canvas_full_of_one_thing_takes_no_minutes(piece: str) -> None:
    started = time.perf_counter()
    text = piece * (10_000 // len(piece))
    assert final_answer(text) is None and not last_boxed(text)
    assert time.perf_counter() - started < 5


def test_scores_are_those_of_lm_evaluation_harness() -> None:
    other = {}
    for case in RECORDED["minerva_math"]:
        ours = grade(cut_at_stop(case["text"], STOP), gold(case, ""))
        if ours["minerva"] != case["cut"]["exact_match"]:
            other[case["name"]] = ours["minerva"]
        if case["name"] not in BY_VERSION:
            assert ours["math_verify"] == case["cut"]["math_verify"], case["name"]
    assert len(RECORDED["minerva_math"]) >= 25
    assert other == {name: ours for name, (ours, _) in DIFFERENCES.items()}
    assert sum(case["cut"]["math_verify"] for case in RECORDED["minerva_math"]) == 23


def test_other_processes_verify_the_same() -> None:
    """Enough of them that two workers are started."""
    pairs = [(r"\boxed{0.5}", "1/2"), (r"\boxed{4}", "3"), (r"so it is $\sqrt{2}$", r"\sqrt{2}")] * 30
    assert all_verified(pairs, workers=2) == [True, False, True] * 30
    assert all_verified(pairs[:3], workers=1) == [True, False, True]
    assert all_verified([], workers=2) == []
    with pytest.raises(RuntimeError, match=r"ended with 1: TypeError: verified\(\) missing 1"):
        all_verified([("only a text",)] * 90, workers=2)  # type: ignore[list-item]


def test_what_is_installed_is_said(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    said = make_task().about["math_verify"]
    assert f"math-verify {version('math-verify')}" in said and f"sympy {version('sympy')}" in said
    monkeypatch.setattr("adjust_dlm.eval.tasks.settings.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"MATH needs math-verify: pip install 'adjust-dlm\[maths\]'"):
        MathConfig(**files)


def test_prompts(files: dict[str, str]) -> None:
    made = problems(MathConfig(**files, shots=2))
    line = "Final Answer: The final answer is $4$. I hope it is correct."
    assert made[0].prompt == (
        f"Problem:\nHalf of $8$?\n\nSolution: It is $\\boxed{{4}}$.\n{line}\n\n"
        "Problem:\nThird of $9$?\n\nSolution: Three.\nFinal Answer: The final answer is $3$. I hope it is correct.\n\n"
        "Problem:\nWhat is $3 + 4$?\n\nSolution:"
    )
    assert [(p.id, p.kind) for p in made[:2]] == [
        ("test/prealgebra/1.json", "Prealgebra"),
        ("test/algebra/2.json", "Algebra"),
    ]
    chat = problems(MathConfig(**files, shots=1, chat=True))[0]
    assert chat.turns == ("Problem:\nHalf of $8$?\n\nSolution:", f"It is $\\boxed{{4}}$.\n{line}")
    assert [p.id for p in problems(MathConfig(**files, shots=0, per_subject=1))] == [made[0].id, made[1].id]


def test_both_kinds_of_files(files: dict[str, str], tmp_path: Path) -> None:
    made = problems(MathConfig(data=str(tmp_path / "long.jsonl"), shots=0))
    assert [(p.id, p.kind, p.facts["gold"]) for p in made] == [
        ("0", "Algebra", "4"),
        ("1", "Geometry", r"\text{ellipse}"),
    ]
    (tmp_path / "bad.jsonl").write_text(lines([{"problem": "?", "solution": r"\boxed{1"}]))
    with pytest.raises(InputError, match=r"bad.jsonl, row 1 has no answer, and no closed box in its solution"):
        problems(MathConfig(data=str(tmp_path / "bad.jsonl"), shots=0))
    for row, said in (
        ({"problem": None, "answer": "1"}, "row 1: problem is None; text is wanted"),
        ({"problem": "?", "solution": None}, "row 1 has no answer"),
        ({"problem": "?", "answer": None}, "row 1 has no answer"),
    ):
        (tmp_path / "bad.jsonl").write_text(lines([row]))
        with pytest.raises(InputError, match=said):
            problems(MathConfig(data=str(tmp_path / "bad.jsonl"), shots=0))
    (tmp_path / "zero.jsonl").write_text(lines([{"problem": "$0 + 0$?", "answer": 0}]))
    assert problems(MathConfig(data=str(tmp_path / "zero.jsonl"), shots=0))[0].facts["gold"] == "0"
    with pytest.raises(InputError, match="4 examples are asked for and no file of them is named"):
        MathConfig(data=files["data"])
    with pytest.raises(InputError, match="has 2 examples, 4 are asked for"):
        problems(MathConfig(**files))
    with pytest.raises(InputError, match="per_subject is -1"):
        MathConfig(shots=0, per_subject=-1)


def test_a_run_of_the_command(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], tmp_path: Path) -> None:
    line = "Final Answer: The final answer is $1/2$. I hope it is correct.\n\nProblem:\nNext \\boxed{3}"
    seen = answer_with(monkeypatch, [r"\[ \boxed{7} \]", line, ""])
    flags = ["--data", files["data"], "--shots-data", files["shots_data"], "--shots", "2"]
    run = ["eval", "math", *flags, "--decoders", "parallel", "--tokens-per-step", "4", "--output", str(tmp_path / "o")]
    assert cli.main(run) == 0
    row = json.loads((tmp_path / "o" / "result.json").read_text())["results"]["rows"][0]
    assert row["metrics"]["math_verify"]["mean"] == pytest.approx(2 / 3)
    assert row["metrics"]["minerva"]["mean"] == pytest.approx(1 / 3)
    assert [row["kinds"][name]["math_verify"]["mean"] for name in ("Prealgebra", "Algebra")] == [1.0, 0.5]
    assert row["kinds"]["Algebra"]["math_verify"]["n"] == 2
    assert seen[0].startswith("<|endoftext|>Problem:\nHalf of $8$?") and seen[0].endswith(
        "What is $3 + 4$?\n\nSolution:"
    )


def check_gold(config: MathConfig, rows: list[dict[str, Any]]) -> None:
    for problem, row in zip(problems(config), rows, strict=True):
        written = maths.written({"answer": problem.facts["gold"], **row}, "")
        assert grade(written, problem.facts["gold"])["minerva"] == 1.0, written
        assert r"\fbox" in written or grade(row["solution"], problem.facts["gold"])["math_verify"] == 1.0


def test_gold_answers_score_one(files: dict[str, str], tmp_path: Path) -> None:
    check_gold(MathConfig(data=files["data"], shots=0), SHORT)
    check_gold(MathConfig(data=str(tmp_path / "long.jsonl"), shots=0), LONG)


@real
@pytest.mark.parametrize(("file", "count"), [("math500_test.jsonl", 500), ("math_test_5000.jsonl", 5000)])
def test_published_gold_answers(file: str, count: int) -> None:
    path = str(Path(str(REAL)) / "math" / file)
    assert len(read_rows(path)) == count == len(problems(MathConfig(data=path, shots=0)))


def test_defaults_are_those_of_base_models() -> None:
    config = MathConfig(shots_data="train.jsonl")
    assert (config.shots, config.max_new_tokens, config.temperature, config.chat) == (4, 512, 0.0, False)
