"""Checkpoints that are whole or absent, a log that resumes, and a clean stop on SIGTERM."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch

from adjust_dlm.data.store import write_atomic
from adjust_dlm.types import InputError, require

NAME = "checkpoint.pt"


def save_checkpoint(folder: Path, payload: dict[str, Any]) -> None:
    """Writes `checkpoint.pt` through a temporary neighbour: a full disk or a kill leaves the old one."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{NAME}.part"
    try:
        with part.open("wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, folder / NAME)
    finally:
        part.unlink(missing_ok=True)


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
    return payload


class MetricsLog:
    """`metrics.jsonl`: one object a line; lines past a resumed step are dropped."""

    def __init__(self, folder: Path, *, resume_step: int = 0, enabled: bool = True) -> None:
        """Opens the log; `enabled=False` on ranks other than 0."""
        self.path, self.enabled = folder / "metrics.jsonl", enabled
        if enabled:
            folder.mkdir(parents=True, exist_ok=True)
            kept = self._kept(resume_step)
            write_atomic(self.path, "".join(line + "\n" for line in kept).encode())

    def _kept(self, step: int) -> list[str]:
        if not step or not self.path.is_file():
            return []
        return [line for line in self.path.read_text().splitlines() if _step_of(line) <= step]

    def write(self, step: int, **values: Any) -> None:
        """Appends one line."""
        if self.enabled:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")


def _step_of(line: str) -> float:
    """The step of a line; infinite for one that a kill or a full disk cut off."""
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf


class StopSignal:
    """Context manager: after SIGTERM or SIGINT, `requested` is True and the loop saves and leaves."""

    def __enter__(self) -> StopSignal:
        """Installs the handlers (main thread only)."""
        self.requested = False
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
