"""One HTML file with everything in it: no script, no request to anywhere, readable on a phone, light and dark."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from adjust_dlm.bench.figures import Figure
from adjust_dlm.bench.records import Measured, Result, label_of, rank, split_variant
from adjust_dlm.bench.samples import Sample
from adjust_dlm.bench.style import STYLE
from adjust_dlm.bench.tables import Cell, Table, show
from adjust_dlm.eval.plots import fit


@dataclass(frozen=True)
class Contents:
    """What a page shows.

    Attributes:
        title: of the page.
        summary: stands first.
        tables: in the order of the page.
        figures: with the SVG of each; none without matplotlib.
        samples: rows with the texts of every decoder.
        results: for the provenance.
    """

    title: str
    summary: Table
    tables: Sequence[Table]
    figures: Sequence[tuple[Figure, str]]
    samples: Sequence[Sequence[Sample]]
    results: Sequence[Result]


def to_html(contents: Contents) -> str:
    """The page."""
    parts = [
        ("summary", "Summary", _table(contents.summary) if contents.summary.rows else ""),
        ("figures", "Figures", "".join(_figure(*drawn) for drawn in contents.figures)),
        ("tables", "Tables", "".join(map(_table, contents.tables))),
        ("samples", "Samples", _texts(contents.samples)),
        ("order", "Order", _orders(contents.samples)),
        ("provenance", "Provenance", "".join(map(_provenance, contents.results))),
    ]
    shown = [(name, title, body) for name, title, body in parts if body]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in shown)
    sections = "".join(f'<section id="{name}"><h2>{title}</h2>{body}</section>' for name, title, body in shown)
    title = text(contents.title)
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{STYLE}</style></head>"
    )
    where = ", ".join(f"<code>{text(str(result.source))}</code>" for result in contents.results)
    top = f'<header><h1>{title}</h1><p class="note">From {where}</p><nav>{links}</nav></header>'
    return f"{head}<body>{top}<main>{sections}</main></body></html>\n"


def text(value: str) -> str:
    """Any text as it may stand in the page, between tags or in an attribute."""
    return escape(fit(value))


# Tables and figures --------------------------------------------------------------------------------------------


def _table(table: Table) -> str:
    best = [table.best(column) for column in range(len(table.head))]
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in table.head)
    body = "".join(
        "<tr>" + "".join(_cell(cell, first=c == 0, best=best[c] == n) for c, cell in enumerate(row)) + "</tr>"
        for n, row in enumerate(table.rows)
    )
    note = f'<p class="note">{_dashes(text(table.note))}</p>' if table.note else ""
    inner = f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<figure><h3>{text(table.title)}</h3>{inner}{note}</figure>"


def _cell(cell: Cell, *, first: bool, best: bool) -> str:
    if isinstance(cell, Measured):
        mean, _, half = show(cell).partition(" +- ")
        inner = f"<b>{mean}</b>" if best else mean
        n = "" if cell.n is None else f' title="n = {cell.n}"'
        return f"<td{n}>{inner}" + (f" <small>&plusmn;&nbsp;{half}</small>" if half else "") + "</td>"
    inner = text(show(cell))
    if first:
        return f'<th scope="row">{inner}</th>'
    return f'<td class="words">{_dashes(inner)}</td>' if isinstance(cell, str) else f"<td>{inner}</td>"


def _dashes(note: str) -> str:
    return note.replace("+-", "&plusmn;")


def _figure(figure: Figure, svg: str) -> str:
    inner = f'<div class="wide" tabindex="0">{svg}</div>'
    return f'<figure><h3>{text(figure.title)}</h3>{inner}<p class="note">{text(figure.note)}</p></figure>'


# Samples -------------------------------------------------------------------------------------------------------


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


def _names(row: Sequence[Sample]) -> list[str]:
    """Decoders; with the folder where two of them are the same."""
    variants = [sample.variant for sample in row]
    return [
        label_of(sample.variant) + (f" ({sample.source})" if variants.count(sample.variant) > 1 else "")
        for sample in row
    ]


def _rows_of_texts(rows: Sequence[Sequence[Sample]], inner: Callable[[Sequence[Sample]], str]) -> str:
    """Every row that has something inside, folded; the first one of a group is open."""
    out, open_groups = [], set[str]()
    for row in rows:
        body = inner(row)
        if not body:
            continue
        first = row[0]
        prompt = f'<p class="prompt">{text(first.prompt)}</p>' if first.prompt else ""
        state = "" if first.group in open_groups else " open"
        open_groups.add(first.group)
        out.append(
            f"<details{state}><summary>{text(first.group)}, row {text(first.row)}</summary>{prompt}{body}</details>"
        )
    return "".join(out)


def _texts(rows: Sequence[Sequence[Sample]]) -> str:
    def cards(row: Sequence[Sample]) -> str:
        inner = "".join(
            f"<div><h4>{text(name)}{_scores(sample)}</h4><p>{text(sample.text) or '<i>empty</i>'}</p></div>"
            for name, sample in zip(_names(row), row, strict=True)
        )
        return f'<div class="cards">{inner}</div>'

    return _rows_of_texts(rows, cards)


def _scores(sample: Sample) -> str:
    return "".join(f' <small class="score">{text(name)} {value:.3g}</small>' for name, value in sample.scores.items())


def _orders(rows: Sequence[Sequence[Sample]]) -> str:
    """Heat maps of all samples whose order is known."""

    def maps(row: Sequence[Sample]) -> str:
        known = [(name, sample) for name, sample in zip(_names(row), row, strict=True) if sample.order]
        inner = "".join(f"<div><h4>{text(name)}</h4>{order_map(sample)}</div>" for name, sample in known)
        return f'<div class="panels">{inner}</div>' if known else ""

    out = _rows_of_texts(rows, maps)
    note = (
        '<p class="note">Positions from left to right, line by line. Faint ones were revealed first, strong ones last; '
        "an outline alone: given, or filler behind the end.</p>"
    )
    return note + out if out else ""


def order_map(sample: Sample) -> str:
    """Every new position as a cell, stronger the later it was revealed."""
    last = max([*sample.order, 1])
    k = split_variant(sample.variant)[1].get("tokens_per_step", 1)
    cells = []
    for n, step in enumerate(sample.order, start=1):
        when = f"revealed as number {step + 1}" + (f", pass {step // k + 1}" if k > 1 else "")
        said = f"position {n}: " + (when if step >= 0 else "given" if step == -1 else "filler behind the end")
        shade = f'style="opacity:{0.1 + 0.9 * step / last:.2f}"' if step >= 0 else 'class="none"'
        cells.append(f'<i title="{said}" {shade}></i>')
    return f'<div class="order" role="img" aria-label="order of {len(sample.order)} positions">{"".join(cells)}</div>'


# Provenance ----------------------------------------------------------------------------------------------------


def _provenance(result: Result) -> str:
    facts: dict[str, Any] = {**result.provenance, "config": result.config}
    rows = "".join(f"<dt>{text(name)}</dt><dd>{text(_words(value))}</dd>" for name, value in facts.items())
    title = f"{text(str(result.source))}: adjust {text(result.command)}"
    return f"<details><summary>{title}</summary><dl>{rows}</dl></details>"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)
