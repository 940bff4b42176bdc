"""ParallelBench: short tasks that reveal what is lost when tokens are committed together (arXiv 2510.04767).

Waiting lines, puzzles and sentences, scored as the benchmark does: by task, and their plain mean by group.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adjust_dlm.bases import Base, load_base
from adjust_dlm.eval.downstream import DownstreamConfig, Problem, Scores, Task, evaluate, flat
from adjust_dlm.eval.generation import COSTS
from adjust_dlm.eval.tasks.parallelbench_metrics import Grammar, GrammarChecker, includes, is_right, open_grammar
from adjust_dlm.eval.tasks.parallelbench_tasks import group_of, make_problem, read_problems, select
from adjust_dlm.sampler import Sampler
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.train import distributed
from adjust_dlm.types import require

log = logging.getLogger(__name__)
NEW_TOKENS = {"waiting_line": 32, "waiting_line_n15": 128, "puzzle": 64, "words_to_sentence": 64}
SHORT = 6  # people in the benchmark's ordinary lists
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ParallelBenchConfig(DownstreamConfig):
    """Settings of `adjust eval parallelbench`.

    Attributes:
        tasks: names of tasks (copy, sudoku, easy, ...) or groups (waiting_line, puzzle, words_to_sentence, all).
        n: rows of every task; of files, spread evenly over each. 0 is 100 rows, or every row of the files.
        people: sizes of the lists in generated rows, in turn. Above 6 people, the group is called waiting_line_n<size>.
        task_seed: of generated rows; `seed` is that of decoding.
        strict: `score` is the strict reading of lists and grids (both readings are reported).
        grammar: LanguageTool for sentences (auto: where it starts; off; languagetool: an error where it does not).
        data: folder of the benchmark's own files; generated rows unless given.
        max_new_tokens: canvas of a reply; 0 is 32 for lists (128 above 6 people) and 64 for the others.
        shots: worked examples before a list or a puzzle.
        limit: problems of a group at most, the first ones; 0 is all. `n` keeps tasks and sizes balanced.
    """

    output: str = "runs/parallelbench"
    tasks: tuple[str, ...] = ("all",)
    n: int = 0
    people: tuple[int, ...] = (3, 4, 5, 6)
    task_seed: int = 0
    strict: bool = False
    grammar: Grammar = "auto"
    max_new_tokens: int = 0
    shots: int = 1
    chat: bool = True

    def __post_init__(self) -> None:
        """Tasks, sizes, and what decoding says of every group's settings."""
        require(bool(self.tasks), "name at least one task, or all")
        self.require_at_least(n=0)
        require(0 <= self.shots <= 8, f"shots is {self.shots}; it must be 0 to 8")
        good = bool(self.people) and all(2 <= size <= 100 for size in self.people)
        require(good, f"people is {list(self.people)}; give sizes from 2 to 100")
        groups = select(self.tasks)
        if self.max_new_tokens:
            super().__post_init__()
        else:
            for group in groups:
                self.for_group(self.group_name(group))

    def for_group(self, name: str) -> ParallelBenchConfig:
        """Settings of one group's run, in its own folder."""
        tokens = self.max_new_tokens or NEW_TOKENS.get(name, NEW_TOKENS["waiting_line_n15"])
        return replace(self, max_new_tokens=tokens, output=str(Path(self.output) / name))

    def group_name(self, group: str) -> str:
        """`waiting_line_n15` for lists of 15 people."""
        most = max(self.people)
        return f"{group}_n{most}" if group == "waiting_line" and most > SHORT else group


def run_parallelbench(
    config: ParallelBenchConfig, base: Base | None = None, sampler: Sampler | None = None
) -> dict[str, Any]:
    """Decodes every group with every variant; one folder of samples each.

    Returns:
        `rows`: for each group, variant and task n, `score` and its parts with the half-width of their 95 % interval,
        and for lists and puzzles `too_long`: problems whose right reply has more tokens than the canvas.
        `macro_averages`: for each group and variant the plain mean over its tasks, and what decoding cost.

    Raises:
        InputError: unreadable files, no grammar check where one is demanded, or a prompt that does not fit the base.
    """
    distributed.start()
    groups = select(config.tasks)
    problems = {config.group_name(group): _problems(config, group, tasks) for group, tasks in groups.items()}
    check, said = open_grammar(config.grammar) if "words_to_sentence" in groups else (None, "not needed")
    about = {"grammar": said, "rows": config.data or f"generated, task_seed {config.task_seed}"}
    about["reading"] = "strict" if config.strict else "lenient"
    try:
        base = base or load_base(config.base, device=config.device, quantize=config.quantize)
        rows: list[Row] = []
        macro: list[Row] = []
        for name, asked in problems.items():
            task = _task(name, asked, check, config)
            long = _too_long(base, asked, config.for_group(name).max_new_tokens)
            for row in evaluate(task, config.for_group(name), base, sampler)["rows"]:
                rows += _by_task(name, row, long)
                macro.append(_macro(name, row))
    finally:
        if check is not None:
            check.close()
    facts = {"task": "parallelbench", "about": about, "first_row": EVALUATION_ROWS}
    return {**facts, "rows": rows, "macro_averages": macro}


