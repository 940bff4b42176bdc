"""`adjust train`: Algorithm 2 on stored trajectories, with checkpoints, held-out metrics and exact resume."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from adjust_dlm.bases import Base, load_base
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.losses import NEXT_DECAY, NEXT_SHARE, Delta, KernelName, RowWeights, kl_and_delta, pick_delta
from adjust_dlm.sampler import Sampler, SamplerConfig, start_sampler
from adjust_dlm.train import distributed
from adjust_dlm.train.batches import random_slices, to_device
from adjust_dlm.train.best import BEST, LAST, keep_best, save_sampler
from adjust_dlm.train.checkpoint import MetricsLog, StopSignal, load_checkpoint, save_checkpoint
from adjust_dlm.train.ema import follow
from adjust_dlm.train.metrics import held_out
from adjust_dlm.train.objective import batch_loss, check_objective, drawn_rollout
from adjust_dlm.train.one_pass import Pool, PoolConfig, start_pool
from adjust_dlm.train.optim import build_optimizers, learning_rate
from adjust_dlm.train.preflight import check_disk, longest, preflight, windows_per_step
from adjust_dlm.train.rows import open_rows
from adjust_dlm.train.trackers import TrackerName, Tracking, check_trackers
from adjust_dlm.train.unroll import Frames, Slices, Step
from adjust_dlm.types import Trajectory, require

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of `adjust train`; the defaults are the measured recipe, `--preset paper` is the paper's.

    Attributes:
        base: name or folder of the frozen base.
        trajectories: folders written by `adjust trajectories`; none with `one_pass`.
        one_pass: decode the trajectories while training on them (see `pool`).
        pool: what `one_pass` decodes.
        output: folder for the sampler, checkpoints and metrics.
        preset: "default", or "paper": AdamW 5e-5 constant after 250 warm-up steps, uniform rows, batch 32.
        rollout: unrolled g steps (K - 1 of training).
        rollouts: lengths of which each micro-batch draws one, in place of `rollout` (which metrics keep).
        detach_every: g steps through which a gradient flows back; 0 is all.
        loss: "sum" over depths, "last" depth alone, or "released": the last step of a random unroll.
        depth_weights: of "sum": share of each depth, scaled to their sum; none is equal shares.
        match_states: weight of the relative squared distance |h^_k - h_k|^2 / |h_k|^2 on masked rows beside the KL.
        on_policy: share of the slices whose windows follow g itself (`train/on_policy.py`).
        weights: "next" or "uniform" row weights.
        next_decay: of "next": weights fall as exp(-rank / next_decay).
        next_share: of "next": weight on that part; the rest is spread over all masked rows.
        ema: weight of the past in a running mean of g's weights, which is then what is measured and saved; 0 is off.
        optimizer: "muon" (matrices; AdamW for the rest) or "adamw".
        lr: peak rate of Muon, or of AdamW.
        warmup: steps of linear warm-up.
        decay: share of the run, at its end, over which the rate falls linearly to 0.
        steps: optimiser steps.
        slice_states: consecutive states per slice; slice_states - rollout windows share their base passes.
        slices: slices per micro-batch; with `one_pass`, rows of the pool that make one.
        accumulate: micro-batches per step and rank.
        clip: gradient norm limit.
        heldout: trajectories kept apart for metrics (with `one_pass` the first rows); not with `heldout_trajectories`.
        heldout_trajectories: folders of trajectories for metrics only, none of whose rows is trained on.
        eval_every: steps between held-out metrics, over 128 windows or one of every held-out row (1024 at most).
        checkpoint_every: steps between checkpoints.
        seed: data order and initial weights.
        suppress_eos: forbid end tokens in teacher and student, as decoding will.
        pairing, layers, mlp, anchor, features: see `SamplerConfig`.
        init: what g starts from: "fresh" weights, "base" (its layers are copies of the base's last ones), or the folder
            of a sampler of the same base and form.
        dtype: of the base and of g's passes (its weights are fp32); bf16 on a GPU and fp32 on the CPU unless given.
        rows: limit on the masked rows of a state that go through the head, the same loss on average; none takes all.
        kernel: of the KL: "triton" (fused, CUDA), "torch", or "auto", the former where it can be had.
        compile: compile the base's body, g and torch's KL kernel (CUDA).
        resume: "auto" goes on from the output folder's checkpoint if there is one, "never" starts anew.
        untimed: first steps that `max_seconds` and the reported seconds leave out: those in which kernels are compiled.
        max_seconds: end by the clock; the rate then follows elapsed time, which is not reproducible bit for bit.
        track: tensorboard, wandb, trackio: where the lines of metrics.jsonl go as well.
        dry_run: print memory, steps, hours and disk space of this run, from a few steps on this device; write nothing.
    """

    base: str = "smol"
    trajectories: tuple[str, ...] = ()
    one_pass: bool = False
    pool: PoolConfig = field(default_factory=PoolConfig)
    output: str = "runs/sampler"
    preset: Literal["default", "paper"] = "default"
    rollout: int = 3
    rollouts: tuple[int, ...] = ()
    detach_every: int = 0
    loss: Literal["sum", "last", "released"] = "sum"
    depth_weights: tuple[float, ...] = ()
    match_states: float = 0.0
    on_policy: float = 0.0
    weights: RowWeights = "next"
    next_decay: float = NEXT_DECAY
    next_share: float = NEXT_SHARE
    ema: float = 0.0
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: float = 2e-3
    warmup: int = 50
    decay: float = 0.7
    steps: int = 5000
    slice_states: int = 11
    slices: int = 8
    accumulate: int = 1
    clip: float = 1.0
    heldout: int = 64
    heldout_trajectories: tuple[str, ...] = ()
    eval_every: int = 500
    checkpoint_every: int = 500
    seed: int = 0
    suppress_eos: bool = False
    pairing: Literal["state", "token"] = "state"
    layers: int = 1
    mlp: float = 1.0
    anchor: bool = False
    features: tuple[int, ...] = ()
    init: str = "fresh"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    rows: int | None = None
    kernel: KernelName = "auto"
    compile: bool = False
    untimed: int = 0
    max_seconds: float | None = None
    resume: Literal["auto", "never"] = "auto"
    track: tuple[TrackerName, ...] = ()
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Checks values, and fills in the paper's preset."""
        if self.preset == "paper":
            for name, value in PAPER.items():
                given, default = getattr(self, name), self.__dataclass_fields__[name].default
                require(
                    given in (default, value),
                    f"preset paper sets {name} to {value!r}; {given!r} was asked for: drop one of the two",
                )
                object.__setattr__(self, name, value)
        for name in ("rollout", "steps", "slices", "accumulate", "eval_every", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("warmup", "heldout", "seed", "untimed"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must be >= 0")
        require(self.rows is None or self.rows >= 1, f"rows is {self.rows}; it must be at least 1, or none for all")
        require(0 <= self.ema < 1, f"ema is {self.ema}; it must lie in 0..1, below 1")
        check_objective(self)
        self.sampler_config()
        require(math.isfinite(self.lr) and self.lr > 0, f"lr is {self.lr}; it must be a positive number")
        require(0 <= self.decay <= 1, f"decay is {self.decay}; it is a share of the run, 0..1")
        require(self.clip > 0, f"clip is {self.clip}; it must be above 0")
        require(self.max_seconds is None or self.max_seconds > 0, f"max_seconds is {self.max_seconds}; it must be > 0")
        check_trackers(self.track)

    def sampler_config(self) -> SamplerConfig:
        """What g is built from."""
        if self.preset == "paper":
            return SamplerConfig.paper()
        names = ("pairing", "layers", "mlp", "anchor", "features")
        return SamplerConfig(**{name: getattr(self, name) for name in names})


# Settings that a resumed run may change.
FREE = ("output", "compile", "kernel", "trajectories", "heldout_trajectories", "resume", "track", "dry_run")
PAPER: dict[str, Any] = {
    "optimizer": "adamw", "lr": 5e-5, "warmup": 250, "decay": 0.0, "weights": "uniform", "rollout": 3,
    "slice_states": 4, "slices": 32, "pairing": "token", "layers": 1, "mlp": 1.0, "anchor": False, "features": (),
}  # fmt: skip


@dataclass
class Run:
    """What one rank holds while training."""

    config: TrainConfig
    base: Base
    sampler: Sampler
    data: Sequence[Trajectory]
    rank: int
    world: int
    device: torch.device
    step: int = 0
    elapsed: float = 0.0
    began: float | None = None  # when `elapsed` was 0; none while no clock runs
    stop: StopSignal = field(default_factory=StopSignal)
    stopping: bool = False
    pad_to: int = 0
    delta: Delta = kl_and_delta
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    step_g: Step | None = None
    averaged: Sampler | None = None
    data_digest: str = ""
    pool: Pool | None = None
    held: Sequence[Trajectory] | None = None
    best: dict[str, float] = field(default_factory=dict)

    @property
    def best_g(self) -> Sampler:
        """What is measured and saved: the running mean, if there is one."""
        return self.averaged or self.sampler

    @functools.cached_property
    def training_rows(self) -> list[int]:
        """The rows that training may see."""
        return self.rows(False)

    def rows(self, held: bool) -> list[int]:
        """Indices of the training part, or of the held-out one: a store of its own, or spread evenly over `data`."""
        if self.held is not None:
            return list(range(len(self.held if held else self.data)))
        total, count = len(self.data), self.config.heldout
        apart = [(2 * i + 1) * total // (2 * count) for i in range(count)]
        return apart if held else sorted(set(range(total)) - set(apart))

    def now(self) -> float:
        """Seconds of training so far."""
        return self.elapsed if self.began is None else time.monotonic() - self.began

    def settings(self) -> dict[str, Any]:
        """What must stay the same between start and resume."""
        fixed = {k: v for k, v in asdict(self.config).items() if k not in FREE}
        return {
            **fixed, "dtype": str(self.base.dtype).removeprefix("torch."), "base_fingerprint": self.base.fingerprint,
            "trajectories": len(self.data), "data_digest": self.data_digest, "world": self.world,
            "heldout_digest": self.held.digest() if isinstance(self.held, TrajectoryStore) else None,
        }  # fmt: skip


def train(config: TrainConfig, base: Base | None = None) -> dict[str, Any]:
    """Trains g and writes it to `config.output/sampler`; continues an interrupted run by itself.

    Returns:
        Steps, windows, seconds, the last held-out metrics and the step of the best; of a dry run, see `preflight`.

    Raises:
        InputError: no or too few trajectories, another base's trajectories, changed settings on resume.
        FloatingPointError: the loss is not finite; the step is named.
        OSError: no room on the disk, before the first step or when something is to be saved.
    """
    rank, world, _ = distributed.start()
    run = _prepare(config, base, rank, world)
    folder = Path(config.output)
    saved = load_checkpoint(folder, run.settings()) if config.resume == "auto" else None
    if saved:
        _restore(run, saved)
        log.info("resumed %s at step %d", folder, run.step)
    distributed.require_same("the step to go on from", run.step)
    if config.dry_run:
        return preflight(run, folder, step=_step, evaluate=_held_out)
    tracking = None
    if rank == 0:
        if _unfinished(run):
            check_disk(run, folder)
        tracking = Tracking(config.track, folder, run.settings(), resume_step=run.step)
    metrics = MetricsLog(folder, resume_step=run.step, enabled=rank == 0, tracking=tracking)
    try:
        with StopSignal() as stop:
            last = _loop(run, folder, metrics, stop)
    finally:
        if tracking:
            tracking.close()
    if rank == 0 and not _unfinished(run):
        save_sampler(run, folder / LAST, heldout=last)
    distributed.barrier()
    return {
        "finished": not _unfinished(run), "steps": run.step, "windows": run.step * windows_per_step(run),
        "seconds": run.elapsed, "sampler": str(folder / LAST), "heldout": last,
        "best_sampler": str(folder / BEST) if run.best else None, "best": run.best,
    }  # fmt: skip


def _prepare(config: TrainConfig, base: Base | None, rank: int, world: int) -> Run:
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    base = base or load_base(config.base, device="auto", dtype=dtype)
    base = base.with_features(config.features)
    data: Sequence[Trajectory] = ()
    held: Sequence[Trajectory] | None
    pool: Pool | None = None
    if config.one_pass:
        held, digest, pool = start_pool(config, base, rank, world)
    else:
        store, held = open_rows(config.trajectories, config.heldout_trajectories, config.heldout, base)
        data, digest = store, store.digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        sampler = start_sampler(base, config.sampler_config(), config.init)
    facts: dict[str, Any] = {"data_digest": digest, "pool": pool, "held": held}
    run = Run(config, base, sampler.to(base.device), data, rank, world, base.device, **facts)
    run.optimizers = build_optimizers(sampler, config.optimizer, config.lr)
    run.delta = pick_delta(config.kernel, base.device, compiled=config.compile)
    if config.ema:
        run.averaged = Sampler(base, sampler.config).to(base.device).requires_grad_(False)
        run.averaged.load_state_dict(sampler.state_dict())
    if config.compile:
        if not base.compiled:
            base.compile()
        run.pad_to = longest(run)
        run.step_g = torch.compile(sampler, dynamic=False)
    return run


def _unfinished(run: Run) -> bool:
    limit = run.config.max_seconds
    return run.step < run.config.steps and (limit is None or run.elapsed < limit)


def _loop(run: Run, folder: Path, metrics: MetricsLog, stop: StopSignal) -> dict[str, float]:
    """Steps until the end, a clock or a signal; saves on the way and when leaving."""
    config = run.config
    last = {} if _unfinished(run) else _held_out(run)  # a finished run that is started again
    run.began, run.stop = time.monotonic() - run.elapsed, stop
    while _unfinished(run):
        losses = _step(run)
        run.step += 1
        if run.step <= config.untimed:
            run.began, run.elapsed = time.monotonic(), 0.0
        leaving = run.stopping or not _unfinished(run)
        if run.step % config.eval_every == 0 or not _unfinished(run):
            last = _held_out(run)
            keep_best(run, folder, last)
            metrics.write(run.step, **losses, seconds=run.elapsed, **last)
            log.info("step %d loss %.4f %s", run.step, losses["loss"], {k: round(v, 4) for k, v in last.items()})
        if run.step % config.checkpoint_every == 0 or leaving:
            payload = _payload(run)  # on every rank: their pools are gathered
            if run.rank == 0:
                save_checkpoint(folder, payload)
        if run.stopping:
            break
    return last


def _held_out(run: Run) -> dict[str, float]:
    base = run.base.eager()  # its batches have a shape of their own
    data = run.data if run.held is None else run.held
    return held_out(base, run.best_g, data, run.rows(True), run.config, _autocast(run), run.pad_to)


def _step(run: Run) -> dict[str, float]:
    """One optimiser step over `accumulate` micro-batches; the same set whatever the number of ranks."""
    config = run.config
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)
    share = max(run.step / config.steps, run.elapsed / config.max_seconds if config.max_seconds else 0.0)
    scale = learning_rate(run.step, share, warmup=config.warmup, decay=config.decay)
    total = torch.zeros((), device=run.device)
    for j in range(config.accumulate):
        loss = _micro_loss(run, run.rank * config.accumulate + j) / config.accumulate
        loss.backward()
        total += loss.detach()
    distributed.average_gradients(run.sampler.parameters())
    norm = torch.nn.utils.clip_grad_norm_(run.sampler.parameters(), config.clip)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale
        optimizer.step()
    if run.averaged is not None:
        follow(run.averaged, run.sampler, decay=config.ema, step=run.step)
    value, size = _settle(run, total, norm)
    if not math.isfinite(value + size):  # g is spoilt by now, but nothing of it has been saved
        raise FloatingPointError(f"loss {value}, gradient norm {size} at step {run.step}: training stopped")
    return {"loss": value, "grad_norm": size, "lr": config.lr * scale}


def _settle(run: Run, loss: Tensor, norm: Tensor) -> tuple[float, float]:
    """Loss and gradient norm, and in `run` the time and whether to stop: one wait for the device, one all-reduce."""
    if run.world == 1:
        value, size = torch.stack([loss, norm]).tolist()
        run.elapsed, run.stopping = run.now(), run.stop.requested
        return value, size
    own = [torch.full_like(loss, x) for x in (run.now(), run.stop.requested)]
    value, run.elapsed, stopped, size = torch.stack([*distributed.mean(torch.stack([loss, *own])), norm]).tolist()
    run.stopping = stopped > 0
    return value, size


def _micro_loss(run: Run, micro: int) -> Tensor:
    config = run.config
    key = (config.seed, run.step, micro)
    rollout = drawn_rollout(config.rollout, config.rollouts, key)
    g = run.sampler if run.step_g is None else run.step_g
    if run.pool is not None:
        seen: Slices | Frames = run.pool.frames()  # decoding: not under autocast
    else:
        slices = random_slices(
            run.data, run.training_rows, count=config.slices, length=config.slice_states, rollout=rollout,
            key=key, pad_id=run.base.spec.pad_id, pad_to=run.pad_to,
        )  # fmt: skip
        seen = to_device(slices, run.device)
    with _autocast(run):
        return batch_loss(run.base, g, seen, config, rollout=rollout, key=key, delta=run.delta)


def _autocast(run: Run) -> Any:
    """bf16 passes of the fp32 g on a half-precision base; nothing on an fp32 one (on the CPU bit for bit on resume)."""
    half = run.base.dtype != torch.float32
    return torch.autocast(run.device.type, torch.bfloat16) if half else nullcontext()


def _payload(run: Run) -> dict[str, Any]:
    return {
        "run": run.settings(), "step": run.step, "elapsed": run.elapsed, "sampler": run.sampler.state_dict(),
        "optimizers": [o.state_dict() for o in run.optimizers], "best": run.best,
        "pools": None if run.pool is None else distributed.from_all_ranks([run.pool.state()]),
        "averaged": None if run.averaged is None else run.averaged.state_dict(),
    }  # fmt: skip


def _restore(run: Run, saved: dict[str, Any]) -> None:
    run.step, run.elapsed, run.best = saved["step"], saved["elapsed"], saved.get("best", {})
    run.sampler.load_state_dict(saved["sampler"])
    if run.pool is not None:
        run.pool.load(saved["pools"][run.rank])
    if run.averaged is not None:
        run.averaged.load_state_dict(saved["averaged"])
    for optimizer, state in zip(run.optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
