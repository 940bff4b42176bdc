"""Two samplers of a run: `sampler`, the last one, and `sampler-best`, the one with the least held-out KL.

Held-out KL is the mean of `kl_1 .. kl_rollout` (`train/metrics.py`): the training loss on rows that training never
sees. It ranks steps of one run; two recipes are better told apart by decoding (docs/design.md, "The default model").
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from adjust_dlm.sampler import WEIGHTS
from adjust_dlm.train.checkpoint import writing
from adjust_dlm.train.record import trained_on
from adjust_dlm.train.run import Run

LAST, BEST = "sampler", "sampler-best"


def heldout_kl(metrics: dict[str, float]) -> float:
    """Mean over depths; infinite where there are no held-out rows."""
    depths = [value for name, value in metrics.items() if name.startswith("kl_")]
    return sum(depths) / len(depths) if depths else math.inf


def keep_best(run: Run, folder: Path, metrics: dict[str, float]) -> None:
    """Saves `sampler-best` if these metrics of the present step are the best so far."""
    kl = heldout_kl(metrics)
    if kl < run.best.get("kl", math.inf):
        run.best = {"step": run.step, "kl": kl}
        if run.rank == 0:
            save_sampler(run, folder / BEST, heldout=metrics, heldout_kl=kl)


def save_sampler(run: Run, folder: Path, **facts: Any) -> None:
    """Writes g with the settings of its run, its step, the rows it has seen, and what is known of where it started.

    Raises:
        OSError: it cannot be written; names the file, the bytes it needs and those that are free.
    """
    if run.started_from:
        facts["started_from"] = {key: value for key, value in run.started_from.items() if key != "trained_on"}
    facts["trained_on"] = trained_on(run)
    with writing(folder / WEIGHTS, sampler_bytes(run)):
        run.sampler.save(folder, training=run.settings(), step=run.step, **facts)


def sampler_bytes(run: Run) -> int:
    """Of the weights on disk: bf16."""
    return 2 * sum(p.numel() for p in run.sampler.parameters())
