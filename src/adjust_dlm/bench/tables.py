"""The paper's tables from blocks of rows: by K, downstream, by kind of problem, speed; as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from adjust_dlm.bench.records import COSTS, Block, Measured, Result, Row, label_of, line_of, rank, split_variant

TEXT = ("kl_qp", "kl_pq", "nll", "mauve")
TITLES = {
    "kl_qp": "KL(q||p)", "kl_pq": "KL(p||q)", "nll": "NLL", "mauve": "MAUVE", "tokens_per_pass": "tokens/pass",
    "tokens_per_second": "tokens/s", "rounds": "rounds", "base_calls": "base passes", "sampler_calls": "g passes",
    "partner_calls": "AR passes",
}  # fmt: skip
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
        found = {n: row[column].mean for n, row in enumerate(self.rows) if isinstance(row[column], Measured)}  # type: ignore[union-attr]
        return max(found, key=lambda n: sign * found[n]) if sign and len(found) > 1 else None


def title_of(name: str) -> str:
    """A measure or cost as a heading."""
    return TITLES.get(name, name.replace("_", " "))


def sign_of(measure: str) -> int:
    """+1 where more is better; distinct-n and the gap are facts about a text, not scores."""
    return {"kl_qp": -1, "kl_pq": -1, "nll": -1, "gap closed": 0, "distinct-2": 0}.get(measure, 1)


# Which tables --------------------------------------------------------------------------------------------------


def all_tables(blocks: Sequence[Block], results: Sequence[Result]) -> list[Table]:
    """Every table that the rows give; one without a row is left out."""
    text = [block for block in blocks if block.task == "text"]
    tasks = [block for block in blocks if block.task != "text"]
    made = [by_k(block) for block in text]
    made += [downstream(tasks), *kinds(tasks)]
    made += [speed(blocks), *(every(block) for block in blocks), paired(results), scored(results)]
    return [table for table in made if table.rows]


def by_k(block: Block) -> Table:
    """Distance to the joint law, NLL and MAUVE of decoders with a fixed K: the paper's Table 1 and what leads it."""
    fixed = [row for row in block.rows if row.k is not None]
    ks = sorted({row.k for row in fixed if row.k is not None})
    columns = [(k, m) for k in ks for m in TEXT if any(m in row.values for row in fixed if row.k == k)]
    lines: dict[str, dict[int, Row]] = {}
    for row in fixed:
        lines.setdefault(line_of(row.variant), {})[row.k or 0] = row
    head = ("decoder", *(f"{title_of(m)}, K={k}" for k, m in columns))
    rows: list[list[Cell]] = [
        [name, *(found[k].values.get(m) if k in found else None for k, m in columns)] for name, found in lines.items()
    ]
    note = f"{block.about}. At K = 1 Parallel and ADJUST are joint decoding. Bold: the best mean of a column."
    return Table("text", f"Text by K: {block.title}", note, head, rows, (0, *(sign_of(m) for _, m in columns)))


def downstream(blocks: Sequence[Block]) -> Table:
    """A task and metric a row, K and decoder a column: the paper's table of downstream tasks."""
    fixed = [row for block in blocks for row in block.rows if row.k is not None]
    variants = {}
    for row in sorted(fixed, key=lambda row: (row.k, rank(row.variant))):
        variants[row.k, line_of(row.variant)] = f"K={row.k} {line_of(row.variant)}"
    rows: list[list[Cell]] = []
    for block in blocks:
        found = {(row.k, line_of(row.variant)): row for row in block.rows if row.k is not None}
        for measure in block.measures() if found else []:
            cells = [found[key].values.get(measure) if key in found else None for key in variants]
            rows.append([block.title, title_of(measure), *cells])
    note = "Shares of 1, means over problems."
    return Table("downstream", "Downstream tasks by K", note, ("task", "metric", *variants.values()), rows)


