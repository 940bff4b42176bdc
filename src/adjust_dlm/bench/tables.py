"""The paper's tables from blocks of rows: by K, downstream, by kind of problem, speed; as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from adjust_dlm.bench.records import (
    COSTS,
    Block,
    Measured,
    Result,
    Row,
    damage_named,
    label_of,
    line_of,
    measured,
    rank,
)
from adjust_dlm.eval.plots import csv_text
from adjust_dlm.words import title_of

TEXT = ("kl_qp", "kl_pq", "nll", "mauve")
NATS = "KL and NLL are in nats a token"
Cell = Measured | str | int | float | None


@dataclass(frozen=True)
class Table:
    """What stands in a table; `Measured` cells keep their interval.

    Attributes:
        name: part of its file name; tables of one name share a file.
        title, note: above and below it.
        head: names of the columns.
        rows: one cell for each column.
        better: for each column +1 where more is better, -1 where less is, 0 where neither is marked.
    """

    name: str
    title: str
    note: str
    head: tuple[str, ...]
    rows: list[list[Cell]]
    better: tuple[int, ...] = ()

    def best(self, column: int) -> int | None:
        """The row with the best value of a column; None where nothing is marked or fewer than two have one."""
        sign = self.better[column] if self.better else 0
        cells = ((n, row[column]) for n, row in enumerate(self.rows))
        found = {n: sign * cell.mean for n, cell in cells if isinstance(cell, Measured)}
        return max(found, key=found.__getitem__) if sign and len(found) > 1 else None


def sign_of(measure: str) -> int:
    """+1 where more is better; distinct-n and the gap are facts about a text, not scores."""
    return {"kl_qp": -1, "kl_pq": -1, "nll": -1, "gap closed": 0, "distinct-2": 0}.get(measure, 1)


# Which tables --------------------------------------------------------------------------------------------------


def all_tables(blocks: Sequence[Block], results: Sequence[Result]) -> list[Table]:
    """Every table that the rows give; one without a row is left out."""
    tasks = [block for block in blocks if block.task != "text"]
    made = [by_k(block) for block in blocks if block.task == "text"]
    made += [downstream(tasks), *kinds(tasks), speed(blocks), *map(every, blocks), paired(results), scored(results)]
    return [table for table in made if table.rows]


def by_k(block: Block) -> Table:
    """Distance to the joint law, NLL and MAUVE of decoders with a fixed K: the paper's Table 1 and what leads it."""
    found = {(line_of(row.variant), row.k): row.values for row in block.rows if row.k}
    ks = sorted({k for _, k in found})
    columns = [(k, m) for k in ks for m in TEXT if any(m in values for (_, at), values in found.items() if at == k)]
    rows: list[list[Cell]] = [
        [name, *(found.get((name, k), {}).get(m) for k, m in columns)] for name in dict.fromkeys(n for n, _ in found)
    ]
    head = ("decoder", *(f"{title_of(m)}, K={k}" for k, m in columns))
    note = f"{block.about}. At K = 1 Parallel and ADJUST are joint decoding. {NATS}. Bold: the best mean of a column."
    return Table("text", f"Text by K: {block.title}", note, head, rows, (0, *(sign_of(m) for _, m in columns)))


def downstream(blocks: Sequence[Block]) -> Table:
    """A task and metric a row, K and decoder a column: the paper's table of downstream tasks."""
    fixed = sorted((row for block in blocks for row in block.rows if row.k), key=lambda row: (row.k, rank(row.variant)))
    columns = list(dict.fromkeys((row.k, line_of(row.variant)) for row in fixed))
    rows: list[list[Cell]] = []
    for block in blocks:
        found: dict[Any, dict[str, Measured]] = {(x.k, line_of(x.variant)): x.values for x in block.rows if x.k}
        for measure in block.measures() if found else []:
            cells = [found.get(column, {}).get(measure) for column in columns]
            rows.append([block.title, title_of(measure), *cells])
    head = ("task", "metric", *(f"K={k} {name}" for k, name in columns))
    return Table("downstream", "Downstream tasks by K", "Shares of 1, means over problems.", head, rows)


