"""`adjust compare` and `make demo`: columns that fill in, fair times, one sentence, and what to try next."""

import io
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from adjust_dlm import decoders
from adjust_dlm.commands import COMMANDS, compare, named
from adjust_dlm.commands.compare import Columns, CompareConfig, closing
from adjust_dlm.commands.generate import BLOCK, FRESH_STYLE, MASKED_STYLE
from adjust_dlm.commands.settings import parse
from adjust_dlm.decoders import decode
from adjust_dlm.types import DecodeConfig
from helpers import CORE, ROOT, writer
from test_cli import Cli, lines, registered, run, sampler, tiny  # noqa: F401 - fixtures
from test_watch import terminal_text

FLAGS = ("compare", "abc", "--base", "tiny", "--max-new-tokens", "8")
ENDING = " (tokens/s while decoding; loading and warm-up are not counted)."


def closed(*decoders: tuple[str, Sequence[str], float, float]) -> str:
    """The sentence for decoders with their texts, base passes and tokens/s."""
    rows = [
        {"decoder": name, "base_calls": passes, "tokens_per_second": speed, "samples": len(texts)}
        for name, texts, passes, speed in decoders
    ]
    return closing(rows, [[{"text": text} for text in texts] for _, texts, _, _ in decoders])


# The sentence --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decoders", "said"),
    [
        (
            [("joint", ["8."], 8, 20.0), ("parallel", ["x"], 4, 66.0), ("adjust", ["8."], 2, 42.0)],
            "joint took 8 base passes; parallel wrote another text, took 4 and was 3.3 times as fast; "
            "adjust wrote the same text, took 2 and was 2.1 times as fast",
        ),
        (
            [("joint", ["a", "b", "c"], 25 / 3, 20.0), ("adjust", ["a", "x", "c"], 7 / 3, 10.0)],
            "joint took 8.333 base passes a sample; "
            "adjust wrote the same text in 2 of 3 samples, took 2.333 and was only 0.5 times as fast",
        ),
        (
            [("joint", ["a"], 64, 20.0), ("parallel", ["b"], 1, 2468.0), ("adjust", ["a"], 1, 19.96)],
            "joint took 64 base passes; parallel wrote another text, took 1 and was 120 times as fast; "
            "adjust wrote the same text, took 1 and was as fast",
        ),
        (
            [("joint", [""], 1, 0.0), ("parallel", [""], 1, 0.0)],
            "joint took 1 base pass; parallel wrote the same text, took 1",
        ),
        (
            [("joint", ["a"], 4, 20.0), ("parallel", [""], 1, 0.0)],
            "joint took 4 base passes; parallel wrote another text, took 1",
        ),
    ],
)
def test_the_sentence(decoders: list[Any], said: str) -> None:
    assert closed(*decoders) == said + ENDING


def test_the_sentence_is_that_of_the_table_and_not_in_json(run: Cli, sampler: Path) -> None:  # noqa: F811
    code, out, _ = run(*FLAGS, "--sampler", sampler)
    said = " ".join(out[out.index("joint took") :].split())
    counts = [re.findall(r"[\d.]+", line) for line in out.splitlines() if re.search("base passes .|tokens/s .", line)]
    passes, speeds = counts[0], [float(speed) for speed in counts[1]]
    found = re.fullmatch(
        r"joint took (\d+) base passes; parallel wrote (another|the same) text, took (\d+) and was (?:only )?([\d.]+) "
        r"times as fast; adjust wrote (another|the same) text, took (\d+) and was (?:only )?([\d.]+) times as fast"
        + re.escape(ENDING),
        said,
    )
    assert code == 0 and found is not None, out
    assert [found[1], found[3], found[6]] == passes
    assert [float(found[4]), float(found[7])] == pytest.approx([speed / speeds[0] for speed in speeds[1:]], rel=0.06)
    rows = lines(run(*FLAGS, "--sampler", sampler, "--json")[1])  # JSON lines alone
    assert [row["decoder"] for row in rows] == ["joint", "parallel", "adjust"]
    same = ["the same" if row["text"] == rows[0]["text"] else "another" for row in rows[1:]]
    assert [found[2], found[5]] == same and [str(row["base_calls"]) for row in rows] == passes


# Columns and times ---------------------------------------------------------------------------------------------


def test_one_column_fills_in_after_the_other() -> None:
    base = writer([3, 5, 4], certainty=[10.0, 30.0, 20.0])  # reveals positions 1, 2, 0
    config = DecodeConfig(max_new_tokens=3, temperature=0, tokens_per_step=2)
    file = io.StringIO()
    frames: list[list[Any]] = []
    with Columns(base, ["joint", "parallel"], Console(file=file, force_terminal=True, width=80)) as columns:
        for name in ("joint", "parallel"):
            columns.begin(name)

            def watch(canvas: Any) -> None:
                columns(canvas)
                frames.append([list(column.renderables) for column in columns.columns.values()])

            decode(base, [[]], config, decoder=name, watch=watch)
    assert columns.transient and "joint" in file.getvalue() and "parallel" in file.getvalue()

    def spans(text: Text) -> list[tuple[str, Any]]:
        return [(text.plain[span.start : span.end], span.style) for span in text.spans]

    masked, fresh = (BLOCK, MASKED_STYLE), FRESH_STYLE
    assert [[spans(column[1]) for column in frame if column] for frame in frames] == [
        [[masked, ("5 ", fresh), masked]],
        [[masked, ("4 ", fresh)]],
        [[]],  # full: nothing stands out
        [[], [(BLOCK, MASKED_STYLE), ("5 4 ", fresh)]],
        [[], []],
    ]
    assert [column[1].plain for column in frames[-1]] == ["3 5 4 "] * 2
    assert [column[0].plain for column in frames[-1]] == [
        "3 tokens, 3 base passes, 0 sampler passes", "3 tokens, 2 base passes, 0 sampler passes",
    ]  # fmt: skip


