"""Downstream tasks: prompts in, completions of any decoder out, every metric with its interval.

A task says what its problems are and how a completion is scored; everything else is here, once. Texts are kept before
they are scored, so a run that stopped goes on, and another way of scoring costs no pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adjust_dlm.bases import Base, load_base
from adjust_dlm.decoders import DECODERS, read_variant
from adjust_dlm.eval.generation import Generated, costs, generate_rows, half_width, open_helpers, to_line
from adjust_dlm.files import write_whole
from adjust_dlm.sampler import Sampler
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.train import distributed
from adjust_dlm.types import DecodeConfig, InputError, require

log = logging.getLogger(__name__)
Scores = dict[str, float]  # metric -> value of one completion, 0..1


@dataclass(frozen=True)
class Problem:
    """One question.

    Attributes:
        id: unique within its task.
        prompt: what the user says, examples included; a chat template goes around it where one is asked for.
        facts: whatever scoring needs; plain JSON.
        kind: the group it is counted in beside the whole, such as a subject.
        turns: messages before the prompt, user and assistant in turn (examples of a chat).
    """

    id: str
    prompt: str
    facts: dict[str, Any]
    kind: str = ""
    turns: tuple[str, ...] = ()


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


@dataclass(frozen=True, kw_only=True)
class DownstreamConfig:
    """Settings that every downstream task has.

    Attributes:
        base: name, folder or Hub id of the base.
        sampler: folder or Hub id of g; the base's own by default.
        partner: autoregressive model for decoders that ask one; the base's own by default.
        data: file of the task's problems, or Hub id of a data set.
        output: where results, samples and texts go.
        decoders: decoders, or variants of them (see `adjust eval table`); each runs at every K unless it sets its own.
        tokens_per_step: K.
        limit: problems at most, the first ones of the task's order; 0 is all.
        num_samples: completions of a problem.
        max_new_tokens, temperature, top_p: of decoding.
        block_length: blocks of decoding; by default one.
        shots: examples in the prompt.
        chat: put prompts into the base's chat template.
        batch_size: rows decoded at once.
        seed: of decoding.
        device: auto, cpu, cuda or cuda:N.
        quantize: int8, fp8 or fp8-dynamic (see `adjust generate`).
        eager: run the reference decoders where their fast form on CUDA would be taken.
    """

    base: str = "smol"
    sampler: str | None = None
    partner: str | None = None
    data: str = ""
    output: str = "runs/eval"
    decoders: tuple[str, ...] = ("parallel", "adjust")
    tokens_per_step: tuple[int, ...] = (1, 2, 4, 8)
    limit: int = 0
    num_samples: int = 1
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    block_length: int | None = None
    shots: int = 0
    chat: bool = False
    batch_size: int = 16
    seed: int = 0
    device: str = "auto"
    quantize: str | None = None
    eager: bool = False

    def __post_init__(self) -> None:
        """Checks what decoding would otherwise find out late."""
        for name, least in (("limit", 0), ("shots", 0), ("num_samples", 1), ("batch_size", 1)):
            value = getattr(self, name)
            require(value >= least, f"{name} is {value}; it must be at least {least}")
        require(bool(self.decoders and self.tokens_per_step), "name at least one decoder and one tokens_per_step")
        for variant in variants(self):
            read_variant(variant)
        self.decode_config()

    def decode_config(self) -> DecodeConfig:
        """What all variants share."""
        return DecodeConfig(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p,
            block_length=self.block_length, seed=self.seed,
        )  # fmt: skip


def variants(config: DownstreamConfig) -> list[str]:
    """Every decoder at every K; K = 1 is joint decoding, whatever the decoder, and runs once.

    One that decides itself how many tokens a pass commits (`threshold:tau=0.9`), or that says its K, runs once.
    Settings of a variant (blocks, an order) hold at K = 1 too.
    """
    out = []
    for decoder in config.decoders:
        name, settings, _ = read_variant(decoder)
        if "tokens_per_step" in settings or not DECODERS[name].takes_k:
            out.append(decoder)
            continue
        for k in config.tokens_per_step:
            joint = k == 1 and name in ("parallel", "adjust")
            said = (
                {key: value for key, value in settings.items() if key != "candidates"}
                if joint
                else {"tokens_per_step": k}
            )
            words = [f"{key}={value}" for key, value in said.items()]
            start = "joint" if joint else decoder
            out.append(start + (("," if ":" in start else ":") + ",".join(words) if words else ""))
    return list(dict.fromkeys(out))


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
    prompts = [ids for ids in _encoded(config, base, problems) for _ in range(config.num_samples)]
    helpers = open_helpers(config, base, variants(config), sampler=sampler)
    rows, folder = [], Path(config.output)
    for variant in variants(config):
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
    facts = {"task": task.name, "about": task.about, "n": len(problems), "config": asdict(config)}
    return {**facts, "first_row": EVALUATION_ROWS, "rows": rows, "kinds": kinds}


def _encoded(config: DownstreamConfig, base: Base, problems: Sequence[Problem]) -> list[list[int]]:
    out = []
    for problem in problems:
        ids = encode(base, problem, chat=config.chat)
        total = len(ids) + config.max_new_tokens
        require(
            total <= base.spec.context,
            f"problem {problem.id} has {len(ids)} tokens, with {config.max_new_tokens} new ones {total}; "
            f"base {base.spec.name!r} takes at most {base.spec.context}: use fewer shots or a shorter answer",
        )
        out.append(ids)
    return out


def encode(base: Base, problem: Problem, *, chat: bool) -> list[int]:
    """Ids of a problem: plain text behind the start token, or the chat with its earlier turns."""
    if not chat:
        return base.encode("\n\n".join([*problem.turns, problem.prompt]))
    if not problem.turns:
        return base.encode(problem.prompt, chat=True)
    require(base.tokenizer is not None, f"base {base.spec.name!r} has no tokenizer; give token ids")
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate((*problem.turns, problem.prompt))]
    try:
        text = base.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of its own
        raise InputError(f"the chat template of base {base.spec.name!r} failed: {error}") from error
    ids: list[int] = base.tokenizer.encode(text, add_special_tokens=False)
    return ids


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop word."""
    ends = [at for word in stop if (at := text.find(word)) >= 0]
    return text[: min(ends, default=len(text))]


