"""Result folders as rows: one for every task and decoder, with what was measured and what it cost.

Only rows of one block are compared: same base, task and settings. A value that a folder does not have is not there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adjust_dlm.decoders import read_options
from adjust_dlm.eval.frontier import FORM
from adjust_dlm.types import InputError, require

RESULT = "result.json"
# The order of every table and legend; what is not named here stands between the baselines and ADJUST.
FIRST, LAST = ("joint", "parallel", "edlm", "apd", "dcd"), ("adjust", "adaptive", "cascade")
NAMES = {
    "joint": "Joint", "parallel": "Parallel", "edlm": "EDLM", "apd": "APD", "dcd": "DCD", "adjust": "ADJUST",
    "adaptive": "ADJUST adaptive", "cascade": "ADJUST cascade", "threshold": "Threshold", "factor": "Factor",
    "entropy_bound": "Entropy bound", "klass": "KLASS", "soft_order": "Soft order",
}  # fmt: skip
COSTS = ("tokens_per_pass", "tokens_per_second", "rounds", "base_calls", "sampler_calls", "partner_calls", "seconds")
TEXT_SETTINGS = ("top_p", "max_new_tokens", "n", "judge", "buckets", "suppress_eos", "seed", "quantize")
LAW_SETTINGS = ("max_new_tokens", "n", "prompts", "chat", "order", "suppress_eos", "seed", "quantize")
# What two rows of a task may differ in and still be compared; every other setting must be equal.
FREE = {
    "base", "sampler", "partner", "output", "decoders", "tokens_per_step", "batch_size", "device", "temperature",
    "workers", "allow_code_execution",
}  # fmt: skip
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
    """

    source: str
    base: str
    task: str
    settings: tuple[tuple[str, Any], ...]
    variant: str
    values: dict[str, Measured]
    kinds: dict[str, dict[str, Measured]] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)

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
    def base(self) -> str:
        """The base of all rows."""
        return self.rows[0].base

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
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    good = isinstance(content, dict) and isinstance(content.get("command"), str)
    good = good and all(isinstance(content.get(key), dict) for key in ("config", "results", "provenance"))
    require(good, f"{file} is no result of `adjust`: command, config, results and provenance are wanted")
    return Result(folder, *(content[key] for key in ("command", "config", "results", "provenance")))


# Rows ----------------------------------------------------------------------------------------------------------


