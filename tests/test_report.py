"""`adjust report`: the numbers of result folders, unchanged, in tables, figures and a page; nothing else."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from adjust_dlm import cli
from adjust_dlm.bench import report
from adjust_dlm.bench.figures import all_figures
from adjust_dlm.bench.records import Block, Measured, Row, blocks_of, label_of, rank, read_result, rows_of
from adjust_dlm.bench.report import PAGES, ReportConfig, make_report
from adjust_dlm.bench.samples import Sample, side_by_side
from adjust_dlm.bench.tables import closed, summary, to_csv, to_markdown
from adjust_dlm.commands.output import Outcome, write_outcome
from adjust_dlm.eval import plots
from adjust_dlm.eval.divergence import DivergenceConfig
from adjust_dlm.eval.downstream import DownstreamConfig, evaluate
from adjust_dlm.eval.frontier import FrontierConfig
from adjust_dlm.eval.table import TableConfig
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import InputError
from test_downstream import base, letters, settings  # noqa: F401

NLL = {("joint", 1): 4.25, ("parallel", 2): 5.68, ("parallel", 4): 6.52, ("adjust", 2): 4.99, ("adjust", 4): 5.58}
MAUVE = {("joint", 1): 1.0, ("parallel", 2): 0.76, ("parallel", 4): 0.31, ("adjust", 2): 0.96, ("adjust", 4): 0.87}
NASTY = "<script>alert(1)</script> & \"q\" 'a' \ud800 \x00 | **x**"


def cell(decoder: str, k: int, temperature: float = 1.0, **more: Any) -> dict[str, Any]:
    key = (decoder, k)
    return {
        "temperature": temperature, "decoder": decoder, "tokens_per_step": k, "n": 64, "nll": NLL.get(key, 5.26),
        "nll_ci95": 0.05, "mauve": MAUVE.get(key, 0.83), "mauve_ci95": 0.02, "distinct_2": 0.6, "distinct_4": 0.9,
        "repeated": 0.0, "tokens_per_pass": float(k or 2), "tokens_per_second": 10.0 * (k or 2), "base_calls": 8.0,
        "sampler_calls": 0.0, "partner_calls": 0.0, "seconds": 0.5, **more,
    }  # fmt: skip


def table(folder: Path, cells: list[dict[str, Any]], **changes: Any) -> Path:
    config = TableConfig(**{"base": "smol", "n": 64, **changes})
    write_outcome(folder, "eval table", config, Outcome(results={"config": asdict(config), "cells": cells}))
    return folder


def paper_table(folder: Path) -> Path:
    return table(folder, [*(cell(*key) for key in reversed(NLL)), cell("edlm:tokens_per_step=2", 0)])


def task(folder: Path, variants: dict[str, float], *, name: str = "gsm8k", kinds: bool = False, **changes: Any) -> Path:
    def metrics(mean: float) -> dict[str, Any]:
        return {"strict": {"mean": mean, "ci95": 0.1, "n": 50}, "flexible": {"mean": mean + 0.01, "ci95": 0.1, "n": 50}}

    rows = [
        {"variant": v, "metrics": metrics(mean), "tokens_per_pass": 2.0, "tokens_per_second": 9.0, "base_calls": 3.0,
         "kinds": {"copy": metrics(mean), "sort": metrics(mean / 2)} if kinds else {}}
        for v, mean in variants.items()
    ]  # fmt: skip
    config = DownstreamConfig(**{"base": "smol", **changes})
    results = {"task": name, "about": {}, "n": 50, "config": asdict(config), "rows": rows}
    write_outcome(folder, f"eval {name}", config, Outcome(results=results))
    return folder


def made(output: Path, *folders: Path, **changes: Any) -> dict[str, Any]:
    names = tuple(str(folder) for folder in folders)
    return make_report(ReportConfig(**{"results": names, "output": str(output), "plot": False, **changes}))


def values(file: Path, title: str = "") -> dict[tuple[str, str], tuple[str, str, str]]:
    lines = list(csv.DictReader(io.StringIO(file.read_text())))
    return {(x["row"], x["column"]): (x["value"], x["ci95"], x["n"]) for x in lines if title in x["table"]}


def text(value: str) -> str:
    """As it stands in the page."""
    return plots.fit(str(escape(value)))


class Outline(HTMLParser):
    """Tags, their attributes, and what is between them; complains about tags that are not closed in order."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


# Numbers -------------------------------------------------------------------------------------------------------


