"""HumanEval and MBPP: programs that a base writes, run against the tests of their problems.

The programs run on this machine (docs/code-execution.md), so nothing happens before `allow_code_execution` is set.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from adjust_dlm.bases import Base
from adjust_dlm.eval.downstream import Scores, Task, evaluate, with_shots
from adjust_dlm.eval.generation import over_ranks
from adjust_dlm.eval.tasks.extract import answered, between_marks, continued, told
from adjust_dlm.eval.tasks.sandbox import PROTECTIONS, Limits, run_programs
from adjust_dlm.eval.tasks.settings import CodeConfig, HumanEvalConfig, MbppConfig
from adjust_dlm.eval.tasks.task_files import Problem, Row, first_rows, read_rows
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import require

log = logging.getLogger(__name__)
BEGIN, DONE = "[BEGIN]", "[DONE]"
EXAMPLE_IDS = (2, 3, 4, 1, 5, 6, 7, 8, 9, 10)  # MBPP's own examples, those of the usual three first
TEST_IDS = range(11, 511)
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that one of k samples is right, unbiased: 1 - C(n - right, k) / C(n, k)."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def run(
    config: HumanEvalConfig | MbppConfig, base: Base | None = None, sampler: Sampler | None = None
) -> dict[str, Any]:
    """`adjust eval humaneval` and `mbpp`: see `evaluate`; `sandbox` says what the programs were kept from."""
    task = MBPP if isinstance(config, MbppConfig) else HUMANEVAL
    config.check_files()
    [tried] = run_programs([["assert 1"]], Limits(seconds=30, memory_mb=config.memory_mb))
    if tried.status != "passed":
        raise RuntimeError(f"the sandbox cannot run a program of one line: {tried.message}")
    wanted = [name for name in PROTECTIONS if name != "user" or os.geteuid() == 0]  # others have no root to give up
    missing = [name for name in wanted if name not in tried.protections]
    if missing:
        log.warning("the sandbox runs without %s (docs/code-execution.md says what each does)", ", ".join(missing))
    out = evaluate(task, config, base, sampler)
    return out | {"sandbox": {"protections": list(tried.protections), "limits": asdict(config.limits())}}


def _score(program: Callable[[Problem, str, CodeConfig], list[str]]) -> Callable[..., list[list[Scores]]]:
    """Runs every reply, as a program of some parts, against its problem's tests; see `Task.score`.

    pass@1 of a completion is its own 0 or 1, so that the mean over a problem's completions is the estimate; a larger k
    is that of its problem, the same for each.
    """

    def score(problems: Sequence[Problem], replies: Sequence[list[str]], config: CodeConfig) -> list[list[Scores]]:
        programs = [program(p, reply, config) for p, group in zip(problems, replies, strict=True) for reply in group]
        results = over_ranks(programs, lambda mine: run_programs(mine, config.limits(), workers=config.workers or None))
        log.info("programs: %s", dict(Counter(result.status for result in results)))
        out, passed = [], iter([result.status == "passed" for result in results])
        for group in replies:
            mine = [next(passed) for _ in group]
            of_all = {k: pass_at_k(len(mine), sum(mine), k) for k in config.ks}
            out.append([{f"pass@{k}": float(right) if k == 1 else v for k, v in of_all.items()} for right in mine])
        return out

    return score


def humaneval_problems(config: HumanEvalConfig) -> list[Problem]:
    """The problems of a file of HumanEval's form, with `shots` solved ones before each."""
    fields = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    rows = read_rows(config.data, fields, texts=fields[1:])
    ask = ask_to_complete if config.chat else str
    shots = [
        (ask(row["prompt"]), _fence(row["prompt"] + row["canonical_solution"]) if config.chat
         else row["canonical_solution"].rstrip())
        for row in first_rows(config.examples, config.shots, fields, fields[1:])
    ]  # fmt: skip
    return [
        with_shots(
            str(row["task_id"]), ask(row["prompt"]), shots,
            {name: row[name] for name in ("prompt", "entry_point", "test")}, chat=config.chat, form="{}{}\n\n\n",
        )
        for row in rows
    ]  # fmt: skip


