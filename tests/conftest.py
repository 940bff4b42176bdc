"""One thread per worker, no settings of the caller's Hub, the same property tests on every run, and a time limit."""

import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_TOKEN"):
    os.environ.pop(name, None)  # before anything imports huggingface_hub: tests bring their own Hub and cache
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: kernels then run on the CPU
torch.set_num_threads(1)
settings.register_profile(
    "house", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes, clusters, browsers, weights and compilers need more time; not all of them let an alarm through.

    Ray swallows what an alarm raises while it waits, so there a thread ends the whole process (with xdist, a worker).
    """
    for item in items:
        if any(item.get_closest_marker(name) for name in ("slow", "smol", "gpu")):
            item.add_marker(pytest.mark.timeout(1200, method="thread"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left out and how to have it, in one line."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        told = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"left out: {told}")
