"""How far a long run is: log lines without a terminal, a bar with one."""

import io
import logging
import sys

import pytest

from adjust_dlm import cli, progress
from adjust_dlm.progress import Bar


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_line_every_thirty_seconds_with_the_time_left(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="adjust_dlm")
    with Bar("train") as bar:
        for second in range(91):
            clock[0] = 100.0 + second
            bar.show(0.5 + second / 400, f"loss {second}")  # resumed at a half; 200 seconds are left from there
    assert [record.getMessage() for record in caplog.records] == [
        "train: loss 30, 57 %, 2.8 min left",
        "train: loss 60, 65 %, 2.3 min left",
        "train: loss 90, 72 %, 1.8 min left",
    ]  # fmt: skip
    caplog.clear()
    with Bar("train", enabled=False) as quiet:
        clock[0] += 1000
        quiet.show(0.5)
    with Bar("eval") as still:
        still.show(0.25)
        clock[0] += 31
        still.show(0.25)  # nothing moved: no time is promised
    assert [record.getMessage() for record in caplog.records] == ["eval, 25 %"]


def test_in_a_terminal_a_bar_is_drawn_and_goes_away_and_log_lines_stand_above_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    logger, handler = logging.getLogger("adjust_dlm"), cli._log_to_stderr(False)
    try:
        with Bar("adapt") as bar:
            bar.show(0.25, "loss 1.5")
            assert bar.bar is not None
            bar.bar.refresh()
            logger.info("hello")
        logger.info("after")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    drawn = terminal.getvalue()
    assert "adapt: loss 1.5" in drawn and "25%" in drawn and "adjust: hello" in drawn
    assert drawn.endswith("adjust: after\n")
