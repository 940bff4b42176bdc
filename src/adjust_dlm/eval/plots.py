"""Curves with error bars by matplotlib, as PNG, and tables as CSV."""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from adjust_dlm.types import require

# Okabe-Ito for those that meet most often; the rest in hues that stay apart from them.
COLOURS = {
    "joint": "#7d7d7d", "parallel": "#d55e00", "edlm": "#e69f00", "apd": "#cc79a7", "dcd": "#8c6d31",
    "adjust": "#0072b2", "adaptive": "#009e73", "cascade": "#56b4e9", "threshold": "#7b5ea7", "factor": "#a3492f",
    "entropy_bound": "#6b8e23", "klass": "#b0304f",
}  # fmt: skip
OTHERS = ("#5f6b7a", "#94724e", "#3f7f7f", "#8a4f8a")
DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (6, 2, 2, 2)))
MARKERS = "osD^v"
# What XML, HTML or UTF-8 cannot hold: control characters, lone halves of surrogate pairs and two more.
_UNFIT = re.compile("[^\t\n\r\x20-\x7e\x80-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Point(NamedTuple):
    """x, y, and half of the 95 % interval of y if known."""

    x: float
    y: float
    half: float | None


class Curve(NamedTuple):
    """Points of one form of a decoder, x ascending; all forms have its colour, each its own dashes and markers."""

    label: str
    decoder: str
    points: list[Point]


class Panel(NamedTuple):
    """One pair of axes: title, labels, 2 or 10 for the ticks of the logarithmic x axis, and at least one curve."""

    title: str
    x: str
    y: str
    base: int
    curves: list[Curve]


def check_plot(plot: bool) -> None:
    """Raises InputError where figures are wanted and matplotlib is not installed."""
    require(not plot or find_spec("matplotlib") is not None, "figures need matplotlib: use --no-plot, or "
            "pip install 'adjust-dlm[eval]'")  # fmt: skip


def fit(text: str) -> str:
    """Any text, as far as a page can hold it."""
    return _UNFIT.sub("\ufffd", text)


def draw(panels: Sequence[Panel]) -> Any:
    """A figure with one row of two axes for every two panels, and one legend below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    styles = _styles(curve for panel in panels for curve in panel.curves)
    columns, rows = min(2, len(panels)), math.ceil(len(panels) / 2)
    below = 0.24 * math.ceil(len(styles) / 4) + 0.3
    figure = Figure(figsize=(6 * columns, 4 * rows + below), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=False):
        for curve in panel.curves:
            xs, ys, halves = zip(*((p.x, p.y, p.half or 0) for p in curve.points), strict=True)
            handles[_plain(curve.label)] = axis.errorbar(
                xs, ys, halves, ms=4, lw=1.4, elinewidth=0.8, capsize=2, **styles[curve.label]
            )
        axis.set_title(textwrap.fill(_plain(panel.title), 64), fontsize=10)
        axis.set(xlabel=_plain(panel.x), ylabel=_plain(panel.y), xscale="log")
        axis.xaxis.set_major_locator(LogLocator(panel.base, (1, 1.5) if panel.base == 2 else (1, 2, 5)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
    for axis in list(axes)[len(panels) :]:
        axis.set_axis_off()
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _styles(curves: Iterable[Curve]) -> dict[str, dict[str, Any]]:
    """Of every label, as matplotlib takes them."""
    forms: dict[str, dict[str, int]] = {}
    styles = {}
    for curve in curves:
        mine = forms.setdefault(curve.decoder, {})
        form = mine.setdefault(curve.label, len(mine))
        colour = COLOURS.get(curve.decoder) or OTHERS[sum(map(ord, curve.decoder)) % len(OTHERS)]
        dashes, marker = DASHES[form % len(DASHES)], MARKERS[form % len(MARKERS)]
        styles[curve.label] = {"color": colour, "ls": dashes, "marker": marker}
    return styles


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formula."""
    return fit(text).replace("$", r"\$")


def to_png(figure: Any) -> bytes:
    """The file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130)
    return out.getvalue()


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """One line a row, numbers with six digits; nothing for None and for what is no number."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {k: ("" if v != v else f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows
    )
    return out.getvalue()
