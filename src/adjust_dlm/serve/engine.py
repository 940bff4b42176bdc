"""The engine: one thread owns the model; requests join and leave between rounds.

Rows with the same decoder and settings share a lane; lanes take turns, a round each. A row's tokens are a function of
its prompt, seed and row id alone (see `sampling.uniform`), so they are what `decode` gives for it, whoever its
neighbours are. Waiting rows come in strictly in the order in which they were asked for, so none starves.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from adjust_dlm.bases import Base, Partner
from adjust_dlm.decoders import Plan, make_plan
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.fast.rounds import Held, Rounds
from adjust_dlm.sampler import Sampler
from adjust_dlm.serve.errors import ApiError
from adjust_dlm.serve.guard import Limits as Limits
from adjust_dlm.serve.lane import Lane
from adjust_dlm.serve.text import Words, Writer, ordinary
from adjust_dlm.serve.work import Cost, Event, Row, Ticket, Work
from adjust_dlm.types import DecodeConfig, InputError, require
from adjust_dlm.variants import DECODERS

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Engine:
    """Decodes requests together.

    Attributes:
        words: the base's tokenizer.
        done: rounds and passes so far, over whole batches.
        decoders: names of what it can run: rows may come and go, and what they need is there.
        draining: set it to refuse new requests; what is there goes on.
    """

    def __init__(
        self, base: Base, *, sampler: Any = None, partner: Partner | None = None, limits: Limits | None = None,
        eager: bool | None = None,
    ) -> None:  # fmt: skip
        """Starts nothing; see `start`. `eager` as in `decode`: rounds have a fast form where decoders have one."""
        self.base, self.sampler, self.partner = base, sampler, partner
        self.limits, self.words, self.done = limits or Limits(), Words(base), Cost()
        self.decoders = [
            name for name, entry in DECODERS.items()
            if entry.resumable and (sampler is not None or not entry.needs_sampler)
            and (partner is not None or not entry.needs_partner)
        ]  # fmt: skip
        self._rounds = self._fast_rounds(eager)
        self.draining = self._closing = self._ended = False
        self._wake = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lanes: dict[Hashable, Lane] = {}
        self._thread: threading.Thread | None = None

    def _fast_rounds(self, eager: bool | None) -> Rounds | None:
        if not fast.wanted(self.base, eager):
            return None
        reason = fast.why_not(self.base, "joint", DecodeConfig(), None, None)
        if reason is not None:
            fast.log_fallback(reason)
            return None
        sampler = self.sampler if isinstance(self.sampler, Sampler) else None
        return Rounds(self.base, sampler, tokens=self.limits.tokens)

    # Any thread ------------------------------------------------------------------------------------------------

    def plan(self, work: Work) -> Plan:
        """All of a request that can be refused before it waits.

        Raises:
            InputError: a decoder that is not served or lacks a helper, or settings that it does not take.
        """
        able = work.decoder in DECODERS and DECODERS[work.decoder].resumable
        require(able, f"decoder {work.decoder!r} is not served here; served are {', '.join(self.decoders)}")
        require(work.config.schedule == "exact", "reference schedules march in step; leave schedule at exact")
        most = self.limits.queue
        require(len(work.rows) <= most, f"{len(work.rows)} rows in one request; this server takes at most {most}")
        helpers = {"sampler": self.sampler, "partner": self.partner}
        plan = make_plan(self.base, work.config, decoder=work.decoder, **helpers, **work.options)
        plan.require_begun([spec.ids for spec in work.rows])
        return plan

    def submit(self, work: Work, sink: Callable[[Event], object]) -> Ticket:
        """Puts a request into the queue; its events go to `sink`, in the engine's thread.

        Raises:
            InputError: see `plan`.
            ApiError: the queue is full, or the server is shutting down.
        """
        self.plan(work)
        ticket, ends = Ticket(work, sink, self.limits.seconds), self.base.spec.end_ids
        settings = work.config.but(seed=0, max_new_tokens=1)  # rows share a pass if they differ in nothing else
        key = (work.decoder, settings, repr(sorted(work.options.items())), work.chance)
        rows = [
            Row(ticket, spec, index, key, Writer(self.words.decode, ends, work.stops, quiet=work.quiet))
            for index, spec in enumerate(work.rows)
        ]
        with self._wake:
            if self.draining or self._closing:
                raise _leaving()
            if len(self._waiting) + len(rows) > self.limits.queue:
                message = f"{len(self._waiting)} rows wait already and the queue takes {self.limits.queue}"
                raise ApiError(429, f"{message}; try again later", code="queue_full", headers={"retry-after": "1"})
            self._waiting.extend(rows)
            self._wake.notify()
        return ticket

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the engine's thread, between rounds: whatever else needs the device."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                raise _leaving()
            self._calls.append((function, future))
            self._wake.notify()
        return future

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Rows in lanes."""
        return sum(len(lane.rows) for lane in list(self._lanes.values()))

    @property
    def held(self) -> Held:
        """Buffers and captured functions of the fast form."""
        return Held() if self._rounds is None else self._rounds.held

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        with self._wake:
            return not (self._waiting or self._lanes or self._calls)

    @property
    def gone(self) -> bool:
        """The thread has died: nobody is answered any more."""
        return self._thread is not None and not self._thread.is_alive() and not self._ended

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._work, name="adjust-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives up whatever is left and ends the thread, after the present round."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._give_up(_leaving())  # for a thread that did not come to it

    # The engine's thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._waiting or self._lanes or self._calls)
                if self._closing:
                    break
            try:
                self.turn()
            except BaseException as error:  # a fault of ours: nobody may wait for ever, and the next request may work
                logger.exception("the engine failed")
                self._give_up(error)
        self._give_up(_leaving())
        self._ended = True

    def _give_up(self, error: BaseException) -> None:
        with self._wake:
            rows = [*self._waiting, *(row for lane in self._lanes.values() for row in lane.rows)]
            self._waiting.clear()
            self._lanes.clear()
            calls = list(self._calls)
            self._calls.clear()
        for row in rows:
            row.ticket.tell(error)
        for _, future in calls:
            future.set_exception(error)

    def turn(self) -> None:
        """Rows nobody waits for leave, waiting ones come in, and the lane that waited longest plays one round."""
        self._do_calls()
        self._drop()
        self._admit()
        for lane in self._lanes.values():
            lane.settle()
        if self._lanes:
            key = next(iter(self._lanes))  # the lane that was served last stands last
            with self._wake:
                lane = self._lanes[key] = self._lanes.pop(key)
            self.done = Cost(*map(operator.add, self.done, lane.play()))
            self._forget_empty()

    def _forget_empty(self) -> None:
        with self._wake:
            self._lanes = {key: lane for key, lane in self._lanes.items() if lane.rows}

    def _do_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(ordinary()(function)())
            except BaseException as error:
                future.set_exception(error)

    def _drop(self) -> None:
        now = time.monotonic()
        with self._wake:
            for row in [*self._waiting, *(row for lane in self._lanes.values() for row in lane.rows)]:
                if now > row.ticket.deadline:
                    message = f"not finished after {self.limits.seconds:g} s"
                    row.ticket.tell(ApiError(504, message, code="request_timeout"))
            if any(row.ticket.over for row in self._waiting):
                self._waiting = deque(row for row in self._waiting if not row.ticket.over)
        for lane in self._lanes.values():
            lane.drop_over()
        self._forget_empty()

    def _admit(self) -> None:
        """Lets rows in from the head of the queue as long as they fit; the first that does not holds the others."""
        while self.running < self.limits.rows:
            with self._wake:
                if not self._waiting:
                    return
                row = self._waiting[0]
                lane = self._lanes.get(row.key)
                if lane is not None and not lane.fits(row, self.limits.tokens):
                    return
            try:
                if lane is None:
                    self._lanes[row.key] = self._lane(row)
                else:
                    lane.add(row)
            except BaseException as error:
                if not isinstance(error, InputError):
                    logger.exception("a request failed")
                row.ticket.tell(error)
            with self._wake:  # only now: a row is always in one place or the other
                self._waiting.popleft()

    def _lane(self, row: Row) -> Lane:
        """A lane for the first row of its kind, whose rounds, or at least passes, are captured where they can be."""
        work, play = row.ticket.work, None
        plan = self.plan(work)
        if self._rounds is not None:
            reason = fast.why_not(plan.base, work.decoder, plan.config, self.sampler, None)
            if reason is None:
                own = plan.own[0] if plan.own else None
                play = functools.partial(self._rounds.play, decoder=work.decoder, options=own)
            elif plan.base.spec.block is not None:
                fast.log_fallback(reason)
            else:
                fast.log_fallback(f"{reason}; only passes are captured")
                base, sampler = self._rounds.passes(plan.base)
                helpers = {"sampler": sampler or self.sampler, "partner": self.partner}
                plan = make_plan(base, work.config, decoder=work.decoder, **helpers, **work.options)
        return Lane(plan, row, chance=work.chance, play=play)


def _leaving() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})
