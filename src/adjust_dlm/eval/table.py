"""The K-table: distance to the joint law, NLL, MAUVE and variety of joint, parallel and ADJUST text."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adjust_dlm.bases import Base, Partner, load_base
from adjust_dlm.bases.adapted import load_ar
from adjust_dlm.data.prompts import unconditional
from adjust_dlm.decoders import read_variant
from adjust_dlm.decoders.divergence import MEASURES
from adjust_dlm.eval.divergence import compare_with_parallel, measure, number, reason_against
from adjust_dlm.eval.diversity import distinct_n, repeated_share, token_entropy
from adjust_dlm.eval.generation import Generated, costs, generate_rows, open_helpers
from adjust_dlm.eval.mauve import features, mauve
from adjust_dlm.eval.nll import NllScore, nll_gap_closed, score_nll
from adjust_dlm.eval.scores import start_of
from adjust_dlm.files import write_whole
from adjust_dlm.sampler import Sampler
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.train import distributed
from adjust_dlm.types import DecodeConfig, require

log = logging.getLogger(__name__)
Texts = list[list[int]]
Cell = tuple[float, str, int]  # temperature, decoder or variant, K (0: a variant has none)


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Settings of `adjust eval table`: unconditional text, the paper's Table 1.

    Attributes:
        base: name or folder of the base.
        sampler: folder or Hub id of g; the base's own by default.
        partner: autoregressive model for decoders that ask one; the base's own by default.
        output: where results and samples go.
        n: texts per cell.
        divergence: texts of a cell that KL is measured on, both ways (see `adjust eval divergence`); 0 is none.
        temperatures: one block of the table each.
        tokens_per_step: K of parallel and ADJUST; 1 adds nothing, it is the joint row.
        variants: more rows, of decoders that decide themselves how many tokens a pass commits: a name in `DECODERS` and
            its settings, such as "threshold:tau=0.9", "adaptive:gamma=2,most=8" or "edlm:tokens_per_step=4".
        max_new_tokens: length of a text.
        top_p: nucleus mass.
        batch_size: rows decoded at once.
        judge: autoregressive model that scores and embeds the texts: "smol" or a folder.
        buckets: k-means clusters of MAUVE; 0 takes n / 10.
        seed: of every cell; all have the same rows, and the n joint texts behind these are MAUVE's reference.
        suppress_eos: never end a text, so that all have the same length.
        device: auto, cpu, cuda or cuda:N.
        compile: compile the base (CUDA).
        quantize: int8, fp8 or fp8-dynamic (see `adjust generate`).
        eager: run the reference decoders where their fast form on CUDA would be taken.
    """

    base: str = "smol"
    sampler: str | None = None
    partner: str | None = None
    output: str = "runs/table"
    n: int = 1024
    divergence: int = 256
    temperatures: tuple[float, ...] = (1.0, 0.6)
    tokens_per_step: tuple[int, ...] = (2, 4, 8)
    variants: tuple[str, ...] = ()
    max_new_tokens: int = 128
    top_p: float = 1.0
    batch_size: int = 256
    judge: str = "smol"
    buckets: int = 0
    seed: int = 1
    suppress_eos: bool = True
    device: str = "auto"
    compile: bool = False
    quantize: str | None = None
    eager: bool = False

    def __post_init__(self) -> None:
        """Checks what decoding would otherwise find out late."""
        require(self.n >= 2, f"n is {self.n}; a table needs at least 2 texts a cell")
        require(
            self.divergence != 1 and self.divergence >= 0,
            f"divergence is {self.divergence}; give 0, or 2 texts or more",
        )
        require(self.batch_size >= 1, f"batch_size is {self.batch_size}; it must be at least 1")
        require(
            all(k >= 1 for k in self.tokens_per_step), f"tokens_per_step is {self.tokens_per_step}; all must be >= 1"
        )
        good = all(math.isfinite(t) and t >= 0 for t in self.temperatures) and self.temperatures
        require(bool(good), f"temperatures are {self.temperatures}; give finite numbers >= 0")
        for variant in self.variants:
            read_variant(variant)


