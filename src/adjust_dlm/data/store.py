"""The trajectory store: tokens + order + prompt length + seed, nothing else (DESIGN: 77 MB for 100K x 128).

A folder holds `shard-00000-00512.parquet` (global rows 0..511) and its neighbours, and `manifest.json`. Every file
appears whole or not at all, so whatever is there is finished work, and an interrupted run needs no other record.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adjust_dlm.files import sweep, write_whole
from adjust_dlm.hub import read_json
from adjust_dlm.types import EVALUATION_ROWS, MASKED, InputError, Trajectory, refusing, require

FORMAT = 1
MANIFEST = "manifest.json"
# Settings that decide what the rows are: a run may only continue with the same ones.
IDENTITY = (
    "format", "base_fingerprint", "mask_id", "dtype", "seed", "temperatures", "decode", "prompts", "first_row", "rows",
    "shard_rows",
)  # fmt: skip
_SHARD = re.compile(r"shard-(\d+)-(\d+)\.parquet")

Range = tuple[int, int]  # global rows [start, stop)


def shard_name(rows: Range) -> str:
    """`shard-00000-00512.parquet` for (0, 512)."""
    return f"shard-{rows[0]:05d}-{rows[1]:05d}.parquet"


def shard_ranges(total: int, shard_rows: int, *, first_row: int = 0) -> list[Range]:
    """The row ranges of a store's shards: the same list whatever machine or world size asks."""
    stop = first_row + total
    return [(start, min(start + shard_rows, stop)) for start in range(first_row, stop, shard_rows)]


def clean(folder: Path) -> None:
    """Removes what writers that were killed left of shards, once somebody else has written them."""
    for path in find_shards(folder).values():
        sweep(path)


@dataclass(frozen=True)
class Columns:
    """Trajectories as compact arrays: N rows, and all of their positions one after another.

    Attributes:
        row_N: int64 global row ids.
        seed_N: int64 seeds.
        prompt_len_N: int32 prompt tokens of each row.
        start_N: int64, N + 1 entries: row n owns positions `start_N[n]:start_N[n + 1]`.
        tokens_P: int32 token ids.
        order_P: int16 commit numbers, `GIVEN`, or `MASKED` where a row ended early.
    """

    row_N: NDArray[np.int64]
    seed_N: NDArray[np.int64]
    prompt_len_N: NDArray[np.int32]
    start_N: NDArray[np.int64]
    tokens_P: NDArray[np.int32]
    order_P: NDArray[np.int16]

    @staticmethod
    def of(table: Any) -> Columns:
        """Of a `pyarrow.Table` of shards, in its order."""
        import pyarrow.compute as pc

        lengths_N = pc.list_value_length(table["tokens"]).to_numpy()
        return Columns(
            row_N=table["row"].to_numpy(),
            seed_N=table["seed"].to_numpy(),
            prompt_len_N=table["prompt_len"].to_numpy(),
            start_N=np.concatenate([[0], lengths_N.cumsum()]).astype(np.int64),
            tokens_P=pc.list_flatten(table["tokens"]).to_numpy(),
            order_P=pc.list_flatten(table["order"]).to_numpy(),
        )


def write_shard(folder: Path, rows: Range, trajectories: list[Trajectory], prompt_lens: list[int]) -> None:
    """Writes one shard of exactly these rows, ascending; its bytes depend on its rows alone.

    Raises:
        OSError: the file cannot be written (nothing half-written stays).
    """
    import pyarrow as pa

    assert [t.row for t in trajectories] == list(range(*rows)), f"rows of {shard_name(rows)} are not its range"
    columns = {
        "row": pa.array([t.row for t in trajectories], pa.int64()),
        "seed": pa.array([t.seed for t in trajectories], pa.int64()),
        "tokens": pa.array([t.tokens_L.numpy() for t in trajectories], pa.list_(pa.int32())),
        "order": pa.array([t.order_L.numpy() for t in trajectories], pa.list_(pa.int16())),
        "prompt_len": pa.array(prompt_lens, pa.int32()),
    }
    write_columns(folder / shard_name(rows), columns, write_page_checksum=True)


