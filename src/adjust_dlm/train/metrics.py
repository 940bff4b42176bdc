"""Held-out metrics of a sampler: how close each unroll depth is to the base, and how stale the base would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from adjust_dlm.bases import Base
from adjust_dlm.sampler import Sampler
from adjust_dlm.train.batches import random_slices, to_device
from adjust_dlm.train.unroll import Unrolled, unroll, unrolled_kl
from adjust_dlm.types import Trajectory

_BATCHES, _SLICES = 8, 16


@torch.no_grad()
def held_out(
    base: Base,
    sampler: Sampler,
    data: Sequence[Trajectory],
    rows: Sequence[int],
    config: Any,
    autocast: Any,
    pad_to: int = 0,
) -> dict[str, float]:
    """Per depth k: `kl_k` teacher || g, `stale_k` teacher || h_0, `top1_k` agreement on the next row.

    The same slices at every call: 8 batches of 16 windows from the held-out rows. Means over all states that count
    at a depth; a depth that no trajectory is long enough for is left out.
    """
    if not rows:
        return {}
    sums: dict[str, float] = {}
    counts: dict[int, int] = {}
    for batch in range(_BATCHES):
        key = (config.seed, 1 << 40, batch)
        slices = random_slices(
            data, rows, count=_SLICES, length=config.rollout + 1, rollout=config.rollout, key=key,
            pad_id=base.spec.pad_id, pad_to=pad_to,
        )  # fmt: skip
        with autocast:
            run = unroll(base, sampler, to_device(slices, base.device), rollout=config.rollout)
            for k in range(1, config.rollout + 1):
                count, means = _depth(base, run, k, config)
                counts[k] = counts.get(k, 0) + count
                for name, value in means.items():
                    sums[f"{name}_{k}"] = sums.get(f"{name}_{k}", 0.0) + count * value
    return {name: value / counts[int(name.rpartition("_")[2])] for name, value in sums.items()}


def _depth(base: Base, run: Unrolled, k: int, config: Any) -> tuple[int, dict[str, float]]:
    """How many states count (each has one next row), and means over them; none of the latter without the former."""
    settings = {name: getattr(config, name) for name in ("weights", "next_decay", "next_share", "suppress_eos")}
    next_row = (run.rank[k - 1] == 0).nonzero(as_tuple=True)
    if not len(next_row[0]):
        return 0, {}
    teacher_RV = base.logits(run.teacher[k - 1][next_row], suppress_eos=config.suppress_eos)
    student_RV = base.logits(run.student[k - 1][next_row], suppress_eos=config.suppress_eos)
    return len(next_row[0]), {
        "kl": float(unrolled_kl(base, run, k, **settings)),
        "stale": float(unrolled_kl(base, run, k, stale=True, **settings)),
        "top1": float((teacher_RV.argmax(-1) == student_RV.argmax(-1)).float().mean()),
    }
