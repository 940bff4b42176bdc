"""Texts of result folders, to be read side by side."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adjust_dlm.bench.records import Facts, Result, Row, damage_named, rank, variant_of
from adjust_dlm.variants import slug

COST = ("completion_tokens", "base_calls", "sampler_calls", "partner_calls", "seconds")


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
        scores: of a task's own metrics, or NLL.
        cost: tokens, passes and seconds, as far as known.
        pieces: the token of every position of `order`, as text, where known.
    """

    source: str
    group: str
    row: str
    variant: str
    text: str
    prompt: str = ""
    order: tuple[int, ...] = ()
    scores: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    pieces: tuple[str, ...] = ()


def samples_of(result: Result, rows: Sequence[Row], limit: int) -> list[Sample]:
    """The first texts of every decoder in a folder, whose rows are given.

    Raises:
        InputError: a damaged file of samples.
    """
    with damage_named(result, "samples*.jsonl"):
        if any(row.texts for row in rows):
            return [sample for row in rows for sample in _task_samples(result, row, limit)]
        return [_sample(result, line) for line in _lines(result.source / "samples.jsonl")]


def _lines(file: Path, limit: int | None = None) -> list[Facts]:
    """The objects of a JSON lines file, at most `limit`; none where there is no file."""
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as stream:
        return [json.loads(line) for line in itertools.islice(stream, limit)]


def _task_samples(result: Result, task: Row, limit: int) -> Iterator[Sample]:
    assert task.texts is not None
    seen = dict[str, int]()
    group = f"{task.base}: {task.task}, T = {result.config['temperature']:g}, seed {result.config['seed']}"
    for line in _lines(task.texts / f"samples-{slug(task.variant)}.jsonl", limit):
        again = seen[line["id"]] = seen.get(line["id"], -1) + 1
        row = f"{line['id']}, sample {again}" if again else str(line["id"])
        texts = line["text"], line.get("prompt", "")
        yield Sample(task.source, group, row, task.variant, *texts, scores=line["scores"], cost=_cost(line))


def _sample(result: Result, line: Facts) -> Sample:
    prompt = line.get("prompt") or result.results.get("prompt") or ""
    temperature = line.get("temperature", result.config.get("temperature"))
    at = "" if temperature is None else f", T = {temperature:g}"
    group = f"{result.config['base']}: {'answers' if prompt else 'text'}{at}, seed {result.config.get('seed')}"
    scores = {} if line.get("nll") is None else {"NLL": line["nll"]}
    texts = line["text"], prompt, tuple(line.get("order", ()))
    more = scores, _cost(line), tuple(line.get("pieces", ()))
    return Sample(str(result.source), group, str(line["row"]), variant_of(line), *texts, *more)


def _cost(line: Facts) -> dict[str, float]:
    return {key: line[key] for key in COST if key in line}


def side_by_side(samples: Sequence[Sample], most: int) -> list[list[Sample]]:
    """At most `most` rows of every group (base, task, temperature, seed): the texts of all decoders for one row id.

    Rows with the texts of most decoders come first, then the order of the files.
    """
    rows: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        rows.setdefault((sample.group, sample.prompt, sample.row), []).append(sample)
    groups: dict[str, list[list[Sample]]] = {}
    for (group, _, _), found in rows.items():
        groups.setdefault(group, []).append(sorted(found, key=lambda sample: rank(sample.variant)))
    return [row for found in groups.values() for row in sorted(found, key=lambda row: -len(row))[:most]]
