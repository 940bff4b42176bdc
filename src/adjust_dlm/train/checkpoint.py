"""Checkpoints that are whole or absent, a log that resumes, and a clean stop on SIGTERM."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from adjust_dlm.files import naming, sweep, write_whole
from adjust_dlm.train.config import CHECKPOINT as NAME
from adjust_dlm.types import InputError, refusing, require


def save_checkpoint(folder: Path, payload: dict[str, Any]) -> None:
    """Writes `checkpoint.pt` whole or not at all: a full disk (OSError) or a kill leaves the old one."""
    path = folder / NAME
    sweep(path)  # what a killed run left is as large
    write_whole({path: lambda file: torch.save(payload, file)})


def load_checkpoint(folder: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint of an interrupted run, or None; the settings of `run` must be the stored ones.

    Raises:
        InputError: unreadable file, or a setting changed (named, with both values).
    """
    path = folder / NAME
    if not path.is_file():
        return None
    with refusing(f"cannot read {path}", Exception, first=True):
        payload: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        settings = payload["run"]
    for key, value in run.items():
        then = settings.get(key)
        require(then == value, f"cannot resume {folder}: {key} was {then!r} and is now {value!r}")
    gone = sorted(key for key, then in settings.items() if then and key not in run)
    require(not gone, f"cannot resume {folder}: this version has no {', '.join(gone)}")
    return payload


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Holds a run's folder until the block or the process ends; a folder that was made for nothing goes again.

    Raises:
        InputError: another run has it.
    """
    path = folder / "run.lock"
    made = [part for part in (folder, *folder.parents) if not part.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise InputError(f"another run is writing to {folder}; wait for its end, or give another output") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows keeps open files
            path.unlink()  # before the release: a lock whose file is gone is not taken
        lock.release()
        with contextlib.suppress(OSError):  # something is in it
            for part in made:
                part.rmdir()


def set_aside(folder: Path) -> None:
    """Renames the checkpoint of the run before: a new run, stopped before one of its own, would go on from it."""
    path = folder / NAME
    if path.is_file():
        path.replace(path.with_suffix(".old.pt"))


class MetricsLog:
    """`metrics.jsonl`: one object a line; lines past a resumed step are dropped."""

    def __init__(
        self, folder: Path, *, resume_step: int = 0, enabled: bool = True, trackers: Sequence[Any] = ()
    ) -> None:
        """Opens the log; `enabled=False` on ranks other than 0. accelerate's `trackers` get its numbers, too."""
        self.path, self.enabled, self.trackers = folder / "metrics.jsonl", enabled, trackers
        if enabled:
            old = self.path.read_text().splitlines() if resume_step and self.path.is_file() else []
            write_whole({self.path: "".join(line + "\n" for line in old if _step_of(line) <= resume_step)})

    def write(self, step: int, **values: Any) -> None:
        """Appends one line."""
        if self.enabled:
            with naming(self.path), self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            for tracker in self.trackers:
                tracker.log({key: float(x) for key, x in values.items() if isinstance(x, int | float)}, step=step)


def _step_of(line: str) -> float:
    """The step of a line; infinite for one that a kill or a full disk cut off."""
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf


class StopSignal:
    """Context manager: after SIGTERM or SIGINT, `requested` is True and the loop saves and leaves."""

    requested = False

    def check(self) -> None:
        """Raises InterruptedError after a signal."""
        if self.requested:
            raise InterruptedError

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
