"""Result folders as rows: one for every task and decoder, with what was measured and what it cost.

Only rows of one block are compared: same base, task and settings. A value that a folder does not have is not there.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adjust_dlm.hub import read_json
from adjust_dlm.types import InputError, require
from adjust_dlm.variants import read_options

RESULT = "result.json"
# The order of every table and legend; what is not named here stands between the baselines and ADJUST.
FIRST, LAST = ("joint", "parallel", "edlm", "apd", "dcd"), ("adjust", "adaptive", "cascade")
NAMES = {
    "edlm": "EDLM", "apd": "APD", "dcd": "DCD", "klass": "KLASS", "adjust": "ADJUST", "adaptive": "ADJUST adaptive",
    "cascade": "ADJUST cascade",
}  # fmt: skip
COSTS = ("tokens_per_pass", "tokens_per_second", "rounds", "base_calls", "sampler_calls", "partner_calls", "seconds")
# What rows must agree in to be compared: these settings of texts and of list tasks, all but the last of other tasks.
TEXTS = (
    "top_p", "max_new_tokens", "n", "prompts", "chat", "order", "judge", "buckets", "suppress_eos", "seed", "quantize",
)  # fmt: skip
LISTS = ("list_max_new_tokens", "list_block_length", "list_n", "seed", "quantize")
FREE = (
    "base", "sampler", "partner", "output", "decoders", "tokens_per_step", "batch_size", "device", "temperature",
    "workers", "allow_code_execution",
)  # fmt: skip
Facts = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A mean, the half-width of its 95 % interval and the number of texts or problems, each as far as known."""

    mean: float
    ci95: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class Result:
    """One `result.json`.

    Attributes:
        source: its folder, as given.
        command, config, results, provenance: its content.
    """

    source: Path
    command: str
    config: Facts
    results: Facts
    provenance: Facts


@dataclass(frozen=True)
class Row:
    """One decoder on one task.

    Attributes:
        source: folder it comes from.
        base, task: what decoded, and what.
        settings: what must be equal for two rows to be compared; temperature first.
        variant: decoder and settings, as the command line says it.
        values: measure -> value (`kl_qp`, `nll`, `mauve`, `accuracy` or a task's own metrics, in its order).
        kinds: group of problems -> the same.
        costs: those of `COSTS` that are known.
        texts: of a downstream task, the folder of its texts.
    """

    source: str
    base: str
    task: str
    settings: tuple[tuple[str, Any], ...]
    variant: str
    values: dict[str, Measured]
    kinds: dict[str, dict[str, Measured]] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    texts: Path | None = None

    @property
    def k(self) -> int | None:
        """Tokens a pass where the decoder has a fixed number; joint decoding has 1."""
        name, options = split_variant(self.variant)
        given = options.get("tokens_per_step")
        return 1 if name == "joint" else given if isinstance(given, int) else None


@dataclass(frozen=True)
class Block:
    """Rows that may be compared.

    Attributes:
        title: base, task and temperature; the folder, too, where two folders measured the same.
        about: the other settings.
        rows: decoders in the house's order, K ascending.
    """

    title: str
    about: str
    rows: list[Row]

    @property
    def task(self) -> str:
        """The task of all rows."""
        return self.rows[0].task

    def measures(self) -> list[str]:
        """All that any row measured, in order."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))


# Files ---------------------------------------------------------------------------------------------------------


def read_result(folder: Path) -> Result:
    """The `result.json` of a folder.

    Raises:
        InputError: there is none, or it is not what a command of `adjust` writes.
    """
    file = folder / RESULT
    require(file.is_file(), f"no result in {folder}: {RESULT} is missing")
    content = read_json(file)
    good = isinstance(content.get("command"), str)
    good = good and all(isinstance(content.get(key), dict) for key in ("config", "results", "provenance"))
    require(good, f"{file} is no result of `adjust`: command, config, results and provenance are wanted")
    return Result(folder, *(content[key] for key in ("command", "config", "results", "provenance")))


# Rows ----------------------------------------------------------------------------------------------------------


def rows_of(result: Result) -> list[Row]:
    """The rows of `eval table`, `eval divergence`, `eval frontier` and every downstream task; none for other commands.

    Raises:
        InputError: a result of one of these that lacks a field.
    """
    out = result.results
    with damage_named(result):
        if result.command in ("eval table", "eval divergence", "eval frontier"):
            return [_text_row(result, facts) for facts in out["cells" if "cells" in out else "rows"]]
        if "macro_averages" in out:
            return [_group_row(result, facts) for facts in out["macro_averages"]]
        return [_task_row(result, facts) for facts in out["rows"]] if "task" in out else []


@contextlib.contextmanager
def damage_named(result: Result, file: str = RESULT) -> Iterator[None]:
    """Raises InputError, with the file, for one that cannot be read, or a field not there or of another kind."""
    try:
        yield
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{result.source / file} is damaged: {type(error).__name__} {error}") from error


def _text_row(result: Result, facts: Facts) -> Row:
    """Of texts, or of a frontier's list tasks, whose one measure is the accuracy."""
    task, _, temperature = facts.get("task", "text").partition(" T=")
    settings = _settings(result, float(temperature or facts["temperature"]), LISTS if task == "lists" else TEXTS)
    values = {name: measured(facts.get(name), facts.get(f"{name}_ci95")) for name in ("kl_qp", "kl_pq")}
    for name, of in {"nll": "nll", "mauve": "mauve", "gap closed": "gap_closed", "distinct-2": "distinct_2"}.items():
        values[name] = measured(facts.get(of), facts.get(f"{of}_ci95"), facts.get("n"))
    values["accuracy"] = measured(facts.get("accuracy"), facts.get("accuracy_ci95"), facts.get("n"))
    return _row(result, task, settings, facts, values)