def test_the_papers_table_comes_out_as_it_went_in(tmp_path: Path) -> None:
    out = made(tmp_path / "out", paper_table(tmp_path / "t"))
    assert out["folders"] == [{"folder": str(tmp_path / "t"), "scores": 18, "texts_shown": 0}]
    found = values(tmp_path / "out" / "text.csv")
    names = {"joint": "Joint", "parallel": "Parallel", "adjust": "ADJUST"}
    for (decoder, k), nll in NLL.items():
        assert found[names[decoder], f"NLL, K={k}"] == (f"{nll:g}", "0.05", "64")
        assert found[names[decoder], f"MAUVE, K={k}"] == (f"{MAUVE[decoder, k]:g}", "0.02", "64")
    assert found["EDLM", "NLL, K=2"][0] == "5.26"
    assert ("EDLM", "NLL, K=4") not in found and ("Parallel", "NLL, K=1") not in found
    lines = (tmp_path / "out" / "text.md").read_text().splitlines()
    assert lines[2] == "| decoder | NLL, K=1 | MAUVE, K=1 | NLL, K=2 | MAUVE, K=2 | NLL, K=4 | MAUVE, K=4 |"
    assert [line.split(" | ")[0] for line in lines[4:8]] == ["| Joint", "| Parallel", "| EDLM", "| ADJUST"]
    assert lines[7] == (
        "| ADJUST |  |  | **4.990 +- 0.050** | **0.960 +- 0.020** | **5.580 +- 0.050** | **0.870 +- 0.020** |"
    )
    assert values(tmp_path / "out" / "speed.csv")["smol: text, T = 1 / EDLM", "K=2"] == ("20", "", "")


def test_the_distance_to_the_joint_law_leads(tmp_path: Path) -> None:
    kl = {"kl_qp": 0.25, "kl_qp_ci95": 0.01, "kl_pq": 0.5, "kl_pq_ci95": 0.02}
    made(tmp_path / "out", table(tmp_path / "t", [cell("joint", 1), cell("parallel", 2), cell("adjust", 2, **kl)]))
    head = (tmp_path / "out" / "text.md").read_text().splitlines()[2]
    assert head.startswith("| decoder | NLL, K=1 | MAUVE, K=1 | KL(q\\|\\|p), K=2 | KL(p\\|\\|q), K=2 | NLL, K=2 |")
    assert values(tmp_path / "out" / "text.csv")["ADJUST", "KL(q||p), K=2"] == ("0.25", "0.01", "")
    row = {"temperature": 0.5, "tokens_per_step": 2, **kl, "decoder": "parallel:tokens_per_step=2"}
    rows = [row, row | {"decoder": "adjust:tokens_per_step=2", "kl_qp": 0.125}]
    config = DivergenceConfig(temperatures=(0.5,))
    outcome = Outcome(results={"config": asdict(config), "rows": rows})
    write_outcome(tmp_path / "law", "eval divergence", config, outcome)
    made(tmp_path / "law-report", tmp_path / "law")
    lines = (tmp_path / "law-report" / "text.md").read_text().splitlines()
    assert lines[2] == "| decoder | KL(q\\|\\|p), K=2 | KL(p\\|\\|q), K=2 |"
    assert lines[4:6] == [
        "| Parallel | 0.250 +- 0.010 | **0.500 +- 0.020** |", "| ADJUST | **0.125 +- 0.010** | 0.500 +- 0.020 |"
    ]  # fmt: skip


def test_the_share_of_the_gap_is_that_of_the_paper(tmp_path: Path) -> None:
    # Dream-7B: 5.68 - 4.99 of 5.68 - 4.25, and 6.52 - 5.58 of 6.52 - 4.25: 48 % and 41 %.
    rows = summary(blocks_of(rows_of(read_result(paper_table(tmp_path / "t"))))).rows
    assert [(row[1], row[2], row[-1]) for row in rows] == [
        ("NLL", 2, "48 %"), ("NLL", 4, "41 %"), ("MAUVE", 2, "83 %"), ("MAUVE", 4, "81 %"),
    ]  # fmt: skip
    cells = [cell(*key) for key in NLL if key != ("adjust", 4)]
    cells.append(cell("adjust", 4, gap_closed=0.414, gap_closed_ci95=0.031))
    rows = summary(blocks_of(rows_of(read_result(table(tmp_path / "m", cells))))).rows
    assert [row[-1] for row in rows] == ["48 %", "41 +- 3 %", "83 %", "81 %"]
    near = Measured(0.70, 0.03), Measured(0.65, 0.03), Measured(0.66, 0.03)
    assert closed(*near, sign=1) == "no gap"
    assert closed(Measured(0.70), Measured(0.60), Measured(0.55), sign=1) == "-50 %"


