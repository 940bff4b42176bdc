"""A lane: rows with the same decoder and settings, decoded as one batch, a round at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch

from adjust_dlm.decoders import Plan
from adjust_dlm.decoders.rows import RoundCanvas, join, take
from adjust_dlm.serve.work import Commit, Cost, Failed, Finished, Progress, Row
from adjust_dlm.types import InputError

logger = logging.getLogger(__name__)
_CALLS = ("rounds_B", "base_calls_B", "sampler_calls_B", "partner_calls_B")


class Lane:
    """Rows that can share a base pass.

    Attributes:
        rows: in the order of the canvas; never empty.
        canvas: theirs.
        turn: when it was last served; the engine serves the smallest.
    """

    def __init__(
        self, plan: Plan, row: Row, turn: int, *, chance: bool, play: Callable[[RoundCanvas], None] | None = None
    ) -> None:
        """A lane with its first row.

        Args:
            plan: the decoder and its settings.
            row: which gives the lane its kind.
            turn: see above.
            chance: note with what probability tokens are drawn.
            play: plays one round as the plan's decoder does; by default that decoder itself.

        Raises:
            InputError: the row does not fit the base.
        """
        self.plan, self.turn, self._chance, self._play = plan, turn, chance, play
        self.rows, self.canvas = [row], self._canvas(row)

    def _canvas(self, row: Row) -> RoundCanvas:
        spec = row.spec
        canvas = RoundCanvas(
            self.plan.base, [spec.ids], self.plan.config, rows=[spec.row], seeds=[spec.seed], new=[spec.new]
        )
        if self._chance:
            canvas.chance_BL = torch.full(canvas.tokens_BL.shape, torch.nan, device=canvas.tokens_BL.device)
        return canvas

    def fits(self, row: Row, most_tokens: int) -> bool:
        """Whether the padded batch stays within bounds with one more row."""
        longest = max(row.length, self.canvas.tokens_BL.shape[1])
        return (len(self.rows) + 1) * longest <= most_tokens

    def add(self, row: Row) -> None:
        """One more row, between rounds. Raises InputError if it does not fit the base."""
        self.canvas = join([self.canvas, self._canvas(row)])
        self.rows.append(row)

    def drop_over(self) -> None:
        """Rows that nobody waits for leave."""
        self._keep([b for b, row in enumerate(self.rows) if not row.ticket.over])

    def _keep(self, kept: list[int]) -> None:
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
        before = take(self.canvas, range(len(self.rows)))
        try:
            self._round(self.canvas)
        except Exception as error:
            before = self._one_by_one(before, error)
        if not self.rows:
            return Cost(0, 0, 0, 0)
        old, new = _calls(before), _calls(self.canvas)
        self._report(before.commits_B.tolist())
        return Cost(*(max(b - a for a, b in zip(*pair, strict=True)) for pair in zip(old, new, strict=True)))

    @torch.no_grad()
    def _round(self, canvas: RoundCanvas) -> None:
        if self._play is None:
            canvas.play(self.plan.run)
        else:
            self._play(canvas)

    def _one_by_one(self, before: RoundCanvas, error: Exception) -> RoundCanvas:
        """Plays the round for each row alone; returns the canvas of the surviving rows before it."""
        if len(self.rows) > 1:
            logger.warning("a batch of %d rows failed (%s); each is tried alone", len(self.rows), error)
        kept, parts = [], []
        for b, row in enumerate(self.rows):
            part = take(before, [b])
            try:
                if len(self.rows) == 1:
                    raise error
                self._round(part)
            except Exception as own:
                if not isinstance(own, InputError):
                    logger.exception("a request failed")
                row.ticket.tell(Failed(own))
            else:
                kept.append(b)
                parts.append(part)
        self.rows = [self.rows[b] for b in kept]
        if parts:
            self.canvas = join(parts)
        return take(before, kept)

    def _report(self, commits_before: list[int]) -> None:
        """Tells every row's client what is new; rows that are over leave."""
        canvas = self.canvas
        tokens, order, masked = (part.tolist() for part in (canvas.tokens_BL, canvas.order_BL, canvas.masked_BL))
        chance = None if canvas.chance_BL is None else canvas.chance_BL.tolist()
        costs = [Cost(*calls) for calls in zip(*_calls(canvas), strict=True)]
        for b, row in enumerate(self.rows):
            first = len(tokens[b]) - row.length
            fresh = sorted((n, i) for i, n in enumerate(order[b]) if n >= commits_before[b])
            commits = tuple(
                Commit(i - first, tokens[b][i], n, None if chance is None else _number(chance[b][i])) for n, i in fresh
            )
            try:
                _tell(row, tokens[b][first:], masked[b][first:], commits, costs[b])
            except Exception as error:  # text that cannot be decoded
                logger.exception("a request failed")
                row.ticket.tell(Failed(error))
        self._keep([b for b, row in enumerate(self.rows) if row.writer.reason is None and not row.ticket.over])


def _calls(canvas: RoundCanvas) -> list[list[int]]:
    return [getattr(canvas, name).tolist() for name in _CALLS]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _tell(row: Row, ids: list[int], masked: list[bool], commits: tuple[Commit, ...], cost: Cost) -> None:
    new = len(row.spec.ids)
    done = not any(masked)
    left = next((i for i in range(new, len(ids)) if masked[i]), len(ids))
    text = row.writer.feed(ids[new:left], done=done)
    row.ticket.tell(Progress(index=row.index, text=text, commits=commits, cost=cost))
    if row.writer.reason is not None:
        started = row.ticket.started
        row.ticket.tell(
            Finished(
                index=row.index, text=row.writer.text, reason=row.writer.reason, tokens=row.writer.tokens, ids=ids,
                cost=cost, seconds=time.monotonic() - started, queued=(row.first_round or started) - started,
            )
        )  # fmt: skip
