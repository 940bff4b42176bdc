"""Seconds of work on a device, their spread, time limits, and what the device gives at most."""

from __future__ import annotations

import contextlib
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adjust_dlm.bases.fp8 import in_fp8, scaled_product


class Clock:
    """Seconds of parts by CUDA events, or by a host clock on the CPU."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` is the host clock."""
        self.cuda, self.now = device.type == "cuda", now

    def __call__(self, part: Callable[[], Any]) -> float:
        """Runs it and waits."""
        if not self.cuda:
            started = self.now()
            part()
            return self.now() - started
        first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        first.record()
        part()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def median(self, part: Callable[[], Any], *, warm: int, runs: int) -> float:
        """After `warm` runs that do not count."""
        return statistics.median([self(part) for _ in range(warm + runs)][warm:])

    def samples(self, part: Callable[[], Any], *, runs: int, seconds: float, warm: int = 2) -> list[float]:
        """Seconds of single runs, as means of batches of at least 5 ms, or of 20 runs (an event costs microseconds).

        At most `runs` batches, of which none but the first begins after `seconds`. The last of the `warm` runs, which
        do not count, sizes them.
        """
        one = [self(part) for _ in range(max(1, warm))][-1]
        inner = 1 if one >= 0.005 else min(20, 1 + int(0.005 / max(one, 1e-6)))
        out: list[float] = []
        while len(out) < runs and (not out or inner * (sum(out) + out[-1]) <= seconds):
            out.append(self(lambda: [part() for _ in range(inner)]) / inner)
        return out


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles (by linear interpolation) of n numbers; of one number, that number."""
    one, n = len(seconds) == 1, len(seconds)
    low, median, high = 3 * [*seconds] if one else statistics.quantiles(seconds, n=4, method="inclusive")
    return {"seconds": median, "seconds_low": low, "seconds_high": high, "n": n}


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """TimeoutError inside once the time is over (main thread only: it is an alarm)."""

    def late(*_: Any) -> None:
        raise TimeoutError

    if seconds <= 0:
        raise TimeoutError
    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@dataclass(frozen=True)
class Ceilings:
    """What a device gives at most.

    Attributes:
        flops: FLOP/s of one large product in the base's dtype.
        bytes: bytes/s of one large copy, read and written ones alike.
        fp8: FLOP/s of one large product in fp8; None where that was not measured.
    """

    flops: float
    bytes: float
    fp8: float | None = None


def gemm_ceiling(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, clock: Clock | None = None, *, fp8: bool = False
) -> float:
    """FLOP/s of one large product, what shares refer to; with `fp8` of numbers that are in fp8 already."""
    n, clock = 8192 if device.type == "cuda" else 1024, clock or Clock(device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in "ab")
    if fp8:
        states, (weight, scale) = in_fp8(a), in_fp8(b)
        return 2 * n**3 / clock.median(lambda: scaled_product(states, weight, None, scale), warm=2, runs=10)
    return 2 * n**3 / clock.median(lambda: a @ b, warm=2, runs=10)


def ceilings(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> Ceilings:
    """All of them, measured now; that of fp8 if asked for and on a card (elsewhere such products are plain ones)."""
    size = 1 << 30 if device.type == "cuda" else 1 << 28
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = Clock(device).median(lambda: target.copy_(source), warm=2, runs=10)
    own = gemm_ceiling(device, fp8=True) if fp8 and device.type == "cuda" else None
    return Ceilings(gemm_ceiling(device, dtype), 2 * size / seconds, own)


def forget_peak(device: torch.device) -> None:
    """From now on `peak_gib` looks at what comes (a process's own peak cannot be forgotten)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Most memory that tensors took on a card; on the CPU most that the process ever had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**30 if sys.platform == "darwin" else 2**20)