def test_downstream_and_kinds(tmp_path: Path) -> None:
    scores = {
        "joint": 0.8,
        "parallel:tokens_per_step=4": 0.4,
        "adjust:tokens_per_step=4": 0.6,
        "threshold:tau=0.9": 0.7,
    }
    bench = task(tmp_path / "p", {"joint": 0.9, "parallel:tokens_per_step=4": 0.5}, name="parallelbench", kinds=True)
    made(tmp_path / "out", task(tmp_path / "g", scores), bench)
    found = values(tmp_path / "out" / "downstream.csv")
    assert found["smol: gsm8k, T = 0 / strict", "K=4 ADJUST"] == ("0.6", "0.1", "50")
    assert found["smol: gsm8k, T = 0 / flexible", "K=1 Joint"] == ("0.81", "0.1", "50")
    assert found["smol: parallelbench, T = 0 / strict", "K=4 Parallel"][0] == "0.5"
    assert not any("Threshold" in column for _, column in found)  # it has no K
    assert values(tmp_path / "out" / "decoders.csv")["Threshold tau=0.9", "strict"] == ("0.7", "0.1", "50")
    kinds = values(tmp_path / "out" / "kinds.csv", "strict")
    assert kinds["Parallel, K=4", "sort"] == ("0.25", "0.1", "50")
    assert values(tmp_path / "out" / "kinds.csv", "flexible")["Joint", "copy"] == ("0.91", "0.1", "50")
    lines = (tmp_path / "out" / "kinds.md").read_text().splitlines()
    assert lines[2] == "| decoder | copy | sort | all |"
    assert lines[4] == "| Joint | **0.900 +- 0.100** | **0.450 +- 0.100** | **0.900 +- 0.100** |"


def test_parallelbench_as_its_command_writes_it(tmp_path: Path) -> None:
    def line(group: str, name: str, variant: str, score: float) -> dict[str, Any]:
        return {"group": group, "task": name, "variant": variant, "n": 100, "score": score, "score_ci95": 0.09}

    def macro(group: str, variant: str, score: float, speed: float) -> dict[str, Any]:
        scores = {"macro_score": score, "macro_score_ci95": 0.06, "score": 9.0, "score_ci95": 9.0}
        return {"group": group, "variant": variant, "tasks": 2, **scores, "tokens_per_pass": speed}

    # The paper's Dream: copy, sort and the easy sentences, one token a pass and ADJUST at K = 4.
    four = "adjust:tokens_per_step=4"
    rows = [
        line("waiting_line", "copy", "joint", 0.73), line("waiting_line", "sort", "joint", 0.21),
        line("waiting_line", "copy", four, 0.63), line("waiting_line", "sort", four, 0.16),
        line("words_to_sentence", "easy", "joint", 0.82), line("words_to_sentence", "easy", four, 0.84),
    ]  # fmt: skip
    macros = [macro("waiting_line", "joint", 0.47, 1), macro("waiting_line", four, 0.395, 4)]
    macros.append(macro("words_to_sentence", "joint", 0.82, 1))
    results = {"task": "parallelbench", "about": {}, "rows": rows, "macro_averages": macros}
    results["macro_averages"].append(macro("words_to_sentence", four, 0.84, 4))
    folder = tmp_path / "p"
    write_outcome(folder, "eval parallelbench", DownstreamConfig(base="smol"), Outcome(results=results))
    sample = {"id": "c0", "text": "Ann, Bob", "scores": {"score": 1.0}}
    (folder / "waiting_line").mkdir()
    (folder / "waiting_line" / "samples-joint.jsonl").write_text(json.dumps(sample) + "\n")
    made(tmp_path / "out", folder)
    lines = (tmp_path / "out" / "kinds.md").read_text().splitlines()
    assert lines[0] == "## By kind of problem: smol: parallelbench, T = 0, score"
    assert lines[2] == "| decoder | copy | sort | easy |"
    assert lines[4:6] == [
        "| Joint | **0.730 +- 0.090** | **0.210 +- 0.090** | 0.820 +- 0.090 |",
        "| ADJUST, K=4 | 0.630 +- 0.090 | 0.160 +- 0.090 | **0.840 +- 0.090** |",
    ]
    found = values(tmp_path / "out" / "downstream.csv")
    assert found["smol: parallelbench waiting_line, T = 0 / score", "K=4 ADJUST"] == ("0.395", "0.06", "")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Ann, Bob" in page and "smol: parallelbench waiting_line, T = 0, seed 0, row c0" in page


def test_a_frontier_and_a_table_of_the_same_settings_share_a_block(tmp_path: Path) -> None:
    config = FrontierConfig(base="smol", n=64, plot=False)
    assert TableConfig(n=64).seed == config.seed
    rows = [
        {"task": "text T=1", "variant": "threshold:tau=0.9", "n": 64, "nll": 2.0, "nll_ci95": 0.1, "mauve": None,
         "mauve_ci95": None, "distinct_2": 0.01, "tokens_per_pass": 1.8},
        {"task": "lists T=0", "variant": "joint", "n": 200, "accuracy": 0.7, "accuracy_ci95": 0.06, "nll": None},
    ]  # fmt: skip
    write_outcome(tmp_path / "f", "eval frontier", config, Outcome(results={"rows": rows, "best": []}))
    folders = tmp_path / "f", table(tmp_path / "t", [cell("joint", 1)])
    both = [row for folder in folders for row in rows_of(read_result(folder))]
    text_block, lists = blocks_of(both)
    assert [row.variant for row in text_block.rows] == ["joint", "threshold:tau=0.9"]
    assert text_block.rows[1].values == {"nll": Measured(2.0, 0.1, 64), "distinct-2": Measured(0.01, None, 64)}
    assert (lists.task, lists.rows[0].values) == ("lists", {"accuracy": Measured(0.7, 0.06, 200)})


