"""`adjust bench runtime`: measures, and prints the table of `runtime.md`."""

from __future__ import annotations

from adjust_dlm.bench.runtime import make_runtime
from adjust_dlm.bench.settings import RuntimeConfig
from adjust_dlm.bench.speed_tables import markdown
from adjust_dlm.commands.output import Outcome, say


def run(config: RuntimeConfig) -> Outcome:
    """All cells that fit into the time."""
    results = make_runtime(config)
    say(markdown(results))
    return Outcome(results=results)
