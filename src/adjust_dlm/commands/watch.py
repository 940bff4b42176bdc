"""`adjust generate --watch`: the canvas filling in, live in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from torch import Tensor

    from adjust_dlm.bases import Base
    from adjust_dlm.decoders import Canvas

BLOCK, PLAIN_BLOCK = "\u2591\u2591\u2591 ", "... "  # a masked position; the second where the terminal knows ASCII only
MASKED_STYLE, FRESH_STYLE, HEAD_STYLE = "dim", "bold black on green", "dim italic"


class Watch:
    """A hook for `decode(watch=...)` and the context that owns the screen while a batch is decoded.

    Args:
        base: turns ids into text.
        console: where to draw; the terminal behind stdout by default.
    """

    def __init__(self, base: Base, console: Console | None = None) -> None:
        """Draws nothing yet."""
        self.base = base
        self.console = console or Console()
        self.block = PLAIN_BLOCK if self.console.options.ascii_only else BLOCK
        self.live = Live(console=self.console, auto_refresh=False, vertical_overflow="visible")
        self.seen_B: Tensor | None = None

    def __enter__(self) -> Watch:
        """Starts drawing."""
        self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Leaves the last frame on the screen."""
        self.live.stop()

    def __call__(self, canvas: Canvas) -> None:
        """Draws the canvas; tokens committed since the last frame stand out."""
        self.live.update(self.frame(canvas), refresh=True)
        self.seen_B = canvas.commits_B.clone()

    def frame(self, canvas: Canvas) -> Group:
        """One text per row of the batch, under a line that counts its passes."""
        seen_B = canvas.commits_B * 0 if self.seen_B is None else self.seen_B
        fresh_BL = canvas.order_BL >= seen_B[:, None]
        several = len(canvas.rows_B) > 1
        parts = []
        for b in range(len(canvas.rows_B)):
            parts += [self._head(canvas, b, several), self._row(canvas, b, fresh_BL[b].tolist())]
        return Group(*parts)

    def _head(self, canvas: Canvas, b: int, several: bool) -> Text:
        row = f"row {int(canvas.rows_B[b])}: " if several else ""
        passes = f"{int(canvas.base_calls_B[b])} base passes, {int(canvas.sampler_calls_B[b])} sampler passes"
        return Text(f"{row}{int(canvas.commits_B[b])} tokens, {passes}", style=HEAD_STYLE)

    def _row(self, canvas: Canvas, b: int, fresh_L: list[bool]) -> Text:
        """The new positions of row b; neighbours of one style are decoded together (a character may be two tokens)."""
        first = canvas.tokens_BL.shape[1] - canvas.config.max_new_tokens
        tokens, masked, order = (x[b].tolist() for x in (canvas.tokens_BL, canvas.masked_BL, canvas.order_BL))
        text = Text()
        run: list[tuple[int, str]] = []
        for i in range(first, len(tokens)):
            style = MASKED_STYLE if masked[i] else FRESH_STYLE if fresh_L[i] else ""
            if not masked[i] and order[i] < 0:
                continue  # filler behind the end
            if run and (masked[i] or run[0][1] != style):
                text.append(*self._piece(run))
                run = []
            if masked[i]:
                text.append(self.block, style)
            else:
                run.append((tokens[i], style))
        if run:
            text.append(*self._piece(run))
        return text

    def _piece(self, run: list[tuple[int, str]]) -> tuple[str, str]:
        ids, style = [token for token, _ in run], run[0][1]
        if self.base.tokenizer is None:
            return "".join(f"{token} " for token in ids), style
        return self.base.tokenizer.decode(ids), style
