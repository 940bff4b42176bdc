"""`adjust report`: result folders in, the paper's tables and figures and one page out."""

from __future__ import annotations

import base64
import functools
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from adjust_dlm.bench.figures import all_figures
from adjust_dlm.bench.records import blocks_of, label_of, read_result, rows_of
from adjust_dlm.bench.samples import samples_of, side_by_side
from adjust_dlm.bench.tables import all_tables, show, summary, table_files
from adjust_dlm.checks import Checked, Whole, require
from adjust_dlm.eval.plots import check_plot, draw, fit, to_png
from adjust_dlm.files import write_whole
from adjust_dlm.words import counted

log = logging.getLogger(__name__)
PAGE = "report.html"
PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, undefined=StrictUndefined
)
PAGES.globals.update(show=show, label_of=label_of, counted=counted)
PAGES.globals.update(json=functools.partial(json.dumps, ensure_ascii=False))


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Checked):
    """Settings of `adjust report`.

    Attributes:
        results: folders with a result.json of `adjust eval`, `generate` or `compare`, in any mix.
        output: where tables (.md, .csv), figures (.png) and report.html go.
        title: of the page.
        samples: rows shown side by side, of every task; 0 leaves texts out.
        plot: draw the figures, beside the page and in it (needs matplotlib).
    """

    results: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    output: str = "runs/report"
    title: str = "Decoders compared"
    samples: Whole = 6
    plot: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.results), "name at least one folder with a result.json")
        folders = [Path(name).resolve() for name in self.results]
        twice = [name for name, at in zip(self.results, folders, strict=True) if folders.count(at) > 1]
        require(not twice, f"{', '.join(twice[:2])}: the same folder twice")
        require(Path(self.output).resolve() not in folders, f"{self.output} is a folder of results; write elsewhere")
        check_plot(self.plot)


def make_report(config: ReportConfig) -> dict[str, Any]:
    """Reads every folder, writes what they give.

    Returns:
        The files, and how many scores and texts of each folder are in them.

    Raises:
        InputError: a folder without a result, or with a damaged one.
    """
    results = [read_result(Path(name)) for name in config.results]
    rows = [rows_of(result) for result in results]
    texts = [
        samples_of(result, found, config.samples) if config.samples else []
        for result, found in zip(results, rows, strict=True)
    ]
    blocks = blocks_of(row for found in rows for row in found)
    first, tables = summary(blocks), all_tables(blocks, results)
    drawn = [(figure, to_png(draw(figure.panels))) for figure in all_figures(blocks) if config.plot]
    samples = side_by_side([sample for found in texts for sample in found], config.samples)
    counts = []
    for result, measured in zip(results, rows, strict=True):
        mine = [text for shown in samples for text in shown if text.source == str(result.source)]
        scores = sum(len(row.values) for row in measured) + sum(len(text.scores) for text in mine)
        counts.append({"folder": str(result.source), "scores": scores, "texts_shown": len(mine)})
    page = PAGES.get_template("report.html.j2").render(
        title=config.title, results=results, counts=counts, summary=first, tables=tables, samples=samples,
        figures=[(figure, base64.b64encode(picture).decode()) for figure, picture in drawn],
        orders=[row for row in samples if any(sample.order for sample in row)],
    )  # fmt: skip
    files = table_files([first, *tables])
    files |= {f"{figure.name}.png": picture for figure, picture in drawn} | {PAGE: fit(page).encode()}
    folder = Path(config.output)
    write_whole({folder / name: content for name, content in files.items()})
    for result, *found in zip(results, rows, texts, strict=True):
        if not any(found) and result.command not in ("eval paired", "eval nll", "eval mauve"):
            log.warning("%s: nothing in it for a table or a figure; it is listed under provenance", result.source)
    return {
        "page": str(folder / PAGE), "files": list(files),
        "folders": counts,
        "blocks": [{"block": x.title, "decoders": len(x.rows), "settings": x.about} for x in blocks],
    }  # fmt: skip
