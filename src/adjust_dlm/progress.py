"""How far a long run is: a bar on stderr with the time left, or, without a terminal, a log line every 30 seconds."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between log lines
logger = logging.getLogger(__name__)


class Bar:
    """A context; `show` may be called as often as one likes, and costs next to nothing.

    Args:
        title: what is going on.
        enabled: False on ranks that say nothing.
    """

    def __init__(self, title: str, *, enabled: bool = True) -> None:
        """Nothing is drawn before the context is entered."""
        self.title, self.enabled = title, enabled
        live = enabled and sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True) if live else None
        self.task = None if self.bar is None else self.bar.add_task(title, total=1.0)
        self.began = self.said = time.monotonic()
        self.first: float | None = None

    def __enter__(self) -> Bar:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, share: float, words: str = "") -> None:
        """`share` of the run is done, from 0 to 1; `words` are the newest figures."""
        if not self.enabled:
            return
        text = f"{self.title}: {words}" if words else self.title
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=share, description=text)
            return
        now = time.monotonic()
        if self.first is None:  # what a resumed run had done before says nothing about its speed
            self.first, self.began = share, now
        if now - self.said >= EVERY:
            self.said, done = now, share - self.first
            left = f", {(1 - share) * (now - self.began) / done / 60:.1f} min left" if done > 0 else ""
            logger.info("%s, %.0f %%%s", text, 100 * share, left)
