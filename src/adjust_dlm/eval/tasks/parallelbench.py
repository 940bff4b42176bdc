"""ParallelBench: short tasks that reveal what is lost when tokens are committed together (arXiv 2510.04767).

Waiting lines, puzzles and sentences, scored as the benchmark does: by task, and their plain mean by group. Lists and
grids have two readings: lenient takes what a careful reader finds, strict wants the form that was asked for.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adjust_dlm.bases import Base, load_base
from adjust_dlm.eval.downstream import Scores, Task, evaluate
from adjust_dlm.eval.generation import COSTS
from adjust_dlm.eval.tasks.parallelbench_tasks import group_of, make_problem, read_list, read_problems, select
from adjust_dlm.eval.tasks.settings import Grammar, ParallelBenchConfig
from adjust_dlm.eval.tasks.task_files import Problem
from adjust_dlm.sampler import Sampler
from adjust_dlm.train import distributed
from adjust_dlm.types import EVALUATION_ROWS, InputError, require

log = logging.getLogger(__name__)
Facts = dict[str, Any]
Check = Callable[[str], list[Any]]  # what is wrong with a text


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
    tool, said = open_grammar(config.grammar) if "words_to_sentence" in groups else (None, "not needed")
    check = None if tool is None else functools.cache(tool.check)  # decoders write many a sentence twice
    try:
        base = base or load_base(config.base, device=config.device, quantize=config.quantize)
        rows, macro = list[Facts](), list[Facts]()
        for name, asked in problems.items():
            task = _task(name, asked, check, config)
            long = _too_long(base, asked, config.for_group(name).max_new_tokens)
            found = evaluate(task, config.for_group(name), base, sampler)
            macro += [_macro(name, row) for row in found["rows"]]
            for line in found["kinds"]:
                lengths = {} if name == "words_to_sentence" else {"too_long": long[line["kind"]]}
                rows.append({"group": name, "task": line.pop("kind").rpartition("/")[2], **line, **lengths})
    finally:
        if tool is not None:
            tool.close()
    facts = {"task": "parallelbench", "about": {"grammar": said}, "first_row": EVALUATION_ROWS}
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


def _task(name: str, asked: list[Problem], check: Check | None, config: ParallelBenchConfig) -> Task:
    def score(problems: Sequence[Problem], completions: Sequence[list[str]], _: Any) -> list[list[Scores]]:
        pairs = zip(problems, completions, strict=True)
        return [[score_reply(problem, text, check=check) for text in texts] for problem, texts in pairs]

    stop = () if config.chat else ("\n\n",)  # a base model goes on with a next question
    return Task(f"parallelbench {name}", lambda _: asked, score, stop=stop)


def score_reply(problem: Problem, text: str, *, check: Check | None = None) -> Scores:
    """All metrics of one reply.

    Lists and puzzles: `lenient`, `strict`, and `score`, the lenient one. Sentences: `score` (both), `inclusion`,
    `grammar`; without a grammar check `inclusion` alone, which is not comparable with a score.
    """
    task = problem.kind.rpartition("/")[2]
    if group_of(task) == "words_to_sentence":
        inclusion = float(all(word in text for word in problem.facts["words"]))  # also within another word
        if check is None:
            return {"inclusion": inclusion}
        grammar = float(bool(text.strip()) and not check(text.strip()))
        return {"score": inclusion * grammar, "inclusion": inclusion, "grammar": grammar}
    both = {name: float(is_right(task, text, problem.facts, strict=name == "strict")) for name in ("lenient", "strict")}
    return {"score": both["lenient"], **both}


def _too_long(base: Base, problems: Sequence[Problem], most: int) -> Counter[str]:
    """By kind, problems that no decoder can solve: the right reply that is known has more than `most` tokens."""
    require(base.tokenizer is not None, f"base {base.spec.name!r} has no tokenizer; these tasks are text")
    sizes = [len(base.tokenizer.encode(problem.facts["example"], add_special_tokens=False)) for problem in problems]
    found = Counter(problem.kind for problem, size in zip(problems, sizes, strict=True) if size > most)
    if found:
        log.warning("right replies of more than %d tokens: %s; see --max-new-tokens", most, dict(found))
    return found


def _macro(group: str, row: Mapping[str, Any]) -> Facts:
    """The plain mean over tasks, whatever their number of rows; its half-width is that of independent tasks."""
    kinds = list(row["kinds"].values())
    out = {"group": group, "variant": row["variant"], "tasks": len(kinds)}
    for name in kinds[0]:
        out[f"macro_{name}"] = sum(kind[name]["mean"] for kind in kinds) / len(kinds)
        out[f"macro_{name}_ci95"] = math.hypot(*(kind[name]["ci95"] for kind in kinds)) / len(kinds)
    return out | {name: row[name] for name in COSTS}


def is_latin(text: str, symbols: Sequence[str]) -> bool:
    """Whether the first n lines that hold exactly the n symbols, apart by commas, are a Latin square.

    Lines with anything else are passed over; there is one reading only.
    """
    wanted = set(symbols)
    rows = [[cell.strip() for cell in line.split(",")] for line in text.split("\n")]
    rows = [row for row in rows if set(row) == wanted][: len(wanted)]
    return len(rows) == len(wanted) and all(set(column) == wanted for column in zip(*rows, strict=False))


def read_grid(text: str, *, strict: bool = False) -> list[str] | None:
    """The 4x4 grid of digits in a reply, as four strings; None where there are not exactly four such lines.

    Strict: four lines of four digits and nothing else but empty lines. Lenient: lines whose digits are not four are
    passed over, and all but digits within a line is.
    """
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if strict:
        return lines if len(lines) == 4 and all(re.fullmatch("[0-9]{4}", line) for line in lines) else None
    rows = [row for line in lines if len(row := "".join(re.findall("[0-9]", line))) == 4]
    return rows if len(rows) == 4 else None


def is_right(task: str, text: str, facts: Facts, *, strict: bool = False) -> bool:
    """Whether a reply to a puzzle or a list task is right.

    A list is the one right one, or one of those of a random kind: the input shuffled, or with one change at any place.
    """
    if task == "latin_square":
        return is_latin(text, facts["symbols"])
    if task == "sudoku":
        return read_grid(text, strict=strict) == facts["answer"].split("\n")
    people, given, word = read_list(text, strict=strict), facts.get("input", []), facts.get("word")
    if task == "shuffle":
        return people is not None and people != given and sorted(people) == sorted(given)
    right = {
        "insert_random": [[*given[:n], word, *given[n:]] for n in range(len(given) + 1)],
        "remove_random": [[*given[:n], *given[n + 1 :]] for n in range(len(given))],
        "replace_random": [[*given[:n], word, *given[n + 1 :]] for n in range(len(given))],
    }
    return people in (right[task] if task in right else [facts["answer"]])


def open_grammar(mode: Grammar) -> tuple[Any, str]:
    """LanguageTool for American English, a local server that `close` ends, and what a result says about it.

    Raises:
        InputError: `languagetool`, and it does not start.
    """
    if mode == "off":
        return None, "off: inclusion only"
    package = "language_tool_python"
    try:
        require(find_spec(package) is not None, "it is not installed (pip install language_tool_python)")
        import language_tool_python  # starts a Java server, after a download of 250 MB the first time

        tool = language_tool_python.LanguageTool("en-US")
    except Exception as error:  # no package, no Java, no download: each has its own kind of error
        why = f"{package}: {' '.join(str(error).split()) or type(error).__name__}"
        if mode == "languagetool":
            raise InputError(f"the grammar check does not start: {why}; --grammar off leaves it out") from error
        log.warning("no grammar check, inclusion only: %s", why)
        return None, f"not available, inclusion only: {why}"
    return tool, f"LanguageTool en-US, default rules, by {package} {version(package)}"
