"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adjust_dlm.serve.text import FinishReason, Writer
from adjust_dlm.types import DecodeConfig


@dataclass(frozen=True, kw_only=True)
class RowSpec:
    """One row of a request: what is given, and what fixes its random numbers.

    Attributes:
        ids: token ids; masks among them are filled in.
        new: masks behind them.
        seed, row: as in `decode(config=..., rows=...)`: the row comes out as it would there.
    """

    ids: list[int]
    new: int
    seed: int
    row: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """A request. All rows share decoder and settings.

    Attributes:
        rows: one for each choice.
        decoder: a name in `DECODERS`.
        config: settings; seed and max_new_tokens are those of the rows.
        options: settings that only this decoder has.
        stops: stop strings; a row is over once its finished text holds one.
        chance: report with what probability each token was drawn.
        quiet: nobody looks at what happens before a row's end: no `Progress` is told.
    """

    rows: tuple[RowSpec, ...]
    decoder: str
    config: DecodeConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    chance: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Commit:
    """A position got its token.

    Attributes:
        position: counted from the row's first token.
        token: its id.
        order: commit number in the row, from 0.
        chance: probability that the token was drawn with; None where it is not known.
    """

    position: int
    token: int
    order: int
    chance: float | None


class Cost(NamedTuple):
    """What a row has cost so far; see `DecodeResult`."""

    rounds: int = 0
    base_calls: int = 0
    sampler_calls: int = 0
    partner_calls: int = 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """After a round: what is new in a row.

    Attributes:
        index: of the row in the request.
        text: what was added to the finished left part.
        commits: of this round, in order.
        cost: of all rounds.
    """

    index: int
    text: str
    commits: tuple[Commit, ...]
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A row is over.

    Attributes:
        index: of the row in the request.
        text: all of it, cut at end tokens and stop strings.
        reason: stop or length.
        tokens: of the text.
        ids: the whole canvas without pads; masks are left in it where a stop string ended the row early.
        cost: of all rounds.
        seconds: since the request came.
        queued: of these, before its first round.
    """

    index: int
    text: str
    reason: FinishReason
    tokens: int
    ids: list[int]
    cost: Cost
    seconds: float
    queued: float


Event = Progress | Finished | BaseException  # an exception: the whole request is over, and has no answer


class Ticket:
    """A request on its way.

    Attributes:
        live: rows that are not finished.
        over: nobody waits for it any more. Any thread may set it: nothing is reported after that, and its rows leave
            before the next round.
        deadline: when it is given up, by `time.monotonic`.
    """

    def __init__(self, work: Work, sink: Callable[[Event], object], seconds: float) -> None:
        """`sink` is called from the engine's thread with every event."""
        self.work, self._sink = work, sink
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self.live, self.over = len(work.rows), False

    def tell(self, event: Event) -> None:
        """Reports; the last row's end and any failure are the last word."""
        if self.over:
            return
        self.live -= isinstance(event, Finished)
        if isinstance(event, BaseException) or self.live == 0:
            self.over = True
        try:
            self._sink(event)
        except Exception:  # a loop that is closed: the client is gone
            self.over = True


@dataclass
class Row:
    """A row in the queue or in a lane.

    Attributes:
        ticket, spec, index: where it belongs.
        key: what rows of a lane have in common.
        writer: of its text.
        first_round: when that began.
        cost: of all rounds.
        commits: so far.
    """

    ticket: Ticket
    spec: RowSpec
    index: int
    key: Hashable
    writer: Writer
    first_round: float | None = None
    cost: Cost = field(default_factory=Cost)
    commits: int = 0

    @property
    def length(self) -> int:
        """Tokens of its canvas."""
        return len(self.spec.ids) + self.spec.new
