"""`--watch`: what the terminal shows after every commit."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from adjust_dlm.commands.generate import BLOCK, FRESH_STYLE, MASKED_STYLE, PLAIN_BLOCK, Watch
from adjust_dlm.decoders import Canvas, decode
from adjust_dlm.types import DecodeConfig
from helpers import writer

Spans = list[tuple[str, str]]


class Recorder(Watch):
    """Keeps the styled rows of every frame."""

    def __call__(self, canvas: Canvas) -> None:
        frame = self.frame(canvas)
        rows = list(frame.renderables[1::2])
        self.rows = [*getattr(self, "rows", []), [[(r.plain[s.start : s.end], s.style) for s in r.spans] for r in rows]]
        self.heads = [part.plain for part in frame.renderables[0::2]]
        super().__call__(canvas)


def console(encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return Console(file=file, force_terminal=True, width=80)


def test_every_commit_stands_out_once() -> None:
    base = writer([3, 5, 4], certainty=[10.0, 30.0, 20.0])  # reveals positions 1, 2, 0
    with Recorder(base, console()) as watch:
        decode(base, [[]], DecodeConfig(max_new_tokens=3, temperature=0), decoder="joint", watch=watch)
    masked, fresh = (BLOCK, MASKED_STYLE), FRESH_STYLE
    frames: list[Spans] = [rows[0] for rows in watch.rows]
    assert frames == [
        [masked, ("5 ", fresh), masked],
        [masked, ("4 ", fresh)],  # 5 is there without a style
        [("3 ", fresh)],
    ]
    assert watch.heads == ["3 tokens, 3 base passes, 0 sampler passes"]


def test_parallel_commits_of_one_round_stand_out_together() -> None:
    base = writer([3, 5, 4], certainty=[10.0, 30.0, 20.0])
    config = DecodeConfig(max_new_tokens=3, temperature=0, tokens_per_step=2)
    with Recorder(base, console()) as watch:
        decode(base, [[], []], config, decoder="parallel", rows=[4, 7], watch=watch)
    for b in range(2):
        assert [rows[b] for rows in watch.rows] == [
            [(BLOCK, MASKED_STYLE), ("5 4 ", FRESH_STYLE)],
            [("3 ", FRESH_STYLE)],
        ]
    assert watch.heads[1] == "row 7: 3 tokens, 2 base passes, 0 sampler passes"


def test_filler_behind_the_end_and_the_prompt_are_not_shown() -> None:
    base = writer([6, 1, 4, 4], certainty=[9.0, 30.0, 20.0, 5.0], end_ids=(1,))
    config = DecodeConfig(max_new_tokens=3, temperature=0)
    with Recorder(base, console()) as watch:
        decode(base, [[6]], config, decoder="joint", watch=watch)
    assert watch.rows[-1] == [[]]  # the end token closes the row: two positions stay unwritten


def test_a_plain_terminal_gets_ascii_and_text_cannot_mark_up() -> None:
    base = writer([3, 5], certainty=[10.0, 30.0])
    plain = console("ascii")
    with Watch(base, plain) as watch:
        decode(base, [[]], DecodeConfig(max_new_tokens=2, temperature=0), decoder="joint", watch=watch)
    assert isinstance(plain.file, io.TextIOWrapper)
    assert PLAIN_BLOCK.strip() in plain.file.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


def test_neighbours_are_decoded_together() -> None:
    """A character of two tokens is whole once both are there."""

    class Halves:
        def decode(self, ids: list[int]) -> str:
            return {(3, 5): "\u00e9"}.get(tuple(ids), "\ufffd")

    base = writer([3, 5], certainty=[30.0, 10.0])
    base.tokenizer = Halves()
    config = DecodeConfig(max_new_tokens=2, temperature=0, tokens_per_step=2)
    with Recorder(base, console()) as watch:
        decode(base, [[]], config, decoder="parallel", watch=watch)
    assert watch.rows == [[[("\u00e9", FRESH_STYLE)]]]


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)


def terminal_text(*argv: str) -> tuple[str, str]:
    """What a command writes to a terminal of 80 columns, control codes included, and to stderr, which is none."""
    with terminal() as (ours, theirs):
        running = subprocess.Popen(
            [sys.executable, "-m", "adjust_dlm.cli", *argv], stdout=theirs, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"},
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:  # Linux: the other side is closed
                break
            if not block:
                break
            shown += block
        _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    return shown.decode(), err


def test_watch_in_a_real_terminal() -> None:
    shown, err = terminal_text("generate", "--base", "exact", "--max-new-tokens", "4", "--decoder", "joint")
    counts = re.findall(r"(\d) tokens?, (\d) base pass(?:es)?", shown)
    assert [counts[0], counts[-1]] == [("1", "1"), ("4", "4")]
    assert err.endswith("4 base passes, 0 sampler passes\n")
