"""What a training run will cost, before anything is spent: `adjust train --dry-run`, and the check for disk space."""

from __future__ import annotations

import errno
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adjust_dlm.train.config import CHECKPOINT
from adjust_dlm.train.record import BEST, LAST
from adjust_dlm.train.run import Run

WARMUP, TIMED = 1, 3  # steps before the clock starts, and under it
_GIB = 1 << 30


def preflight(
    run: Run, folder: Path, *, step: Callable[[Run], Any], evaluate: Callable[[Run], Any],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:  # fmt: skip
    """Time and memory of a few real steps on this device; writes nothing, and leaves `run` good for nothing.

    hours = (steps left x seconds of a step + evaluations left x seconds of one) / 3600. Checkpoints are not in it.
    One-pass training sees each text once: its rows are windows / new tokens (more, if texts end early). It decodes in
    bursts, so the clock runs over whole ones.

    Returns:
        Steps, windows, hours, `memory_gib`, `disk_gib`, and `problems`: sentences, empty where all is well.
    """
    config, problems = run.config, list[str]()
    left = config.steps - run.step
    windows = windows_of(run, left)
    try:
        check_disk(run, folder)
    except OSError as error:
        problems.append(str(error.strerror))
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
    evaluations = config.steps // config.eval_every - run.step // config.eval_every
    hours = (left * seconds["step"] + evaluations * seconds["evaluation"]) / 3600 if seconds else None
    if hours is not None and config.max_seconds:
        hours = min(hours, max(0.0, config.max_seconds - run.elapsed) / 3600)
    rows = len(run.training_rows) if run.pool is None else -(-windows // config.pool.max_new_tokens)
    return {
        "dry_run": True, "steps": left, "windows": windows, "windows_per_row": windows / max(1, rows),
        "seconds_per_step": seconds.get("step"), "seconds_per_evaluation": seconds.get("evaluation"), "hours": hours,
        "training_rows": rows, "heldout_rows": len(run.rows(True)), "ranks": run.world,
        "memory_gib": {name: size / _GIB for name, size in _memory_bytes(run).items()},
        "disk_gib": {name: size / _GIB for name, size in disk_bytes(run, folder).items()},
        "problems": problems,
    }  # fmt: skip


def check_disk(run: Run, folder: Path) -> None:
    """Raises OSError (ENOSPC) unless checkpoints and samplers will fit, with the bytes needed and free."""
    disk = disk_bytes(run, folder)
    if disk["needed"] > disk["free"]:
        need = f"checkpoints and samplers need {disk['needed']:,} bytes, {disk['free']:,} are free"
        raise OSError(errno.ENOSPC, f"no room for this run in {folder}: {need}")


def windows_of(run: Run, steps: int) -> int:
    """Of that many steps on all ranks; on a block base blocks of the longest text have their own (causal: at most)."""
    config, size = run.config, None if run.base.spec.causal else run.base.spec.block
    blocks = 1 if size is None else -(-longest(run) // size)
    return steps * run.world * config.accumulate * config.slices * (config.slice_states - config.rollout) * blocks


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


def optimizer_bytes(run: Run) -> int:
    """Of the optimisers' state from the first step on: 4 bytes a parameter of Muon, 8 of AdamW."""
    total = 0
    for optimizer in run.optimizers:
        moments = 1 if isinstance(optimizer, torch.optim.Muon) else 2
        total += 4 * moments * sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return total


def longest(run: Run) -> int:
    """L: the canvas that a batch is padded to at most."""
    if run.pad_to or run.pool is not None:
        return run.pad_to if run.pool is None else run.pool.width
    stores: list[Any] = [run.data] if run.held is None else [run.data, run.held]
    return max(int(np.diff(store.columns.start_N).max()) for store in stores)


def _memory_bytes(run: Run) -> dict[str, int]:
    """What training holds for itself (g and gradients in fp32, optimiser), the peak so far, and what there is."""
    own = 8 * sum(p.numel() for p in run.sampler.parameters()) + optimizer_bytes(run)
    if run.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(run.device)
        return {"sampler": own, "peak": peak, "device": torch.cuda.get_device_properties(run.device).total_memory}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"sampler": own, "peak": peak, "machine": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}


def disk_bytes(run: Run, folder: Path) -> dict[str, int]:
    """Bytes in the output folder: a checkpoint is g and optimiser state in fp32 (and pools), a sampler bf16.

    needed = two checkpoints (the old one stays until the new one is whole) + three samplers (last, best, and one being
    written) - what is there already.
    """
    weights = sum(p.numel() for p in run.sampler.parameters())
    checkpoint = 4 * weights + optimizer_bytes(run) + (0 if run.pool is None else run.world * run.pool.saved_bytes)
    there = [folder / CHECKPOINT, *(file for name in (LAST, BEST) for file in (folder / name).glob("*.safetensors"))]
    kept = sum(path.stat().st_size for path in there if path.is_file())
    needed = max(0, 2 * checkpoint + 3 * 2 * weights - kept)
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    return {"checkpoint": checkpoint, "sampler": 2 * weights, "needed": needed, "free": free}
