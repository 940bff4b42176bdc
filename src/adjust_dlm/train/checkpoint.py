"""Checkpoints that are whole or absent, a log that resumes, and a clean stop on SIGTERM."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjust_dlm.files import sweep, write_whole
from adjust_dlm.types import InputError, require

if TYPE_CHECKING:
    from adjust_dlm.train.trackers import Tracking

NAME = "checkpoint.pt"


def save_checkpoint(folder: Path, payload: dict[str, Any]) -> None:
    """Writes `checkpoint.pt` whole or not at all: a full disk or a kill leaves the old one.

    Raises:
        OSError: it cannot be written; names the file, the bytes it needs and those that are free.
    """
    path = folder / NAME
    sweep(path)  # what a killed run left is as large
    with writing(path, tensor_bytes(payload)):
        write_whole({path: lambda file: torch.save(payload, file)})


@contextlib.contextmanager
def writing(path: Path, needed: int) -> Iterator[None]:
    """Makes a failed write say what failed: `needed` bytes for `path`, and what is free there.

    Raises:
        OSError: in place of the one in the block. torch turns that into a RuntimeError while it closes its archive.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = (error.__cause__, error.__context__, error)  # `write_whole` has the reason as its cause
        cause = next((cause for cause in found if isinstance(cause, OSError)), None)
        if cause is None:
            raise
        old = "; the one before it stays" if path.exists() else ""
        message = f"cannot write {path}, {needed:,} bytes with {free_bytes(path):,} free: {cause.strerror}{old}"
        raise OSError(cause.errno, message) from error


def free_bytes(path: Path) -> int:
    """What is free on the disk of a file or folder that need not be there yet."""
    nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(nearest).free


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(tensor_bytes(part) for part in parts)


def load_checkpoint(folder: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint of an interrupted run, or None.

    Args:
        folder: the run's output folder.
        run: settings that must not change between start and resume; compared with the stored `run`.

    Raises:
        InputError: unreadable file, or a setting changed (named, with both values).
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        payload: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        settings = payload["run"]
    except Exception as error:
        raise InputError(f"cannot read {path}: {(str(error) or repr(error)).splitlines()[0]}") from error
    for key, value in run.items():
        then = settings.get(key)
        require(then == value, f"cannot resume {folder}: {key} was {then!r} and is now {value!r}")
    gone = sorted(key for key, then in settings.items() if then and key not in run)
    require(not gone, f"cannot resume {folder}: this version has no {', '.join(gone)}")
    return payload


def set_aside(folder: Path) -> None:
    """Renames the checkpoint of the run before: a new run, stopped before one of its own, would go on from it."""
    path = folder / NAME
    if path.is_file():
        path.replace(path.with_suffix(".old.pt"))


class MetricsLog:
    """`metrics.jsonl`: one object a line; lines past a resumed step are dropped."""

    def __init__(
        self, folder: Path, *, resume_step: int = 0, enabled: bool = True, tracking: Tracking | None = None
    ) -> None:
        """Opens the log; `enabled=False` on ranks other than 0. `tracking` gets the same lines."""
        self.path, self.enabled, self.tracking = folder / "metrics.jsonl", enabled, tracking
        if enabled:
            write_whole({self.path: "".join(line + "\n" for line in self._kept(resume_step))})

    def _kept(self, step: int) -> list[str]:
        if not step or not self.path.is_file():
            return []
        return [line for line in self.path.read_text().splitlines() if _step_of(line) <= step]

    def write(self, step: int, **values: Any) -> None:
        """Appends one line."""
        if self.enabled:
            line = json.dumps({"step": step, **values}) + "\n"
            with writing(self.path, len(line)), self.path.open("a") as file:
                file.write(line)
            if self.tracking:
                self.tracking.write(step, values)


def _step_of(line: str) -> float:
    """The step of a line; infinite for one that a kill or a full disk cut off."""
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf


class StopSignal:
    """Context manager: after SIGTERM or SIGINT, `requested` is True and the loop saves and leaves."""

    requested = False

    def __enter__(self) -> StopSignal:
        """Installs the handlers (main thread only)."""
        self._old: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._stop)
        return self

    def _stop(self, *_: Any) -> None:
        self.requested = True

    def __exit__(self, *_: Any) -> None:
        """Puts the old handlers back."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
