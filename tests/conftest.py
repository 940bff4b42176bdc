"""One thread per worker, no settings of the caller's Hub, the same property tests on every run, and a time limit."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_TOKEN"):
    os.environ.pop(name, None)  # before anything imports huggingface_hub: tests bring their own Hub and cache
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: kernels then run on the CPU
torch.set_num_threads(1)
gc.disable()  # until all is imported and collected: it would look at a million objects that stay
settings.register_profile(
    "house", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")


@pytest.fixture(scope="session", autouse=True)
def _interpreted_quickly() -> Iterator[None]:
    """Triton's interpreter replaces its whole language again in every call that a kernel makes: half of its time.

    Once for each module of such functions is enough: what the kernel itself needs is replaced at its start.
    """
    if not find_spec("triton"):
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    call, seen = InterpretedFunction.__call__, set[str]()

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        module = function.fn.__module__
        if module in seen:
            return function.rewrite()(*args, **kwargs)
        seen.add(module)
        return call(function, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", called)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes, clusters, browsers, weights and compilers need more time; not all of them let an alarm through.

    Ray swallows what an alarm raises while it waits, so there a thread ends the whole process (with xdist, a worker).
    """
    for item in items:
        if any(item.get_closest_marker(name) for name in ("slow", "smol", "gpu")):
            item.add_marker(pytest.mark.timeout(1200, method="thread"))


def pytest_collection_finish() -> None:
    """What was imported is never garbage, so nothing looks at it again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Or what is written in C++ says at the end of the process that it leaks."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left out and how to have it, in one line."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        told = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"left out: {told}")
