"""What one rank of `adjust train` holds."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from adjust_dlm.bases import Base
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.losses import Delta, kl_and_delta
from adjust_dlm.sampler import Sampler
from adjust_dlm.train.checkpoint import StopSignal
from adjust_dlm.train.config import FREE, TrainConfig
from adjust_dlm.train.one_pass import Pool
from adjust_dlm.train.unroll import Step
from adjust_dlm.types import Trajectory


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
    losses: dict[str, float] | None = None  # of the present step, while its held-out metrics are due
    pad_to: int = 0
    delta: Delta = kl_and_delta
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    step_g: Step | None = None
    pool: Pool | None = None
    pool_end: int = 0  # the row behind the last that a rank's pool had taken when g was last measured
    held: Sequence[Trajectory] | None = None
    best: dict[str, float] = field(default_factory=dict)
    started_from: dict[str, Any] | None = None

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

    @functools.cached_property
    def digests(self) -> dict[str, str | None]:
        """Of what is trained on (of a pool, its prompts), and of held-out rows that have folders of their own."""
        data, held = (x.digest() if isinstance(x, TrajectoryStore) else None for x in (self.data, self.held))
        own = data if self.pool is None else self.pool.source.facts()["sha256"]
        return {"data_digest": own, "heldout_digest": held}

    def now(self) -> float:
        """Seconds of training so far."""
        return self.elapsed if self.began is None else time.monotonic() - self.began

    def settings(self) -> dict[str, Any]:
        """What must stay the same between start and resume."""
        fixed = {k: v for k, v in asdict(self.config).items() if k not in FREE}
        return {
            **fixed, "dtype": str(self.base.dtype).removeprefix("torch."), "base_fingerprint": self.base.fingerprint,
            "trajectories": len(self.data), "world": self.world, **self.digests,
        }  # fmt: skip
