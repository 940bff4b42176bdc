r"""MATH: competition problems whose answer stands in a box, asked as Minerva's evaluation asks.

`exact` takes the last box, or the line "Final Answer: The final answer is X. I hope it is correct." where no box is
closed, and compares normalised LaTeX. `minerva` takes that line only, as lm-evaluation-harness' `minerva_math`.
`math_verify`, where the package of this name is installed, parses the completion and compares by value.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from adjust_dlm.eval.by_value import all_verified, verified
from adjust_dlm.eval.downstream import DownstreamConfig, Problem, Scores, Task, evaluate
from adjust_dlm.eval.tasks.gsm8k import END_WORDS
from adjust_dlm.eval.tasks.latex import final_answer, find_answer, last_boxed, normalize
from adjust_dlm.eval.tasks.sandbox import available_workers
from adjust_dlm.eval.tasks.shots import Shot, first_shots, with_shots
from adjust_dlm.eval.tasks.task_files import Row, read_rows
from adjust_dlm.train.distributed import from_all_ranks
from adjust_dlm.types import require

STOP = ("Problem:", *END_WORDS)
MATH_VERIFY = "math-verify"


@dataclass(frozen=True, kw_only=True)
class MathConfig(DownstreamConfig):
    """Settings of `adjust eval math`; the defaults are those of Minerva's evaluation of base models.

    Attributes:
        data: .jsonl (also .xz, .gz) or .parquet file of the problems, or owner/name:path of one on the Hub.
        shots_data: file of the examples, of which the prompt shows the first ones: rows with problem and solution;
            needed where shots are asked for.
        shots: examples in the prompt.
        max_new_tokens: of an answer.
        per_subject: problems of each subject at most, the first ones; 0 is all.
    """

    output: str = "runs/math"
    data: str = "HuggingFaceH4/MATH-500:test.jsonl"
    shots_data: str = ""
    shots: int = 4
    max_new_tokens: int = 512
    per_subject: int = 0

    def __post_init__(self) -> None:
        """Checks what reading would find out late."""
        super().__post_init__()
        require(self.per_subject >= 0, f"per_subject is {self.per_subject}; it must be at least 0")
        require(
            not self.shots or bool(self.shots_data),
            f"{self.shots} examples are asked for and no file of them is named: give --shots-data FILE or --shots 0",
        )


def run(config: MathConfig) -> dict[str, Any]:
    """Evaluates the decoders on MATH; see `evaluate`."""
    return evaluate(make_task(config), config)


def make_task(config: MathConfig) -> Task:
    """MATH with the metrics that this installation has."""
    packages = (MATH_VERIFY, "sympy", "latex2sympy2_extended", "antlr4-python3-runtime")  # all four decide
    versions = ", ".join(f"{name} {version(name)}" for name in packages) if has_math_verify() else ""
    about = {
        "exact": "last box, else the final answer line; normalised strings",
        "minerva": "the final answer line; normalised strings",
        "math_verify": versions or f"not reported: {MATH_VERIFY} is not installed",
        "shots_data": config.shots_data if config.shots else None,
    }
    return Task("math", problems, score, STOP, about)


def has_math_verify() -> bool:
    """Whether `math_verify` can be reported."""
    return find_spec("math_verify") is not None


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


def _shots(config: MathConfig) -> list[Shot]:
    if not config.shots:
        return []
    fields = ("problem", "solution")
    rows = read_rows(config.shots_data, fields, texts=fields)[: config.shots]
    made = [Shot(_ask(row), written(row, f"{config.shots_data}, row {n}")) for n, row in enumerate(rows, start=1)]
    return first_shots(made, config.shots, config.shots_data)


def written(row: Row, where: str) -> str:
    """The solution of a row with the final answer line that Minerva's examples end in."""
    solution: str = row["solution"].strip()
    if final_answer(solution) is not None:
        return solution
    answer = " ".join(gold(row, where).split())  # the line is one
    return f"{solution}\nFinal Answer: The final answer is ${answer}$. I hope it is correct."


def same_answer(answer: str | None, right: str) -> bool:
    """Whether an answer was given and is the gold one, both normalised."""
    return answer is not None and normalize(answer) == normalize(right)


def grade(text: str, right: str, *, by_value: bool) -> Scores:
    """Scores of one completion, cut at its stop words, against the gold answer."""
    scores = {
        "exact": float(same_answer(find_answer(text), right)),
        "minerva": float(same_answer(final_answer(text), right)),
    }
    return scores | ({"math_verify": float(verified(text, right))} if by_value else {})


def score(items: Sequence[Problem], texts: Sequence[list[str]], config: MathConfig) -> list[list[Scores]]:
    """See `Task.score`."""
    rights = [problem.facts["gold"] for problem in items]
    out = [[grade(text, right, by_value=False) for text in group] for right, group in zip(rights, texts, strict=True)]
    if has_math_verify():
        pairs = [(text, right) for right, group in zip(rights, texts, strict=True) for text in group]
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = all_verified(
            pairs[rank::world], workers=available_workers() // int(os.environ.get("LOCAL_WORLD_SIZE", world))
        )
        numbered = from_all_ranks([(rank + n * world, value) for n, value in enumerate(mine)])
        values = [value for _, value in sorted(numbered)]
        for scores, value in zip(itertools.chain(*out), values, strict=True):
            scores["math_verify"] = float(value)
    return out