def _problems(config: ParallelBenchConfig, group: str, tasks: Sequence[str]) -> list[Problem]:
    if config.data:
        folder, name = Path(config.data), config.group_name(group)
        return [p for task in tasks for p in read_problems(folder, name, task, n=config.n, shots=config.shots)]
    return [
        make_problem(task, number, seed=config.task_seed, people=config.people, shots=config.shots)
        for task in tasks
        for number in range(config.n or 100)
    ]


def _task(name: str, asked: list[Problem], check: GrammarChecker | None, config: ParallelBenchConfig) -> Task:
    def score(problems: Sequence[Problem], completions: Sequence[list[str]], _: Any) -> list[list[Scores]]:
        return [
            [score_reply(problem, text, strict=config.strict, check=check) for text in texts]
            for problem, texts in zip(problems, completions, strict=True)
        ]

    stop = () if config.chat else ("\n\n",)  # a base model goes on with a next question
    return Task(f"parallelbench {name}", lambda _: asked, score, stop=stop)


def score_reply(problem: Problem, text: str, *, strict: bool = False, check: GrammarChecker | None = None) -> Scores:
    """All metrics of one reply.

    Args:
        problem: of any task here.
        text: the reply.
        strict: which reading `score` is.
        check: grammar of sentences.

    Returns:
        Lists and puzzles: `score`, `lenient`, `strict`. Sentences: `score` (both), `inclusion`, `grammar`; without a
        grammar check `inclusion` alone, which is not comparable with a score.
    """
    task = problem.kind.rpartition("/")[2]
    if group_of(task) == "words_to_sentence":
        inclusion = float(includes(text, problem.facts["words"]))
        if check is None:
            return {"inclusion": inclusion}
        grammar = float(check.is_clean(text))
        return {"score": inclusion * grammar, "inclusion": inclusion, "grammar": grammar}
    both = {name: float(is_right(task, text, problem.facts, strict=name == "strict")) for name in ("lenient", "strict")}
    return {"score": both["strict" if strict else "lenient"], **both}


def _too_long(base: Base, problems: Sequence[Problem], most: int) -> Counter[str]:
    """By kind, problems that no decoder can solve: the right reply that is known has more than `most` tokens."""
    require(base.tokenizer is not None, f"base {base.spec.name!r} has no tokenizer; these tasks are text")
    sizes = [len(base.tokenizer.encode(problem.facts["example"], add_special_tokens=False)) for problem in problems]
    found = Counter(problem.kind for problem, size in zip(problems, sizes, strict=True) if size > most)
    if found:
        log.warning("right replies of more than %d tokens: %s; see --max-new-tokens", most, dict(found))
    return found


def _by_task(group: str, row: Mapping[str, Any], too_long: Counter[str]) -> list[Row]:
    out = []
    for kind, metrics in row["kinds"].items():
        n = next(iter(metrics.values()))["n"]
        line = {"group": group, "task": kind.rpartition("/")[2], "variant": row["variant"], "n": n}
        lengths = {} if group_of(line["task"]) == "words_to_sentence" else {"too_long": too_long[kind]}
        out.append(line | flat(metrics) | lengths)
    return out


def _macro(group: str, row: Mapping[str, Any]) -> Row:
    """The plain mean over tasks, whatever their number of rows; its half-width is that of independent tasks."""
    kinds = list(row["kinds"].values())
    metrics = {
        f"macro_{name}": {
            "mean": sum(kind[name]["mean"] for kind in kinds) / len(kinds),
            "ci95": math.hypot(*(kind[name]["ci95"] for kind in kinds)) / len(kinds),
        }
        for name in kinds[0]
    }
    cost = {name: row[name] for name in COSTS}
    return {"group": group, "variant": row["variant"], "tasks": len(kinds)} | flat(metrics) | cost
