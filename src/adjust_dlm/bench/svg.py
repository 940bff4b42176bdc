"""A panel as inline SVG: colours of text and grid are the page's, so that it fits light and dark."""

from __future__ import annotations

import math
from html import escape

from adjust_dlm.bench.figures import Curve, Panel, Point, limits, linear_ticks, log_ticks

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 44


class _Scale:
    """Data to picture."""

    def __init__(self, panel: Panel) -> None:
        self.left, self.right, self.low, self.high = limits(panel)

    def x(self, value: float) -> float:
        share = math.log(value / self.left) / math.log(self.right / self.left)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def to_svg(panel: Panel) -> str:
    """The panel; pointing at a point tells its numbers."""
    scale = _Scale(panel)
    inner = [*_axes(panel, scale), *(part for curve in panel.curves for part in _curve(curve, scale))]
    label = escape(f"{panel.y} against {panel.x}: {panel.title}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(inner)}</svg>'


def _axes(panel: Panel, scale: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    out = []
    for tick in linear_ticks(scale.low, scale.high):
        y = scale.y(tick)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(_text(LEFT - 7, y + 4, f"{tick:g}", "end"))
    for tick in log_ticks(scale.left, scale.right, panel.base):
        x = scale.x(tick)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        out.append(_text(x, bottom + 17, f"{tick:.3g}", "middle"))
    out.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    out.append(_text((LEFT + right) / 2, HEIGHT - 6, panel.x, "middle"))
    at = (TOP + bottom) / 2
    out.append(f'<text x="13" y="{at}" text-anchor="middle" transform="rotate(-90 13 {at})">{escape(panel.y)}</text>')
    return out


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _curve(curve: Curve, scale: _Scale) -> list[str]:
    places = [(scale.x(p.x), scale.y(p.y)) for p in curve.points]
    dashes = f' stroke-dasharray="{" ".join(map(str, curve.dashes))}"' if curve.dashes else ""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    out = [f'<g stroke="{curve.colour}" fill="{curve.colour}"><polyline class="curve" points="{line}"{dashes}/>']
    return [*out, *(_dot(point, curve.marker, scale) for point in curve.points), "</g>"]


# Shapes around (0, 0) of about the same area, by matplotlib's names.
SHAPES = {
    "o": "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z", "s": "M-3.2 -3.2h6.4v6.4h-6.4z",
    "D": "M0 -4.6L4.6 0L0 4.6L-4.6 0z", "^": "M0 -4.6L4.4 3.4H-4.4z", "v": "M0 4.6L4.4 -3.4H-4.4z",
}  # fmt: skip


def _dot(point: Point, marker: str, scale: _Scale) -> str:
    x, y = scale.x(point.x), scale.y(point.y)
    bar = ""
    if point.half:
        top, bottom = scale.y(point.y + point.half), scale.y(point.y - point.half)
        ends = "".join(f"M{x - 3:.1f} {end:.1f}h6" for end in (top, bottom))
        bar = f'<path class="bar" d="M{x:.1f} {top:.1f}V{bottom:.1f}{ends}"/>'
    shape = f'<path class="dot" transform="translate({x:.1f} {y:.1f})" d="{SHAPES[marker]}">'
    return f"{bar}{shape}<title>{escape(point.note)}</title></path>"
