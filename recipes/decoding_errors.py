"""How far from exact: states that the prefix cache reuses, states of g deep in a round, and quantized bases.

    python recipes/decoding_errors.py [--tables cache depth quantized] [--base smol] [--rows 64] [--device cuda]

Rows are decoded with K = 1; on the way the same canvases are looked at through caches of several periods, by g from
round starts that lie 16 commits apart (also the states of the round's start as they are), and by the base with other
weights. Printed is the KL divergence from the exact distribution in nats, mean over open positions, as a table in
Markdown each.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from adjust_dlm import DecodeConfig, load_base, load_sampler
from adjust_dlm.bases import Base
from adjust_dlm.bases.memory import Memory
from adjust_dlm.decoders.machinery.cache import with_cache
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.pick import pick, rows_at_once
from adjust_dlm.sampler import Sampler

TABLES = ["cache", "depth"]
Sums = defaultdict[tuple[str, int], list[float]]


def divergences(base: Base, exact_BLD: Tensor, other_BLD: Tensor, at_BL: Tensor) -> tuple[float, float, float]:
    """Means over positions: KL(exact || other), equal argmax, and how much higher the entropy of the other is."""
    kl, same, wider, count = 0.0, 0, 0.0, 0
    for part in at_BL.nonzero().split(rows_at_once(base) // 4):
        p, q = (base.logits(h[part[:, 0], part[:, 1]]).log_softmax(-1) for h in (exact_BLD, other_BLD))
        kl += float(torch.where(p.isneginf(), 0, p.exp() * (p - q)).sum())
        wider += float(torch.where(p.isneginf(), 0, p.exp() * p - q.exp() * q).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(part)
    return kl / count, same / count, wider / count


def walk(base: Base, config: DecodeConfig, rows: int) -> Iterator[tuple[int, Canvas, Tensor]]:
    """Before each commit of a K = 1 decode: its number, the canvas, and the exact states."""
    canvas = Canvas(base, [[base.spec.bos_id]] * rows, config)
    for step in itertools.count():
        if not canvas.open:
            return
        h_BLD = base.hidden(canvas)
        yield step, canvas, h_BLD
        canvas.start_round()
        canvas.commit(pick(base, h_BLD, canvas))


@torch.no_grad()
def cache_errors(base: Base, config: DecodeConfig, rows: int, periods: list[int]) -> Sums:
    """By period and pass since a row was last computed whole (0: just now)."""
    out: Sums = defaultdict(list)
    twins: dict[int, Canvas] = {}
    for _, canvas, h_BLD in walk(base, config, rows):
        for period in periods:
            if period not in twins:  # the same tokens, a memory each
                twins[period] = copy.copy(canvas)
                twins[period].memory = Memory(rows, base.device)
            twin = twins[period]
            reused_BLD = with_cache(base, config.but(cache_period=period)).hidden(twin)
            age = int(twin.memory.counts_B3[0, 0]) - 1
            kl, same, _ = divergences(base, h_BLD, reused_BLD, canvas.open_BL)
            out[f"{period}", age] += [kl]
            out[f"{period} argmax", age] += [same]
    return out


@torch.no_grad()
def drift(base: Base, sampler: Sampler, config: DecodeConfig, rows: int, depth: int) -> Sums:
    """By number of commits since the base pass."""
    base = sampler.on(base)
    out: Sums = defaultdict(list)
    for step, canvas, h_BLD in walk(base, config, rows):
        k = step % depth
        if k == 0:
            start_BLD = chain_BLD = h_BLD
        else:
            chain_BLD = sampler(chain_BLD, canvas)
            for name, states in (("g", chain_BLD), ("stale", start_BLD)):
                out[name, k] += [divergences(base, h_BLD, states, canvas.open_BL)[0]]
    return out


@torch.no_grad()
def quantized(base: Base, others: dict[str, Base], config: DecodeConfig, rows: int, every: int) -> Sums:
    """By number of commits, of which `every` lie between two looks; only linear layers of the body are quantized."""
    out: Sums = defaultdict(list)
    for step, canvas, h_BLD in walk(base, config, rows):
        for kind, other in others.items() if step % every == 0 else ():
            kl, same, wider = divergences(base, h_BLD, other.hidden(canvas), canvas.open_BL)
            out[kind, step] += [kl]
            out[f"{kind} argmax", step] += [same]
            out[f"{kind} entropy", step] += [wider]
    return out


def table(sums: Sums, head: str) -> str:
    """A line for each name, a column for each number."""
    names, columns = list(dict.fromkeys(n for n, _ in sums)), sorted({k for _, k in sums})
    lines = [f"| {head} | " + " | ".join(map(str, columns)) + " |", "|" + "---|" * (1 + len(columns))]
    for name in names:
        cells = [f"{sum(v) / len(v):.4f}" if (v := sums.get((name, k))) else "" for k in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """The tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=[*TABLES, "quantized"], default=TABLES)
    parser.add_argument("--base", default="smol")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--periods", type=int, nargs="+", default=[2, 4, 8, 32])
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--kinds", nargs="+", default=["int8", "fp8", "fp8-dynamic"], help="of quantized weights")
    parser.add_argument("--device", default="auto")
    flags = parser.parse_args(argv)
    base = load_base(flags.base, device=flags.device)
    config = DecodeConfig(max_new_tokens=flags.new, suppress_eos=True, seed=1)
    if "cache" in flags.tables:
        errors = cache_errors(base, config.but(block_length=flags.block_length), flags.rows, flags.periods)
        sys.stdout.write(table(errors, "period, passes since computed whole") + "\n\n")
    if "depth" in flags.tables:
        depths = drift(base, load_sampler(None, base), config, flags.rows, flags.depth)
        sys.stdout.write(table(depths, "commits since the base pass") + "\n\n")
    if "quantized" in flags.tables:
        others = {kind: load_base(flags.base, device=flags.device, quantize=kind) for kind in flags.kinds}
        errors = quantized(base, others, config, flags.rows, 16)
        sys.stdout.write(table(errors, "commits") + "\n")


if __name__ == "__main__":
    main()
