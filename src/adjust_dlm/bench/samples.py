"""Texts of result folders, to be read side by side."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adjust_dlm.bench.records import Facts, Result, is_downstream, is_grouped
from adjust_dlm.eval.downstream import slug
from adjust_dlm.types import InputError, require

SAMPLES = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """One text, to be read.

    Attributes:
        source: folder it comes from.
        group: what the texts beside it share: base, task, temperature and seed.
        row: id of the row or problem.
        variant: decoder and settings.
        text: what was written.
        prompt: what it was asked, where known.
        order: commit number of every new position (-1 given, -2 filler behind the end), where known.
        scores: of a task's own metrics.
    """

    source: str
    group: str
    row: str
    variant: str
    text: str
    prompt: str = ""
    order: tuple[int, ...] = ()
    scores: dict[str, float] = field(default_factory=dict)


def read_lines(file: Path, limit: int | None = None) -> list[Facts]:
    """The objects of a JSON lines file, at most `limit`.

    Raises:
        InputError: a line that is no JSON object, by number.
    """
    out = []
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(itertools.islice(stream, limit), start=1):
                value = json.loads(line)
                require(isinstance(value, dict), f"{file}, line {number}: a JSON object is wanted")
                out.append(value)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{file}, line {len(out) + 1} is not JSON: {error}") from error
    return out


def samples_of(result: Result, limit: int) -> list[Sample]:
    """The first texts of every decoder in a folder.

    Raises:
        InputError: a damaged file of samples.
    """
    try:
        if is_downstream(result):
            variants = [row["variant"] for row in result.results["rows"]]
            return list(_task_samples(result, result.results["task"], result.source, variants, limit))
        if is_grouped(result):
            parts = [(row["group"], row["variant"]) for row in result.results["macro_averages"]]
            return [
                sample
                for group, variant in parts
                for sample in _task_samples(
                    result, f"{result.results['task']} {group}", result.source / group, [variant], limit
                )
            ]
        if (result.source / SAMPLES).is_file() and "base" in result.config:
            return [_sample(result, line) for line in read_lines(result.source / SAMPLES)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the samples in {result.source} are damaged: {type(error).__name__} {error}") from error
    return []


def _task_samples(result: Result, task: str, folder: Path, variants: Sequence[str], limit: int) -> Iterator[Sample]:
    config = result.config
    group = f"{config['base']}: {task}, T = {config['temperature']:g}, seed {config['seed']}"
    for variant in variants:
        file, seen = folder / f"samples-{slug(variant)}.jsonl", dict[str, int]()
        for line in read_lines(file, limit) if file.is_file() else []:
            again = seen[line["id"]] = seen.get(line["id"], -1) + 1
            row = f"{line['id']}, sample {again}" if again else str(line["id"])
            text, prompt = line["text"], line.get("prompt", "")
            yield Sample(str(result.source), group, row, variant, text, prompt, scores=line["scores"])


def _sample(result: Result, line: Facts) -> Sample:
    prompt = line.get("prompt") or result.results.get("prompt") or ""
    temperature = line.get("temperature", result.config.get("temperature"))
    at = "" if temperature is None else f", T = {temperature:g}"
    group = f"{result.config['base']}: {'answers' if prompt else 'text'}{at}, seed {result.config.get('seed')}"
    k = line.get("tokens_per_step", 0)
    variant = line["decoder"] + (f":tokens_per_step={k}" if k > 1 and ":" not in line["decoder"] else "")
    order = tuple(line.get("order", ()))
    return Sample(str(result.source), group, str(line["row"]), variant, line["text"], prompt, order)
