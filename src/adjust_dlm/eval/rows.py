"""Rows of a published data set: from a file of the usual forms, or from the Hub without its `datasets` library."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adjust_dlm.bases.hub import is_hub_id
from adjust_dlm.types import InputError, require

Row = dict[str, Any]
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")


def read_rows(data: str, hub_files: Sequence[str], fields: Sequence[str]) -> list[Row]:
    """All rows of a data set.

    Args:
        data: path of a file (JSON lines, gzipped or not, a JSON list, or Parquet), or Hub id ORG/NAME.
        hub_files: patterns of the files that hold the rows in a repository of the Hub.
        fields: what every row must have.

    Raises:
        InputError: no such file, an unknown form, a broken line, or a row without one of the fields.
    """
    path = Path(data)
    require(bool(data), f"no data given; name a file ({', '.join(ENDINGS)}) or the Hub id of a data set")
    files = [path] if path.is_file() or not is_hub_id(data) else _from_hub(data, hub_files)
    rows: list[Any] = [row for file in files for row in _read(file)]
    require(bool(rows), f"{data} holds no rows")
    for n, row in enumerate(rows):
        missing = [name for name in fields if name not in row] if isinstance(row, dict) else list(fields)
        require(not missing, f"row {n} of {data} has no field {', '.join(missing)}")
    return rows


def _read(path: Path) -> list[Row]:
    require(path.is_file(), f"no file {str(path)!r} here")
    require(path.name.endswith(ENDINGS), f"{path} is none of the forms that can be read: {', '.join(ENDINGS)}")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return pq.read_table(path).to_pylist()
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        if path.suffix == ".json":
            rows = json.loads(text)
            require(isinstance(rows, list), f"{path} holds a {type(rows).__name__}; it must be a list of rows")
            return rows
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except InputError:
        raise
    except (ValueError, OSError, EOFError) as error:  # pyarrow's and gzip's are among them
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def _from_hub(name: str, patterns: Sequence[str]) -> list[Path]:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns=list(patterns)))
    except Exception as error:  # those of its HTTP library, too, which changes with its major versions
        said = " ".join(str(error).split()) or "no reason given"
        raise InputError(f"no file {name!r} here, and the Hub gave none: {type(error).__name__}: {said}") from error
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    require(bool(files), f"data set {name!r} of the Hub has no {' or '.join(patterns)}")
    return files
