"""The paper's figures as panels of curves with error bars; drawn by matplotlib as PNG, by `svg` inside the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adjust_dlm.bench.records import Block, Row, curve_of, label_of, line_of, rank, split_variant
from adjust_dlm.bench.tables import sign_of, title_of

# Okabe-Ito for those that meet most often; the rest in hues that stay apart from them.
COLOURS = {
    "joint": "#7d7d7d", "parallel": "#d55e00", "edlm": "#e69f00", "apd": "#cc79a7", "dcd": "#8c6d31",
    "adjust": "#0072b2", "adaptive": "#009e73", "cascade": "#56b4e9", "threshold": "#7b5ea7", "factor": "#a3492f",
    "entropy_bound": "#6b8e23", "klass": "#b0304f",
}  # fmt: skip
OTHERS = ("#5f6b7a", "#94724e", "#3f7f7f", "#8a4f8a")
DASHES = ((), (6, 3), (2, 2), (6, 2, 2, 2))
MARKERS = "osD^v"


@dataclass(frozen=True)
class Point:
    """x, y, half of the 95 % interval of y if known, and what a reader sees when pointing at it."""

    x: float
    y: float
    half: float | None
    note: str


@dataclass(frozen=True)
class Curve:
    """Points of one form of a decoder, x ascending.

    Attributes:
        label: for the legend.
        decoder: gives the colour.
        form: 0, 1, ...: forms of one decoder have different dashes.
        points: at least one.
    """

    label: str
    decoder: str
    form: int
    points: list[Point]

    @property
    def colour(self) -> str:
        """The same in every figure."""
        return COLOURS.get(self.decoder) or OTHERS[sum(map(ord, self.decoder)) % len(OTHERS)]

    @property
    def dashes(self) -> tuple[int, ...]:
        """Lengths of dashes and gaps; empty for a full line."""
        return DASHES[self.form % len(DASHES)]

    @property
    def marker(self) -> str:
        """As matplotlib names it: circle, square, diamond, triangle up or down."""
        return MARKERS[self.form % len(MARKERS)]


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: of the block.
        x, y: labels.
        base: 2 or 10: the logarithmic x axis' ticks.
        curves: in the house's order.
    """

    title: str
    x: str
    y: str
    base: int
    curves: list[Curve]


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
    forms: dict[str, int] = {}
    starts = {_way(rows[0]): rows for rows in lines.values() if split_variant(rows[0].variant)[0] == "joint"}
    made = []
    for label, rows in lines.items():
        decoder = split_variant(rows[0].variant)[0]
        forms[decoder] = forms.get(decoder, -1) + 1
        start = starts.get(_way(rows[0]), []) if _starts_at_joint(x, decoder, rows) else []
        points = sorted((_point(row, x, measure) for row in [*start, *rows]), key=lambda point: point.x)
        made.append(Curve(label, decoder, forms[decoder], points))
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
    at = float(row.k or 0) if x == "K" else row.costs[x]
    shown = f"{value.mean:.3f}" + ("" if value.ci95 is None else f" +- {value.ci95:.3f}")
    return Point(at, value.mean, value.ci95, f"{label_of(row.variant)}: {title_of(measure)} {shown} at {at:.3g}")


# Axes ----------------------------------------------------------------------------------------------------------


def log_ticks(low: float, high: float, base: int) -> list[float]:
    """Powers of two, or 1-2-5 steps, that lie in [low, high]; the ends themselves where fewer than two do."""
    steps = (1.0,) if base == 2 else (1.0, 2.0, 5.0)
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    found = [step * float(base) ** n for n in powers for step in steps]
    inside = [tick for tick in found if low * 0.999 <= tick <= high * 1.001]
    return inside if len(inside) > 1 else [low, high]


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers in [low, high], at most `most`."""
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 10) for n in range(first, last + 1)]


def limits(panel: Panel) -> tuple[float, float, float, float]:
    """x and y ranges that hold every point and its bar, with a little room."""
    points = [point for curve in panel.curves for point in curve.points]
    left, right = min(p.x for p in points), max(p.x for p in points)
    low = min(p.y - (p.half or 0) for p in points)
    high = max(p.y + (p.half or 0) for p in points)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return left / 1.12, right * 1.12, low - room, high + room


def draw(figure: Figure, path: Path) -> None:
    """A PNG with one row of two axes for every two panels, and one legend below."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    columns = min(2, len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)
    below = 0.24 * math.ceil(len(decoders_in(figure.panels)) / 4) + 0.3
    drawn, axes = plt.subplots(rows, columns, figsize=(6 * columns, 4 * rows + below), squeeze=False)
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, figure.panels, strict=False):
        left, right, low, high = limits(panel)
        for curve in panel.curves:
            xs, ys = [p.x for p in curve.points], [p.y for p in curve.points]
            handles[curve.label] = axis.errorbar(
                xs, ys, [p.half or 0 for p in curve.points], label=curve.label, color=curve.colour, marker=curve.marker,
                ms=4, lw=1.4, elinewidth=0.8, capsize=2, ls=(0, curve.dashes) if curve.dashes else "-",
            )  # fmt: skip
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, xscale="log", xlim=(left, right), ylim=(low, high))
        axis.title.set_fontsize(10)
        axis.xaxis.set_major_locator(FixedLocator(log_ticks(left, right, panel.base)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(figure.panels) :]:
        axis.set_axis_off()
    share = below / (4 * rows + below)
    drawn.tight_layout(rect=(0, share, 1, 1))
    drawn.legend(list(handles.values()), list(handles), loc="lower center", ncols=min(4, len(handles)), fontsize=8)
    drawn.savefig(path, dpi=130)
    plt.close(drawn)


def decoders_in(panels: Iterable[Panel]) -> list[Curve]:
    """One curve of every label, for a legend."""
    return list({curve.label: curve for panel in panels for curve in panel.curves}.values())
