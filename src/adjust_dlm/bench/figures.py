"""The paper's figures as panels of curves with error bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adjust_dlm.bench.records import Block, Row, curve_of, line_of, rank, split_variant
from adjust_dlm.bench.tables import sign_of, title_of
from adjust_dlm.eval.plots import Curve, Panel, Point


@dataclass(frozen=True)
class Figure:
    """Panels of one file.

    Attributes:
        name: of the file.
        title, note: for the page.
        panels: at least one.
    """

    name: str
    title: str
    note: str
    panels: list[Panel]


def all_figures(blocks: Sequence[Block]) -> list[Figure]:
    """Quality against K, against tokens per pass and against tokens per second; empty ones are left out."""
    start = (
        "Curves start at joint decoding, one token a pass. Bars are 95 % intervals. Text that repeats itself has a low "
        "NLL for being dull: see MAUVE and distinct-2 beside it."
    )
    made = [
        Figure("by-k", "Quality against K", start, _panels(blocks, "K", 2)),
        Figure("by-passes", "Quality against tokens per base pass", start, _panels(blocks, "tokens_per_pass", 2)),
        Figure("by-speed", "Quality against speed", f"{start} Speed is that of one run.",
               _panels(blocks, "tokens_per_second", 10)),
    ]  # fmt: skip
    return [figure for figure in made if figure.panels]


def shown_measures(block: Block) -> list[str]:
    """NLL and MAUVE of text; the first metric of a task, which is its main one."""
    measures = [name for name in block.measures() if sign_of(name)]
    return measures if block.task == "text" else measures[:1]


def _panels(blocks: Sequence[Block], x: str, base: int) -> list[Panel]:
    made = []
    for block in blocks:
        for measure in shown_measures(block):
            curves = _curves(block, x, measure)
            if any(len(curve.points) > 1 for curve in curves) or len(curves) > 1:
                made.append(Panel(block.title, title_of(x), title_of(measure), base, curves))
    return made


def _curves(block: Block, x: str, measure: str) -> list[Curve]:
    """Curves of a block; only decoders with a K have points in a figure by K."""
    name_of = line_of if x == "K" else curve_of
    lines: dict[str, list[Row]] = {}
    for row in sorted(block.rows, key=lambda row: rank(row.variant)):
        at = row.k if x == "K" else row.costs.get(x)
        if measure in row.values and at is not None and at > 0:
            lines.setdefault(name_of(row.variant), []).append(row)
    starts = {_way(rows[0]): rows for rows in lines.values() if split_variant(rows[0].variant)[0] == "joint"}
    made = []
    for label, rows in lines.items():
        decoder = split_variant(rows[0].variant)[0]
        start = starts.get(_way(rows[0]), []) if _starts_at_joint(x, decoder, rows) else []
        points = sorted((_point(row, x, measure) for row in [*start, *rows]), key=lambda point: point.x)
        made.append(Curve(label, decoder, points))
    return made


def _way(row: Row) -> str:
    """Settings that change text at one token a pass, too: only joint decoding with the same ones starts a curve."""
    options = split_variant(row.variant)[1]
    return str({name: options[name] for name in ("block_length", "cache_period", "order") if name in options})


def _starts_at_joint(x: str, decoder: str, rows: Sequence[Row]) -> bool:
    """By K only where K = 1 of that decoder is joint decoding, and was not measured itself."""
    if decoder == "joint":
        return False
    return x != "K" or (decoder in ("parallel", "adjust") and all(row.k != 1 for row in rows))


def _point(row: Row, x: str, measure: str) -> Point:
    value = row.values[measure]
    return Point(float(row.k or 0) if x == "K" else row.costs[x], value.mean, value.ci95)