def write_columns(path: Path, columns: dict[str, Any], **how: Any) -> None:
    """A parquet file of pyarrow arrays, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd", **how)
    write_whole({path: sink.getvalue()})


def read_shard(path: Path) -> Any:
    """Reads and checks one shard.

    Returns:
        A `pyarrow.Table`, see `Columns.of`.

    Raises:
        InputError: unreadable, truncated or damaged, or not the rows that its name promises.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    start, stop = _range_of(path)
    hint = "; delete it and run the same command again"
    with refusing(f"cannot read {path}", pa.ArrowException, OSError, KeyError, ValueError, first=True, hint=hint):
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
        lengths = [pc.list_value_length(table[name]) for name in ("tokens", "order")]
        right = table["row"].to_pylist() == list(range(start, stop))
    require(lengths[0].equals(lengths[1]), f"tokens and order of {path} differ in length; delete it")
    require(right, f"{path} does not hold the rows {start}..{stop - 1} that its name promises, each once")
    return table


def _range_of(path: Path) -> Range:
    match = _SHARD.fullmatch(path.name)
    if match is None:
        raise InputError(f"{path} is not named like a shard ({shard_name((0, 512))})")
    return int(match[1]), int(match[2])


def find_shards(folder: Path) -> dict[Range, Path]:
    """Shards of a folder by row range, ascending."""
    return dict(sorted((_range_of(path), path) for path in folder.glob("shard-*.parquet")))


def is_whole(path: Path) -> bool:
    """Whether a shard is there, readable and complete."""
    try:
        read_shard(path)
    except InputError:
        return False
    return True


def missing(folder: Path, ranges: list[Range]) -> list[Range]:
    """Those still to be made: shards that are absent, truncated or damaged."""
    return [rows for rows in ranges if not is_whole(folder / shard_name(rows))]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store.

    Raises:
        InputError: no manifest, not JSON, or of another format.
    """
    path = folder / MANIFEST
    require(path.is_file(), f"{folder} is no trajectory store: {MANIFEST} is missing (`adjust trajectories` writes it)")
    manifest = read_json(path)
    found = manifest.get("format")
    require(found == FORMAT, f"{path} has format {found!r}; this version reads {FORMAT}")
    lacking = sorted(set(IDENTITY) - manifest.keys())
    require(not lacking, f"{path} lacks {', '.join(lacking)}")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes `manifest.json` whole or not at all."""
    write_whole({folder / MANIFEST: json.dumps(manifest, indent=2, sort_keys=True) + "\n"})


