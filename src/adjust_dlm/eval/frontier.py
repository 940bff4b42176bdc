"""The frontier: quality of every decoder against tokens per base pass and wall time, as one CSV and one plot."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adjust_dlm.bases import Base
from adjust_dlm.data.lists import ListTask, list_tasks
from adjust_dlm.eval.generation import costs, generate_rows, half_width, open_helpers
from adjust_dlm.eval.plots import Curve, Panel, Point, csv_text, draw, to_png
from adjust_dlm.eval.settings import FORM, FrontierConfig
from adjust_dlm.eval.table import make_table, open_base
from adjust_dlm.files import write_whole
from adjust_dlm.sampler import Sampler
from adjust_dlm.train import distributed
from adjust_dlm.types import EVALUATION_ROWS, DecodeConfig, require
from adjust_dlm.variants import DECODERS, read_variant
from adjust_dlm.words import title_of

log = logging.getLogger(__name__)


COLUMNS = (
    "task", "label", "variant", "kind", "n", "tokens_per_pass", "tokens_per_second", "speedup", "rounds",
    "base_calls", "sampler_calls", "partner_calls", "kl_qp", "kl_qp_ci95", "kl_pq", "kl_pq_ci95", "nll", "nll_ci95",
    "mauve", "mauve_ci95", "distinct_2", "repeated", "accuracy", "accuracy_ci95",
)  # fmt: skip
Row = dict[str, Any]


def make_frontier(config: FrontierConfig, base: Base | None = None, sampler: Sampler | None = None) -> Row:
    """Every decoder's cost and quality; writes `frontier.csv` and `.png`.

    Returns:
        `first_row` (of every task), `rows` (one per task and variant) and `best` (see `compare`).
    """
    rank, _, _ = distributed.start()
    base = base or open_base(config)
    wanted = [*config.variants, *(["adjust"] if config.tokens_per_step else [])] if config.n else []
    wanted += config.list_variants if config.list_n else ()
    helpers = open_helpers(config, base, wanted, sampler=sampler)
    cells = make_table(config, base, **helpers)["cells"] if config.n else []
    rows = [_row(f"text T={cell['temperature']:g}", cell) for cell in cells]
    if config.list_n:
        rows += _lists(config, base, helpers)
    slow = {row["task"]: row["tokens_per_second"] for row in rows if row["variant"] == "joint"}
    for row in rows:
        row["speedup"] = row["tokens_per_second"] / slow[row["task"]]
    best = compare(rows)
    if rank == 0:
        files: dict[str, str | bytes] = {"frontier.csv": csv_text(rows, COLUMNS)}
        if config.plot:
            files["frontier.png"] = to_png(draw(panels(rows)))
        write_whole({Path(config.output, name): content for name, content in files.items()})
    distributed.barrier()
    return {"first_row": EVALUATION_ROWS, "rows": rows, "best": best}


def label_of(variant: str) -> str:
    """The curve that a variant lies on: its decoder, and the settings that make another form of it."""
    name, settings, options = read_variant(variant)
    form = [f"{key}={value}" for key, value in (settings | options).items() if key in FORM]
    return " ".join([name, *form])


def kind_of(variant: str) -> str:
    """`joint`, `sampler` (uses g), `partner` (asks an autoregressive model), or `free` (the base alone)."""
    name = read_variant(variant).name
    kind = "sampler" if DECODERS[name].needs_sampler else "partner" if DECODERS[name].needs_partner else "free"
    return name if name == "joint" else kind


def _row(task: str, facts: Row) -> Row:
    variant = facts["decoder"]
    if facts.get("tokens_per_step", 0) > 1:
        variant = f"{variant}:tokens_per_step={facts['tokens_per_step']}"
    about = {"task": task, "variant": variant, "label": label_of(variant), "kind": kind_of(variant)}
    return {column: (about | facts).get(column) for column in COLUMNS}


def _lists(config: FrontierConfig, base: Base, helpers: Row) -> list[Row]:
    """Accuracy of joint decoding and every variant at T = 0."""
    require(base.tokenizer is not None, f"base {base.spec.name!r} has no tokenizer; leave the lists out (list_n 0)")
    tasks = list(itertools.islice(list_tasks(config.seed, held_out=True), config.list_n))
    prompts = [base.encode(task.prompt, chat=True) for task in tasks]
    settings = DecodeConfig(max_new_tokens=config.list_max_new_tokens, temperature=0.0, seed=config.seed)
    rows, keep = [], Path(config.output) / "texts"
    for variant in dict.fromkeys(("joint", *config.list_variants)):
        made = generate_rows(
            base, helpers, variant, prompts, settings, batch_size=config.batch_size, keep=keep, eager=config.eager
        )
        right = [is_right(task, base.decode(line.tokens)) for task, line in zip(tasks, made, strict=True)]
        facts = {"accuracy": sum(right) / len(right), "accuracy_ci95": half_width(right), **costs(made)}
        rows.append(_row("lists T=0", {"decoder": variant, "n": len(right), **facts}))
        log.info("lists %s: %.3f right at %.2f tokens a pass", variant, facts["accuracy"], facts["tokens_per_pass"])
    return rows


def is_right(task: ListTask, text: str) -> bool:
    """Whether a reply is the answer, spaces around it aside; for `shuffle` any other order of the same people is."""
    if task.kind != "shuffle":
        return text.strip() == task.answer
    try:
        people = json.loads(text)
    except ValueError:
        return False
    given = json.loads(re.findall(r"\[.*\]", task.prompt)[0])
    whole = isinstance(people, list) and all(isinstance(person, str) for person in people)
    return whole and people != given and sorted(people) == sorted(given)


MEASURES = {"kl_qp": -1, "nll": -1, "mauve": 1, "accuracy": 1}  # columns of quality; +1 where more is better
WIDEST = 3.0  # ratio of two neighbours on a curve that a straight line may stand between
GRID = (2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)


def value_at(rows: Sequence[Row], column: str, x: float) -> float | None:
    """Linear interpolation of a curve over tokens per pass; None outside of what was measured, and in wide gaps."""
    points = sorted((row["tokens_per_pass"], row[column]) for row in rows)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1 <= WIDEST * x0:
            return float(y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return None


def compare(rows: Sequence[Row], grid: Sequence[float] = GRID) -> list[Row]:
    """At each number of tokens per pass the best curve with g, and the best without training, task by task.

    Joint decoding (one token a pass) in the same blocks is the start of every curve. Text that repeats itself has a low
    NLL for being dull, so rows with less than half the distinct bigrams of joint text are no candidates.
    """

    def start(label: str) -> list[Row]:
        blocks = [word for word in label.split() if word.startswith("block_length=")]
        return [joint[name] for name in [" ".join(["joint", *blocks])] if name in joint]

    out = []
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for task, (column, sign) in itertools.product(tasks, MEASURES.items()):
        mine = [row for row in rows if row["task"] == task and row[column] is not None]
        varied = max((row["distinct_2"] or 0 for row in mine if row["kind"] == "joint"), default=0) / 2
        mine = [row for row in mine if (row["distinct_2"] or 0) >= varied]
        joint = {row["label"]: row for row in mine if row["kind"] == "joint"}
        labels = dict.fromkeys((row["label"], row["kind"]) for row in mine if row["kind"] != "joint")
        for x in grid:
            line: Row = {"task": task, "measure": column, "tokens_per_pass": x}
            for kind in ("sampler", "free", "partner"):
                curves = {name: [r for r in mine if r["label"] == name] for name, k in labels if k == kind}
                values = {name: value_at([*start(name), *curve], column, x) for name, curve in curves.items()}
                found = {name: value for name, value in values.items() if value is not None}
                name = max(found, key=lambda name: sign * found[name], default=None)
                line |= {kind: name, f"{kind}_value": None if name is None else found[name]}
            if line["sampler"] or line["free"]:
                out.append(line)
    return out


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Each task and measure against tokens per pass and against speed-up over joint decoding."""
    found = []
    for task, measure in itertools.product(dict.fromkeys(row["task"] for row in rows), MEASURES):
        mine = [row for row in rows if row["task"] == task and row[measure] is not None]
        for x in ("tokens_per_pass", "speedup") if mine else ():
            curves = []
            for label in dict.fromkeys(row["label"] for row in mine):
                points = [Point(row[x], row[measure], row[f"{measure}_ci95"]) for row in mine if row["label"] == label]
                curves.append(Curve(label, label.split()[0], sorted(points, key=lambda point: point.x)))
            found.append(Panel(task, title_of(x), title_of(measure, unit=True), 2, curves))
    return found
