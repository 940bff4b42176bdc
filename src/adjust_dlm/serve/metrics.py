"""What /metrics tells Prometheus, and the log; a registry for each server, so that several live in one process."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from adjust_dlm.serve.engine import Engine
from adjust_dlm.serve.work import Finished

LOG_SECONDS = 10.0  # between lines of throughput
logger = logging.getLogger(__name__)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)


class Metrics:
    """Counters and histograms of one server, and what its engine says when it is asked.

    Attributes:
        paths: that get a label of their own; strangers share one.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.paths, registry = engine, set[str](), CollectorRegistry()
        self.rows_done = self.tokens_done = 0
        self.registry = registry
        registry.register(self)
        counter = functools.partial(Counter, registry=registry)
        histogram = functools.partial(Histogram, registry=registry, buckets=_SECONDS)
        self.requests = counter("adjust_requests", "Requests by path and status.", ["path", "status"])
        self.seconds = histogram("adjust_request_seconds", "From request to last byte.", ["path"])
        self.queued = histogram("adjust_queue_seconds", "Of rows, before their first round.")
        self.decoding = histogram("adjust_row_seconds", "Of rows, from request to last token.")
        self.tokens = counter("adjust_tokens", "Tokens by kind.", ["kind"])

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """What the registry asks of its collectors."""
        engine, done, held = self.engine, self.engine.done, self.engine.held
        yield GaugeMetricFamily("adjust_queue_rows", "Rows that wait.", value=engine.waiting)
        yield GaugeMetricFamily("adjust_running_rows", "Rows that are decoded.", value=engine.running)
        yield GaugeMetricFamily("adjust_draining", "1 while new requests are refused.", value=int(engine.draining))
        yield CounterMetricFamily("adjust_rounds", "Rounds of batches.", value=done.rounds)
        for kind in ("base", "sampler", "partner"):
            calls = getattr(done, f"{kind}_calls")
            yield CounterMetricFamily(f"adjust_{kind}_passes", f"Passes of the {kind} over batches.", value=calls)
        yield GaugeMetricFamily("adjust_captured_shapes", "Shapes of batches with buffers.", value=held.shapes)
        yield GaugeMetricFamily("adjust_captured_functions", "Captured functions at hand.", value=held.functions)
        yield CounterMetricFamily("adjust_captures", "Functions captured, dropped ones included.", value=held.captures)
        memory = GaugeMetricFamily("adjust_captured_bytes", "Device memory of the fast form.", labels=["kind"])
        memory.add_metric(["buffers"], held.buffer_bytes)
        memory.add_metric(["graphs"], held.graph_bytes)
        yield memory

    async def log(self) -> None:
        """A line of throughput every `LOG_SECONDS` in which something ran; ends when it is cancelled."""
        while True:
            rows, tokens = self.rows_done, self.tokens_done
            await asyncio.sleep(LOG_SECONDS)
            rows, tokens = self.rows_done - rows, self.tokens_done - tokens
            if rows or self.engine.running or self.engine.waiting:
                rate, now = tokens / LOG_SECONDS, (self.engine.running, self.engine.waiting)
                logger.info("%.1f tokens/s in %d rows that ended; %d run, %d wait", rate, rows, *now)

    def request(self, path: str, status: int, seconds: float) -> None:
        """A request is over."""
        label = path if path in self.paths else "other"
        self.requests.labels(label, str(status)).inc()
        self.seconds.labels(label).observe(seconds)
        logger.debug("%s: %d in %.3f s", path, status, seconds)

    def row(self, event: Finished) -> None:
        """A row is over."""
        self.queued.observe(event.queued)
        self.decoding.observe(event.seconds)
        self.tokens.labels("completion").inc(event.tokens)
        self.rows_done, self.tokens_done = self.rows_done + 1, self.tokens_done + event.tokens
