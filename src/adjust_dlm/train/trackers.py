"""`adjust train --track`: the lines of `metrics.jsonl` in TensorBoard, W&B or trackio as well."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from adjust_dlm.files import write_whole
from adjust_dlm.types import require

TrackerName = Literal["tensorboard", "wandb", "trackio"]
PROJECT, RECORD = "adjust-dlm", "tracking.json"


def check_trackers(names: Sequence[str]) -> None:
    """Raises InputError for a tracker whose package is not installed."""
    for name in names:
        spec = find_spec(name)
        # A folder of that name has no origin: W&B leaves one in the working folder.
        installed = spec is not None and spec.origin is not None
        require(installed, f"track {name} needs a package that is not installed: pip install {name}")


def start_trackers(names: Sequence[str], folder: Path, settings: dict[str, Any], *, resume_step: int = 0) -> list[Any]:
    """accelerate's trackers, started: event files in `OUTPUT/tensorboard`, or the service's own run.

    The run is called as its output folder; `resume_step` 0 starts a new one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = _run_id(folder, resume_step) if set(names) - {"tensorboard"} else ""
    return [_tracker(name, folder, settings, run, resume_step) for name in dict.fromkeys(names)]


def _run_id(folder: Path, resume_step: int) -> str:
    """The id under which a service knows the run: kept in the output folder, so that a resumed run goes on there."""
    path = folder / RECORD
    if resume_step and path.is_file():
        return str(json.loads(path.read_text(encoding="utf-8"))["run"])
    run = uuid.uuid4().hex[:12]
    write_whole({path: json.dumps({"run": run}) + "\n"})
    return run


def _tracker(name: str, folder: Path, settings: dict[str, Any], run: str, resume_step: int) -> Any:
    from accelerate import PartialState, tracking

    PartialState()  # its trackers ask it for the main process
    if name == "tensorboard":  # what stands there behind the resumed step is struck out
        board = tracking.TensorBoardTracker("tensorboard", folder, purge_step=resume_step + 1)
        board.start()
        board.log({"settings": f"```\n{json.dumps(settings, indent=2)}\n```"}, step=resume_step + 1)
        return board
    project, title = os.environ.get(f"{name.upper()}_PROJECT", PROJECT), folder.absolute().name
    if name == "wandb":
        service: Any = tracking.WandBTracker(
            project, resume="allow", config=settings, id=run, name=title, dir=str(folder)
        )
    else:
        service = tracking.TrackioTracker(project, resume="allow", config=settings, name=f"{title}-{run}")
    service.start()
    return service
