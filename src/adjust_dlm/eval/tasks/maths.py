r"""MATH: competition problems whose answer stands in a box, asked as Minerva's evaluation asks.

math-verify compares by value: `math_verify` what it finds in the completion, `minerva` what the line "Final Answer: The
final answer is X. I hope it is correct." says and nothing else, as lm-evaluation-harness' `minerva_math`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from adjust_dlm.eval.by_value import all_verified
from adjust_dlm.eval.downstream import Scores, Task, evaluate, with_shots
from adjust_dlm.eval.generation import over_ranks
from adjust_dlm.eval.tasks.gsm8k import END_WORDS
from adjust_dlm.eval.tasks.sandbox import available_workers
from adjust_dlm.eval.tasks.settings import MathConfig
from adjust_dlm.eval.tasks.task_files import Problem, Row, first_rows, read_rows
from adjust_dlm.types import require

STOP = ("Problem:", *END_WORDS)
_BOX = re.compile(r"(?<!\\)\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is none
_FINAL = re.compile(r"Final Answer: The final answer is\s*(.*?)\.?\s*(?:I hope|\n|\Z)")


def run(config: MathConfig) -> dict[str, Any]:
    """Evaluates the decoders on MATH; see `evaluate`."""
    return evaluate(make_task(), config)


def make_task() -> Task:
    """MATH, and the versions that decide about some answers."""
    packages = ("math-verify", "sympy", "latex2sympy2_extended", "antlr4-python3-runtime")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    about = {"math_verify": versions, "minerva": "the final answer line, by the same packages"}
    return Task("math", problems, score, STOP, about)


def problems(config: MathConfig) -> list[Problem]:
    """The file's problems in its order, each behind the examples; the subject is the kind.

    Raises:
        InputError: a row without problem or answer, or too few examples.
    """
    shots = _shots(config)
    out, seen = [], Counter[str]()
    for number, row in enumerate(read_rows(config.data, ("problem",), texts=("problem",)), start=1):
        kind = str(row.get("subject", row.get("type", "")))
        seen[kind] += 1
        if config.per_subject and seen[kind] > config.per_subject:
            continue
        name = str(row.get("unique_id", row.get("idx", number)))
        facts = {"gold": gold(row, f"{config.data}, row {number}")}
        out.append(with_shots(name, _ask(row), shots, facts, kind=kind, chat=config.chat))
    few = [f"{kind} ({count})" for kind, count in sorted(seen.items()) if count < config.per_subject]
    require(not few, f"per_subject is {config.per_subject}; {config.data} has fewer of {', '.join(few)}")
    return out


def gold(row: Row, where: str) -> str:
    """The row's answer as written: its own field, or the last box of its solution.

    Raises:
        InputError: neither is there.
    """
    answer, solution = row.get("answer"), row.get("solution")
    if answer is None and isinstance(solution, str):
        answer = last_boxed(solution)
    require(answer is not None and answer != "", f"{where} has no answer, and no closed box in its solution")
    return str(answer)  # a number, too


def _ask(row: Row) -> str:
    return f"Problem:\n{row['problem'].strip()}\n\nSolution:"


def _shots(config: MathConfig) -> list[tuple[str, str]]:
    rows = first_rows(config.shots_data, config.shots, ("problem", "solution"), ("problem", "solution"))
    return [(_ask(row), written(row, f"{config.shots_data}, row {n}")) for n, row in enumerate(rows, start=1)]


def written(row: Row, where: str) -> str:
    """The solution of a row with the final answer line that Minerva's examples end in."""
    solution: str = row["solution"].strip()
    if final_answer(solution) is not None:
        return solution
    answer = " ".join(gold(row, where).split())  # the line is one
    return f"{solution}\nFinal Answer: The final answer is ${answer}$. I hope it is correct."


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed` or `\fbox`, up to the brace that closes it; None without one, or if it stays open.

    A box without braces holds the text up to white space or $.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start : start + 1] != "{":
        return re.split(r"[\s$]", text[start:], maxsplit=1)[0] or None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()]
    return None


def final_answer(text: str) -> str | None:
    """X of the first "Final Answer: The final answer is X. I hope it is correct."; the last words may lack."""
    found = _FINAL.search(text)
    return found[1].strip() or None if found else None


def score(items: Sequence[Problem], texts: Sequence[list[str]], config: MathConfig) -> list[list[Scores]]:
    """See `Task.score`."""
    pairs = [(text, problem.facts["gold"]) for problem, group in zip(items, texts, strict=True) for text in group]
    lines = [(f"$\\boxed{{{(final_answer(text) or '').strip(' $')}}}$", right) for text, right in pairs]
    values = over_ranks([*pairs, *lines], lambda mine: all_verified(mine, workers=available_workers()))
    made = iter(zip(values[: len(pairs)], values[len(pairs) :], strict=True))
    return [[dict(zip(("math_verify", "minerva"), map(float, next(made)), strict=True)) for _ in g] for g in texts]