def kinds(blocks: Sequence[Block]) -> list[Table]:
    """A decoder a row, a kind of problem a column: ParallelBench's tasks, MATH's subjects. One table a metric.

    Groups of one benchmark (`parallelbench waiting_line`, `parallelbench puzzle`) share a table.
    """
    benchmarks: dict[tuple[str, str], list[Block]] = {}
    for block in blocks:
        if any(row.kinds for row in block.rows):
            title = block.title.replace(block.task, block.task.split()[0])
            benchmarks.setdefault((title, block.about), []).append(block)
    return [
        _kinds(title, about, found, measure)
        for (title, about), found in benchmarks.items()
        for measure in dict.fromkeys(m for block in found for row in block.rows for k in row.kinds.values() for m in k)
    ]


def _kinds(title: str, about: str, blocks: Sequence[Block], measure: str) -> Table:
    found: dict[str, dict[str, Measured]] = {}
    for row in (row for block in blocks for row in block.rows):
        values = {kind: metrics[measure] for kind, metrics in row.kinds.items() if measure in metrics}
        found.setdefault(row.variant, {}).update(values)
        if len(blocks) == 1 and measure in row.values:
            found[row.variant]["all"] = row.values[measure]
    names = list(dict.fromkeys(kind for values in found.values() for kind in values))
    rows: list[list[Cell]] = [
        [label_of(variant), *(found[variant].get(kind) for kind in names)] for variant in sorted(found, key=rank)
    ]
    better = (0, *(sign_of(measure) for _ in names))
    note = f"{about}. Bold: the best mean of a column."
    return Table("kinds", f"By kind of problem: {title}, {title_of(measure)}", note, ("decoder", *names), rows, better)


def speed(blocks: Sequence[Block]) -> Table:
    """Tokens per second by K: the paper's table of EDLM's speed, for every decoder."""
    timed = [(block, row) for block in blocks for row in block.rows if row.k and "tokens_per_second" in row.costs]
    ks = sorted({row.k for _, row in timed if row.k})
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for block, row in timed:
        lines.setdefault((block.title, line_of(row.variant)), {})[row.k or 0] = row.costs["tokens_per_second"]
    rows: list[list[Cell]] = [[*name, *(found.get(k) for k in ks)] for name, found in lines.items()]
    note = "Tokens before the first end token over the wall time of decoding. One run: it has no interval."
    return Table("speed", "Tokens per second by K", note, ("task", "decoder", *(f"K={k}" for k in ks)), rows)


def every(block: Block) -> Table:
    """All that is known of every decoder of a block."""
    measures = block.measures()
    costs = [name for name in COSTS if any(row.costs.get(name) for row in block.rows)]
    rows: list[list[Cell]] = [
        [
            label_of(row.variant), next((v.n for v in row.values.values()), None),
            *(row.costs.get(name) for name in costs), *(row.values.get(name) for name in measures),
        ]
        for row in block.rows
    ]  # fmt: skip
    head = ("decoder", "n", *map(title_of, (*costs, *measures)))
    note = f"{block.about}. Passes and seconds are means a row; {'+-'} is half of a 95 % interval."
    return Table("decoders", f"Every decoder: {block.title}", note, head, rows)


def paired(results: Iterable[Result]) -> Table:
    """Differences that `eval paired` measured."""
    rows: list[list[Cell]] = []
    for found in (result.results for result in results if result.command == "eval paired"):
        gap = Measured(found["difference"], (found["high"] - found["low"]) / 2, found["n"])
        rows.append([found["a"], found["b"], found["metric"], found["n"], gap, found["mcnemar_p"]])
    head = ("A", "B", "metric", "problems", "B - A", "McNemar p")
    return Table("paired", "Paired comparisons", "The same problems, one by one; exact McNemar test.", head, rows)


def scored(results: Iterable[Result]) -> Table:
    """Texts that `eval nll` and `eval mauve` scored."""
    rows: list[list[Cell]] = []
    for result in results:
        if result.command not in ("eval nll", "eval mauve"):
            continue
        name = result.command.split()[1]
        for found in result.results["rows"]:
            value = None if found[name] is None else Measured(found[name], found[f"{name}_ci95"], found["n"])
            rows.append([found["file"], found["decoder"], title_of(name), result.results["judge"], found["n"], value])
    return Table("scored", "Texts from files", "", ("file", "decoder", "measure", "judge", "texts", "value"), rows)


