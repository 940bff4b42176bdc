"""Downstream tasks: prompts in, completions of any decoder out, every metric with its interval.

A task says what its problems are and how a completion is scored; everything else is here, once. Texts are kept before
they are scored, so a run that stopped goes on, and another way of scoring costs no pass.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adjust_dlm.bases import Base, load_base
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.eval.generation import Generated, costs, generate_rows, half_width, open_helpers, to_line
from adjust_dlm.eval.tasks.settings import DownstreamConfig
from adjust_dlm.eval.tasks.task_files import Problem
from adjust_dlm.files import write_whole
from adjust_dlm.sampler import Sampler
from adjust_dlm.train import distributed
from adjust_dlm.types import EVALUATION_ROWS, require
from adjust_dlm.variants import slug

log = logging.getLogger(__name__)
Scores = dict[str, float]  # metric -> value of one completion, 0..1


@dataclass(frozen=True)
class Task:
    """What evaluation asks of a task.

    Attributes:
        name: as the command line says it.
        problems: settings -> all problems, in a fixed order.
        score: (problem, completions of it, settings) -> the scores of each; completions are cut at their stop words.
            Called once with everything, so that a task may run many at a time.
        stop: words at which a completion ends (the word itself is dropped); the end token ends it anyway.
        about: lines for `result.json`: which rule, which version.
    """

    name: str
    problems: Callable[[Any], list[Problem]]
    score: Callable[[Sequence[Problem], Sequence[list[str]], Any], list[list[Scores]]]
    stop: tuple[str, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)


def evaluate(
    task: Task, config: DownstreamConfig, base: Base | None = None, sampler: Sampler | None = None
) -> dict[str, Any]:
    """Runs every variant on every problem.

    Writes one `samples-<variant>.jsonl` for each variant: a line a completion with its id, text, scores and passes.

    Returns:
        `task`, `about`, `n` problems, `first_row` of decoding, and `rows`: for each variant mean, 95 % half-width and n
        of every metric, by kind of problem too, and what decoding cost; `kinds` is the same by kind, as a table.

    Raises:
        InputError: no problems, or a prompt that does not fit the base.
    """
    rank, _, _ = distributed.start()
    problems = task.problems(config)[: config.limit or None]
    require(bool(problems), f"task {task.name} has no problems in {config.data!r}")
    base = base or load_base(config.base, device=config.device, quantize=config.quantize)
    asked = [encode(base, problem, chat=config.chat) for problem in problems]
    PromptSource(f"task {task.name}", asked).check_fits(base, config.max_new_tokens)
    prompts = [ids for ids in asked for _ in range(config.num_samples)]
    helpers = open_helpers(config, base, config.variants(), sampler=sampler)
    rows, folder = [], Path(config.output)
    for variant in config.variants():
        made = generate_rows(
            base, helpers, variant, prompts, config.decode_config(), batch_size=config.batch_size,
            keep=folder / "texts", eager=config.eager,
        )  # fmt: skip
        texts = [cut_at_stop(base.decode(line.tokens), task.stop) for line in made]
        grouped = [texts[at : at + config.num_samples] for at in range(0, len(texts), config.num_samples)]
        scores = task.score(problems, grouped, config)
        summary = summarize(problems, scores)
        rows.append({"variant": variant, **flat(summary["metrics"]), **summary, **costs(made)})
        log.info("%s %s: %s", task.name, variant, {k: f"{v['mean']:.3f}" for k, v in rows[-1]["metrics"].items()})
        if rank == 0:
            lines = _samples(variant, config, problems, grouped, scores, made)
            write_whole({folder / f"samples-{slug(variant)}.jsonl": lines})
    distributed.barrier()
    kinds = [
        {"variant": row["variant"], "kind": kind, "n": next(iter(metrics.values()))["n"], **flat(metrics)}
        for row in rows
        for kind, metrics in row["kinds"].items()
    ]
    about = {"about": task.about, "n": len(problems), "first_row": EVALUATION_ROWS}
    return {"task": task.name, **about, "rows": rows, "kinds": kinds}


def encode(base: Base, problem: Problem, *, chat: bool) -> list[int]:
    """Ids of a problem: plain text behind the start token, or the chat with its earlier turns."""
    texts = [*problem.turns, problem.prompt]
    if not chat:
        return base.encode("\n\n".join(texts))
    roles = itertools.cycle(("user", "assistant"))
    return base.encode_messages([{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)])


def with_shots(
    id: str, ask: str, shots: Sequence[tuple[str, str]], facts: dict[str, Any], *, chat: bool, kind: str = "",
    form: str = "{} {}\n\n",
) -> Problem:  # fmt: skip
    r"""A problem behind its examples: turns of a chat, or one text, with each example in the `form`.

    `ask` is what the prompt says up to where the answer begins, such as "Q: ...\nA:", `shots` the same of each example
    and its answer as the model should write it.

    Raises:
        InputError: the question is one of the examples.
    """
    require(all(ask != shown for shown, _ in shots), f"problem {id} is among the examples of its own prompt")
    if chat:
        return Problem(id, ask, facts, kind, tuple(text for shot in shots for text in shot))
    return Problem(id, "".join([*(form.format(*shot) for shot in shots), ask]), facts, kind)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop word."""
    ends = [at for word in stop if (at := text.find(word)) >= 0]
    return text[: min(ends, default=len(text))]


def summarize(problems: Sequence[Problem], scores: Sequence[Sequence[Scores]]) -> dict[str, Any]:
    """Means over problems of the means over their completions, as a whole and by kind.

    Returns:
        `metrics`: name -> mean, ci95 (half-width) and n; `kinds`: kind -> the same.
    """
    values = [{name: sum(s[name] for s in group) / len(group) for name in group[0]} for group in scores]
    kinds = sorted({problem.kind for problem in problems} - {""})
    by_kind = {kind: _means([v for p, v in zip(problems, values, strict=True) if p.kind == kind]) for kind in kinds}
    return {"metrics": _means(values), "kinds": by_kind}


def _means(values: Sequence[Scores]) -> dict[str, dict[str, float]]:
    columns = {name: [value[name] for value in values] for name in values[0]}
    return {name: {"mean": sum(c) / len(c), "ci95": half_width(c), "n": len(c)} for name, c in columns.items()}


def flat(metrics: dict[str, dict[str, float]]) -> dict[str, float]:
    """Columns of a table: name -> mean, name_ci95 -> half-width."""
    return {name + end: m[key] for name, m in metrics.items() for end, key in (("", "mean"), ("_ci95", "ci95"))}


def _samples(
    variant: str, config: DownstreamConfig, problems: Sequence[Problem], texts: Sequence[list[str]],
    scores: Sequence[Sequence[Scores]], made: Sequence[Generated],
) -> str:  # fmt: skip
    lines = []
    for n, row in enumerate(made):
        at, of = divmod(n, config.num_samples)
        asked = {name: getattr(problems[at], name) for name in ("id", "kind", "prompt")}
        facts = {"decoder": variant, "temperature": config.temperature, **asked}
        facts |= {"text": texts[at][of], "scores": scores[at][of], **asdict(row)}
        del facts["tokens"]
        lines.append(to_line(facts))
    return "".join(lines)