def test_other_settings_are_another_block_and_two_folders_of_one_decoder_are_kept_apart(tmp_path: Path) -> None:
    a, b = table(tmp_path / "a", [cell("joint", 1)]), table(tmp_path / "b", [cell("joint", 1, nll=4.0)])
    longer = table(tmp_path / "c", [cell("parallel", 2)], max_new_tokens=256)
    blocks = blocks_of(row for folder in (a, b, longer) for row in rows_of(read_result(folder)))
    assert [len(block.rows) for block in blocks] == [1, 1, 1]
    titles = [block.title for block in blocks]
    assert titles.count(f"smol: text, T = 1 ({a})") == titles.count(f"smol: text, T = 1 ({b})") == 1
    assert "max new tokens 256" in next(block.about for block in blocks if block.title == "smol: text, T = 1")


def test_a_quantized_base_is_another_block(tmp_path: Path) -> None:
    """Of texts and of lists; a folder from before the setting is one without it."""
    whole, old = table(tmp_path / "a", [cell("joint", 1)]), table(tmp_path / "b", [cell("parallel", 2)])
    content = json.loads((old / "result.json").read_text())
    del content["config"]["quantize"]
    (old / "result.json").write_text(json.dumps(content))
    small = table(tmp_path / "c", [cell("adjust", 2)], quantize="int8")
    blocks = blocks_of(row for folder in (whole, old, small) for row in rows_of(read_result(folder)))
    assert sorted(len(block.rows) for block in blocks) == [1, 2]
    assert [block.about.endswith("quantize int8") for block in blocks if len(block.rows) == 1] == [True]
    lists = [
        {"task": "lists T=0", "variant": v, "n": 2, "accuracy": 1.0, "accuracy_ci95": 0.5} for v in ("joint", "apd")
    ]
    for folder, row, quantize in (("d", lists[0], None), ("e", lists[1], "fp8")):
        config = FrontierConfig(plot=False, quantize=quantize)
        write_outcome(tmp_path / folder, "eval frontier", config, Outcome(results={"rows": [row], "best": []}))
    assert len(blocks_of(row for name in "de" for row in rows_of(read_result(tmp_path / name)))) == 2


def test_order_and_names_of_decoders() -> None:
    ordered = [
        "joint", "parallel:tokens_per_step=2", "parallel:tokens_per_step=16", "parallel:order=margin,tokens_per_step=4",
        "edlm:tokens_per_step=2", "apd", "dcd:tokens_per_step=16", "entropy_bound:gamma=1", "threshold:tau=0.1",
        "threshold:tau=0.9", "adjust:tokens_per_step=2", "adjust:candidates=4,tokens_per_step=2", "adaptive:gamma=6",
        "cascade:tau=0.9",
    ]  # fmt: skip
    assert sorted([*ordered[7:], *ordered[:7]], key=rank) == ordered
    assert [label_of(v) for v in ordered[3:8]] == [
        "Parallel order=margin, K=4", "EDLM, K=2", "APD", "DCD, K=16", "Entropy bound gamma=1",
    ]  # fmt: skip
    assert label_of("of_tomorrow:x=1") == "Of tomorrow x=1"


# Figures -------------------------------------------------------------------------------------------------------


def test_curves_start_at_joint_and_carry_their_bars(tmp_path: Path) -> None:
    figures = {figure.name: figure for figure in all_figures(blocks_of(rows_of(read_result(paper_table(tmp_path)))))}
    by_k = {curve.label: curve for curve in figures["by-k"].panels[0].curves}
    assert [(p.x, p.y, p.half) for p in by_k["ADJUST"].points] == [(1, 4.25, 0.05), (2, 4.99, 0.05), (4, 5.58, 0.05)]
    assert [p.x for p in by_k["EDLM"].points] == [2]  # EDLM at K = 1 is not joint decoding
    speed = {curve.label: curve for curve in figures["by-speed"].panels[1].curves}
    assert [(p.x, p.y) for p in speed["Parallel"].points] == [(10, 1.0), (20, 0.76), (40, 0.31)]


def test_a_curve_in_blocks_starts_at_joint_decoding_in_blocks() -> None:
    def row(variant: str, x: float, y: float) -> Row:
        return Row("f", "b", "lists", (), variant, {"accuracy": Measured(y)}, costs={"tokens_per_pass": x})

    rows = [row("joint", 1, 0.7), row("parallel:block_length=16,tokens_per_step=2", 2, 0.5)]
    curves = all_figures([Block("t", "", rows)])[-1].panels[0].curves
    assert [len(curve.points) for curve in curves] == [1, 1]
    rows.append(row("joint:block_length=16", 1, 0.6))
    curves = {c.label: c for c in all_figures([Block("t", "", rows)])[-1].panels[0].curves}
    assert [p.y for p in curves["Parallel block_length=16"].points] == [0.6, 0.5]


