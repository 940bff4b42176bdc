"""What a command leaves behind: `result.json`, `samples.jsonl`, `run.yaml`, each whole or not at all; and tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from adjust_dlm.files import plain, write_whole
from adjust_dlm.types import require
from adjust_dlm.words import title_of

RESULT, SAMPLES, RUN = "result.json", "samples.jsonl", "run.yaml"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command returns.

    Attributes:
        results: becomes `result.json`, beside command, settings and provenance.
        samples: one JSON object a line of `samples.jsonl`; None writes no such file.
    """

    results: dict[str, Any]
    samples: list[dict[str, Any]] | None = None


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: what is not a finite number becomes null."""
    # A round trip, since the encoder has no hook for floats but its own spelling of NaN and infinity.
    strict = json.loads(json.dumps(plain(value)), parse_constant=lambda _: None)
    return json.dumps(strict, indent=indent, ensure_ascii=False)


def check_folder(folder: Path | None) -> None:
    """Refuses an output folder that could not be written, before any work is done. Creates nothing.

    Raises:
        InputError: it is a file, or the folder it is to be made in is not writable.
    """
    if folder is None:
        return
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    require(nearest.is_dir(), f"cannot write to {folder}: {nearest} is not a folder")
    require(os.access(nearest, os.W_OK | os.X_OK), f"cannot write to {folder}: no permission in {nearest}")


def write_outcome(folder: Path, command: str, settings: Any, outcome: Outcome) -> None:
    """Writes all files of a run. Every one is complete on disk before the first takes its name.

    Raises:
        OSError: full disk or no permission; files of an earlier run are then untouched.
    """
    from adjust_dlm.provenance import provenance

    config = plain(settings)
    result = {"command": command, "config": config, "results": outcome.results, "provenance": provenance()}
    header = f"# Repeat with: adjust {command} --config {RUN}\n"
    texts = {RUN: header + yaml.safe_dump(config, sort_keys=False, allow_unicode=True)}
    if outcome.samples is not None:
        texts[SAMPLES] = "".join(to_json(sample) + "\n" for sample in outcome.samples)
    texts[RESULT] = to_json(result, indent=2) + "\n"
    write_whole({folder / name: text for name, text in texts.items()})


def say(text: str) -> None:
    """One line of output on stdout, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """A table on stdout; numbers on the right, long texts folded, with a rule between rows where some have lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    lines = any("\n" in str(cell) for row in rows for cell in row)
    table = Table(title=title, title_justify="left", show_lines=lines)
    for n, name in enumerate(columns):
        numbers = all(isinstance(row[n], int | float) or row[n] is None or " +- " in str(row[n]) for row in rows)
        whole = [show_value(row[n]) for row in rows]
        parts = [*name.split(), *(whole if numbers else " ".join(whole).split())]
        table.add_column(
            name, justify="right" if numbers and rows else "left", overflow="fold",
            min_width=min(16, max(map(len, parts))),
        )  # fmt: skip
    for row in rows:
        table.add_row(*(Text(show_value(cell)) for cell in row))
    console = Console(file=sys.stdout)
    # A table that cannot be folded into the terminal is wider than it; no column ever vanishes.
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).minimum)
    while (needed := _width(console, table, console.width)) > console.width:
        console.width = needed
    console.print(table)


def _width(console: Any, table: Any, width: int) -> int:
    """Of a table that should not be wider than that; rich crops what is."""
    from rich.segment import Segment

    lines = Segment.split_lines(console.render(table, console.options.update(width=width)))
    return max(sum(segment.cell_length for segment in line) for line in lines)


def show_value(value: Any) -> str:
    """A cell: four significant digits for fractions, nothing for None and for what is no number."""
    if isinstance(value, float):
        return "" if value != value else f"{value:.4g}"
    return "" if value is None else str(value)


def show_results(results: Mapping[str, Any]) -> None:
    """Any result: a table of its single values, and one for every mapping and every list of records in it.

    Keys become words with units, and a value stands with its 95 % half-width in one cell.
    """
    results = plain(results)
    single = {key: value for key, value in results.items() if not isinstance(value, dict | list)}
    for key, value in {"": single, **results}.items():
        if isinstance(value, dict) and value and not any(isinstance(item, dict | list) for item in value.values()):
            cells = [(title_of(name, unit=True), value[name]) for name in _with_intervals([value])]
            show_table(("", "value"), cells, title=title_of(key, unit=True) or None)
            continue
        if isinstance(value, dict) and all(isinstance(row, dict) for row in value.values()):
            value = [{"": name, **row} for name, row in value.items()]
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            columns = [name for name in _with_intervals(value) if _worth_showing([row.get(name) for row in value])]
            heads = [title_of(name, unit=True) for name in columns]
            show_table(heads, [[row.get(name) for name in columns] for row in value], title=title_of(key, unit=True))


def _with_intervals(rows: list[dict[str, Any]]) -> list[str]:
    """The columns of rows, once each half-width has moved into the cell of its mean."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in (name for name in names if f"{name}_ci95" in names):
        for row in rows:
            mean, half = row.get(name), row.pop(f"{name}_ci95", None)
            if show_value(mean) and show_value(half):
                row[name] = f"{show_value(mean)} +- {half:.2g}"
    return [name for name in names if not name.endswith("_ci95")]


def _worth_showing(cells: list[Any]) -> bool:
    """Whether a column belongs in a table: no nested values, and no sentence repeated in every row."""
    nested = any(isinstance(cell, dict | list) for cell in cells)
    return not nested and not (len(cells) > 1 and len({str(cell) for cell in cells}) == 1 and len(str(cells[0])) > 20)
