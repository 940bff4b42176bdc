"""Trains one g after another on an equal budget and judges each by decoding: which knob buys what.

    python recipes/ablations.py --base OUT/base --trajectories OUT/text OUT/text-t06 OUT/chat OUT/lists --output ABL \
        --seconds 45 --ks 4 --candidates 4 --stop-after 560

One process a GPU: `CUDA_VISIBLE_DEVICES=0 ... --share 0/2` and `CUDA_VISIBLE_DEVICES=1 ... --share 1/2`. Each finished
variant is one line of `ABL/results-*.jsonl`, written as soon as it is scored; the same command goes on where it was
stopped and leaves finished variants out. Texts of joint and parallel decoding are made once (by share 0) and kept in
ABL/texts.
The table of all variants is printed at the end. Compiled kernels serve every variant of the same shapes: more slices
and each choice of features cost a compilation of the base of their own, before the clock starts.
`--only a b` picks variants, `--variants FILE` reads others (YAML: name -> settings of `adjust train`).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import logging
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adjust_dlm.bases import Base, load_base
from adjust_dlm.commands.settings import filled, read_yaml
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.eval.generation import Generated, costs
from adjust_dlm.eval.mauve import features as text_features
from adjust_dlm.eval.mauve import mauve
from adjust_dlm.eval.nll import NllScore, gap_closed, score_nll
from adjust_dlm.eval.table import TableConfig, generate_cell, open_judge, score_line
from adjust_dlm.files import write_whole
from adjust_dlm.sampler import Sampler, load_sampler
from adjust_dlm.train.metrics import held_out
from adjust_dlm.train.trainer import Run, TrainConfig, train
from adjust_dlm.types import require

log = logging.getLogger("ablations")
Line = dict[str, Any]
PATIENCE = 1200.0  # seconds that other shares wait for share 0
DEPTHS = 7  # rollout of the held-out KL: what K = 8 needs

# One knob at a time against the form and the settings of the g that ships (recipes/smol.sh), the likeliest to matter
# first. On `smol` (30 layers, 134.5M parameters) every g stays below 6 % of it.
SHIPPED: Line = {"layers": 2, "mlp": 0.875, "features": [10, 20], "rows": 32, "slices": 32, "lr": 3e-3, "warmup": 100}
CHANGES: dict[str, Line] = {
    "shipped": {},
    "reverse": {"reverse": 0.9},
    "half-reverse": {"reverse": 0.5},
    "one-layer": {"layers": 1, "mlp": 1.0},
    "no-features": {"features": []},
    "lr-6e-3": {"lr": 6e-3},
    "slices-8": {"slices": 8},
    "near-rows": {"next_decay": 1.5, "next_share": 0.95},
    "uniform-rows": {"weights": "uniform"},
    "last-depth": {"loss": "last"},
    "adamw": {"optimizer": "adamw", "lr": 1e-3},
    "text-alone": {"trajectories": ["text"]},
    "no-ends": {"trajectories": ["text", "text-t06"]},  # chats and lists have the only end tokens
    "token-pairing": {"pairing": "token"},
    "all-rows": {"rows": None},
    "late-features": {"features": [24, 28]},
    "seed-1": {"seed": 1},  # how far apart equal settings end up
    "seed-2": {"seed": 2},
}
VARIANTS: dict[str, Line] = {name: {**SHIPPED, **changes} for name, changes in CHANGES.items()}


@dataclass
class Judged:
    """What variants are compared with.

    Attributes:
        table: how texts are made.
        judge: autoregressive model, and the token it starts texts with.
        joint: NLL of joint text.
        parallel: NLL of parallel text for each K.
        reference: MAUVE features of other joint texts.
    """

    table: TableConfig
    judge: tuple[Any, int]
    joint: NllScore
    parallel: dict[int, NllScore]
    reference: Any


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smol")
    parser.add_argument("--trajectories", nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--variants", type=Path, help="YAML of variants in place of the built-in list")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--share", default="0/1", help="i/n: variants i, i+n, ...")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="optimiser steps of each variant")
    budget.add_argument("--seconds", type=float, help="training time of each, without the first --untimed steps")
    parser.add_argument("--untimed", type=int, default=20)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--heldout", type=int, default=64)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--ks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--candidates", type=int, default=0, help="see DecodeConfig; raised to K where it is smaller")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--judge", default="smol")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which none is started")
    args = parser.parse_args(argv)
    args.part, args.parts = (int(x) for x in args.share.split("/"))
    return args


def training(args: argparse.Namespace, name: str, changes: Line) -> TrainConfig:
    """A variant's settings; its folder's name holds a digest of them, so that other settings never resume it."""
    budget: Line = {"max_seconds": args.seconds, "steps": 10**9} if args.seconds else {"steps": args.steps}
    common = TrainConfig(
        base=args.base, trajectories=tuple(args.trajectories), slices=args.slices, heldout=args.heldout,
        compile=torch.cuda.is_available() and not args.no_compile, untimed=args.untimed,
        eval_every=10**9, checkpoint_every=1000, **budget,
    )  # fmt: skip
    config = replace(filled(TrainConfig, changes, where=name, base=common))  # replace() checks the values
    known = {Path(folder).name: folder for folder in args.trajectories}
    config = replace(config, trajectories=tuple(known.get(x, x) for x in config.trajectories))
    digest = hashlib.sha256(json.dumps(asdict(config)).encode()).hexdigest()[:8]
    return replace(config, output=str(args.output / f"{name}-{digest}"))


def cells_of(args: argparse.Namespace) -> dict[int, tuple[float, str, int]]:
    """K -> the cell of ADJUST."""
    out = {}
    for k in args.ks:
        held = f",candidates={max(args.candidates, k)}" if args.candidates else ""
        out[k] = (1.0, f"adjust:tokens_per_step={k}{held}", 0)
    return out


def ids(rows: list[Generated]) -> list[list[int]]:
    """Their tokens."""
    return [row.tokens for row in rows]


def open_references(args: argparse.Namespace, base: Base) -> Judged:
    """Joint and parallel texts, made by share 0 where they are not kept; the other shares wait for it."""
    table = TableConfig(
        base=args.base, output=str(args.output), n=args.n, temperatures=(1.0,), tokens_per_step=tuple(args.ks),
        max_new_tokens=args.max_new_tokens, batch_size=args.batch_size, judge=args.judge,
    )  # fmt: skip
    done = done_file(args)
    if args.part:
        log.info("waiting for share 0 to finish joint and parallel texts (%s)", done)
        began = time.monotonic()
        while not done.is_file():
            require(time.monotonic() - began < PATIENCE, f"share 0 has not written {done} in {PATIENCE:.0f} s")
            time.sleep(1.0)
    cells = [(1.0, "joint", 1), *[(1.0, "parallel", k) for k in args.ks]]
    texts = [ids(generate_cell(base, {}, table, cell)) for cell in cells]
    others = ids(generate_cell(base, {}, table, (1.0, "joint", 1), behind=args.n))
    judge = open_judge(table, base)
    scores = [nll_of(judge, rows) for rows in texts]
    reference = text_features(judge[0], others)
    if args.part == 0:
        lines = [
            score_line(*cell, rows, score) | mauve_of(table, reference, text_features(judge[0], rows))
            for cell, rows, score in zip(cells, texts, scores, strict=True)
        ]
        write_whole({done: json.dumps(lines)})
    return Judged(table, judge, scores[0], dict(zip(args.ks, scores[1:], strict=True)), reference)


def done_file(args: argparse.Namespace) -> Path:
    """What joint and parallel texts of these settings score, written when all are there."""
    facts = json.dumps([args.base, args.judge, args.n, args.ks, args.max_new_tokens])
    digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
    return Path(args.output) / f"references-{digest}.json"


def nll_of(judge: tuple[Any, int], rows: list[list[int]]) -> NllScore:
    """As `adjust eval table` has it."""
    return score_nll(judge[0], rows, condition_id=judge[1], batch_size=64)


def mauve_of(table: TableConfig, reference: Any, features: Any) -> Line:
    """MAUVE and its interval."""
    score = mauve(reference, features, buckets=table.buckets or None)
    return {name: score[name] for name in ("mauve", "mauve_ci95")}


def train_variant(config: TrainConfig, base: Base, fast: Base) -> tuple[Sampler, Line]:
    """g of a variant, and what its training was like."""
    started = time.monotonic()
    result = train(config, fast)
    if not result["finished"]:
        raise SystemExit(f"stopped by a signal; the same command goes on with {config.output}")
    g = load_sampler(result["sampler"], base)
    data = TrajectoryStore(*config.trajectories)
    held = Run(config=config, base=base, sampler=g, data=data, rank=0, world=1, device=base.device).rows(True)
    plain = replace(TrainConfig(), rollout=DEPTHS, slice_states=DEPTHS + 1, suppress_eos=config.suppress_eos)
    size, own = sum(p.numel() for p in base.model.parameters()), sum(p.numel() for p in g.parameters())
    timed = result["windows"] * max(0.0, 1 - config.untimed / result["steps"])
    return g, {
        "parameters": own, "parameter_share": own / size, "steps": result["steps"], "windows": result["windows"],
        "train_seconds": result["seconds"], "windows_per_second": timed / max(result["seconds"], 1e-9),
        "wall_train": time.monotonic() - started, "heldout": result["heldout"],
        "depths": held_out(g.on(base), g, data, held, plain, nullcontext()),
    }  # fmt: skip


def decode_variant(args: argparse.Namespace, base: Base, g: Sampler, judged: Judged) -> tuple[Line, dict[int, Any]]:
    """Scores of each K but for MAUVE, and the features that it needs."""
    started, cells, features = time.monotonic(), {}, {}
    for k, cell in cells_of(args).items():
        rows = generate_cell(base, {"sampler": g}, judged.table, cell)
        nll = nll_of(judged.judge, ids(rows))
        line = score_line(cell[0], "adjust", k, ids(rows), nll) | costs(rows)
        cells[k] = line | gap_closed(judged.joint, judged.parallel[k], nll)
        features[k] = text_features(judged.judge[0], ids(rows))
    return {"cells": cells, "wall_decode": time.monotonic() - started}, features


def scored(line: Line, features: dict[int, Any], judged: Judged, path: Path) -> Line:
    """Adds MAUVE, which the CPU does while the next variant trains, and writes the line."""
    for k, of_k in features.items():
        line["cells"][k] |= mauve_of(judged.table, judged.reference, of_k)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    log.info("%s", json.dumps({key: value for key, value in line.items() if key in ("variant", "depths", "cells")}))
    return line


def finished(output: Path) -> dict[str, Line]:
    """Every variant scored so far by the name of its folder; the torn last line of a killed run is left out."""
    out = {}
    for path in sorted(output.glob("results-*.jsonl")):
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            out[line["key"]] = line
    return out


def markdown(lines: list[Line], references: list[Line]) -> str:
    """One row a variant."""
    ks = sorted({k for line in lines for k in line["cells"]}, key=int)
    deep = (1, 2, 3, DEPTHS)
    head = ["variant", "M", "steps", "s", "windows/s", *[f"KL {d}" for d in deep]]
    head += [word for k in ks for word in (f"closed K={k}", "MAUVE", "dist-4")]
    rows = []
    for line in lines:
        row = [line["variant"], f"{line['parameters'] / 1e6:.2f}", line["steps"], f"{line['train_seconds']:.0f}"]
        row += [f"{line['windows_per_second']:.0f}"]
        row += [f"{line['depths'][f'kl_{d}']:.3f}" if f"kl_{d}" in line["depths"] else "" for d in deep]
        for k in ks:
            cell = line["cells"].get(k)
            row += [closed(cell), plus_minus(cell, "mauve"), f"{cell['distinct_4']:.3f}"] if cell else [""] * 3
        rows.append(row)
    out = [head, ["---"] * len(head), *rows]
    text = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in out) + "\n"
    said = [
        f"{x['decoder']} K={x['tokens_per_step']}: NLL {plus_minus(x, 'nll')}, MAUVE {plus_minus(x, 'mauve')}, "
        f"distinct-4 {x['distinct_4']:.3f}"
        for x in references
    ]
    return text + "\n" + "\n".join(said) + "\n"


def closed(cell: Line) -> str:
    """Share of the gap with its interval."""
    if cell["gap_closed"] is None:
        return "no gap"
    return f"{100 * cell['gap_closed']:.1f} +- {100 * cell['gap_closed_ci95']:.1f} %"


def plus_minus(cell: Line, name: str) -> str:
    """A number with its interval."""
    return f"{cell[name]:.3f} +- {cell[f'{name}_ci95']:.3f}"


def main(argv: list[str] | None = None, base: Base | None = None) -> str:
    """Runs this process's share and returns the table of all that is finished."""
    args, began = arguments(argv), time.monotonic()
    variants: dict[str, Line] = read_yaml(args.variants) if args.variants else VARIANTS
    unknown = sorted(set(args.only) - set(variants))
    require(not unknown, f"unknown variant {', '.join(unknown)}; known are {', '.join(variants)}")
    chosen = [name for name in variants if name in args.only or not args.only]
    todo = {name: training(args, name, variants[name] or {}) for name in chosen[args.part :: args.parts]}
    if torch.cuda.is_available():
        import torch._dynamo.config as dynamo

        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 4096  # beyond it, torch would run later g eagerly
    args.output.mkdir(parents=True, exist_ok=True)
    base = base or load_base(args.base, device="auto")
    fast = copy.copy(base)  # `train` compiles it, for its own shapes; what is rare runs on `base`
    judged: Judged | None = None
    failed: list[str] = []
    path = args.output / f"results-{args.part}.jsonl"
    with ThreadPoolExecutor(1) as worker:
        waiting: list[Future[Line]] = []
        for name, config in todo.items():
            if Path(config.output).name in finished(args.output) or time.monotonic() - began > args.stop_after:
                log.info("%s: finished before, or no time left", name)
                continue
            if judged is None and args.part == 0:
                judged = open_references(args, base)
            try:
                g, line = train_variant(config, base, fast)
                judged = judged or open_references(args, base)
                cells, features = decode_variant(args, base, g, judged)
            except Exception as error:  # the others still have their chance; the table says what failed
                log.exception("%s failed", name)
                failed.append(f"{name}: {error!r}")
                torch.cuda.empty_cache()
                continue
            line = {"variant": name, "key": Path(config.output).name, "settings": variants[name], **line, **cells}
            waiting.append(worker.submit(scored, line, features, judged, path))
    for future in waiting:
        future.result()  # raises what went wrong there
    lines = list(finished(args.output).values())
    references = json.loads(done_file(args).read_text()) if done_file(args).is_file() else []
    table = markdown(lines, references) if lines else "nothing is finished\n"
    return table + "".join(f"failed: {line}\n" for line in failed)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    sys.stdout.write(main())