def rows_of(result: Result) -> list[Row]:
    """The rows of `eval table`, `eval divergence`, `eval frontier` and every downstream task; none for other commands.

    Raises:
        InputError: a result of one of these that lacks a field.
    """
    try:
        if _kind(result) == "table":
            return [
                _text_row(result, cell, _cell_variant(cell), cell["temperature"]) for cell in result.results["cells"]
            ]
        if _kind(result) == "frontier":
            return [_frontier_row(result, row) for row in result.results["rows"]]
        if _kind(result) == "divergence":
            return [
                _text_row(result, row, row["decoder"], row["temperature"], LAW_SETTINGS)
                for row in result.results["rows"]
            ]
        if is_downstream(result):
            return [_task_row(result, row) for row in result.results["rows"]]
        if is_grouped(result):
            return [_group_row(result, row) for row in result.results["macro_averages"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{result.source / RESULT} is damaged: {type(error).__name__} {error}") from error
    return []


def _kind(result: Result) -> str:
    """Last word of the command: a task of `eval` had one word once."""
    return result.command.split()[-1] if result.command else ""


def is_downstream(result: Result) -> bool:
    """Whether `downstream.evaluate` wrote it."""
    rows = result.results.get("rows")
    return "task" in result.results and isinstance(rows, list) and all("metrics" in row for row in rows)


def is_grouped(result: Result) -> bool:
    """Whether it is one of `eval parallelbench`: groups of tasks, each with its own lengths."""
    return "task" in result.results and isinstance(result.results.get("macro_averages"), list)


def _cell_variant(cell: Facts) -> str:
    k = cell["tokens_per_step"]
    return f"{cell['decoder']}:tokens_per_step={k}" if k > 1 else str(cell["decoder"])


def _text_row(
    result: Result, facts: Facts, variant: str, temperature: float, names: Sequence[str] = TEXT_SETTINGS
) -> Row:
    settings = (("temperature", float(temperature)), *_settings(result.config, names))
    n = facts["n"] if names is TEXT_SETTINGS else None
    kl = {name: _measured(facts.get(name), facts.get(f"{name}_ci95"), None) for name in ("kl_qp", "kl_pq")}
    values = kl | {name: _measured(facts.get(name), facts.get(f"{name}_ci95"), n) for name in ("nll", "mauve")}
    values["gap closed"] = _measured(facts.get("gap_closed"), facts.get("gap_closed_ci95"), n)
    values["distinct-2"] = _measured(facts.get("distinct_2"), None, n)
    return _row(result, "text", settings, variant, values, facts)


def _frontier_row(result: Result, facts: Facts) -> Row:
    task, _, temperature = facts["task"].partition(" T=")
    if task == "text":
        return _text_row(result, facts, facts["variant"], float(temperature))
    names = ("list_max_new_tokens", "list_block_length", "list_n", "seed", "quantize")
    settings = (("temperature", float(temperature)), *_settings(result.config, names))
    values = {"accuracy": _measured(facts["accuracy"], facts["accuracy_ci95"], facts["n"])}
    return _row(result, task, settings, facts["variant"], values, facts)


def _task_row(result: Result, facts: Facts) -> Row:
    def all_of(metrics: Facts) -> dict[str, Measured | None]:
        return {name: _measured(value["mean"], value["ci95"], value["n"]) for name, value in metrics.items()}

    settings = _task_settings(result.config)
    row = _row(result, result.results["task"], settings, facts["variant"], all_of(facts["metrics"]), facts)
    kinds = {kind: _known(all_of(metrics)) for kind, metrics in facts.get("kinds", {}).items()}
    return Row(**{**vars(row), "kinds": kinds})


def _task_settings(config: Facts) -> tuple[tuple[str, Any], ...]:
    names = [name for name in config if name not in FREE and config[name] is not False]
    return (("temperature", float(config["temperature"])), *_settings(config, names))


def _group_row(result: Result, macro: Facts) -> Row:
    """A group's means over its tasks, and its tasks as kinds."""

    def all_of(facts: Facts, start: str = "") -> dict[str, Measured]:
        names = [key.removeprefix(start) for key in facts if key.startswith(start) and f"{key}_ci95" in facts]
        found = {n: _measured(facts[start + n], facts[f"{start}{n}_ci95"], facts.get("n")) for n in names}
        return _known(found)

    group, variant = macro["group"], macro["variant"]
    mine = [row for row in result.results["rows"] if (row["group"], row["variant"]) == (group, variant)]
    settings = _task_settings(result.config)
    task = f"{result.results['task']} {group}"
    row = _row(result, task, settings, variant, all_of(macro, "macro_"), macro)
    return Row(**{**vars(row), "kinds": {line["task"]: all_of(line) for line in mine}})


def _row(
    result: Result, task: str, settings: tuple[tuple[str, Any], ...], variant: str,
    values: Mapping[str, Measured | None], facts: Facts,
) -> Row:  # fmt: skip
    costs = {name: float(facts[name]) for name in COSTS if facts.get(name) is not None}
    base = str(result.config["base"])
    return Row(str(result.source), base, str(task), settings, variant, _known(values), costs=costs)


def _measured(mean: float | None, ci95: float | None, n: int | None) -> Measured | None:
    """None for what was not measured, or has no finite value."""
    if mean is None or not math.isfinite(mean):
        return None
    return Measured(float(mean), None if ci95 is None or not math.isfinite(ci95) else float(ci95), n)


def _known(values: Mapping[str, Measured | None]) -> dict[str, Measured]:
    return {name: value for name, value in values.items() if value is not None}


def _settings(config: Facts, names: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, config[name]) for name in names if config.get(name) not in (None, ""))


# Names and order -----------------------------------------------------------------------------------------------


def split_variant(variant: str) -> tuple[str, Facts]:
    """`adjust:candidates=4,tokens_per_step=2` -> name and settings; the decoder need not exist any more."""
    name, _, pairs = variant.partition(":")
    return name, read_options(pairs.split(",")) if pairs else {}


def line_of(variant: str) -> str:
    """A variant without its K, as a person reads it: the line of a table by K."""
    name, options = split_variant(variant)
    return " ".join([nice(name), *(f"{k}={_json(v)}" for k, v in options.items() if k != "tokens_per_step")])


def curve_of(variant: str) -> str:
    """What a curve is drawn through: the decoder, and settings that make another form of it (see `eval frontier`)."""
    name, options = split_variant(variant)
    return " ".join([nice(name), *(f"{k}={_json(v)}" for k, v in options.items() if k in FORM)])


def label_of(variant: str) -> str:
    """A variant as a person reads it."""
    k = split_variant(variant)[1].get("tokens_per_step")
    return line_of(variant) + ("" if k is None else f", K={k}")


def nice(decoder: str) -> str:
    """The name of a decoder as the papers spell it."""
    return NAMES.get(decoder, decoder.replace("_", " ").capitalize())


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
        variants = [row.variant for row in group]
        twice = len(set(variants)) < len(variants)
        parts: dict[str, list[Row]] = {}
        for row in group:
            parts.setdefault(row.source if twice else "", []).append(row)
        out += [_block(part, source) for source, part in parts.items()]
    return sorted(out, key=lambda block: (block.task != "text", block.base, block.task, block.title, block.about))


def _block(rows: list[Row], source: str) -> Block:
    settings = dict(rows[0].settings)
    temperature = settings.pop("temperature", None)
    at = "" if temperature is None else f", T = {temperature:g}"
    title = f"{rows[0].base}: {rows[0].task}{at}" + (f" ({source})" if source else "")
    about = ", ".join(f"{name.replace('_', ' ')} {_json(value)}" for name, value in settings.items())
    return Block(title, about, sorted(rows, key=lambda row: rank(row.variant)))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
