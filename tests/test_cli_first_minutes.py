"""What a newcomer types first: no command, a wrong word, a pipe, a conversation, the list of decoders."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm.commands import COMMANDS, FLAGS, GROUPS, named
from adjust_dlm.commands import generate as generate_module
from adjust_dlm.commands.settings import one_line
from adjust_dlm.decoders import DECODERS
from adjust_dlm.types import DecodeConfig
from adjust_dlm.words import known
from test_cli import Cli, lines, registered, run, sampler, tiny  # noqa: F401 - fixtures

JOINT = ("--base", "tiny", "--decoder", "joint", "--max-new-tokens", "4")


def test_adjust_alone_is_help_in_groups(run: Cli) -> None:  # noqa: F811
    code, out, err = run()
    assert (code, err) == (0, "") and out == run("--help")[1]
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    assert all(f"{group}:" in out for group in GROUPS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["genrate"], "unknown command 'genrate'; did you mean generate? known are"),
        (["eval", "gsm8"], "adjust eval wants one more word; did you mean gsm8k? known are"),
        (["eval"], "adjust eval wants one more word; known are divergence"),
        (["zzz"], "unknown command 'zzz'; known are"),
        (["generate", "hi", "--decoder", "adjst"], "unknown decoder 'adjst'; did you mean adjust? known are"),
        (["generate", "--tokns-per-step", "4"], "did you mean --tokens-per-step?"),
        (["generate", "--candidates", "x"], "--candidates is 'x'; it takes {None}|INT"),
        (["generate", "--seed", "x"], "--seed is 'x'; it takes INT (see"),
        (["generate", "--top-p", "x"], "--top-p is 'x'; it takes FLOAT (see"),
        (["fetch", "small"], "error: name is 'small'; it must be one of smol (see"),
        (["generate", "--dtype"], "Missing value for argument '--dtype'"),
        (["eval", "divergence", "--dtype", "f"], "--dtype is 'f'; it must be one of auto, bfloat16, float32 (see"),
        (["train", "--pool.order", "x"], "--pool.order is 'x'; it must be one of confidence, entropy, left_to_right,"),
        (["chat", "--base", "exact"], "base 'exact' has no chat template; use `adjust generate`"),
    ],
)
def test_a_wrong_word_is_one_line_that_names_what_is_near(words: list[str], said: str, run: Cli) -> None:  # noqa: F811
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("adjust: error: ") and err.count("\n") == 1 and said in err, err


def test_what_a_box_says_is_its_first_paragraph() -> None:
    top, side, rule = "\u256d\u2500 Value error \u2500\u256e", "\u2502", "\u2500" * 9
    box = "\n".join(
        [
            top,
            f"\x1b[31m{side}\x1b[0m Error parsing --a: bad {side}",
            f"{side} value 'x'. {side}",
            f"{side} {rule} {side}",
        ]
    )
    assert one_line(box) == "Error parsing --a: bad value 'x'"
    assert one_line("plain\n") == "plain" and known("a", ()) == "known are "


def boxes(shown: str) -> dict[str, dict[str, list[str]]]:
    """Box -> flag, as the help spells it -> the lines of what it says."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in shown.splitlines():
        inside = line.strip("\u2502").strip()
        if title := re.match(r"\u256d\u2500 ([\w ]+) \u2500", line):
            flags = found.setdefault(title[1], {})
        elif start := re.match(r"\u2502 (-\S.*?|\[.*?)(?:  +(.*?) *)?\u2502$", line):
            flags[start[1].strip()] = told = [start[2]] if start[2] else []
        elif line.startswith("\u2502") and flags:
            told.append(inside)
    return found


