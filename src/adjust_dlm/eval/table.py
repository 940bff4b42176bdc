"""The K-table: distance to the joint law, NLL, MAUVE and variety of joint, parallel and ADJUST text."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adjust_dlm.bases import Base, Partner, load_base
from adjust_dlm.bases.autoregressive import load_ar
from adjust_dlm.data.prompts import unconditional
from adjust_dlm.decoders.divergence import MEASURES
from adjust_dlm.eval.divergence import compare_with_parallel, measure, reason_against
from adjust_dlm.eval.generation import Generated, costs, generate_rows, open_helpers, over_ranks, to_line
from adjust_dlm.eval.mauve import features, mauve
from adjust_dlm.eval.nll import NllScore, Tokens, gap_closed, score_nll
from adjust_dlm.eval.scores import start_of
from adjust_dlm.eval.settings import TableConfig
from adjust_dlm.files import write_whole
from adjust_dlm.sampler import Sampler
from adjust_dlm.train import distributed
from adjust_dlm.types import EVALUATION_ROWS, DecodeConfig, TokenSource, require
from adjust_dlm.variants import read_variant

log = logging.getLogger(__name__)
Texts = list[list[int]]
Cell = tuple[float, str, int]  # temperature, decoder or variant, K (0: a variant has none)


def make_table(
    config: TableConfig, base: Base | None = None, sampler: Sampler | None = None, partner: Partner | None = None
) -> dict[str, Any]:
    """Generates every cell once, scores it, writes the first texts into `samples.jsonl`, returns the numbers."""
    require(find_spec("sklearn") is not None, "MAUVE needs scikit-learn: pip install 'adjust-dlm[eval]'")
    rank, _, _ = distributed.start()
    base = base or open_base(config)
    helpers = open_helpers(config, base, [d for d, _ in _methods(config)], sampler=sampler, partner=partner)
    judge, start = open_judge(config, base)
    cells = list(dict.fromkeys((t, d, k) for t in config.temperatures for d, k in _methods(config)))
    made = {cell: generate_cell(base, helpers, config, cell) for cell in cells}
    texts = {cell: [line.tokens for line in rows] for cell, rows in made.items()}
    nll = {cell: score_nll(judge, rows, condition_id=start, batch_size=64) for cell, rows in texts.items()}
    reference = {
        t: features(judge, [x.tokens for x in generate_cell(base, helpers, config, (t, "joint", 1), config.n)])
        for t in config.temperatures
    }

    def line_of(cell: Cell) -> dict[str, Any]:
        about = {"model": config.judge, "pooling": "mean", "max_new_tokens": config.max_new_tokens}
        ours = features(judge, texts[cell])
        found = mauve(reference[cell[0]], ours, buckets=config.buckets or None, about=about)
        line = score_line(*cell, texts[cell], nll[cell]) | {"mauve_settings": found.pop("settings"), **found}
        parallel = nll.get((cell[0], "parallel", cell[2] or read_variant(cell[1]).settings.get("tokens_per_step", 0)))
        if parallel is not None and not cell[1].startswith(("parallel", "joint")):
            line |= gap_closed(nll[cell[0], "joint", 1], parallel, nll[cell])
        return line | costs(made[cell]) | _divergence(base, helpers, config, cell)

    lines = over_ranks(cells, lambda mine: map(line_of, mine))  # MAUVE's clustering is the slow part
    compare_with_parallel(lines)
    if rank == 0:
        write_whole({Path(config.output, "samples.jsonl"): "".join(_samples(base, texts))})
    distributed.barrier()
    return {"first_row": EVALUATION_ROWS, "cells": lines}


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
        base, helpers, cell[1], [unconditional(base)] * config.n, _settings(config, cell),
        first_row=EVALUATION_ROWS + behind, batch_size=config.batch_size, keep=Path(config.output) / "texts",
        eager=config.eager,
    )  # fmt: skip
    log.info("T=%s %s K=%d: %d texts from row %d on, where no trajectory is", *cell, len(rows), rows[0].row)
    return rows


def _settings(config: TableConfig, cell: Cell) -> DecodeConfig:
    temperature, _, k = cell
    return config.decode_config(tokens_per_step=max(k, 1), temperature=temperature)


def _divergence(base: Base, helpers: dict[str, Any], config: TableConfig, cell: Cell) -> dict[str, Any]:
    """KL both ways, as far as it can be read off the decoder's commits, or why it cannot."""
    temperature, decoder, _ = cell
    if config.divergence == 0:
        return {}
    settings = _settings(config, cell).but(**read_variant(decoder).settings)
    sources: tuple[TokenSource, ...] = ("own",)
    reason = reason_against(base, decoder, settings, sources)
    if reason is not None or temperature == 0:
        return {"no_divergence": reason or "at T = 0 the law has one text, and every KL is infinite"}
    if reason_against(base, decoder, settings, ("own", "base")) is None:
        sources = ("own", "base")
    prompts = [unconditional(base)] * config.divergence
    facts = measure(
        base, helpers, decoder, prompts, settings, temperature=temperature, sources=sources,
        batch_size=config.batch_size, keep=Path(config.output, "kept"),
    )  # fmt: skip
    about = {name: facts["own"][name] for name in MEASURES[2:]}
    return about | {name: facts[name] for kl in ("kl_qp", "kl_pq") for name in (kl, f"{kl}_ci95") if name in facts}


