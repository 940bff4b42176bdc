"""Keeping trajectories that training decodes on its way: the store that `adjust trajectories` would have written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from adjust_dlm.bases import Base
from adjust_dlm.data import store
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.data.trajectories import TrajectoriesConfig, manifest_of
from adjust_dlm.types import Trajectory, require


class Keeper:
    """Takes finished rows in any order; a shard is written once all of its rows are there.

    Rows depend on settings and row number alone, so a folder of the same settings may be gone on with, and a shard
    that is there already is left as it is. The manifest counts what is there without a gap.

    Args:
        config: settings that make these rows; `output`, `first_row` and `shard_rows` are heeded, `num` is not.
        base: who decodes.
        source: prompts.
        dry_run: check the folder, make none.

    Raises:
        InputError: the folder holds rows that other settings made, or a part of a shard.
    """

    def __init__(self, config: TrajectoriesConfig, base: Base, source: PromptSource, *, dry_run: bool = False) -> None:
        self.config, self.base, self.source = config, base, source
        self.folder = Path(config.output)
        self.waiting: dict[int, Trajectory] = {}
        self.start = config.first_row
        require(not self.folder.exists() or self.folder.is_dir(), f"{self.folder} is not a folder")
        if not dry_run:
            self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / store.MANIFEST).is_file():
            rows = store.read_manifest(self.folder)["rows"]
            store.check_same_run(self.folder, self.manifest(rows))
            part = rows % config.shard_rows
            require(part == 0, f"{self.folder} ends in a shard of {part} rows; use another folder to keep rows in")

    def manifest(self, rows: int) -> dict[str, Any]:
        """Of a store that holds `rows` rows."""
        return manifest_of(replace(self.config, num=rows), self.base, self.source)

    def __call__(self, trajectory: Trajectory) -> None:
        """Takes one row."""
        if trajectory.row >= self.start:
            self.waiting[trajectory.row] = trajectory
        while all(row in self.waiting for row in range(self.start, self.start + self.config.shard_rows)):
            self._write((self.start, self.start + self.config.shard_rows))

    def _write(self, rows: store.Range) -> None:
        done = [self.waiting.pop(row) for row in range(*rows)]
        if not store.is_whole(self.folder / store.shard_name(rows)):
            store.write_shard(self.folder, rows, done, [len(self.source.ids(x.row)) for x in done])
        self.start = rows[1]
        end = max(stop for _, stop in store.find_shards(self.folder))
        store.write_manifest(self.folder, self.manifest(end - self.config.first_row))

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what waits for its shard."""
        rows = [(x.tokens_L, x.order_L, x.row, x.seed, x.temperature) for x in self.waiting.values()]
        return {"start": self.start, "waiting": rows}

    def load(self, saved: dict[str, Any]) -> None:
        """Goes on from a `state`."""
        self.start = saved["start"]
        self.waiting = {fields[2]: Trajectory(*fields) for fields in saved["waiting"]}
