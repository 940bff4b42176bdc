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

        Args:
            part: what to time.
            runs: batches at most.
            seconds: once they took this long, no further batch begins; there is always one.
            warm: runs that do not count, the last of which sizes the batches.
        """
        one = [self(part) for _ in range(max(1, warm))][-1]
        inner = 1 if one >= 0.005 else min(20, 1 + int(0.005 / max(one, 1e-6)))
        out: list[float] = []
        while len(out) < runs and (not out or inner * (sum(out) + out[-1]) <= seconds):
            out.append(self(lambda: [part() for _ in range(inner)]) / inner)
        return out


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of n numbers."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Quartiles by linear interpolation; of one number, that number."""
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0], 1)
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(median, low, high, len(numbers))


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


def gemm_ceiling(device: torch.device, dtype: torch.dtype = torch.bfloat16, clock: Clock | None = None) -> float:
    """FLOP/s of one large product: what shares of arithmetic refer to."""
    n = _large(device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in "ab")
    return 2 * n**3 / (clock or Clock(device)).median(lambda: a @ b, warm=2, runs=10)


def fp8_ceiling(device: torch.device, clock: Clock | None = None) -> float:
    """FLOP/s of one large product of numbers that are in fp8 already, with the scales of `bases.fp8`."""
    n = _large(device)
    a, (b, scale) = (in_fp8(torch.randn(n, n, device=device).bfloat16()) for _ in "ab")
    return 2 * n**3 / (clock or Clock(device)).median(lambda: scaled_product(a, b, None, scale), warm=2, runs=10)


def _large(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 1024


def ceilings(device: torch.device, dtype: torch.dtype, clock: Clock | None = None, *, fp8: bool = False) -> Ceilings:
    """All of them, measured now; that of fp8 if asked for and on a card (elsewhere such products are plain ones)."""
    size = 1 << 30 if device.type == "cuda" else 1 << 28
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = (clock or Clock(device)).median(lambda: target.copy_(source), warm=2, runs=10)
    own = fp8_ceiling(device, clock) if fp8 and device.type == "cuda" else None
    return Ceilings(gemm_ceiling(device, dtype, clock), 2 * size / seconds, own)


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