def score_line(t: float, decoder: str, k: int, rows: Texts, nll: NllScore) -> dict[str, Any]:
    """What a cell's texts and their NLL say; MAUVE comes on top. Dull text lowers NLL: so its variety stands here."""
    return {
        "temperature": t, "decoder": decoder, "tokens_per_step": k, "n": nll.n_texts, "nll": nll.nll,
        "nll_ci95": nll.ci95, "distinct_2": distinct_n(rows, 2), "distinct_4": distinct_n(rows, 4),
        "entropy": token_entropy(rows), "repeated": repeated_share(rows),
    }  # fmt: skip


def _samples(base: Base, texts: dict[Cell, Texts], limit: int = 20) -> Iterator[str]:
    """The first texts of every cell, to be read by a person."""
    for (t, decoder, k), rows in texts.items():
        for row, ids in enumerate(rows[:limit], EVALUATION_ROWS):
            text = base.decode(ids) if base.tokenizer is not None else " ".join(map(str, ids))
            yield to_line({"temperature": t, "decoder": decoder, "tokens_per_step": k, "row": row, "text": text})


def distinct_n(token_lists: Tokens, n: int) -> float:
    """Unique n-grams / all n-grams, over all texts together; nan when no text has n tokens.

    It falls with the amount of text: compare only sets of the same size.
    """
    grams = [gram for ids in token_lists for gram in _ngrams(ids, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def token_entropy(token_lists: Tokens) -> float:
    """Entropy of the tokens of a text, in nats, averaged over the texts that have any; nan when none has.

    The usual companion of generative perplexity. At most the log of the length: compare only texts of the same length.
    """
    found = []
    for ids in filter(len, token_lists):
        shares = [count / len(ids) for count in Counter(ids).values()]
        found.append(-sum(share * math.log(share) for share in shares))
    return sum(found) / len(found) if found else math.nan


def repeated_share(token_lists: Tokens, *, n: int = 4, above: float = 0.2) -> float:
    """Share of texts in which one repeated n-gram covers more than `above` of the tokens.

    Catches the loops (copies of one line, one word over and over) that low temperatures fall into.
    """
    require(len(token_lists) > 0, "no texts to look for repetition in")
    return sum(repeat_coverage(ids, n) > above for ids in token_lists) / len(token_lists)


def repeat_coverage(ids: Sequence[int], n: int) -> float:
    """Largest share of the tokens that lie inside occurrences of one n-gram that occurs at least twice."""
    starts = defaultdict(list)
    for i, gram in enumerate(_ngrams(ids, n)):
        starts[gram].append(i)
    covered = [len({i + j for i in at for j in range(n)}) for at in starts.values() if len(at) > 1]
    return max(covered, default=0) / max(len(ids), 1)


def _ngrams(ids: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    require(n >= 1, f"n is {n}; an n-gram has at least 1 token")
    return zip(*(ids[j:] for j in range(n)), strict=False)
