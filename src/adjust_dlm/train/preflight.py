"""What a training run will cost, before anything is spent: `adjust train --dry-run`, and the check for disk space.

Legend: D width, I inner width of the MLP, H heads of d numbers, V vocabulary, L the longest canvas, b bytes a number of
the base (2 in half precision, 4 in fp32), P parameters of g.
"""

from __future__ import annotations

import errno
import inspect
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adjust_dlm.bases import Base
from adjust_dlm.losses import weighted_kl
from adjust_dlm.train.best import BEST, LAST, sampler_bytes
from adjust_dlm.train.checkpoint import NAME, free_bytes
from adjust_dlm.train.run import Run

WARMUP, TIMED = 1, 3  # steps before the clock starts, and under it
_CHUNK_COPIES = 6  # fp32 [chunk, V]: both logits, both log-softmaxes, p, and the gradient
_GIB = 1 << 30
KL_CHUNK: int = inspect.signature(weighted_kl).parameters["chunk"].default


def preflight(
    run: Run,
    folder: Path,
    *,
    step: Callable[[Run], Any],
    evaluate: Callable[[Run], Any],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Sizes by formula, time by a few real steps on this device; writes nothing, and leaves `run` good for nothing.

    hours = (steps left x seconds of a step + evaluations left x seconds of one) / 3600. Checkpoints are not in it.
    One-pass training sees each text once: its rows are windows / new tokens (more, if texts end early). It decodes in
    bursts, so the clock runs over whole ones.

    Args:
        run: as training would start, or go on, with it.
        folder: where training would write.
        step: one optimiser step.
        evaluate: the held-out metrics.
        clock: seconds.

    Returns:
        Steps, windows, hours, `memory_gib`, `disk_gib`, and `problems`: sentences, empty where all is well.
    """
    config, memory, disk = run.config, memory_bytes(run), disk_bytes(run, folder)
    left = config.steps - run.step
    windows = windows_of(run, left)
    problems = [] if disk["needed"] <= disk["free"] else [_lacks_room(folder, disk)]
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    try:
        seconds = {
            "step": _timed(lambda: step(run), clock, times=_steps_to_time(run, step)),
            # on a CPU nothing is compiled by then, and one may take minutes
            "evaluation": _timed(lambda: evaluate(run), clock, times=1, warmup=int(run.device.type == "cuda")),
        }
    except torch.OutOfMemoryError:
        seconds = {}
        problems.append("a step does not fit into the memory of the device: lower slices, and raise accumulate")
    memory |= _device_memory(run.device)
    evaluations = config.steps // config.eval_every - run.step // config.eval_every
    hours = (left * seconds["step"] + evaluations * seconds["evaluation"]) / 3600 if seconds else None
    if hours is not None and config.max_seconds:
        hours = min(hours, max(0.0, config.max_seconds - run.elapsed) / 3600)
    rows = len(run.training_rows) if run.pool is None else -(-windows // config.pool.max_new_tokens)
    return {
        "dry_run": True, "steps": left, "windows": windows, "windows_per_row": windows / max(1, rows),
        "seconds_per_step": seconds.get("step"), "seconds_per_evaluation": seconds.get("evaluation"), "hours": hours,
        "training_rows": rows, "heldout_rows": len(run.rows(True)), "ranks": run.world,
        "memory_gib": {name: size / _GIB for name, size in memory.items()},
        "disk_gib": {name: size / _GIB for name, size in disk.items()},
        "problems": problems,
    }  # fmt: skip


def check_disk(run: Run, folder: Path) -> None:
    """Raises OSError (ENOSPC) unless checkpoints and samplers will fit, with the bytes needed and free."""
    disk = disk_bytes(run, folder)
    if disk["needed"] > disk["free"]:
        raise OSError(errno.ENOSPC, _lacks_room(folder, disk))


def _lacks_room(folder: Path, disk: dict[str, int]) -> str:
    return (
        f"no room for this run in {folder}: checkpoints and samplers need {disk['needed']:,} bytes, "
        f"{disk['free']:,} are free"
    )


def windows_of(run: Run, steps: int) -> int:
    """Of that many steps on all ranks."""
    config = run.config
    return steps * run.world * config.accumulate * config.slices * (config.slice_states - config.rollout)


def _timed(call: Callable[[], Any], clock: Callable[[], float], *, times: int = TIMED, warmup: int = WARMUP) -> float:
    """Mean seconds of a call that waits for its own results, after `warmup` calls that do not count."""
    for _ in range(warmup):
        call()
    start = clock()
    for _ in range(times):
        call()
    return (clock() - start) / times


def _steps_to_time(run: Run, step: Callable[[Run], Any]) -> int:
    """Steps between which a pool decodes as often as it will on average, once all of its rows have begun."""
    if run.pool is None:
        return TIMED
    step(run)
    while not run.pool.settled:
        step(run)
    whole = math.lcm(run.pool.groups, run.config.accumulate) // run.config.accumulate
    return -(-TIMED // whole) * whole


def memory_bytes(run: Run) -> dict[str, int]:
    """Bytes on the device, an upper bound within the limits of `activation_bytes`.

    base = its tensors. g = 4 P, gradients = 4 P (both fp32). Optimiser: 4 bytes a parameter with Muon (one momentum), 8
    with AdamW (two moments). KL = 6 fp32 tensors of [min(chunk, rows), V], rows as in `activation_bytes`.
    """
    parameters = sum(p.numel() for p in run.sampler.parameters())
    rows = run.config.slices * (run.config.slice_states - run.config.rollout) * longest(run)
    chunk = min(rows, KL_CHUNK)
    sizes = {
        "base": base_bytes(run.base), "sampler": 4 * parameters, "gradients": 4 * parameters,
        "optimizer": optimizer_bytes(run), "activations": activation_bytes(run),
        "kl": _CHUNK_COPIES * 4 * chunk * run.base.spec.vocab_size,
    }  # fmt: skip
    if run.pool is not None:
        sizes["pool"] = run.pool.bytes
    return {**sizes, "sum": sum(sizes.values())}


def base_bytes(base: Base) -> int:
    """Of every tensor that a base holds, itself or in its modules; what two names share counts once."""
    tensors: list[Tensor] = []
    for value in vars(base).values():
        tensors += [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else []
        tensors += [value] if isinstance(value, Tensor) else []
    stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(stores.values())


def optimizer_bytes(run: Run) -> int:
    """Of the optimisers' state from the first step on: 4 bytes a parameter of Muon, 8 of AdamW."""
    total = 0
    for optimizer in run.optimizers:
        moments = 1 if isinstance(optimizer, torch.optim.Muon) else 2
        total += 4 * moments * sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return total


def activation_bytes(run: Run) -> int:
    """Bytes between forward and backward of one micro-batch, N = slices x slice_states x L, R = slices x windows x L.

    base pass, without a graph:   N (4 D + max(3 I, 3 H d)) b; of a pool, N = its rows x L, and what it hands out
    graph of g, every depth:      rollout x layers x R (11 D + 5 H d + 4 mlp I) b, and in half precision fp32 copies of
                                  what enters two norms, 8 R D a depth, and a half-precision copy of g, 2 P
    rows of the KL, every depth:  rollout x 3 R D b  (teacher, student, gradient; if every row were masked)
    """
    config, shape = run.config, run.base.layer_config
    b = run.base.dtype.itemsize
    width, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads * shape.head_dim
    base_rows = config.slices * config.slice_states * longest(run)
    windows = config.slices * (config.slice_states - config.rollout)
    g_rows = config.rollout * windows * longest(run)  # of all depths together
    handed_out = 0
    if run.pool is not None:
        handed_out = base_rows * width * (1 + len(run.base.keep)) * b
        base_rows = run.pool.rows * longest(run)
    passed = base_rows * (4 * width + max(3 * inner, 3 * heads)) * b + handed_out
    g = run.sampler.config
    graph = g.layers * g_rows * (11 * width + 5 * heads + int(4 * g.mlp * inner)) * b
    if b < 4:
        graph += 8 * g_rows * width + 2 * sum(p.numel() for p in run.sampler.parameters())
    return passed + graph + 3 * g_rows * width * b


def longest(run: Run) -> int:
    """L: the canvas that a batch is padded to at most."""
    if run.pad_to or run.pool is not None:
        return run.pad_to if run.pool is None else run.pool.width
    stores: list[Any] = [run.data] if run.held is None else [run.data, run.held]
    return max(int(np.diff(store.columns.start_N).max()) for store in stores)


def _device_memory(device: torch.device) -> dict[str, int]:
    """What the timed steps took at most, as measured, and what there is."""
    if device.type == "cuda":
        return {
            "measured peak": torch.cuda.max_memory_allocated(device),
            "device": torch.cuda.get_device_properties(device).total_memory,
        }
    return {"machine": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}


def disk_bytes(run: Run, folder: Path) -> dict[str, int]:
    """Bytes in the output folder: a checkpoint is g and optimiser state in fp32 (and pools), a sampler bf16.

    needed = two checkpoints (the old one stays until the new one is whole) + three samplers (last, best, and one being
    written) - what is there already.
    """
    weights = sum(p.numel() for p in run.sampler.parameters())
    checkpoint = 4 * weights + optimizer_bytes(run) + (0 if run.pool is None else run.world * run.pool.saved_bytes)
    there = [folder / NAME, *(file for name in (LAST, BEST) for file in (folder / name).glob("*.safetensors"))]
    kept = sum(path.stat().st_size for path in there if path.is_file())
    needed = max(0, 2 * checkpoint + 3 * sampler_bytes(run) - kept)
    return {"checkpoint": checkpoint, "sampler": sampler_bytes(run), "needed": needed, "free": free_bytes(folder)}