def test_drawing_is_not_timed(run: Cli, sampler: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    drawn: list[str] = []

    class Slow(Columns):
        def frame(self, canvas: Any) -> Any:
            drawn.append(self.name)
            time.sleep(0.2)
            return super().frame(canvas)

    monkeypatch.setattr(compare, "Columns", Slow)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    rows: list[Any] = []
    monkeypatch.setattr(compare, "_show", lambda flags, found, said: rows.extend(found))
    assert run(*FLAGS, "--sampler", sampler)[0] == 0
    assert list(dict.fromkeys(drawn)) == [row["decoder"] for row in rows] == ["joint", "parallel", "adjust"]
    assert len(drawn) >= 10 and all(0 < row["seconds"] < 0.2 * drawn.count(row["decoder"]) for row in rows)
    drawn.clear()
    for more in (("--json",), ("--num-samples", "2")):  # no live columns there
        assert run(*FLAGS, "--sampler", sampler, *more)[0] == 0 and drawn == []


def test_the_first_decoder_does_not_pay_for_the_warm_up(
    run: Cli,  # noqa: F811
    sampler: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, int]] = []

    def spy(base: Any, prompts: Any, config: DecodeConfig, **how: Any) -> Any:
        made.append((how["decoder"], config.tokens_per_step))
        return decode(base, prompts, config, **how)

    monkeypatch.setattr(decoders, "decode", spy)
    assert run(*FLAGS, "--sampler", sampler)[0] == 0
    assert made == [("adjust", 8), ("joint", 4), ("parallel", 4), ("adjust", 4)]
    made.clear()
    assert run("compare", "--base", "exact", "--max-new-tokens", "4")[0] == 0  # no sampler: without g
    assert made == [("parallel", 4), ("joint", 4), ("parallel", 4)]


@pytest.mark.parametrize("live", [False, True])
def test_on_a_card_the_timed_run_is_neither_the_first_nor_the_watched_one(
    live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, bool, Any]] = []

    def spy(*_: Any, decoder: str, watch: Any = None, eager: Any = None, **more: Any) -> Any:
        made.append((decoder, watch is not None, eager))
        return SimpleNamespace(seconds=float(len(made)))

    monkeypatch.setattr(decoders, "decode", spy)
    monkeypatch.setattr(compare, "sample_record", lambda base, result, b: {"seconds": result.seconds})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: live)
    card: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    samples = compare._decode(CompareConfig(), card, None, [3], DecodeConfig())
    watched = [("", True, True)] * live
    runs = [[(name, *how) for _, *how in [*watched, ("", False, None), ("", False, None)]] for name in CORE[:2]]
    assert made == [("parallel", False, None), *runs[0], *runs[1]]  # the warm-up first
    assert [sample["seconds"] for sample in samples] == [1.0 + len(runs[0]), 1.0 + 2 * len(runs[0])]  # the last of each


def test_compare_in_a_real_terminal() -> None:
    shown, err = terminal_text("compare", "--base", "exact", "--max-new-tokens", "4")
    counts = re.findall(r"(\d) tokens?, (\d) base pass(?:es)?", shown)
    assert counts[0] == ("1", "1") and ("4", "4") in counts
    plain = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).split())
    assert re.search(r"joint took 4 base passes; parallel wrote .* text, took 1 and was .* times as fast", plain)
    assert plain.endswith(ENDING.strip()) and "decoder adjust is left out" in err


# make demo -----------------------------------------------------------------------------------------------------


def demo() -> list[str]:
    """What `make demo` runs once the package is installed."""
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    text = recipe[1].replace("$(BIN)", "bin").replace("$(PROMPT)", "How many legs does a spider have?")
    return [line.strip() for line in text.splitlines()]


def test_what_to_try_next_can_be_run() -> None:
    first, *printed = demo()
    said = [shlex.split(line.removeprefix("@echo"))[:1] for line in printed]
    assert said[:2] == [[], ["Try next:"]]
    words = [shlex.split(part, comments=True) for (line,) in said[2:] for part in line.split("&&")]
    commands = [line[1:] for line in [shlex.split(first), *words] if line[0] == "bin/adjust"]
    assert [command[0] for command in commands] == ["compare", "compare", "chat", "serve"]
    for name, *flags in commands:
        config = named(COMMANDS[name].settings)
        assert isinstance(parse(config, flags, prog=name, description="")[0], config)
    assert ["bin/pip", "install", "-e", ".[serve]"] in words


@pytest.mark.smol
def test_the_demo_of_the_default_model_is_right(run: Cli) -> None:  # noqa: F811
    assert f"PROMPT ?= {shlex.split(demo()[0])[2]}\n" in (ROOT / "Makefile").read_text()
    joint, parallel, adjust = lines(run(*shlex.split(demo()[0])[1:], "--json", "--device", "cpu")[1])
    assert joint["text"] == adjust["text"] == "A spider has 8 legs." != parallel["text"]
    assert (joint["base_calls"], parallel["base_calls"], adjust["base_calls"]) == (8, 4, 2)
