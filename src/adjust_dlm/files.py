"""Files and folders that appear whole or not at all, and values as the types that files know."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any

Content = str | bytes | Callable[[IO[bytes]], Any]  # a text is written as UTF-8; a function writes into the open file


def write_whole(files: Mapping[Path, Content]) -> None:
    """All files or none: temporary neighbours first, synced, then the renames. A folder made for nothing goes again.

    Raises:
        OSError: no room, no permission, ...: names the file. The old ones are as they were, and no neighbour stays.
    """
    made = [folder for path in files for folder in path.parents if not folder.exists()]
    parts = {path: path.with_name(f".{path.name}.{uuid.uuid4().hex}.part") for path in files}
    try:
        for path, content in files.items():
            _write_synced(path, parts[path], content)
        for path, part in parts.items():
            os.replace(part, path)
    except BaseException:
        for part in parts.values():
            part.unlink(missing_ok=True)
        for folder in made:
            with contextlib.suppress(OSError):  # something else is in it
                folder.rmdir()
        raise


def _write_synced(path: Path, part: Path, content: Content) -> None:
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes the OSError of a failed write name its file, also where `torch.save` raises a RuntimeError in its place."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, f"cannot write {path}: {cause.strerror}") from error


def sweep(path: Path) -> None:
    """Removes what killed writers of a file left beside it; nobody may be writing it now."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` when the block ends without an error.

    The caller holds a lock, so what an earlier one left is from a crash. Its parent is for what should not stay.
    """
    work = folder.with_name(f"{folder.name}.tmp")
    made = work / "made"
    shutil.rmtree(work, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        yield made
        if folder.exists():
            folder.rename(work / "old")
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def plain(value: Any) -> Any:
    """Dataclasses, paths, tuples, NumPy and torch scalars as the types that JSON and YAML know."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