def test_drawn_curves_have_their_numbers_their_bars_and_room(tmp_path: Path) -> None:
    by_k = next(f for f in all_figures(blocks_of(rows_of(read_result(paper_table(tmp_path))))) if f.name == "by-k")
    drawn = plots.draw(by_k.panels)
    assert [axis.get_title() for axis in drawn.axes] == ["smol: text, T = 1"] * 2
    for axis, panel in zip(drawn.axes, by_k.panels, strict=True):
        assert (axis.get_xscale(), axis.get_xlabel(), axis.get_ylabel()) == ("log", "K", panel.y)
        left, right, low, high = *axis.get_xlim(), *axis.get_ylim()
        for curve, shown in zip(panel.curves, axis.containers, strict=True):
            line, _, (bars,) = shown
            assert list(zip(*line.get_data(), strict=True)) == [(p.x, p.y) for p in curve.points]
            for p, (bottom, top) in zip(curve.points, bars.get_segments(), strict=True):
                assert (*bottom, *top) == pytest.approx((p.x, p.y - p.half, p.x, p.y + p.half))
                assert left < p.x < right and low < bottom[1] and top[1] < high
        ticks = [round(x, 9) for x in axis.get_xticks() if left <= x <= right]
        assert ticks == [1, 1.5, 2, 3, 4]
    (legend,) = drawn.legends
    assert [entry.get_text() for entry in legend.get_texts()] == ["Joint", "Parallel", "EDLM", "ADJUST"]


def test_a_curve_looks_the_same_in_all_panels_and_like_no_other() -> None:
    names = ["adjust", "adjust a=1", "adjust b=1", "parallel"]
    curves = [plots.Curve(name, name.split()[0], [plots.Point(1, 1, None)]) for name in names]
    panels = [plots.Panel("t", "x", "y", 2, part) for part in (curves, curves[1:])]
    first, second = (
        [(shown[0].get_color(), shown[0].get_marker()) for shown in axis.containers] for axis in plots.draw(panels).axes
    )
    assert first[1:] == second and len(set(first)) == 4 and len({colour for colour, _ in first}) == 2


@pytest.mark.parametrize(("basis", "xs"), [(2, (2.1, 3.0)), (10, (21.0, 29.0)), (2, (5.0, 5.0)), (10, (9.0, 450.0))])
def test_every_axis_has_ticks(basis: int, xs: tuple[float, float]) -> None:
    points = [plots.Point(x, 1.0, None) for x in xs]
    drawn = plots.draw([plots.Panel("t", "x", "y", basis, [plots.Curve("c", "joint", points)])])
    plots.to_png(drawn)
    (left, right), ticks = drawn.axes[0].get_xlim(), drawn.axes[0].get_xticks()
    assert 2 <= sum(left <= x <= right for x in ticks) <= 12


def test_a_drawing_holds_any_label() -> None:
    labels = [NASTY, "$\\frac{", "$x^2$", "x\\$y", "]]>", "a\uffffb"]
    curves = [plots.Curve(f"{n} {label}", "of_tomorrow", [plots.Point(1, n, 0.1)]) for n, label in enumerate(labels)]
    drawn = plots.draw([plots.Panel(label, label, label, 2, curves) for label in labels])
    assert plots.to_png(drawn).startswith(b"\x89PNG")
    words = [entry.get_text().replace("\\$", "$") for entry in drawn.legends[0].get_texts()]
    assert words == [f"{n} {plots.fit(label)}" for n, label in enumerate(labels)]