def ask_to_complete(prompt: str) -> str:
    """The user's turn of a chat about a function of HumanEval's form."""
    asked = "Complete the Python function below. Reply with one code block that holds the whole function."
    return f"{asked}\n\n{_fence(prompt)}"


def _fence(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


def humaneval_program(problem: Problem, reply: str, config: CodeConfig) -> list[str]:
    """Parts: what the reply says, the tests, their call."""
    prompt, entry, test = (problem.facts[name] for name in ("prompt", "entry_point", "test"))
    made = (answered if config.chat else continued)(prompt, entry, reply)
    return [*made, test, f"check({entry})"]


def mbpp_problems(config: MbppConfig) -> list[Problem]:
    """Problems 11 to 510 of a file of MBPP's form, with the first `shots` of its examples before each."""
    rows = read_rows(config.data, ("task_id", "code", "test_list"), texts=("code",))
    sanitized = "test_imports" in rows[0]
    question, setup = ("prompt", "test_imports") if sanitized else ("text", "test_setup_code")
    for row in rows:
        _check_mbpp(row, question, setup, f"problem {row['task_id']!r} of {config.data}")
    by_id = {int(row["task_id"]): row for row in rows}
    shown = [by_id[n] for n in EXAMPLE_IDS if n in by_id][: config.shots]
    require(
        len(shown) == config.shots,
        f"{config.data} has {len(shown)} of MBPP's examples (1..10); shots is {config.shots}",
    )
    shots = [
        (_ask_for_program(row, question, config.chat), _fence(code) if config.chat else code)
        for row in shown
        for code in [row["code"].replace("\r\n", "\n").strip()]
    ]
    out = []
    for row in (by_id[n] for n in TEST_IDS if n in by_id):
        before = row[setup] if isinstance(row[setup], str) else "\n".join(row[setup])
        facts, ask = {"tests": list(row["test_list"]), "setup": before}, _ask_for_program(row, question, config.chat)
        out.append(with_shots(str(row["task_id"]), ask, shots, facts, chat=config.chat, form=f"{{}}{{}}\n{DONE}\n\n"))
    return out


def _check_mbpp(row: Row, question: str, setup: str, where: str) -> None:
    require(str(row["task_id"]).isdecimal(), f"{where}: its task_id is no number")
    require(isinstance(row.get(question), str), f"{where}: {question} is {row.get(question)!r}; text is wanted")
    for name in ("test_list", setup):
        value = row.get(name)
        lines = [value] if name == setup and isinstance(value, str) else value
        good = isinstance(lines, list) and all(isinstance(line, str) for line in lines)
        require(good, f"{where}: {name} is {value!r}; a list of texts is wanted")


def _ask_for_program(row: Row, question: str, chat: bool) -> str:
    """The wording that the benchmark's paper prints."""
    asked = (
        f"You are an expert Python programmer, and here is your task: {row[question]} "
        "Your code should pass these tests:"
    )
    end = "\n\nReply with one code block of Python that holds the whole program." if chat else f"\n{BEGIN}\n"
    return "\n".join([asked, "", *row["test_list"]]) + end


def mbpp_program(problem: Problem, reply: str, config: CodeConfig) -> list[str]:
    """Parts: what the reply says, what the tests need, the tests."""
    tests = "\n".join(problem.facts["tests"])
    text = between_marks(reply, BEGIN, DONE)
    return [told(text, set(_CALLED.findall(tests))) if config.chat else text, problem.facts["setup"], tests]


HUMANEVAL = Task(
    "humaneval", humaneval_problems, _score(humaneval_program),
    about={
        "rule": "passes all tests of its problem; pass@k is the unbiased estimate",
        "base": "prompt + completion up to the first new statement at the left edge",
        "chat": "last whole code block that defines the function, the prompt's imports and helpers before it",
    },
)  # fmt: skip
MBPP = Task(
    "mbpp", mbpp_problems, _score(mbpp_program),
    about={
        "rule": "passes all of test_list; pass@k is the unbiased estimate",
        "base": f"completion up to {DONE}",
        "chat": "last whole code block that defines what the tests call",
    },
)  # fmt: skip
