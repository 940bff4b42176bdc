"""`adjust train`: Algorithm 2 on stored trajectories, with checkpoints, held-out metrics and exact resume."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases import Base, load_base
from adjust_dlm.bases.attention import fuses
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.losses import pick_delta
from adjust_dlm.progress import Bar
from adjust_dlm.sampler import read_config, start_sampler
from adjust_dlm.train import distributed
from adjust_dlm.train.batches import batch_loss, random_slices, to_device
from adjust_dlm.train.blocks import BlockSlices, random_blocks
from adjust_dlm.train.causal import random_windows
from adjust_dlm.train.checkpoint import MetricsLog, StopSignal, claim, load_checkpoint, save_checkpoint, set_aside
from adjust_dlm.train.config import TrainConfig
from adjust_dlm.train.metrics import divergence, held_out
from adjust_dlm.train.one_pass import Pool, start_pool
from adjust_dlm.train.optim import build_optimizers, learning_rate
from adjust_dlm.train.preflight import check_disk, longest, preflight, windows_of
from adjust_dlm.train.record import BEST, LAST, check_unseen, keep_best, save_sampler
from adjust_dlm.train.rows import open_rows
from adjust_dlm.train.run import Run
from adjust_dlm.train.trackers import start_trackers
from adjust_dlm.train.unroll import Frames, Slices, states_compared
from adjust_dlm.types import Trajectory, require
from adjust_dlm.words import by_depth

__all__ = ["Run", "TrainConfig", "train"]
log = logging.getLogger(__name__)


def train(config: TrainConfig, base: Base | None = None) -> dict[str, Any]:
    """Trains g and writes it to `config.output/sampler`; continues an interrupted run by itself.

    Returns:
        Steps, windows, seconds, last held-out metrics, best step, samplers (None: not yet); of a dry run: `preflight`.

    Raises:
        InputError: no or too few trajectories, or of another base; other settings on resume; another run in the folder.
        FloatingPointError: the loss is not finite; the step is named.
        OSError: no room on the disk, before the first step or when something is to be saved.
    """
    config.check_files()
    rank, world, _ = distributed.start()
    run = _prepare(config, base, rank, world)
    folder = Path(config.output)
    with claim(folder) if rank == 0 and not config.dry_run else nullcontext():
        saved = load_checkpoint(folder, run.settings()) if config.resume == "auto" else None
        if saved:
            _restore(run, saved)
            log.info("resumed %s at step %d", folder, run.step)
        distributed.require_same("the step to go on from", run.step)
        if config.dry_run:
            return preflight(run, folder, step=_step, evaluate=_held_out)
        trackers = []
        if rank == 0:
            if _unfinished(run):
                check_disk(run, folder)
            if config.resume == "never":
                set_aside(folder)
            trackers = start_trackers(config.track, folder, run.settings(), resume_step=run.step)
        metrics = MetricsLog(folder, resume_step=run.step, enabled=rank == 0, trackers=trackers)
        try:
            with StopSignal() as stop:
                last = _loop(run, folder, metrics, stop)
        finally:
            for tracker in trackers:
                tracker.finish()
        law: dict[str, Any] = {}
        finished = not run.stopping and not _unfinished(run)
        if rank == 0 and finished:
            save_sampler(run, folder / LAST, heldout=last)  # safe, whatever becomes of the measurement
            law = divergence(run.base, run.sampler, *_held_rows(run), config, _autocast(run))
            told = {d: round(law[d]["kl_qp"], 4) for d in ("parallel", "adjust") if d in law}
            log.info("KL(q || p), nats a token: %s", told or law.get("no_divergence", "not measured"))
            if law:
                save_sampler(run, folder / LAST, heldout=last, divergence=law)
        distributed.barrier()
        return {
            "finished": finished, "steps": run.step, "windows": windows_of(run, run.step),
            "seconds": run.elapsed, "heldout": last, "divergence": law,
            "sampler": str(folder / LAST) if finished else None,
            "best_sampler": str(folder / BEST) if run.best else None, "best": run.best,
        }  # fmt: skip


def _prepare(config: TrainConfig, base: Base | None, rank: int, world: int) -> Run:
    base = base or load_base(config.base, device="auto", dtype=config.dtype)
    base = base.with_features(config.features)
    _check_blocks(config, base)
    data: Sequence[Trajectory] = ()
    held: Sequence[Trajectory] | None
    pool: Pool | None = None
    if config.one_pass:
        held, pool = start_pool(config, base, rank, world)
    else:
        data, held = open_rows(config.trajectories, config.heldout_trajectories, config.heldout, base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        sampler = start_sampler(base, config.sampler_config(), "fresh" if config.resumes else config.init)
    run = Run(config, base, sampler.to(base.device), data, rank, world, base.device, pool=pool, held=held)
    if config.init != "fresh" and not config.resumes:
        run.started_from = read_config(Path(config.init))
        check_unseen(run)
    run.optimizers = build_optimizers(sampler, config.optimizer, config.lr)
    run.delta = pick_delta(config.kernel, base.device, compiled=config.compile, reverse=config.reverse)
    if config.compile:
        with torch.no_grad():  # its passes have no gradients: fused kernels then do without a compiler, and sooner
            fused = isinstance(base, TransformerBase) and fuses(base.head_matrix)
        if not base.compiled and not fused:
            base.compile()
        run.pad_to = longest(run)
        run.step_g = torch.compile(sampler, dynamic=False)
    return run


def _check_blocks(config: TrainConfig, base: Base) -> None:
    """Raises InputError for settings that a block base does not know."""
    size, most = base.spec.block, (base.spec.block or 0) + config.rollout
    if size is None:
        return
    require(size > 1, f"base {base.spec.name!r} writes one token a pass, as joint does: g has nothing to learn")
    require(not config.one_pass, f"one_pass decodes whole canvases; base {base.spec.name!r} writes in blocks")
    require(not config.compile, f"compile is true; base {base.spec.name!r} writes in blocks: leave it out")
    long = f"slice_states is {config.slice_states}; blocks of {size} have at most {most} states with this rollout"
    require(config.slice_states <= most or base.spec.causal, long)


def _unfinished(run: Run) -> bool:
    limit = run.config.max_seconds
    return run.step < run.config.steps and (limit is None or run.elapsed < limit)


def _leaves(run: Run) -> bool:
    return run.stopping or not _unfinished(run)


def _loop(run: Run, folder: Path, metrics: MetricsLog, stop: StopSignal) -> dict[str, float]:
    """Steps until the end, a clock or a signal; saves on the way and when leaving."""
    run.began, run.stop = time.monotonic() - run.elapsed, stop
    last: dict[str, float] = {}
    if run.losses is not None or not _unfinished(run):  # stopped in an evaluation, or finished and started again
        last = _evaluate(run, folder, metrics)
    with Bar("train", enabled=run.rank == 0) as bar:
        return _steps(run, folder, metrics, bar) or last


def _steps(run: Run, folder: Path, metrics: MetricsLog, bar: Bar) -> dict[str, float]:
    """Of `_loop`; the last held-out metrics, if any were due."""
    config, last = run.config, {}
    while not _leaves(run):
        losses = _step(run)
        run.step += 1
        bar.show(_share(run), f"step {run.step}, loss {losses['loss']:.4f}")
        if run.step <= config.untimed:
            run.began, run.elapsed = time.monotonic(), 0.0
        if run.step % config.eval_every == 0 or not _unfinished(run):
            run.losses = losses
            last = _evaluate(run, folder, metrics)
        if run.step % config.checkpoint_every == 0 or _leaves(run):
            payload = _payload(run)  # on every rank: their pools are gathered
            if run.rank == 0:
                save_checkpoint(folder, payload)
    return last


def _share(run: Run) -> float:
    """How much of the run is over, by steps or by the clock, whichever is further on."""
    limit = run.config.max_seconds
    return max(run.step / run.config.steps, run.elapsed / limit if limit else 0.0)


def _evaluate(run: Run, folder: Path, metrics: MetricsLog) -> dict[str, float]:
    """Held-out metrics of the present step, logged if they were due; none, and they stay due, after a signal."""
    last: dict[str, float] | None = None
    with suppress(InterruptedError):
        last = _held_out(run)
    run.stopping |= bool(distributed.total(torch.tensor(float(run.stop.requested), device=run.device)) > 0)
    if last is None:
        return {}
    if run.losses is not None:
        keep_best(run, folder, last)
        metrics.write(run.step, **run.losses, seconds=run.elapsed, **last)
        log.info("step %d: loss %.4f; by depth: %s", run.step, run.losses["loss"], by_depth(last))
        run.losses = None
    return last


def _held_out(run: Run) -> dict[str, float]:
    if run.pool is not None:  # here, where every rank is; g is saved by the first alone
        run.pool_end = max(distributed.from_all_ranks([run.pool.end]))
    return held_out(run.base, run.sampler, *_held_rows(run), run.config, _autocast(run), run.pad_to, run.stop.check)


def _held_rows(run: Run) -> tuple[Sequence[Trajectory], list[int]]:
    return run.data if run.held is None else run.held, run.rows(True)


def _step(run: Run) -> dict[str, float]:
    """One optimiser step: the mean over the states of all micro-batches and ranks."""
    config = run.config
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)
    scale = learning_rate(run.step, _share(run), warmup=config.warmup, decay=config.decay)
    total = torch.zeros((), device=run.device)
    firsts = [(run.rank * config.accumulate + j) * config.slices for j in range(config.accumulate)]
    parts = [_draw(run, first) for first in firsts]
    states = distributed.total(torch.stack([states_compared(part, config.rollout) for part in parts]).sum(0))
    for first, part in zip(firsts, parts, strict=True):
        loss = _micro_loss(run, first, part, states)
        loss.backward()
        total += loss.detach()
    distributed.sum_gradients(run.sampler.parameters())
    norm = torch.nn.utils.clip_grad_norm_(run.sampler.parameters(), config.clip)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale
        optimizer.step()
    value, size = _settle(run, total, norm)
    if not math.isfinite(value + size):  # g is spoilt by now, but nothing of it has been saved
        raise FloatingPointError(f"loss {value}, gradient norm {size} at step {run.step}: training stopped")
    return {"loss": value, "grad_norm": size, "lr": config.lr * scale}


def _settle(run: Run, loss: Tensor, norm: Tensor) -> tuple[float, float]:
    """Loss and gradient norm, and in `run` the time and whether to stop: one wait for the device, one all-reduce."""
    own = [torch.full_like(loss, x) for x in (run.now() / run.world, run.stop.requested)]
    value, run.elapsed, stopped, size = torch.stack([*distributed.total(torch.stack([loss, *own])), norm]).tolist()
    run.stopping = stopped > 0
    return value, size


def _draw(run: Run, first: int) -> Slices | BlockSlices | Frames:
    """A micro-batch, from slice `first` of the step on."""
    config = run.config
    if run.pool is not None:
        return run.pool.frames()
    drawn: dict[str, Any] = {
        "count": config.slices, "length": config.slice_states, "rollout": config.rollout, "first": first,
        "key": (config.seed, run.step),
    }  # fmt: skip
    pads: dict[str, Any] = {"pad_id": run.base.spec.pad_id}
    if run.base.spec.causal:
        return to_device(random_windows(run.data, run.training_rows, **drawn, **pads), run.device)
    if run.base.spec.block is not None:
        return random_blocks(run.data, run.training_rows, **drawn, base=run.base).to(run.device)
    return to_device(random_slices(run.data, run.training_rows, **drawn, **pads, pad_to=run.pad_to), run.device)


def _micro_loss(run: Run, first: int, part: Slices | BlockSlices | Frames, states: Tensor) -> Tensor:
    g, key = run.sampler if run.step_g is None else run.step_g, (run.config.seed, run.step)
    with _autocast(run):
        return batch_loss(run.base, g, part, run.config, key=key, delta=run.delta, first=first, states=states)


def _autocast(run: Run) -> Any:
    """bf16 passes of the fp32 g on a half-precision base; nothing on an fp32 one (on the CPU bit for bit on resume)."""
    half = run.base.dtype != torch.float32
    return torch.autocast(run.device.type, torch.bfloat16) if half else nullcontext()


def _payload(run: Run) -> dict[str, Any]:
    return {
        "run": run.settings(), "step": run.step, "elapsed": run.elapsed, "sampler": run.sampler.state_dict(),
        "optimizers": [o.state_dict() for o in run.optimizers], "best": run.best, "started_from": run.started_from,
        "losses": run.losses,
        "pools": None if run.pool is None else distributed.from_all_ranks([run.pool.state()]),
    }  # fmt: skip


def _restore(run: Run, saved: dict[str, Any]) -> None:
    run.step, run.elapsed, run.best = saved["step"], saved["elapsed"], saved.get("best", {})
    run.started_from, run.losses = saved.get("started_from"), saved.get("losses")
    run.sampler.load_state_dict(saved["sampler"])
    if run.pool is not None:
        run.pool.load(saved["pools"][run.rank])
    for optimizer, state in zip(run.optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
