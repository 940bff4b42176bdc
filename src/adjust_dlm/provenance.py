"""Where a result came from: versions, machine, card, date and command line, for every result file."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

import adjust_dlm

_PACKAGES = ("torch", "transformers", "peft", "tokenizers", "numpy", "pyarrow", "torchao")  # the last quantizes


def provenance() -> dict[str, Any]:
    """What it takes to repeat a run, apart from its settings: plain values, ready for JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "versions": versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cards": cards(),
    }


def cards() -> list[str]:
    """Names of the visible CUDA cards; empty on a machine without one."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def versions() -> dict[str, str | None]:
    """Of this package, Python, and the packages that results may depend on; None where one is not installed."""
    own = {"adjust-dlm": adjust_dlm.__version__, "python": platform.python_version()}
    return own | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