def summary(blocks: Sequence[Block]) -> Table:
    """Joint, parallel and ADJUST side by side, and the share of what parallel loses that ADJUST keeps."""
    rows: list[list[Cell]] = []
    for block in blocks:
        plain = {(split_variant(row.variant)[0], row.k): row for row in block.rows if _is_plain(row)}
        for measure in (name for name in block.measures() if sign_of(name)):
            joint = plain["joint", 1].values.get(measure) if ("joint", 1) in plain else None
            for k in sorted({k for _, k in plain if k and k > 1}):
                pair = [plain[name, k].values.get(measure) if (name, k) in plain else None for name in CORE]
                if joint and pair[0] and pair[1]:
                    measured = plain["adjust", k].values.get("gap closed") if measure == "nll" else None
                    share = closed(joint, pair[0], pair[1], sign_of(measure), measured)
                    rows.append([block.title, title_of(measure), k, joint, *pair, share])
    head = ("task", "measure", "K", "joint, K=1", "parallel", "ADJUST", "gap closed")
    note = (
        "Gap closed: (ADJUST - parallel) / (joint - parallel); no gap where the intervals of joint and parallel meet."
    )
    return Table("summary", "What ADJUST keeps of what parallel decoding loses", note, head, rows)


CORE = ("parallel", "adjust")


def _is_plain(row: Row) -> bool:
    name, options = split_variant(row.variant)
    return name in ("joint", *CORE) and row.k is not None and not options.keys() - {"tokens_per_step"}


def closed(joint: Measured, parallel: Measured, adjust: Measured, sign: int, measured: Measured | None = None) -> str:
    """The share in per cent, or `no gap` where parallel is not worse than joint beyond both intervals.

    Args:
        joint: the measure at one token a pass.
        parallel: at K.
        adjust: at K.
        sign: +1 where more is better.
        measured: the share with its interval, where the command that had the texts measured it.
    """
    gap = sign * (joint.mean - parallel.mean)
    if gap <= (joint.ci95 or 0) + (parallel.ci95 or 0):
        return "no gap"
    if measured is not None and measured.ci95 is not None:
        return f"{100 * measured.mean:.0f} +- {100 * measured.ci95:.0f} %"
    return f"{100 * sign * (adjust.mean - parallel.mean) / gap:.0f} %"


# Text forms ----------------------------------------------------------------------------------------------------


def show(cell: Cell, plus_minus: str = "+-") -> str:
    """A cell in words: three decimals for means, four digits for other fractions, nothing for None."""
    if isinstance(cell, Measured):
        return f"{cell.mean:.3f}" + ("" if cell.ci95 is None else f" {plus_minus} {cell.ci95:.3f}")
    if isinstance(cell, float):
        return f"{cell:.1f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return "" if cell is None else str(cell)


def to_markdown(table: Table) -> str:
    """Title, pipe table, note; the best of a column in bold."""
    best = [table.best(column) for column in range(len(table.head))]
    lines = [f"## {_plain(table.title)}", "", _line(map(_plain, table.head)), "|" + "---|" * len(table.head)]
    for n, row in enumerate(table.rows):
        words = [_plain(show(cell)) for cell in row]
        lines.append(_line([f"**{word}**" if best[c] == n else word for c, word in enumerate(words)]))
    return "\n".join([*lines, "", _plain(table.note), ""])


def _line(words: Iterable[str]) -> str:
    return "| " + " | ".join(words) + " |"


def _plain(text: str) -> str:
    """Nothing in it ends a cell or starts a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def to_csv(tables: Sequence[Table]) -> str:
    """One line a value: table, row, column, value, half-width, n. Numbers in full."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("table", "row", "column", "value", "ci95", "n"))
    for table in tables:
        for row in table.rows:
            names = [str(cell) for cell, head in zip(row, table.head, strict=True) if head in NAMING]
            for cell, head in zip(row, table.head, strict=True):
                if head in NAMING or cell is None:
                    continue
                value = (cell.mean, cell.ci95, cell.n) if isinstance(cell, Measured) else (cell, None, None)
                writer.writerow((table.title, " / ".join(names), head, *map(_number, value)))
    return out.getvalue()


NAMING = ("decoder", "task", "metric", "measure", "file", "A", "B", "K")


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
