"""The paper's figures as panels of curves with error bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adjust_dlm.bench.records import Block, Row, line_of, split_variant
from adjust_dlm.bench.tables import sign_of
from adjust_dlm.eval.plots import Curve, Panel, Point
from adjust_dlm.eval.settings import FORM
from adjust_dlm.words import title_of


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


def _panels(blocks: Sequence[Block], x: str, base: int) -> list[Panel]:
    """Of every measure of a text that is a score, and of the first metric of a task, which is its main one."""
    made = []
    for block in blocks:
        measures = list(filter(sign_of, block.measures()))
        for measure in measures if block.task == "text" else measures[:1]:
            curves = _curves(block, x, measure)
            if any(len(curve.points) > 1 for curve in curves) or len(curves) > 1:
                made.append(Panel(block.title, title_of(x), title_of(measure), base, curves))
    return made


def _curves(block: Block, x: str, measure: str) -> list[Curve]:
    """Curves of a block: by K a decoder and its settings, else a decoder and what makes another form of it."""

    def at(row: Row) -> float:
        return (row.k if x == "K" else row.costs.get(x)) or 0.0

    lines: dict[str, list[Row]] = {}
    for row in block.rows:
        if measure in row.values and at(row):
            lines.setdefault(line_of(row.variant, None if x == "K" else FORM), []).append(row)
    starts = {_way(rows[0]): rows for rows in lines.values() if split_variant(rows[0].variant)[0] == "joint"}
    made = []
    for label, rows in lines.items():
        decoder = split_variant(rows[0].variant)[0]
        # By K only where K = 1 of that decoder is joint decoding, and was not measured itself.
        begins = x != "K" or (decoder in ("parallel", "adjust") and all(row.k != 1 for row in rows))
        start = starts.get(_way(rows[0]), []) if begins and decoder != "joint" else []
        values = [(at(row), row.values[measure]) for row in sorted([*start, *rows], key=at)]
        made.append(Curve(label, decoder, [Point(where, value.mean, value.ci95) for where, value in values]))
    return made


def _way(row: Row) -> str:
    """Settings that change text at one token a pass, too: only joint decoding with the same ones starts a curve."""
    options = split_variant(row.variant)[1]
    return str({name: options[name] for name in ("block_length", "cache_period", "order") if name in options})
