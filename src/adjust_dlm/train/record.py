"""The rows that a sampler was trained on, as its file names them: `trained_on` in sampler.json.

A record is one folder of trajectories, or what a pool has decoded: rows and all that decides their text, but no path.
Rows that a run splits off its training folders to measure on count as trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.data.trajectories import manifest_of
from adjust_dlm.train.run import Run
from adjust_dlm.types import require

Record = dict[str, Any]
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
