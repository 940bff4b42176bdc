"""Settings of `adjust train` and `adjust adapt`, checked without torch."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from adjust_dlm.checks import Count, NotNegative, NotNegativeOrInf, Positive, PositiveOrInf, Seed, Share, Whole, require
from adjust_dlm.data.settings import KINDS, SAMPLED, CorpusConfig, TextConfig, TrajectoriesConfig
from adjust_dlm.hub import require_init
from adjust_dlm.train.trackers import TrackerName, check_trackers
from adjust_dlm.types import DEFAULT_BASE, NEXT_DECAY, NEXT_SHARE, KernelName, OrderRule, RowWeights, SamplerConfig

CHECKPOINT = "checkpoint.pt"  # in the output folder
# Settings that a resumed run may change.
FREE = (
    "output", "compile", "kernel", "trajectories", "heldout_trajectories", "heldout_texts", "resume", "track",
    "dry_run",
)  # fmt: skip
# Settings that may differ between a run and its resumption: they change no weight.
ADAPT_FREE = (
    "output", "corpus", "micro_batch", "sample_batch", "eval_every", "log_every", "checkpoint_every_seconds", "resume",
)  # fmt: skip
_RECIPE: dict[str, Any] = {  # what both forms share: the paper's, and the released code's
    "optimizer": "adamw", "lr": 5e-5, "warmup": 250, "decay": 0.0, "clip": 1.0, "weights": "uniform", "rollout": 3,
    "slice_states": 4, "slices": 32, "reverse": 0.0, "init": "fresh",
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "printed": {**_RECIPE, **asdict(SamplerConfig.printed()), "loss": "sum"},
    "released": {**_RECIPE, **asdict(SamplerConfig.released()), "loss": "released"},
}


@dataclass(frozen=True, kw_only=True)
class PoolConfig(TextConfig):
    """What `adjust train --one-pass` decodes, and the size of the pool.

    Attributes:
        rows: rows decoded together, a multiple of `slices`; the more, the better a card is used.
    """

    rows: int = 64

    def check_rows(self, slices: int) -> None:
        """Raises InputError unless micro-batches and temperatures divide the pool."""
        kinds = len(self.temperature)
        require(
            self.rows >= 1 and self.rows % slices == 0 and self.rows % kinds == 0,
            f"pool.rows is {self.rows}; it must be a multiple of {slices} (slices) and {kinds} (temperatures)",
        )

    def trajectories(self, *, seed: int, suppress_eos: bool, first: int = 0) -> TrajectoriesConfig:
        """The settings under which `adjust trajectories` makes the same rows."""
        return TrajectoriesConfig.from_settings(self, output="", first_row=first, seed=seed, suppress_eos=suppress_eos)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(SamplerConfig):
    """Settings of `adjust train`, those of g among them; the defaults are the measured recipe.

    Attributes:
        base: name or folder of the frozen base.
        trajectories: folders written by `adjust trajectories`; none with `one_pass`.
        one_pass: decode the trajectories while training on them (see `pool`).
        pool: what `one_pass` decodes.
        output: folder for the sampler, checkpoints and metrics.
        preset: g, loss and optimizer: ours, "printed" (as in the paper) or "released" (as in the authors' code); see
            docs/training.md.
        rollout: unrolled g steps (K - 1 of training).
        loss: "sum" over depths, "last" depth alone, or "released": one depth, drawn for each step.
        reverse: r of the loss (1 - r) KL(base || g) + r KL(g || base); the latter keeps g from what the base finds
            impossible.
        weights: "next" or "uniform" row weights.
        next_decay: of "next": weights fall as exp(-rank / next_decay).
        next_share: of "next": weight on that part; the rest is spread over all masked rows.
        optimizer: "muon" (matrices; AdamW for the rest) or "adamw".
        lr: peak rate of Muon, or of AdamW.
        warmup: steps of linear warm-up.
        decay: share of the run, at its end, over which the rate falls linearly to 0.
        steps: optimiser steps.
        slice_states: consecutive states per slice; slice_states - rollout windows share their base passes.
        slices: slices per micro-batch; with `one_pass`, rows of the pool that make one.
        accumulate: micro-batches per step and rank; the loss is the mean over the states of all of them.
        clip: gradient norm limit.
        heldout: trajectories kept apart for metrics (with `one_pass` the first rows); not with `heldout_trajectories`.
        heldout_trajectories: folders of trajectories for metrics only, none of whose rows is trained on.
        heldout_texts: held-out prompts decoded at the end for KL(q || p) (see `adjust eval divergence`); 0 is none.
        eval_every: steps between held-out metrics, over 128 windows or one of every held-out row (1024 at most).
        checkpoint_every: steps between checkpoints.
        seed: data order and initial weights.
        suppress_eos: forbid end tokens in teacher and student, as decoding will.
        init: what g starts from: "fresh" weights, or the folder of a sampler of the same base and form.
        dtype: of the base and of g's passes (its weights are fp32); bf16 on a GPU and fp32 on the CPU unless given.
        rows: limit on the masked rows of a state that go through the head, the same loss on average; none takes all.
        kernel: of the KL: "triton" (fused, CUDA), "torch", or "auto", the former where it can be had.
        compile: compile g, torch's KL kernel, and the base's body where it has no fused kernels (CUDA).
        resume: "auto" goes on from the output folder's checkpoint if there is one, "never" starts anew.
        untimed: first steps that `max_seconds` and the reported seconds leave out: those in which kernels are compiled.
        max_seconds: end by the clock; the rate then follows elapsed time, which is not reproducible bit for bit.
        track: where the lines of metrics.jsonl go as well.
        dry_run: print memory, steps, hours and disk space of this run, from a few steps on this device; write nothing.
    """

    base: str = DEFAULT_BASE
    trajectories: tuple[str, ...] = ()
    one_pass: bool = False
    pool: PoolConfig = field(default_factory=PoolConfig)
    output: str = "runs/sampler"
    preset: Literal["default", "printed", "released"] = "default"
    rollout: Count = 3
    loss: Literal["sum", "last", "released"] = "sum"
    reverse: Share = 0.0
    weights: RowWeights = "next"
    next_decay: Positive = NEXT_DECAY
    next_share: Share = NEXT_SHARE
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: Positive = 2e-3
    warmup: Whole = 50
    decay: Share = 0.7
    steps: Count = 5000
    slice_states: int = 11
    slices: Count = 8
    accumulate: Count = 1
    clip: PositiveOrInf = 1.0
    heldout: Whole = 64
    heldout_trajectories: tuple[str, ...] = ()
    heldout_texts: Whole = 64
    eval_every: Count = 500
    checkpoint_every: Count = 500
    seed: Seed = 0
    suppress_eos: bool = False
    init: str = "fresh"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    rows: Count | None = None
    kernel: KernelName = "auto"
    compile: bool = False
    untimed: Whole = 0
    max_seconds: PositiveOrInf | None = None
    resume: Literal["auto", "never"] = "auto"
    track: tuple[TrackerName, ...] = ()
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Checks values, and fills in the preset."""
        super().__post_init__()
        for name, value in PRESETS.get(self.preset, {}).items():
            given, default = getattr(self, name), self.__dataclass_fields__[name].default
            require(
                given in (default, value),
                f"preset {self.preset} sets {name} to {value!r}; {given!r} was asked for: drop one of the two",
            )
            object.__setattr__(self, name, value)
        require(
            self.slice_states > self.rollout,
            f"slice_states is {self.slice_states}; it must exceed the rollout ({self.rollout})",
        )
        require(
            not (self.one_pass and self.trajectories),
            f"trajectories is {self.trajectories}; one_pass decodes what it trains on: give stored rows as "
            "heldout_trajectories",
        )
        if self.one_pass:
            self.pool.check_rows(self.slices)
        check_trackers(self.track)

    @property
    def resumes(self) -> bool:
        """Whether the output folder has a run to go on with."""
        return self.resume == "auto" and (Path(self.output) / CHECKPOINT).is_file()

    def check_files(self) -> None:
        """Raises InputError unless there are trajectories, or prompts to decode them from, and what g starts from."""
        from adjust_dlm.data.store import read_manifest  # needs NumPy

        if self.one_pass:
            self.pool.check_files()
        found = bool(self.one_pass or self.trajectories)
        require(found, "no trajectories: give folders written by `adjust trajectories`")
        for folder in (*self.trajectories, *self.heldout_trajectories):
            read_manifest(Path(folder))
        if not self.resumes:
            require_init(self.init)

    def sampler_config(self) -> SamplerConfig:
        """What g is built from."""
        return SamplerConfig.from_settings(self)


@dataclass(frozen=True, kw_only=True)
class AdaptConfig(CorpusConfig):
    """Everything that decides what `adapt` makes: its corpus, and its training.

    Attributes:
        output: folder of the adapted base, its checkpoint and its metrics.
        corpus: folder of the corpus, made there if it is missing; None: `corpus` in the output folder.
        share_text: weight of plain text in every batch; kinds without canvases are left out.
        share_chat: weight of chat.
        share_lists: weight of list tasks.
        share_files: weight of your own files.
        share_questions: weight of short questions.
        batch_size: canvases of a step, over all processes.
        micro_batch: canvases of one pass of one process; must divide its part of the batch.
        steps: optimizer steps.
        max_seconds: end of training by the clock; the rate then follows elapsed time, which is not reproducible bit for
            bit.
        lr: peak learning rate of AdamW; after the warm-up flat for 30 % of the run, then linear to 0.
        warmup: steps of linear warm-up.
        clip: largest norm of the gradient.
        block_size: S of a block base, with an exact cache (see docs/blocks.md); none sees a whole canvas. Divides
            `length`.
        causal: text is read as by the model itself, and MASK alone is adapted; goes with order left_to_right.
        order: the base's own order rule.
        suffix: share of the blocks that hide all from some position on (what `left_to_right` meets), not any positions.
        lora_rank: rank of the adapters.
        lora_alpha: their scale times the rank.
        init: folder of a base that `adapt` made from the same model at the same rank: training starts from its adapter.
        mask_id: id that becomes MASK; None: the first known unused token of the tokenizer.
        eval_every: steps between evaluations; 0: only before and after training.
        log_every: steps between lines of the log; the loss, the clock and signals are looked at then, and before an
            evaluation.
        checkpoint_every_seconds: time between checkpoints.
        compile: compile the passes (GPUs only).
        resume: `auto` goes on from the folder's checkpoint if there is one, `never` starts anew.
    """

    output: Path
    corpus: Path | None = None
    share_text: NotNegative = 0.55
    share_chat: NotNegative = 0.25
    share_lists: NotNegative = 0.2
    share_files: NotNegative = 0.25
    share_questions: NotNegative = 0.1
    batch_size: Count = 512
    micro_batch: Count = 256
    steps: Count = 4000
    max_seconds: PositiveOrInf | None = None
    lr: Positive = 2e-3
    warmup: Whole = 100
    clip: PositiveOrInf = 1.0
    block_size: Count | None = None
    causal: bool = False
    order: OrderRule = "entropy"
    suffix: float = 0.0
    lora_rank: Count = 64
    lora_alpha: Count = 64
    init: Path | None = None
    mask_id: int | None = None
    eval_every: Whole = 0
    log_every: Count = 20
    checkpoint_every_seconds: NotNegativeOrInf = 120.0
    compile: bool = True
    resume: Literal["auto", "never"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.suffix <= (self.block_size is not None),
            f"suffix is {self.suffix}; it is a share of blocks, 0..1, and needs block_size",
        )
        require(
            not self.causal or ((self.block_size or 1) > 1 and self.order == "left_to_right"),
            "causal is true; such blocks are written from left to right: give block_size above 1, order left_to_right",
        )
        require(
            not (self.causal and self.suffix),
            f"suffix is {self.suffix}; causal blocks hide what stands behind a position, always: leave it out",
        )
        size = self.block_size or 1
        near = self.length // size * size or size
        require(
            self.length % size == 0,
            f"length is {self.length}; with block_size {size} it must be a multiple of that, such as {near}",
        )
        asked = {kind: getattr(self, kind) for kind in SAMPLED} | {"files": len(self.text_files)}
        weighed = any(asked[kind] and share for kind, share in self.shares.items())
        require(weighed, f"every kind of canvas that is asked for has share 0: {asked}")

    def identity(self) -> dict[str, Any]:
        """The chats of causal bases are in the model's own template."""
        return super().identity() | {"own_template": self.causal or None}

    def check_files(self) -> None:
        """The folder of the corpus, too, and whether the processes can share a batch."""
        super().check_files()
        self.canvases_of_a_pass(int(os.environ.get("WORLD_SIZE", "1")))
        init = self.fresh_from
        require(
            init is None or (init / "adapter_model.safetensors").is_file(),
            f"init is {init}, which holds no adapter_model.safetensors",
        )
        good = self.corpus is None or not self.corpus.exists() or self.corpus.is_dir()
        require(good, f"corpus is {self.corpus}, which is not a folder")

    @property
    def fresh_from(self) -> Path | None:
        """`init`, unless the output folder has a run to go on with."""
        goes_on = self.resume == "auto" and (self.output / CHECKPOINT).is_file()
        return None if goes_on else self.init

    @property
    def shares(self) -> dict[str, float]:
        """Weight of each kind of canvas."""
        return {kind: getattr(self, f"share_{kind}") for kind in KINDS}

    def canvases_of_a_pass(self, world: int) -> int:
        """Of one process; raises `InputError` if the batch does not divide."""
        require(
            self.batch_size % world == 0, f"batch_size {self.batch_size} is not a multiple of the {world} processes"
        )
        local = self.batch_size // world
        micro = min(self.micro_batch, local)
        require(local % micro == 0, f"micro_batch {micro} does not divide the {local} canvases of a process")
        return micro

    def run(self) -> dict[str, Any]:
        """The settings that a resumed run must share."""
        fields = {k: v for k, v in asdict(self).items() if k not in ADAPT_FREE}
        own = {"text_files": [str(path) for path in self.text_files]}
        return fields | own | {"init": None if self.init is None else str(self.init)}