def make_table(
    config: TableConfig, base: Base | None = None, sampler: Sampler | None = None, partner: Partner | None = None
) -> dict[str, Any]:
    """Generates every cell once, scores it, writes `samples.jsonl` and `table.md`, returns the numbers."""
    require(find_spec("sklearn") is not None, "MAUVE needs scikit-learn: pip install 'adjust-dlm[eval]'")
    rank, world, _ = distributed.start()
    base = base or open_base(config)
    helpers = open_helpers(config, base, [d for d, _ in _methods(config)], sampler=sampler, partner=partner)
    judge, start = open_judge(config, base)
    cells = list(dict.fromkeys((t, d, k) for t in config.temperatures for d, k in _methods(config)))
    made = {cell: generate_cell(base, helpers, config, cell) for cell in cells}
    texts = {cell: [line.tokens for line in rows] for cell, rows in made.items()}
    references = {
        t: [line.tokens for line in generate_cell(base, helpers, config, (t, "joint", 1), behind=config.n)]
        for t in config.temperatures
    }
    lines = _score(config, start, judge, texts, references, cells[rank::world])
    for line in lines:
        line |= costs(made[_cell(line)]) | _divergence(base, helpers, config, _cell(line))
    lines = sorted(distributed.from_all_ranks(lines), key=lambda line: cells.index(_cell(line)))
    compare_with_parallel(lines)
    out = {"config": asdict(config), "first_row": EVALUATION_ROWS, "cells": lines}
    if rank == 0:
        _write(Path(config.output), render(out), base, texts)
    distributed.barrier()
    return out


def open_base(config: TableConfig) -> Base:
    """The base, compiled if asked."""
    base = load_base(config.base, device=config.device, quantize=config.quantize)
    if config.compile:
        base.compile()
    return base


def open_judge(config: TableConfig, base: Base) -> tuple[Any, int]:
    """The judge, and the token it starts texts with: its own, since a base may start with one that it never saw."""
    judge, words = load_ar(config.judge, device=base.device, dtype=base.dtype)
    require(
        judge.config.vocab_size == base.spec.vocab_size,
        f"judge {config.judge!r} has {judge.config.vocab_size} tokens, base {config.base!r} {base.spec.vocab_size}: "
        "token ids would mean other words",
    )
    return judge, start_of(words, judge.config)


def _methods(config: TableConfig) -> list[tuple[str, int]]:
    """(decoder, K); a variant has no K: 0."""
    fixed = [(d, k) for d in ("parallel", "adjust") for k in config.tokens_per_step if k > 1]
    return [("joint", 1), *fixed, *[(variant, 0) for variant in config.variants if variant != "joint"]]


def generate_cell(
    base: Base, helpers: dict[str, Any], config: TableConfig, cell: Cell, behind: int = 0
) -> list[Generated]:
    """n unconditional texts of a cell, each up to its end token; `behind`: so many rows after the first ones."""
    rows = generate_rows(
        base,
        helpers,
        cell[1],
        [unconditional(base)] * config.n,
        _settings(config, cell),
        first_row=EVALUATION_ROWS + behind,
        batch_size=config.batch_size,
        keep=Path(config.output) / "texts",
        eager=config.eager,
    )
    log.info("T=%s %s K=%d: %d texts from row %d on, where no trajectory is", *cell, len(rows), rows[0].row)
    return rows


def _settings(config: TableConfig, cell: Cell) -> DecodeConfig:
    temperature, _, k = cell
    return DecodeConfig(
        tokens_per_step=max(k, 1), max_new_tokens=config.max_new_tokens, temperature=temperature, top_p=config.top_p,
        seed=config.seed, suppress_eos=config.suppress_eos,
    )  # fmt: skip


def _divergence(base: Base, helpers: dict[str, Any], config: TableConfig, cell: Cell) -> dict[str, Any]:
    """KL both ways, as far as it can be read off the decoder's commits, or why it cannot."""
    temperature, decoder, _ = cell
    if config.divergence == 0:
        return {}
    settings = _settings(config, cell).but(**read_variant(decoder).settings)
    reasons = {sources: reason_against(base, decoder, settings, sources) for sources in (("own", "base"), ("own",))}
    able = next((sources for sources, reason in reasons.items() if reason is None and temperature > 0), None)
    if able is None:
        return {"no_divergence": reasons["own",] or "at T = 0 the law has one text, and every KL is infinite"}
    prompts = [unconditional(base)] * config.divergence
    how: dict[str, Any] = {"temperature": temperature, "sources": able, "batch_size": config.batch_size}
    how |= {"keep": Path(config.output) / "kept"}
    facts = measure(base, helpers, decoder, prompts, settings, **how)
    about = {name: facts["own"][name] for name in MEASURES[2:]}
    return about | {name: facts[name] for kl in ("kl_qp", "kl_pq") for name in (kl, f"{kl}_ci95") if name in facts}


