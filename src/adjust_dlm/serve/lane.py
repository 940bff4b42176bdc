"""A lane: rows with the same decoder and settings, decoded as one batch, a round at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from adjust_dlm.decoders import Plan
from adjust_dlm.decoders.machinery.rows import RoundCanvas, before, join, take
from adjust_dlm.options import CANVASES
from adjust_dlm.serve.work import Commit, Cost, Finished, Progress, Row
from adjust_dlm.types import InputError

logger = logging.getLogger(__name__)
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_COUNTS = ("commits_B", "rounds_B", "base_calls_B", "sampler_calls_B", "partner_calls_B")


class Lane:
    """Rows that can share a base pass.

    Attributes:
        rows: in the order of the canvas; never empty.
        canvas: theirs, but for those that came since `settle`.
    """

    def __init__(
        self, plan: Plan, row: Row, *, chance: bool, play: Callable[[RoundCanvas], None] | None = None
    ) -> None:
        """A lane with its first row; `chance` notes with what probability tokens are drawn.

        `play` plays one round as the plan's decoder does, and leaves the canvas as it was if it fails; by default that
        decoder itself.

        Raises:
            InputError: the row does not fit the base.
        """
        self.plan, self._chance, self._play = plan, chance, play
        self.rows, self.canvas = [row], self._canvas(row)
        self._coming: list[RoundCanvas] = []

    def _canvas(self, row: Row) -> RoundCanvas:
        spec = row.spec
        canvas = RoundCanvas(
            self.plan.base, [spec.ids], self.plan.config, rows=[spec.row], seeds=[spec.seed], new=[spec.new]
        )
        if self._chance:
            canvas.chance_BL = torch.full(canvas.tokens_BL.shape, torch.nan, device=canvas.tokens_BL.device)
        return canvas

    def fits(self, row: Row, most_tokens: int) -> bool:
        """Whether the padded batch stays within bounds with one more row; every canvas that a pass looks at counts."""
        longest = max(one.length for one in (row, *self.rows))
        many = max((getattr(own, name, 1) for own in self.plan.own for name in CANVASES), default=1)
        return (len(self.rows) + 1) * longest * many <= most_tokens

    def add(self, row: Row) -> None:
        """One more row, between rounds; `settle` comes next. Raises InputError if it does not fit the base."""
        self._coming.append(self._canvas(row))
        self.rows.append(row)

    def settle(self) -> None:
        """Rows that were added join the canvas; if that fails, for want of memory, they fail, and the others go on."""
        coming, self._coming = self._coming, []
        if not coming:
            return
        try:
            self.canvas = join([self.canvas, *coming])
        except BaseException as error:
            logger.exception("%d rows could not come in", len(coming))
            for row in self.rows[-len(coming) :]:
                row.ticket.tell(error)
            del self.rows[-len(coming) :]

    def drop_over(self) -> None:
        """Rows that are finished, or that nobody waits for, leave."""
        kept = [b for b, row in enumerate(self.rows) if row.writer.reason is None and not row.ticket.over]
        if len(kept) < len(self.rows):
            self.rows = [self.rows[b] for b in kept]
            if kept:
                self.canvas = take(self.canvas, kept)

    def play(self) -> Cost:
        """One round; every row reports and finished rows leave. Returns the passes that the batch took.

        A row that cannot be decoded fails alone: the round is repeated row by row, from the canvas before it.
        """
        now = time.monotonic()
        for row in self.rows:
            row.first_round = row.first_round or now
        earlier = self.canvas if self._play else before(self.canvas)
        try:
            self._round(self.canvas)
        except BaseException as error:
            self._one_by_one(earlier, error)
        return self._report() if self.rows else Cost()

    @torch.no_grad()
    def _round(self, canvas: RoundCanvas) -> None:
        if self._play is None:
            canvas.play(self.plan.run)
        else:
            self._play(canvas)

    def _one_by_one(self, before: RoundCanvas, error: BaseException) -> None:
        """Plays the round for each row alone; those that fail leave."""
        if len(self.rows) > 1:
            logger.warning("a batch of %d rows failed (%s); each is tried alone", len(self.rows), error)
        kept, parts = [], []
        for b, row in enumerate(self.rows):
            part = take(before, [b])
            try:
                if len(self.rows) == 1:
                    raise error
                self._round(part)
            except BaseException as own:
                if not isinstance(own, InputError):
                    logger.exception("a request failed")
                row.ticket.tell(own)
            else:
                kept.append(b)
                parts.append(part)
        self.rows = [self.rows[b] for b in kept]
        if parts:
            self.canvas = join(parts)

    def _report(self) -> Cost:
        """Tells every row's client what is new; rows that are over leave. Returns the passes of the batch."""
        canvas, length = self.canvas, self.canvas.tokens_BL.shape[1]
        counts = [getattr(canvas, name)[:, None] for name in _COUNTS]
        facts_BX = torch.cat([canvas.tokens_BL, canvas.order_BL, canvas.masked_BL, *counts], 1).cpu()
        columns = facts_BX[:, : 3 * length].unflatten(1, (3, length)).numpy()
        chance = None if canvas.chance_BL is None else canvas.chance_BL.cpu().numpy()
        spent = []
        for b, (row, (commits, *calls)) in enumerate(zip(self.rows, facts_BX[:, 3 * length :].tolist(), strict=True)):
            own = slice(length - row.length, length)
            tokens, order, masked = columns[b, :, own]
            before, row.cost = row.cost, Cost(*calls)
            spent.append([new - old for new, old in zip(row.cost, before, strict=True)])
            quiet, chances = row.ticket.work.quiet, None if chance is None else chance[b, own]
            fresh = () if quiet else _fresh(tokens, order, row.commits, chances)
            row.commits = commits
            try:
                _tell(row, tokens, masked, fresh)
            except BaseException as error:  # text that cannot be decoded
                logger.exception("a request failed")
                row.ticket.tell(error)
        self.drop_over()
        return Cost(*map(max, zip(*spent, strict=True)))


def _fresh(tokens: Ints, order: Ints, before: int, chance: Floats | None) -> tuple[Commit, ...]:
    """Commits of the round, in order; `before` were there already."""
    at = np.flatnonzero(order >= before)
    at = at[order[at].argsort()]
    known = [math.nan] * len(at) if chance is None else chance[at].tolist()
    chances = [None if math.isnan(value) else value for value in known]
    return tuple(map(Commit, at.tolist(), tokens[at].tolist(), order[at].tolist(), chances))


def _tell(row: Row, tokens: Ints, masked: Ints, commits: tuple[Commit, ...]) -> None:
    new, open_ = len(row.spec.ids), np.flatnonzero(masked)
    done = not len(open_)
    left = next((i for i in open_.tolist() if i >= new), len(tokens))
    text = row.writer.feed(tokens[new:left].tolist(), done=done)
    if not row.ticket.work.quiet:
        row.ticket.tell(Progress(index=row.index, text=text, commits=commits, cost=row.cost))
    if row.writer.reason is not None:
        started = row.ticket.started
        row.ticket.tell(
            Finished(
                index=row.index, text=row.writer.text, reason=row.writer.reason, tokens=row.writer.tokens,
                ids=tokens.tolist(), cost=row.cost, seconds=time.monotonic() - started,
                queued=(row.first_round or started) - started,
            )
        )  # fmt: skip
