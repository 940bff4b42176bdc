"""Training data for g: decodes of the base, one token a pass or by ADJUST (DESIGN: "Trajectories").

Work is cut into shards of global rows. A row's randomness comes from (seed, row) alone, a shard's batches are composed
from that shard alone, and rank r makes shards r, r + world, ...: so neither the world size nor an interruption shows
in the result, and whatever shard is on disk is finished.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adjust_dlm.bases import Base, load_base
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.data import store
from adjust_dlm.data.prompts import PromptSource, open_prompts
from adjust_dlm.data.ray_engine import Show, make_with_ray
from adjust_dlm.data.settings import TrajectoriesConfig
from adjust_dlm.data.store import temperature_index
from adjust_dlm.decoders import decode_many
from adjust_dlm.progress import Bar
from adjust_dlm.provenance import versions
from adjust_dlm.sampler import load_sampler, weights_digest
from adjust_dlm.types import Trajectory, require

logger = logging.getLogger(__name__)


def make_trajectories(
    config: TrajectoriesConfig, base: Base | None = None, progress: bool = True, *, source: PromptSource | None = None
) -> dict[str, Any]:
    """Makes, or finishes, a folder of trajectories; under torchrun (RANK, WORLD_SIZE) this process's share of it.

    The processes need no contact, only the same folder. The one that finds it complete closes its manifest.

    Args:
        config: all settings.
        base: the frozen model; loaded from `config` when not given.
        progress: say on stderr how far it is (first rank only).
        source: prompts as token ids, instead of `config.prompts`.

    Returns:
        `output, rows, rows_made, shards_made, complete, base_calls, tokens, seconds, tokens_per_second`, and
        `lengths` once the folder is complete. Counts are this process's own.

    Raises:
        InputError: bad settings or prompts, or a folder that other settings made (the setting is named).
        OSError: a file cannot be written; finished shards stay, nothing half-written does.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ranges = store.shard_ranges(config.num, config.shard_rows, first_row=config.first_row)
    make: Callable[[Show], dict[str, int]]
    if config.engine == "ray":
        require(base is None and source is None, "engine ray loads base and prompts in its actors; give their names")
        require(world == 1, f"world is {world}; engine ray starts its actors itself: run it without torchrun")
        total, make = config.num, functools.partial(make_with_ray, config, prepared_run)
    else:
        run = prepared_run(config, base, source)
        todo = store.missing(run.folder, ranges[rank::world])
        total, make = sum(b - a for a, b in todo), functools.partial(run.make_shards, todo)
    started, folder = time.perf_counter(), Path(config.output)
    with Bar("trajectories", enabled=progress and rank == 0) as bar:
        made = make(lambda done: bar.show(done / max(1, total)))
    seconds = time.perf_counter() - started
    left = store.missing(folder, ranges)
    result: dict[str, Any] = {
        "output": str(folder), "rows": config.num, **made, "complete": not left, "seconds": seconds,
        "tokens_per_second": made["tokens"] / seconds if made["shards_made"] else math.nan,
    }  # fmt: skip
    if not left:
        store.clean(folder)
        result["lengths"] = store.length_stats(store.TrajectoryStore(folder).columns)
        store.write_manifest(folder, {**store.read_manifest(folder), "lengths": result["lengths"]})
    return result


def prepared_run(config: TrajectoriesConfig, base: Base | None = None, source: PromptSource | None = None) -> RowMaker:
    """A process's part of a folder, which is made or fits the settings; loads what is not given."""
    base = base or load_base(config.base, device=config.device, dtype=config.dtype)
    if source is None:
        last = config.first_row + config.num
        source = open_prompts(config.prompts, base, chat=config.chat, rows=last, seed=config.seed)
    run, folder = RowMaker(config, base, source), Path(config.output)
    require(not folder.exists() or folder.is_dir(), f"{folder} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    shards = store.find_shards(folder)  # before the manifest: another process may be writing both
    manifest = manifest_of(config, base, source)
    if (folder / store.MANIFEST).is_file():
        store.check_same_run(folder, manifest)
    else:
        require(not shards, f"{folder} holds shards but no {store.MANIFEST}; use another output folder")
        store.write_manifest(folder, manifest)
    return run


def manifest_of(config: TrajectoriesConfig, base: Base, source: PromptSource) -> dict[str, Any]:
    """What a folder is made of; nothing in it depends on time, place or world size."""
    spec = base.spec
    drawn_by = {} if config.sampler is None else {"sampler": weights_digest(config.sampler)}
    return {
        "format": store.FORMAT,
        "base": spec.name,
        "base_fingerprint": base.fingerprint,
        "mask_id": spec.mask_id,
        "dtype": str(base.dtype).removeprefix("torch."),
        "seed": config.seed,
        "temperatures": list(config.temperature),
        "decode": asdict(config.decode_configs(base)[0]) | drawn_by,
        "prompts": source.facts(),
        "first_row": config.first_row,
        "rows": config.num,
        "shard_rows": config.shard_rows,
        "lengths": None,
        "versions": versions(),
    }


class RowMaker:
    """One process's part of a folder: what is fixed for all shards, and what it has counted so far."""

    def __init__(self, config: TrajectoriesConfig, base: Base, source: PromptSource) -> None:
        self.config, self.base, self.source = config, base, source
        self.folder = Path(config.output)
        self.decode_configs = config.decode_configs(base)
        self.sampler = None if config.sampler is None else load_sampler(config.sampler, base)
        self.made = {"rows_made": 0, "shards_made": 0, "base_calls": 0, "tokens": 0}
        source.check_fits(base, config.max_new_tokens)
        if config.compile:
            require(isinstance(base, TransformerBase), f"base {base.spec.name!r} cannot be compiled")
            assert isinstance(base, TransformerBase)
            base.compile()

    def make_shards(self, todo: list[store.Range], show: Show | None = None) -> dict[str, int]:
        """Decodes shards in batches and writes them; counts of all that were made so far."""
        for rows in todo:
            path = self.folder / store.shard_name(rows)
            if path.exists():
                logger.warning("replacing the damaged %s", path)
            texts = self.decoded(rows, show)
            store.write_shard(self.folder, rows, texts, [len(self.source.ids(row)) for row in range(*rows)])
            self.made["shards_made"] += 1
        return self.made

    def decoded(self, rows: store.Range, show: Show | None = None) -> list[Trajectory]:
        """Rows of a range in their order; rows of one temperature and of similar prompt length go together."""
        done: dict[int, Trajectory] = {}
        how: dict[str, Any] = {"batch_size": self.config.batch_size, "sampler": self.sampler}
        how["decoder"] = "joint" if self.sampler is None else "adjust"
        for t, settings in enumerate(self.decode_configs):
            mine = [r for r in range(*rows) if temperature_index(r, len(self.source), len(self.decode_configs)) == t]
            mine.sort(key=lambda row: (len(self.source.ids(row)), row))
            prompts = [self.source.ids(row) for row in mine]
            for which, result in decode_many(self.base, prompts, settings, rows=mine, **how):
                self.made["rows_made"] += len(which)
                self.made["base_calls"] += int(result.base_calls_B.sum())
                self.made["tokens"] += int((result.order_BL >= 0).sum())
                if show is not None:
                    show(self.made["rows_made"])
                done |= {mine[n]: result.trajectory(b) for b, n in enumerate(which)}
        return [done[row] for row in range(*rows)]