def test_help_shows_flags_in_boxes_with_their_choices(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("COLUMNS", "100")
    found = boxes(run("generate", "--help")[1])
    assert {box: [flag.split(",")[0].split()[0] for flag in flags] for box, flags in found.items()} == {
        "positional arguments": ["[[STR"],
        "options": ["-h", "--config", "--verbose"],
        "text options": [
            "--max-new-tokens", "--temperature", "--top-p", "--top-k", "--num-samples", "--chat", "--suppress-eos",
            "--seed",
        ],
        "decoder options": [
            "--tokens-per-step", "--decoder", "--set", "--order", "--order-on", "--schedule", "--block-length",
            "--candidates", "--cache-period", "--cache-window", "--batch-size", "--eager",
        ],
        "model options": [
            "--base", "--sampler", "--partner", "--device", "--dtype", "--quantize", "--device-map", "--revision",
            "--compile",
        ],
        "output options": ["--output", "--json", "--watch"],
    }  # fmt: skip
    assert found["decoder options"]["--schedule {exact,reference}"] == [
        "K per pass, or the model family's published step counts. (default: exact)"
    ]
    assert found["text options"]["--top-k INT"] == ["keep the k likeliest tokens; 0 keeps all. (default: 0)"]
    told = {flag: lines for flags in found.values() for flag, lines in flags.items()}
    assert told["--order {None,entropy,confidence,margin,random,left_to_right}"] == [
        "which position is next; by default the base's own rule."
    ]
    assert {
        "--dtype {auto,float32,bfloat16,float16}", "--quantize {None,int8,fp8,fp8-dynamic}",
        "--order-on {None,processed,raw}", "--device-map {None,auto,balanced,balanced_low_0,sequential}",
    } <= told.keys()  # fmt: skip


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_is_short_and_says_no_empty_default(
    name: str,
    run: Cli,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two lines a flag in a terminal of 100 columns, beside a blank one where a text just fills its line."""
    monkeypatch.setenv("COLUMNS", "100")
    out = run(name, "--help")[1]
    assert "(default: )" not in out and "default: None" not in out
    told = {flag: lines for flags in boxes(out).values() for flag, lines in flags.items()}
    assert {flag: lines for flag, lines in told.items() if len([x for x in lines if x]) > 2} == {}
    assert [flag for flag, lines in told.items() if not " ".join(lines).partition("(default")[0]] == []


def test_a_box_is_there_where_its_first_flag_is(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("COLUMNS", "100")
    adapt = boxes(run("adapt", "--help")[1])
    assert "text options" not in adapt and "--chat INT" in adapt["corpus options"]
    assert {"--lr FLOAT", "--batch-size INT", "--seed INT"} <= adapt["training options"].keys()
    train = boxes(run("train", "--help")[1])
    assert train["pool options"]["--pool.rows INT"][0].startswith("rows decoded together")
    assert "what `one_pass` decodes." in run("train", "--help")[1]
    frontier = boxes(run("eval", "frontier", "--help")[1])
    (variants,) = (lines for flag, lines in frontier["decoder options"].items() if flag.startswith("--list-variants"))
    assert re.fullmatch(r"the same .*\(default: joint:block_length=16 and \d\d more\)", " ".join(variants))
    known_flags = {field.name for command in COMMANDS.values() for field in fields(named(command.settings))}
    assert {flag for flags in FLAGS.values() for flag in flags} <= known_flags


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_flag_errors_are_one_line_whatever_stdout_can_show(encoding: str) -> None:
    """tyro frames its messages otherwise where stdout is not UTF-8, as in a pipe on Windows."""
    for words, said in (
        (["--topp", "3"], "Unrecognized options: --topp, 3; did you mean --top-p?"),
        (["--dtype"], "Missing value for argument '--dtype'. Expected 1 values"),
    ):
        command = [sys.executable, "-m", "adjust_dlm.cli", "generate", *words]
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        made = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert made.returncode == 2 and made.stderr == f"adjust: error: {said} (see adjust generate --help)\n"


def test_a_prompt_comes_from_a_pipe(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    wanted = lines(run("generate", "abc", *JOINT, "--no-chat", "--json")[1])
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    assert lines(run("generate", "-", *JOINT, "--no-chat", "--json")[1])[0]["tokens"] == wanted[0]["tokens"]
    code, _, err = run("generate", "-", "-", *JOINT)
    assert code == 2 and "the prompt - stands there twice" in err
    terminal = io.StringIO("abc\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    code, _, err = run("generate", "-", *JOINT)
    assert code == 2 and "stdin is a terminal" in err


def test_one_text_is_watched_in_a_terminal(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    flags = generate_module.GenerateConfig(prompt=("a",))
    assert not generate_module._watched(flags)  # stdout is no terminal here
    monkeypatch.setattr(sys, "stdout", type("T", (), {"isatty": staticmethod(lambda: True)}))
    assert generate_module._watched(flags) and generate_module._watched(generate_module.GenerateConfig())
    for more in ({"prompt": ("a", "b")}, {"num_samples": 2}, {"json": True}, {"watch": "never"}):
        assert not generate_module._watched(generate_module.GenerateConfig(**more))
    assert generate_module._watched(generate_module.GenerateConfig(num_samples=2, watch="always"))


def test_every_decoder_is_listed_with_its_settings(run: Cli) -> None:  # noqa: F811
    out = run("decoders")[1]
    fresh = [sys.executable, "-m", "adjust_dlm.cli", "decoders", "--json"]  # nothing else has brought the functions
    listed = json.loads(subprocess.run(fresh, capture_output=True, text=True, check=True).stdout)["decoders"]
    assert [line["decoder"] for line in listed] == list(DECODERS)
    assert all(line["what it does"] and line["decoder"] in out for line in listed)
    by_name = {line["decoder"]: line for line in listed}
    assert by_name["threshold"]["settings"] == {"tau": 0.9, "score": "drawn"} and by_name["adjust"]["needs"] == "g"
    assert by_name["edlm"]["needs"] == "AR model" and by_name["joint"]["settings"] == {}
    assert {line["decoder"] for line in listed if line["served"]} == {k for k, d in DECODERS.items() if d.resumable}


def test_a_conversation_is_that_of_generate_and_forgets_what_does_not_fit(
    run: Cli,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked: list[list[str]] = []
    plain = tiny().tokenizer.__class__.apply_chat_template

    def template(self: Any, messages: list[dict[str, str]], **more: Any) -> str:
        asked.append([message["content"] for message in messages])
        joined = "".join(message["content"] for message in messages)
        return plain(self, [{"content": joined}], **more)

    monkeypatch.setattr(tiny().tokenizer.__class__, "apply_chat_template", template)
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n\n  \ncd\n"))
    flags = (*JOINT, "--temperature", "1")
    code, out, err = run("chat", *flags, "--output", tmp_path / "talk")
    assert code == 0, err
    turns = lines((tmp_path / "talk" / "samples.jsonl").read_text())
    assert [turn["prompt"] for turn in turns] == ["ab", "cd"] and out == "".join(f"{t['text']}\n" for t in turns)
    assert asked[0] == ["ab"] and asked[-1] == ["ab", turns[0]["text"], "cd"]
    first = lines(run("generate", "ab", *flags, "--json")[1])
    assert first[0]["tokens"] == turns[0]["tokens"]
    asked.clear()
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * (tiny().spec.context - 12) + f"\n{'b' * 20}\n"))
    code, _, err = run("chat", *flags)
    assert code == 0 and "the oldest question and its answer are left out" in err and asked[-1] == ["b" * 20]
    assert DecodeConfig().temperature == 1.0
    monkeypatch.setattr(sys, "stdin", io.StringIO("caf\udce9\n"))  # what Python makes of a byte that is no UTF-8
    code, _, err = run("chat", *flags)
    assert code == 2 and "not UTF-8" in err