def check_same_run(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuses to mix two runs in one folder.

    Raises:
        InputError: a setting that decides the content differs; names it with both values.
    """
    then, now = (_flat({key: m[key] for key in IDENTITY}) for m in (read_manifest(folder), manifest))
    for key in (*now, *(k for k in then if k not in now)):
        require(
            then.get(key) == now.get(key),
            f"cannot continue {folder}: {key} was {then.get(key)!r} and is now {now.get(key)!r}; "
            "use the same settings or another output folder",
        )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in settings.items():
        out |= {f"{key}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
    return out


def _check_ranges(folder: Path, shards: dict[Range, Path], manifest: dict[str, Any]) -> None:
    """Every row of the manifest in exactly one shard."""
    at = manifest["first_row"]
    stop = at + manifest["rows"]
    require(stop <= EVALUATION_ROWS, f"{folder} has rows from {EVALUATION_ROWS} on, which are for evaluation")
    for (first, last), path in [*shards.items(), ((stop, stop), folder / MANIFEST)]:
        require(last <= stop, f"{path} reaches past row {stop - 1}, the last one of {folder / MANIFEST}")
        require(first >= at, f"{path} repeats rows {first}..{min(at, last) - 1} of another shard; delete one of them")
        require(
            first == at,
            f"{folder} lacks rows {at}..{first - 1} ({shard_name((at, first))}); run the same command again",
        )
        at = last


def _load_folder(folder: Path) -> tuple[dict[str, Any], Any]:
    """Manifest and table of all rows."""
    import pyarrow as pa

    manifest, shards = read_manifest(folder), find_shards(folder)
    _check_ranges(folder, shards, manifest)
    table = pa.concat_tables([read_shard(path) for path in shards.values()])
    wrong_N = (table["seed"].to_numpy() != manifest["seed"]).nonzero()[0]
    require(
        not len(wrong_N),
        f"row {manifest['first_row'] + sum(wrong_N[:1])} of {folder} has another seed than {manifest['seed']} of "
        f"{MANIFEST}",
    )
    return manifest, table


class TrajectoryStore(Sequence[Trajectory]):
    """All trajectories of one or more folders in memory, in row order, folder after folder.

    Args:
        folders: what `adjust trajectories` wrote, finished; all from one base.

    Attributes:
        manifests: one per folder.
        columns: the arrays themselves, for code that slices them directly.
        temperature_N: float64, that each row was drawn at.

    Raises:
        InputError: rows missing or twice, a damaged file, or folders that do not belong together (named).
    """

    def __init__(self, *folders: str | Path) -> None:
        import pyarrow as pa

        require(bool(folders), "no trajectory folder given")
        loaded = [_load_folder(Path(folder)) for folder in folders]
        self.folders = [Path(folder) for folder in folders]
        self.manifests = [manifest for manifest, _ in loaded]
        self._check_together()
        self.columns = Columns.of(pa.concat_tables([table for _, table in loaded]))
        self.temperature_N = np.concatenate([_temperatures(manifest, table["row"]) for manifest, table in loaded])

    def _check_together(self) -> None:
        pairs = itertools.combinations(zip(self.folders, self.manifests, strict=True), 2)
        for (other_folder, other), (folder, m) in pairs:
            for key in ("base_fingerprint", "mask_id"):
                require(
                    m[key] == other[key],
                    f"{folder} has {key} {m[key]!r}, {other_folder} has {other[key]!r}: one base for all folders",
                )
            ends = [x["first_row"] + x["rows"] for x in (m, other)]
            overlap = m["first_row"] < ends[1] and other["first_row"] < ends[0]
            same_prompts = any(m["prompts"][key] == other["prompts"][key] for key in ("source", "sha256"))
            require(
                not (overlap and m["seed"] == other["seed"] and same_prompts),
                f"{folder} and {other_folder} share rows of seed {m['seed']} on the same prompts, so they hold "
                "copies: make one of them with another seed or first row",
            )

    def digest(self) -> str:
        """sha256 of all rows in order: what a training run must find again when it resumes."""
        c = self.columns
        parts = (c.row_N, c.seed_N, c.start_N, c.tokens_P, c.order_P)
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()

    def __len__(self) -> int:
        return len(self.columns.row_N)

    def __getitem__(self, n: int) -> Trajectory:  # type: ignore[override]
        """The n-th trajectory (not row id n, when rows do not start at 0)."""
        import torch

        c, n = self.columns, range(len(self))[n]
        part = slice(c.start_N[n], c.start_N[n + 1])
        tokens_L, order_L = (torch.from_numpy(x[part].astype(np.int64)) for x in (c.tokens_P, c.order_P))
        return Trajectory(tokens_L, order_L, int(c.row_N[n]), int(c.seed_N[n]), float(self.temperature_N[n]))


def temperature_index(row: Any, prompts: int, temperatures: int) -> Any:
    """Which temperature a row (or an array of rows) gets: every prompt meets each in turn, whatever the two counts."""
    return (row % prompts + row // prompts) % temperatures


def _temperatures(manifest: dict[str, Any], rows: Any) -> NDArray[np.float64]:
    values = np.array(manifest["temperatures"], np.float64)
    return values[temperature_index(rows.to_numpy(), manifest["prompts"]["count"], len(values))]


def length_stats(columns: Columns) -> dict[str, float]:
    """Means, least and most of prompt and new tokens, and how many rows ended early."""
    open_N = np.add.reduceat(columns.order_P == MASKED, columns.start_N[:-1], dtype=np.int64)
    new_N = np.add.reduceat(columns.order_P >= 0, columns.start_N[:-1], dtype=np.int64)
    out: dict[str, float] = {"ended_early": int((open_N > 0).sum())}
    for name, values_N in (("prompt", columns.prompt_len_N), ("committed", new_N)):
        out[f"{name}_min"], out[f"{name}_max"] = int(values_N.min()), int(values_N.max())
        out[f"{name}_mean"] = round(float(values_N.mean()), 4)
    return out