def kinds(blocks: Sequence[Block]) -> list[Table]:
    """A decoder a row, a kind of problem a column: ParallelBench's tasks, MATH's subjects. One table a metric.

    Groups of one benchmark (`parallelbench waiting_line`, `parallelbench puzzle`) share a table.
    """
    benchmarks: dict[tuple[str, str], list[Row]] = {}
    for block in blocks:
        title = block.title.replace(block.task, block.task.split()[0])
        benchmarks.setdefault((title, block.about), []).extend(row for row in block.rows if row.kinds)
    return [
        _kinds(title, about, rows, measure)
        for (title, about), rows in benchmarks.items()
        for measure in dict.fromkeys(m for row in rows for metrics in row.kinds.values() for m in metrics)
    ]


def _kinds(title: str, about: str, rows: Sequence[Row], measure: str) -> Table:
    found: dict[str, dict[str, Measured]] = {}
    for row in rows:
        values = found.setdefault(row.variant, {})
        values |= {kind: metrics[measure] for kind, metrics in row.kinds.items() if measure in metrics}
        if len({row.task for row in rows}) == 1 and measure in row.values:
            values["all"] = row.values[measure]
    names = list(dict.fromkeys(kind for values in found.values() for kind in values))
    cells: list[list[Cell]] = [
        [label_of(variant), *map(found[variant].get, names)] for variant in sorted(found, key=rank)
    ]
    better, note = (0, *[sign_of(measure)] * len(names)), f"{about}. Bold: the best mean of a column."
    title = f"By kind of problem: {title}, {title_of(measure)}"
    return Table("kinds", title, note, ("decoder", *names), cells, better)


def speed(blocks: Sequence[Block]) -> Table:
    """Tokens per second by K: the paper's table of EDLM's speed, for every decoder."""
    found = {
        (block.title, line_of(row.variant), row.k): row.costs["tokens_per_second"]
        for block in blocks for row in block.rows if row.k and "tokens_per_second" in row.costs
    }  # fmt: skip
    ks = sorted({k for *_, k in found})
    names = dict.fromkeys((title, line) for title, line, _ in found)
    rows: list[list[Cell]] = [[*name, *(found.get((*name, k)) for k in ks)] for name in names]
    note = "Tokens before the first end token over the wall time of decoding. One run: it has no interval."
    return Table("speed", "Tokens per second by K", note, ("task", "decoder", *(f"K={k}" for k in ks)), rows)


def every(block: Block) -> Table:
    """All that is known of every decoder of a block."""
    measures = block.measures()
    costs = [name for name in COSTS if any(row.costs.get(name) for row in block.rows)]
    rows: list[list[Cell]] = [
        [
            label_of(row.variant), next((v.n for v in row.values.values()), None),
            *map(row.costs.get, costs), *map(row.values.get, measures),
        ]
        for row in block.rows
    ]  # fmt: skip
    head = ("decoder", "n", *map(title_of, (*costs, *measures)))
    note = f"{block.about}. Passes and seconds are means a row; {NATS}; +- is half of a 95 % interval."
    return Table("decoders", f"Every decoder: {block.title}", note, head, rows)


def paired(results: Iterable[Result]) -> Table:
    """Differences that `eval paired` measured."""
    rows: list[list[Cell]] = []
    for result in (result for result in results if result.command == "eval paired"):
        with damage_named(result):
            a, metric = result.results["a"], result.results["metric"]
            for found in result.results.get("pairs", [result.results]):  # earlier results are of one pair
                gap = Measured(found["difference"], (found["high"] - found["low"]) / 2, found["n"])
                rows.append([a, found["b"], metric, found["n"], gap, found.get("least"), found["mcnemar_p"]])
    head = ("A", "B", "metric", "problems", "B - A", "one-sided 95 % bound", "McNemar p")
    return Table("paired", "Paired comparisons", "The same problems, one by one; exact McNemar test.", head, rows)


def scored(results: Iterable[Result]) -> Table:
    """Texts that `eval nll` and `eval mauve` scored."""
    rows: list[list[Cell]] = []
    for result in (result for result in results if result.command in ("eval nll", "eval mauve")):
        name, out = result.command.split()[1], result.results
        with damage_named(result):
            for found in out["rows"]:
                value = measured(found[name], found[f"{name}_ci95"], found["n"])
                rows.append([found["file"], found["decoder"], title_of(name), out["judge"], found["n"], value])
    head = ("file", "decoder", "measure", "judge", "texts", "value")
    return Table("scored", "Texts from files", f"{NATS}.", head, rows)