def test_pngs_are_drawn_and_not_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = paper_table(tmp_path / "t")
    out = made(tmp_path / "out", folder, plot=True)
    drawn = [name for name in out["files"] if name.endswith(".png")]
    assert drawn == ["by-k.png", "by-passes.png", "by-speed.png"]
    assert all((tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") for name in drawn)
    page = (tmp_path / "out" / "report.html").read_text()
    outline = Outline(page)
    titles = ("Quality against K", "Quality against tokens per base pass", "Quality against speed")
    shown = [(a["alt"], a["src"]) for tag, a in outline.tags if tag == "img"]
    pictures = [base64.b64encode((tmp_path / "out" / name).read_bytes()).decode() for name in drawn]
    assert shown == [(title, f"data:image/png;base64,{png}") for title, png in zip(titles, pictures, strict=True)]
    assert not re.search(r"https?://|url\(|<script", page)
    made(tmp_path / "again", folder, plot=True)
    assert (tmp_path / "again" / "report.html").read_text() == page
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"figures need matplotlib: use --no-plot, or pip install 'adjust-dlm\[eval\]'"
    ):
        ReportConfig(results=(str(folder),))
    assert "by-k.png" not in made(tmp_path / "plain", folder)["files"]
    assert "<img" not in (tmp_path / "plain" / "report.html").read_text()


# The page ------------------------------------------------------------------------------------------------------


def generated(folder: Path, decoder: str, text: str, order: list[int], k: int = 2, **more: Any) -> Path:
    sample = {"text": text, "tokens": [5] * len(order), "order": order, "decoder": decoder, "tokens_per_step": k,
              "row": 0, "prompt": "", "seed": 0, **more}  # fmt: skip
    config = {"base": "smol", "temperature": 1.0, "seed": 0, "decoder": decoder}
    write_outcome(folder, "generate", config, Outcome(results={"samples": 1}, samples=[sample]))
    return folder


def test_the_page_stands_alone_and_escapes_everything(tmp_path: Path) -> None:
    sample = {"text": NASTY, "order": [0, 1], "decoder": "joint", "tokens_per_step": 1, "row": 0, "prompt": NASTY}
    config = {"base": NASTY.replace("\x00", ""), "temperature": 1.0, "seed": 0}
    folder = tmp_path / "<b>odd & folder"
    folder.mkdir()
    content = {"command": "generate", "config": config, "results": {}, "provenance": {"date": NASTY}}
    (folder / "result.json").write_text(json.dumps(content))
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    made(tmp_path / "out", folder, title=NASTY)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    outline = Outline(page)
    assert not {"script", "b", "img", "link", "iframe", "object"} & {tag for tag, _ in outline.tags}
    assert not re.search(r"https?://|//[a-z]|url\(|@import|\bsrc=|javascript:", page)
    links = [attributes["href"] for tag, attributes in outline.tags if tag == "a"]
    assert links and all(link is not None and link.startswith("#") for link in links)
    ids = {attributes.get("id") for _, attributes in outline.tags}
    assert {link[1:] for link in links if link} <= ids
    shown = text(NASTY)
    assert shown == ("&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#34;q&#34; &#39;a&#39; \ufffd \ufffd | **x**")
    assert page.count(shown) >= 4  # title twice, prompt, text
    assert ("meta", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in [
        (t, a.get("content")) for t, a in outline.tags
    ]
    assert ("meta", "width=device-width, initial-scale=1") in [(t, a.get("content")) for t, a in outline.tags]
    assert "prefers-color-scheme:dark" in page


def test_figures_of_a_hostile_folder_are_as_harmless(tmp_path: Path) -> None:
    name = NASTY.replace("\ud800", "$x_$ \\frac{")
    cells = [cell("joint", 1), cell("parallel", 2)]
    out = made(tmp_path / "out", table(tmp_path / "<b>$t", cells, base=name), table(tmp_path / "u", cells), plot=True)
    assert "by-k.png" in out["files"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    outline = Outline(page)
    assert not {"script", "b", "svg", "link", "foreignobject"} & {tag for tag, _ in outline.tags}
    rest = re.sub(r' src="data:image/png;base64,[\w+/=]+"', "", page)
    assert not re.search(r"https?://|//[a-z]|url\(|@import|\bsrc=|javascript:|<[!?](?!doctype)", rest)
    assert not [key for _, attributes in outline.tags for key in attributes if key.startswith("on")]
    titles = [word for word in outline.words if word.startswith("<script>") and "x_$ \\frac{" in word]
    assert len(titles) > 2 and all(word.startswith(plots.fit(name)[:40]) for word in titles)


def test_texts_of_one_row_stand_side_by_side(tmp_path: Path) -> None:
    parts = [("adjust", "late", 4), ("joint", "first", 1), ("parallel", "middle", 4)]
    folders = [generated(tmp_path / name, name, word, [0, 1, 2, 3], k) for name, word, k in parts]
    made(tmp_path / "out", *folders)
    words = [word for word in Outline((tmp_path / "out" / "report.html").read_text()).words if word.strip()]
    at = [words.index(word) for word in ("first", "middle", "late")]
    assert at == sorted(at) and [words[n - 1] for n in at] == ["Joint", "Parallel, K=4", "ADJUST, K=4"]
    assert words.count("smol: text, T = 1, seed 0, row 0") == 2  # samples, and order
    made(tmp_path / "none", *folders, samples=0)
    assert "middle" not in (tmp_path / "none" / "report.html").read_text()


def test_rows_with_most_decoders_come_first_and_other_prompts_are_other_rows() -> None:
    def sample(row: str, variant: str, prompt: str = "", group: str = "g") -> Sample:
        return Sample("f", group, row, variant, "x", prompt)

    samples = [sample("0", "joint"), sample("1", "joint"), sample("1", "adjust"), sample("1", "apd", "another")]
    rows = side_by_side([*samples, sample("7", "joint", group="h")], most=2)
    assert [[(s.row, s.variant) for s in row] for row in rows] == [
        [("1", "joint"), ("1", "adjust")], [("0", "joint")], [("7", "joint")],
    ]  # fmt: skip


def test_order_maps_are_as_strong_as_positions_are_late() -> None:
    sample = Sample("f", "g", "0", "parallel:tokens_per_step=2", "x", order=(0, 3, 1, 2, -1, -2))
    drawn = drawn_order(sample)
    assert re.findall(r'style="--late:([\d.]+)"', drawn) == ["0.10", "1.00", "0.40", "0.70"]
    assert 'class="order cells" role="img" aria-label="order of 6 positions"' in drawn
    assert re.findall(r'title="([^"]+)"', drawn) == [
        "position 1: revealed as number 1", "position 2: revealed as number 4",
        "position 3: revealed as number 2", "position 4: revealed as number 3",
        "position 5: given", "position 6: filler behind the end",
    ]  # fmt: skip
    assert "spelled" not in drawn_order(replace(sample, pieces=("",) * 6))  # a base without a tokenizer


def drawn_order(sample: Sample) -> str:
    """The part of the page that shows a sample's order."""
    parts = dict.fromkeys(("results", "counts", "tables", "figures", "samples"), ())
    page = PAGES.get_template("report.html.j2").render(title="", summary={"rows": ()}, orders=[[sample]], **parts)
    return page[page.index('<section id="order">') : page.index('<section id="provenance">')]


def test_order_maps_have_the_words() -> None:
    pieces = ("Once", " a", "<b>", "\n", "given", "<end>", "x")
    drawn = drawn_order(Sample("f", "g", "0", "joint", "x", order=(0, 2, 1, 3, -1, 4, -2), pieces=pieces))
    assert re.findall(r'(?:style="--late:([\d.]+)"|class="none")>([^<]*)</i>', drawn) == [
        ("0.10", "Once"), ("0.55", " a"), ("0.33", "&lt;b&gt;"), ("0.78", "\u21b5\n"), ("", "given"),
        ("1.00", "&lt;end&gt;"),
    ]  # fmt: skip
    assert re.sub(r"<[^>]*>", "", drawn[drawn.index('class="order spelled">') + 22 : drawn.index("</div>")]) == (
        "Once a&lt;b&gt;\u21b5\ngiven&lt;end&gt;"  # nothing between the tokens: white space counts there
    )


def test_prompts_are_headings_with_scores_passes_and_seconds_of_each_text(tmp_path: Path) -> None:
    cost = {"completion_tokens": 1, "base_calls": 2, "sampler_calls": 6, "partner_calls": 0, "seconds": 0.126}
    a = generated(tmp_path / "a", "adjust", "Paris.", [0], prompt="Capital of <France>?", nll=0.25, **cost)
    b = generated(
        tmp_path / "b", "joint", "Paris!", [0], 1, prompt="Capital of <France>?", base_calls=1, partner_calls=1
    )
    c = task(tmp_path / "c", {"joint": 0.8})
    sample = {"id": "p1", "text": "18", "scores": {"strict": 1.0}, "base_calls": 12, "seconds": 1.5}
    (c / "samples-joint.jsonl").write_text(json.dumps(sample) + "\n")
    out = made(tmp_path / "out", a, b, c)
    page = (tmp_path / "out" / "report.html").read_text()
    words = [word.strip() for word in Outline(page).words if word.strip()]
    heading = words.index("Capital of <France>?")
    assert words[heading : heading + 10] == [
        "Capital of <France>?", "smol: answers, T = 1, seed 0, row 0", "Joint", "Paris!", "1 base pass, 1 partner pass",
        "ADJUST, K=2", "NLL 0.25", "Paris.", "1 token, 2 base passes, 6 sampler passes, 0.13 s", "Without a prompt",
    ]  # fmt: skip
    assert words[heading + 10 : heading + 15] == [
        "smol: gsm8k, T = 0, seed 0, row p1", "Joint", "strict 1", "18",
        "12 base passes, 1.50 s",
    ]  # fmt: skip
    assert "<summary><h3>Capital of &lt;France&gt;?</h3><small>" in page
    assert [(x["scores"], x["texts_shown"]) for x in out["folders"]] == [(1, 1), (0, 1), (3, 1)]
    shown = " ".join(re.sub(r"<[^>]*>", "", page[page.index("From <code>") : page.index("<nav>")]).split())
    assert shown == f"From {a} (1 score, 1 text), {b} (0 scores, 1 text), {c} (3 scores, 1 text)"


def test_markdown_cells_cannot_break_out() -> None:
    block = Block("a|b <i>", "", [Row("f", "b", "t", (), "joint:x=a|b", {"m": Measured(1)})])
    lines = to_markdown(report.all_tables([block], [])[-1]).splitlines()
    assert lines[0] == "## Every decoder: a\\|b &lt;i>" and lines[4].startswith("| Joint x=a\\|b | ")
    assert "joint" not in to_csv([])


# Folders as commands write them --------------------------------------------------------------------------------


def test_a_downstream_run_as_it_is_written(base: Any, tmp_path: Path) -> None:  # noqa: F811
    config = settings(tmp_path / "run", num_samples=2)
    found = evaluate(letters([]), config, base, Sampler(base).eval())
    write_outcome(tmp_path / "run", "eval letters", config, Outcome(results=found))
    made(tmp_path / "out", tmp_path / "run")
    got = values(tmp_path / "out" / "downstream.csv")
    for row, column in zip(found["rows"], ("K=1 Joint", "K=4 Parallel", "K=4 ADJUST"), strict=True):
        assert got[f"{config.base}: letters, T = 1 / has e", column][0] == f"{row['metrics']['has_e']['mean']:.6g}"
    page = (tmp_path / "out" / "report.html").read_text()
    first = json.loads((tmp_path / "run" / "samples-joint.jsonl").read_text().splitlines()[0])
    assert text(first["text"]) in page and "row p0, sample 1" in page and "has_e" in page


def test_generate_then_report_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--base", "exact", "--max-new-tokens", "4", "--output", str(tmp_path / "g")]
    assert cli.main(["generate", *words, "--decoder", "joint"]) == 0
    written = capsys.readouterr().out.strip()
    assert cli.main(["bases", "--output", str(tmp_path / "b")]) == 0
    command = ["report", str(tmp_path / "g"), str(tmp_path / "b"), "--output", str(tmp_path / "out"), "--no-plot"]
    assert cli.main(command) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"<p>{text(written)}</p>" in page and 'class="order cells"' in page
    assert '<p class="cost">4 tokens, 4 base passes, 0.' in page
    assert [m for m in caplog.messages if "nothing in it" in m] == [
        f"{tmp_path / 'b'}: nothing in it for a table or a figure; it is listed under provenance"
    ]
    assert json.loads((tmp_path / "out" / "result.json").read_text())["results"]["files"] == ["report.html"]


# Bad input -----------------------------------------------------------------------------------------------------


def test_a_folder_without_a_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=f"no result in {re.escape(str(tmp_path))}: result.json is missing"):
        made(tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "result.json is missing" in capsys.readouterr().err


def break_cell(folder: Path) -> None:
    content = json.loads((folder / "result.json").read_text())
    del content["results"]["cells"][0]["decoder"]
    (folder / "result.json").write_text(json.dumps(content))


def scores(folder: Path, **changes: Any) -> None:
    """In place of the table: a result of `eval nll`, with fields changed or (None) left out."""
    row = {"file": "a", "decoder": "", "n": 3, "nll": 2.5, "nll_ci95": None} | changes
    content = json.loads((folder / "result.json").read_text())
    content |= {"command": "eval nll", "results": {"judge": "smol", "rows": [row]}}
    (folder / "result.json").write_text(json.dumps(content))


def broken(folder: Path, **changes: Any) -> None:
    """The first cell of the table, changed."""
    content = json.loads((folder / "result.json").read_text())
    content["results"]["cells"][0] |= changes
    (folder / "result.json").write_text(json.dumps(content))


def pair(folder: Path) -> None:
    content = json.loads((folder / "result.json").read_text())
    pairs = [{"b": "y", "n": 3, "difference": 0.1}]
    content |= {"command": "eval paired", "results": {"a": "x", "metric": "m", "pairs": pairs}}
    (folder / "result.json").write_text(json.dumps(content))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no JSON": (lambda f: (f / "result.json").write_text("{"), "result.json is not JSON"),
    "no object": (lambda f: (f / "result.json").write_text("[]"), "holds a list; an object is wanted"),
    "no config": (lambda f: (f / "result.json").write_text('{"command": "x"}'), "is no result of `adjust`"),
    "a cell without a decoder": (break_cell, "result.json is damaged: KeyError 'decoder'"),
    "a text as NLL": (lambda f: broken(f, nll="4.2"), "is damaged: TypeError a number is wanted, not '4.2'"),
    "true as NLL": (lambda f: broken(f, nll=True), "is damaged: TypeError a number is wanted, not True"),
    "a text as n": (lambda f: broken(f, n="64"), "is damaged: TypeError a number is wanted, not 5.58, 0.05 or '64'"),
    "scores": (lambda f: scores(f, nll="2.5"), "is damaged: TypeError a number is wanted, not '2.5'"),
    "no pair": (pair, "is damaged: KeyError 'high'"),
    "a name twice": (
        lambda f: (f / "result.json").write_text('{"command": "x", "command": "y"}'),
        "'command' stands there twice",
    ),
    "samples": (lambda f: (f / "samples.jsonl").write_text('{"row": 1}\n'), "samples.*jsonl is damaged: KeyError"),
    "lines": (lambda f: (f / "samples.jsonl").write_text('{}\n{"a\n'), "samples.*jsonl is damaged: JSONDecodeError"),
    "numbers": (lambda f: (f / "samples.jsonl").write_text("7\n"), "samples.*jsonl is damaged: AttributeError"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_one_clear_error(damage: str, tmp_path: Path) -> None:
    folder = paper_table(tmp_path / "t")
    breaks, message = DAMAGE[damage]
    breaks(folder)
    with pytest.raises(InputError, match=message):
        made(tmp_path / "out", folder)
    assert not (tmp_path / "out").exists()


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    folder = str(paper_table(tmp_path / "t"))
    for changes, message in (
        ({"results": ()}, "name at least one folder"),
        ({"results": (folder, f"{folder}/.")}, "the same folder twice"),
        ({"results": (folder,), "output": folder}, "is a folder of results; write elsewhere"),
        ({"results": (folder,), "samples": -1}, "samples is -1"),
    ):
        with pytest.raises(InputError, match=message):
            ReportConfig(**changes)
