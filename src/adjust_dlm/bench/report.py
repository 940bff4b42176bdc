"""`adjust report`: result folders in, the paper's tables and figures and one page out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from adjust_dlm.bench.figures import all_figures
from adjust_dlm.bench.page import Contents, side_by_side, to_html
from adjust_dlm.bench.records import Block, Result, blocks_of, read_result, rows_of
from adjust_dlm.bench.samples import samples_of
from adjust_dlm.bench.tables import Table, all_tables, summary, to_csv, to_markdown
from adjust_dlm.eval.plots import check_plot, draw, to_png, to_svg
from adjust_dlm.files import write_whole
from adjust_dlm.types import require

log = logging.getLogger(__name__)
PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
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
    samples: int = 6
    plot: bool = True

    def __post_init__(self) -> None:
        """Checks what can be refused before anything is read."""
        require(bool(self.results), "name at least one folder with a result.json")
        require(self.samples >= 0, f"samples is {self.samples}; it must be at least 0")
        folders = [Path(name).resolve() for name in self.results]
        twice = [name for name, at in zip(self.results, folders, strict=True) if folders.count(at) > 1]
        require(not twice, f"{', '.join(twice[:2])}: the same folder twice")
        require(Path(self.output).resolve() not in folders, f"{self.output} is a folder of results; write elsewhere")
        check_plot(self.plot)


def make_report(config: ReportConfig) -> dict[str, Any]:
    """Reads every folder, writes what they give.

    Returns:
        The files, and how many rows each folder gave.

    Raises:
        InputError: a folder without a result, or with a damaged one.
    """
    results = [read_result(Path(name)) for name in config.results]
    rows = {str(result.source): rows_of(result) for result in results}
    blocks = blocks_of(row for found in rows.values() for row in found)
    tables = all_tables(blocks, results)
    texts = [sample for result in results if config.samples for sample in samples_of(result, config.samples)]
    drawn = [(figure, draw(figure.panels)) for figure in all_figures(blocks) if config.plot]
    shown = [(figure, to_svg(picture, figure.name, figure.title)) for figure, picture in drawn]
    contents = Contents(config.title, summary(blocks), tables, shown, side_by_side(texts, config.samples), results)
    folder = Path(config.output)
    files = _tables([contents.summary, *tables])
    files |= {f"{figure.name}.png": to_png(picture) for figure, picture in drawn} | {PAGE: to_html(contents).encode()}
    write_whole({folder / name: content for name, content in files.items()})
    unused = [str(result.source) for result in results if _gave_nothing(result, rows, contents)]
    for name in unused:
        log.warning("%s: nothing in it for a table or a figure; it is listed under provenance", name)
    counts = [{"folder": name, "rows": len(found)} for name, found in rows.items()]
    return {"page": str(folder / PAGE), "files": list(files), "folders": counts, "blocks": _about(blocks)}


def _gave_nothing(result: Result, rows: dict[str, list[Any]], contents: Contents) -> bool:
    shown = any(str(result.source) == sample.source for row in contents.samples for sample in row)
    return not (rows[str(result.source)] or shown or result.command in ("eval paired", "eval nll", "eval mauve"))


def _tables(tables: list[Table]) -> dict[str, bytes]:
    """Tables of one name share a .md and a .csv."""
    files: dict[str, bytes] = {}
    for name in dict.fromkeys(table.name for table in tables if table.rows):
        mine = [table for table in tables if table.name == name]
        texts = {f"{name}.md": "\n".join(map(to_markdown, mine)), f"{name}.csv": to_csv(mine)}
        files |= {file: text.encode("utf-8", "replace") for file, text in texts.items()}
    return files


def _about(blocks: list[Block]) -> list[dict[str, Any]]:
    return [{"block": block.title, "decoders": len(block.rows), "settings": block.about} for block in blocks]
