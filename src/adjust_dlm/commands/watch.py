"""`adjust generate --watch`: the canvas filling in, live in the terminal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from torch import Tensor

    from adjust_dlm.bases import Base
    from adjust_dlm.decoders import Canvas

BLOCK, PLAIN_BLOCK = "\u2591\u2591\u2591 ", "... "  # a masked position; the second where the terminal knows ASCII only
MASKED_STYLE, FRESH_STYLE, HEAD_STYLE = "dim", "bold black on green", "dim italic"


class Watch(Live):
    """A hook for `decode(watch=...)` and the context that owns the screen while a batch is decoded.

    Args:
        base: turns ids into text.
        console: where to draw; the terminal behind stdout by default.
    """

    def __init__(self, base: Base, console: Console | None = None) -> None:
        """Draws nothing yet."""
        super().__init__(console=console or Console(), auto_refresh=False, vertical_overflow="visible")
        self.base = base
        self.block = PLAIN_BLOCK if self.console.options.ascii_only else BLOCK
        self.seen_B: Tensor | None = None

    def __call__(self, canvas: Canvas) -> None:
        """Draws the canvas; tokens committed since the last frame stand out."""
        self.update(self.frame(canvas), refresh=True)
        self.seen_B = canvas.commits_B.clone()

    def frame(self, canvas: Canvas) -> Group:
        """One text per row of the batch, under a line that counts its passes."""
        seen_B = canvas.commits_B * 0 if self.seen_B is None else self.seen_B
        fresh_BL = canvas.order_BL >= seen_B[:, None]
        parts = []
        for b, number in enumerate(canvas.rows_B.tolist()):
            row = f"row {number}: " if len(canvas.rows_B) > 1 else ""
            passes = f"{int(canvas.base_calls_B[b])} base passes, {int(canvas.sampler_calls_B[b])} sampler passes"
            head = Text(f"{row}{int(canvas.commits_B[b])} tokens, {passes}", style=HEAD_STYLE)
            parts += [head, self._row(canvas, b, fresh_BL[b].tolist())]
        return Group(*parts)

    def _row(self, canvas: Canvas, b: int, fresh_L: list[bool]) -> Text:
        """The new positions of row b; neighbours of one style are decoded together (a character may be two tokens)."""
        first = canvas.tokens_BL.shape[1] - canvas.config.max_new_tokens
        tokens, masked, order = (x[b].tolist() for x in (canvas.tokens_BL, canvas.masked_BL, canvas.order_BL))
        text = Text()
        new = [i for i in range(first, len(tokens)) if masked[i] or order[i] >= 0]  # no filler behind the end
        for style, run in groupby(new, lambda i: MASKED_STYLE if masked[i] else FRESH_STYLE if fresh_L[i] else ""):
            ids = [tokens[i] for i in run]
            if style == MASKED_STYLE:
                text.append(self.block * len(ids), style)
            elif self.base.tokenizer is None:
                text.append("".join(f"{token} " for token in ids), style)
            else:
                text.append(self.base.tokenizer.decode(ids), style)
        return text