def _score(
    config: TableConfig,
    start: int,
    judge: Any,
    texts: dict[Any, Texts],
    references: dict[float, Texts],
    mine: list[Any],
) -> list[dict[str, Any]]:
    """The lines of some cells (MAUVE's clustering is the slow part, so ranks share the cells)."""
    nll = {
        cell: score_nll(judge, rows, condition_id=start, batch_size=64, device=judge.device)
        for cell, rows in texts.items()
    }
    about = {"model": config.judge, "pooling": "mean", "max_new_tokens": config.max_new_tokens}
    reference = {t: text_features(judge, rows) for t, rows in references.items()}
    lines = []
    for t, decoder, k in mine:
        rows = texts[t, decoder, k]
        score = mauve(reference[t], text_features(judge, rows), buckets=config.buckets or None, about=about)
        line = score_line(t, decoder, k, rows, nll[t, decoder, k])
        line |= {"mauve": score.mean, "mauve_ci95": score.ci95, "mauve_std": score.std}
        line["mauve_settings"] = score.settings
        parallel = nll.get((t, "parallel", k or read_variant(decoder).settings.get("tokens_per_step", 0)))
        if parallel is not None and not decoder.startswith(("parallel", "joint")):
            line |= gap_facts(nll[t, "joint", 1], parallel, nll[t, decoder, k])
        lines.append(line)
    return lines


def gap_facts(joint: NllScore, parallel: NllScore, adjust: NllScore) -> dict[str, float | None]:
    """Share of the gap closed; None where parallel text does not score worse than joint beyond both intervals."""
    if parallel.nll - parallel.ci95 <= joint.nll + joint.ci95:
        return {"gap_closed": None, "gap_closed_ci95": None}
    share, half = nll_gap_closed(joint, parallel, adjust)
    return {"gap_closed": share, "gap_closed_ci95": half}


def text_features(judge: Any, rows: Texts) -> Any:
    """Of all texts that have a token; MAUVE's settings say how many these are."""
    return features(judge, [ids for ids in rows if ids], 64, pooling="mean")


def _cell(line: dict[str, Any]) -> Cell:
    return line["temperature"], line["decoder"], line["tokens_per_step"]


def score_line(t: float, decoder: str, k: int, rows: Texts, nll: NllScore) -> dict[str, Any]:
    """What a cell's texts and their NLL say; MAUVE comes on top."""
    return {
        "temperature": t, "decoder": decoder, "tokens_per_step": k, "n": nll.n_texts, "nll": nll.nll,
        "nll_ci95": nll.ci95, "distinct_2": distinct_n(rows, 2), "distinct_4": distinct_n(rows, 4),
        "entropy": token_entropy(rows), "repeated": repeated_share(rows), "rule": nll.rule,
    }  # fmt: skip


def render(table: dict[str, Any]) -> str:
    """Markdown of the numbers."""
    head = [
        "T", "decoder", "K", "tokens/pass", "KL(q\\|\\|p)", "below parallel", "KL(p\\|\\|q)", "n", "NLL", "MAUVE",
        "distinct-2", "distinct-4", "entropy", "repeated",
    ]  # fmt: skip
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for c in table["cells"]:
        cells = [
            c["temperature"], c["decoder"], c["tokens_per_step"] or "",
            f"{c['tokens_per_pass']:.2f}" if "tokens_per_pass" in c else "",
            number(c, "kl_qp"), number(c, "kl_qp_below_parallel", percent=True), number(c, "kl_pq"), c["n"],
            f"{c['nll']:.3f} +- {c['nll_ci95']:.3f}", f"{c['mauve']:.3f} +- {c['mauve_ci95']:.3f}",
            f"{c['distinct_2']:.3f}", f"{c['distinct_4']:.3f}",
            f"{c['entropy']:.3f}", f"{c['repeated']:.3f}",
        ]  # fmt: skip
        rows.append("| " + " | ".join(str(x) for x in cells) + " |")
    return "\n".join(rows) + "\n"


def _write(folder: Path, markdown: str, base: Base, texts: dict[Any, Texts], limit: int = 20) -> None:
    """`table.md`, and the first texts of every cell, to be read by a person."""
    lines = []
    for (t, decoder, k), rows in texts.items():
        for row, ids in enumerate(rows[:limit], EVALUATION_ROWS):
            text = base.decode(ids) if base.tokenizer is not None else " ".join(map(str, ids))
            line = {"temperature": t, "decoder": decoder, "tokens_per_step": k, "row": row, "text": text}
            lines.append(json.dumps(line) + "\n")
    write_whole({folder / "table.md": markdown, folder / "samples.jsonl": "".join(lines)})