def _task_row(result: Result, facts: Facts) -> Row:
    """Of a downstream task."""

    def all_of(metrics: Facts) -> dict[str, Measured | None]:
        return {name: measured(value["mean"], value["ci95"], value["n"]) for name, value in metrics.items()}

    kinds = {kind: all_of(metrics) for kind, metrics in facts.get("kinds", {}).items()}
    values = all_of(facts["metrics"])
    return _row(result, result.results["task"], _settings(result), facts, values, kinds, result.source)


def _group_row(result: Result, macro: Facts) -> Row:
    """A group's means over its tasks (`eval parallelbench`), and its tasks as kinds."""

    def all_of(facts: Facts, start: str = "") -> dict[str, Measured | None]:
        names = [key.removeprefix(start) for key in facts if key.startswith(start) and f"{key}_ci95" in facts]
        return {n: measured(facts[start + n], facts[f"{start}{n}_ci95"], facts.get("n")) for n in names}

    group, task = macro["group"], f"{result.results['task']} {macro['group']}"
    mine = [row for row in result.results["rows"] if (row["group"], row["variant"]) == (group, macro["variant"])]
    kinds = {line["task"]: all_of(line) for line in mine}
    return _row(result, task, _settings(result), macro, all_of(macro, "macro_"), kinds, result.source / group)


def _row(
    result: Result, task: str, settings: tuple[tuple[str, Any], ...], facts: Facts,
    values: Mapping[str, Measured | None], kinds: Mapping[str, Mapping[str, Measured | None]] | None = None,
    texts: Path | None = None,
) -> Row:  # fmt: skip
    found = {name: value for name, value in values.items() if value}
    groups = {kind: {n: value for n, value in of.items() if value} for kind, of in (kinds or {}).items()}
    costs = {name: float(facts[name]) for name in COSTS if facts.get(name) is not None}
    base, source = str(result.config["base"]), str(result.source)
    return Row(source, base, task, settings, variant_of(facts), found, groups, costs, texts)


def measured(mean: float | None, ci95: float | None, n: int | None = None) -> Measured | None:
    """None for what was not measured, or has no finite value."""
    if any(isinstance(value, bool | str) for value in (mean, ci95, n)):
        raise TypeError(f"a number is wanted, not {mean!r}, {ci95!r} or {n!r}")
    if mean is None or not math.isfinite(mean):
        return None
    return Measured(float(mean), None if ci95 is None or not math.isfinite(ci95) else float(ci95), n)


def _settings(
    result: Result, temperature: float | None = None, names: Sequence[str] = ()
) -> tuple[tuple[str, Any], ...]:
    """Of a run: those that are set; all but the free ones unless `names` are given."""
    config = result.config
    names = names or [name for name in config if name not in FREE and config[name] is not False]
    t = float(config["temperature"]) if temperature is None else temperature
    return (("temperature", t), *((name, config[name]) for name in names if config.get(name) not in (None, "")))


# Names and order -----------------------------------------------------------------------------------------------


def variant_of(facts: Facts) -> str:
    """Decoder and settings of a row or a text, K among them."""
    name, k = str(facts["variant"] if "variant" in facts else facts["decoder"]), facts.get("tokens_per_step", 0)
    return f"{name}:tokens_per_step={k}" if k > 1 and ":" not in name else name


def split_variant(variant: str) -> tuple[str, Facts]:
    """`adjust:candidates=4,tokens_per_step=2` -> name and settings; the decoder need not exist any more."""
    name, _, pairs = variant.partition(":")
    return name, read_options(pairs.split(",")) if pairs else {}


def line_of(variant: str, only: Container[str] | None = None) -> str:
    """A variant as a person reads it, with the settings in `only`, or all but K: the line of a table by K."""
    name, options = split_variant(variant)
    said = [f"{k}={_json(v)}" for k, v in options.items() if (k != "tokens_per_step" if only is None else k in only)]
    return " ".join([NAMES.get(name, name.replace("_", " ").capitalize()), *said])


def label_of(variant: str) -> str:
    """A variant as a person reads it."""
    k = split_variant(variant)[1].get("tokens_per_step")
    return line_of(variant) + ("" if k is None else f", K={k}")


def rank(variant: str) -> tuple[Any, ...]:
    """Sorts decoders the same way everywhere: joint, parallel, edlm, apd, dcd, others by name, adjust and its kin."""
    name, options = split_variant(variant)
    at = FIRST.index(name) if name in FIRST else len(FIRST) + 1 + LAST.index(name) if name in LAST else len(FIRST)
    k = options.pop("tokens_per_step", 0)
    numbers = [value if isinstance(value, int | float) else 0 for value in options.values()]
    return at, name, len(options), [*options], k if isinstance(k, int) else 0, numbers, line_of(variant)


def blocks_of(rows: Iterable[Row]) -> list[Block]:
    """Rows that may be compared, together; apart by folder where two folders have the same decoder."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.base, row.task, json.dumps(row.settings)), []).append(row)
    out = []
    for group in groups.values():
        twice = len({row.variant for row in group}) < len(group)
        for source in dict.fromkeys(row.source if twice else "" for row in group):
            mine = sorted((x for x in group if source in ("", x.source)), key=lambda row: rank(row.variant))
            (_, temperature), *settings = mine[0].settings
            title = f"{mine[0].base}: {mine[0].task}, T = {temperature:g}" + (f" ({source})" if source else "")
            about = ", ".join(f"{name.replace('_', ' ')} {_json(value)}" for name, value in settings)
            out.append(Block(title, about, mine))
    return sorted(out, key=lambda block: (block.task != "text", block.title, block.about))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