def summary(blocks: Sequence[Block]) -> Table:
    """Joint, parallel and ADJUST side by side, and the share of what parallel loses that ADJUST keeps."""
    rows: list[list[Cell]] = []
    for block in blocks:
        found = {row.variant.replace(":tokens_per_step=", " "): row.values for row in block.rows}
        for measure in filter(sign_of, block.measures()):
            joint = found.get("joint", {}).get(measure)
            for k in sorted({row.k for row in block.rows if row.k and row.k > 1}):
                parallel, adjust = (found.get(f"{name} {k}", {}).get(measure) for name in ("parallel", "adjust"))
                if joint and parallel and adjust:
                    own = found[f"adjust {k}"].get("gap closed") if measure == "nll" else None
                    share = closed(joint, parallel, adjust, sign_of(measure), own)
                    rows.append([block.title, title_of(measure), k, joint, parallel, adjust, share])
    head = ("task", "measure", "K", "joint, K=1", "parallel", "ADJUST", "gap closed")
    gap = "Gap closed: (ADJUST - parallel) / (joint - parallel); no gap where the intervals of joint and parallel meet."
    note = f"{gap} {NATS}."
    return Table("summary", "What ADJUST keeps of what parallel decoding loses", note, head, rows)


def closed(joint: Measured, parallel: Measured, adjust: Measured, sign: int, measured: Measured | None = None) -> str:
    """The share in per cent, or `no gap` where parallel is not worse than joint beyond both intervals.

    `sign` is +1 where more is better, `measured` the share with its interval where the command had the texts.
    """
    gap = sign * (joint.mean - parallel.mean)
    if gap <= (joint.ci95 or 0) + (parallel.ci95 or 0):
        return "no gap"
    if measured is not None and measured.ci95 is not None:
        return f"{100 * measured.mean:.0f} +- {100 * measured.ci95:.0f} %"
    return f"{100 * sign * (adjust.mean - parallel.mean) / gap:.0f} %"


# Text forms ----------------------------------------------------------------------------------------------------


def table_files(tables: Sequence[Table]) -> dict[str, bytes]:
    """Tables of one name share a .md and a .csv."""
    files: dict[str, str] = {}
    for name in dict.fromkeys(table.name for table in tables if table.rows):
        mine = [table for table in tables if table.name == name]
        files |= {f"{name}.md": "\n".join(map(to_markdown, mine)), f"{name}.csv": to_csv(mine)}
    return {name: text.encode("utf-8", "replace") for name, text in files.items()}


def show(cell: Cell) -> str:
    """A cell in words: three decimals for means, some digits for other fractions, nothing for None and no number."""
    if isinstance(cell, Measured):
        return f"{cell.mean:.3f}" + ("" if cell.ci95 is None else f" +- {cell.ci95:.3f}")
    if isinstance(cell, float):
        shown = f"{cell:.1f}".removesuffix(".0") if abs(cell) >= 100 else f"{cell:.3g}"
        return "" if cell != cell else shown
    return "" if cell is None else str(cell)


def to_markdown(table: Table) -> str:
    """Title, pipe table, note; the best of a column in bold."""
    best = [table.best(column) for column in range(len(table.head))]
    words = [
        [f"**{_plain(show(cell))}**" if best[c] == n else _plain(show(cell)) for c, cell in enumerate(row)]
        for n, row in enumerate(table.rows)
    ]
    return f"## {_plain(table.title)}\n\n{pipes(map(_plain, table.head), words)}\n{_plain(table.note)}\n"


def pipes(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table of cells as they are."""
    head = list(head)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def _plain(text: str) -> str:
    """Nothing in it ends a cell or starts a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def to_csv(tables: Sequence[Table]) -> str:
    """One line a value: table, row, column, value, half-width, n. Numbers in full."""
    lines = []
    for table in tables:
        for row in table.rows:
            cells = list(zip(table.head, row, strict=True))
            names = " / ".join(str(cell) for head, cell in cells if head in NAMING)
            for head, cell in cells:
                if head not in NAMING and cell is not None:
                    value = (cell.mean, cell.ci95, cell.n) if isinstance(cell, Measured) else (cell, None, None)
                    lines.append(dict(zip(COLUMNS, (table.title, names, head, *value), strict=True)))
    return csv_text(lines, COLUMNS)


COLUMNS = ("table", "row", "column", "value", "ci95", "n")
NAMING = ("decoder", "task", "metric", "measure", "file", "A", "B", "K")
