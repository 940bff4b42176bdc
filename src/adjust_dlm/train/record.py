"""Samplers of a run, and the rows they were trained on, as their file names them: `trained_on` in sampler.json.

`sampler` is the last one, `sampler-best` the one with the least held-out KL, the mean of `kl_1 .. kl_rollout`
(`train/metrics.py`): the training loss on rows that training never sees. It ranks steps of one run; two recipes are
better told apart by decoding.

A record is one folder of trajectories, or what a pool has decoded: rows and all that decides their text, but no path.
Rows that a run splits off its training folders to measure on count as trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.data.trajectories import manifest_of
from adjust_dlm.train.run import Run
from adjust_dlm.types import require

Record = dict[str, Any]
LAST, BEST = "sampler", "sampler-best"
UNKNOWN: Record = {"use": "unknown"}  # of a sampler from before there were records
_DECIDE = ("max_new_tokens", "top_p", "top_k", "order", "order_on", "suppress_eos", "tokens_per_step", "sampler")


def record_of(manifest: Mapping[str, Any], use: str) -> Record:
    """Of a folder with this manifest; `use` is training or heldout."""
    prompts, settings = manifest["prompts"], manifest["decode"]
    kind = prompts["source"].partition(":")[0]
    known = kind if kind in ("unconditional", "lists", "corpus") else "file"
    return {
        "use": use, **{key: manifest[key] for key in ("seed", "first_row", "rows", "temperatures")},
        "prompts": {"kind": known, "count": prompts["count"], "sha256": prompts["sha256"]},
        **{key: settings[key] for key in _DECIDE if key in settings}, "dtype": manifest["dtype"],
    }  # fmt: skip


def own_records(run: Run) -> list[Record]:
    """Of what this run trains on and of held-out rows that have folders of their own, or that a pool leaves out."""
    stores = {"training": run.data, "heldout": run.held}
    found = [(use, m) for use, rows in stores.items() if isinstance(rows, TrajectoryStore) for m in rows.manifests]
    if run.pool is not None:
        config, pool = run.config, run.pool
        made = config.pool.trajectories(seed=config.seed, suppress_eos=config.suppress_eos)
        parts = [("training", pool.first, run.pool_end)]
        if not isinstance(run.held, TrajectoryStore):
            parts.append(("heldout", 0, config.heldout))
        found += [
            (use, manifest_of(replace(made, first_row=first, num=end - first), run.base, pool.source))
            for use, first, end in parts
            if end > first
        ]
    return [record_of(manifest, use) for use, manifest in found]


def trained_on(run: Run) -> list[Record]:
    """The records of the sampler that the run started from, then its own; each once."""
    earlier = _earlier(run)
    return [*earlier, *(record for record in own_records(run) if record not in earlier)]


def _earlier(run: Run) -> list[Record]:
    return [] if run.started_from is None else run.started_from.get("trained_on") or [UNKNOWN]


def check_unseen(run: Run) -> None:
    """Raises InputError if a row that is held out may be one that the sampler at the start was trained on.

    Rows of one seed, prompt and temperature count as one, whatever their other settings.
    """
    seen = [record for record in _earlier(run) if record["use"] == "training"]
    for held in (record for record in own_records(run) if record["use"] == "heldout"):
        first, last = _shared(held, seen)
        require(
            first > last,
            f"the sampler in {run.config.init} was trained on rows {first}..{last} of seed {held['seed']}, which are "
            "held out here; make held-out trajectories with another seed or first row",
        )


def _shared(held: Record, seen: Sequence[Record]) -> tuple[int, int]:
    """The first and last row that one of `seen` shares with `held`; (0, -1) if none does."""
    for other in seen:
        mine, theirs = held["prompts"], other["prompts"]
        same = mine["sha256"] == theirs["sha256"] or mine["kind"] == theirs["kind"] == "lists"
        first = max(held["first_row"], other["first_row"])
        last = min(r["first_row"] + r["rows"] for r in (held, other)) - 1
        hot = {*held["temperatures"]} & {*other["temperatures"]}
        if same and hot and held["seed"] == other["seed"] and first <= last:
            return first, last
    return 0, -1


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
    """Writes g with the settings of its run, its step, the rows it has seen, and what is known of where it started."""
    if run.started_from:
        facts["started_from"] = {key: value for key, value in run.started_from.items() if key != "trained_on"}
    facts["trained_on"] = trained_on(run)
    run.sampler.save(folder, training=run.settings(), step=run.step, **facts)