def summarize(problems: Sequence[Problem], scores: Sequence[Sequence[Scores]]) -> dict[str, Any]:
    """Means over problems of the means over their completions, as a whole and by kind.

    Returns:
        `metrics`: name -> mean, ci95 (half-width) and n; `kinds`: kind -> the same.
    """
    values = [
        {name: sum(s[name] for s in group) / len(group) for name in group[0]} for group in scores
    ]  # of each problem
    kinds = sorted({problem.kind for problem in problems} - {""})
    by_kind = {kind: _means([v for p, v in zip(problems, values, strict=True) if p.kind == kind]) for kind in kinds}
    return {"metrics": _means(values), "kinds": by_kind}


def _means(values: Sequence[Scores]) -> dict[str, dict[str, float]]:
    out = {}
    for name in values[0]:
        column = [value[name] for value in values]
        out[name] = {"mean": sum(column) / len(column), "ci95": half_width(column), "n": len(column)}
    return out


def flat(metrics: dict[str, dict[str, float]]) -> dict[str, float]:
    """Columns of a table: name -> mean, name_ci95 -> half-width."""
    return {name + end: m[key] for name, m in metrics.items() for end, key in (("", "mean"), ("_ci95", "ci95"))}


def slug(variant: str) -> str:
    """A variant as part of a file name."""
    return "".join(c if c.isalnum() or c in "._=-" else "-" for c in variant)


def _samples(
    variant: str, config: DownstreamConfig, problems: Sequence[Problem], texts: Sequence[list[str]],
    scores: Sequence[Sequence[Scores]], made: Sequence[Generated],
) -> str:  # fmt: skip
    lines, at, about = [], 0, {"decoder": variant, "temperature": config.temperature}
    for problem, group, values in zip(problems, texts, scores, strict=True):
        for text, value in zip(group, values, strict=True):
            facts = {**about, "id": problem.id, "kind": problem.kind, "prompt": problem.prompt}
            facts |= {"text": text, "scores": value}
            lines.append(to_line(facts | {k: v for k, v in asdict(made[at]).items() if k != "tokens"}))
            at += 1
    return "".join(lines)
