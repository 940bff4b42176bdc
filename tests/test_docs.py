"""The documents do what they say: every command, request and Python block runs, every file that they name is there."""

import ast
import functools
import json
import os
import re
import shlex
import shutil
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import printed
from adjust_dlm import cli
from adjust_dlm.cli import _name as command_name
from adjust_dlm.commands import COMMANDS, named, settings
from adjust_dlm.serve.http import Server
from helpers import load_recipe

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#]+)")
_TORCHRUN = re.compile(r"^torchrun .*-m adjust_dlm\.cli ")
_PROGRAM = re.compile(r"^(adjust|python|curl|docker|serve|ray|pip|make|sed|export|recipes/\S+) ")
_CODE = re.compile(r"`[^`\n]*`")  # what stands in code is no link
SHELL = ("", "sh", "bash", "shell", "console")


@dataclass(frozen=True)
class Block:
    """A fenced part of a document."""

    file: Path
    language: str
    text: str


BLOCKS = [Block(file, *found) for file in FILES for found in _FENCE.findall(file.read_text(encoding="utf-8"))]
SNIPPETS = [block for block in BLOCKS if block.language == "python"]
FIRST = [block for block in SNIPPETS if block.file.name == "README.md"]  # loads and generates
*DECODES, TRAINS = [block for block in SNIPPETS if block.file.name == "commands.md"]


def lines_of(block: Block) -> list[str]:
    """Every line of a shell block that calls a program; lines joined, torchrun and settings in front left out."""
    lines = [line.strip().removeprefix("$ ") for line in re.sub(r"\\\n", " ", block.text).splitlines()]
    lines = [re.sub(r"^([A-Z_]+=(\"[^\"]*\"|\S+) )+", "", line) for line in lines]
    lines = [_TORCHRUN.sub("adjust ", line) for line in lines]
    return [line for line in lines if _PROGRAM.match(line) and block.language in SHELL]


LINES = {block: lines_of(block) for block in BLOCKS}
COMMAND_LINES = [line for lines in LINES.values() for line in lines if line.startswith("adjust ")]


def name_of(block: Block) -> str:
    return f"{block.file.name}-{BLOCKS.index(block)}"


def run_block(block: Block, names: dict[str, Any]) -> None:
    exec(compile(block.text, str(block.file), "exec"), names)


def test_there_is_something_to_test() -> None:
    assert {shlex.split(line, comments=True)[1] for line in COMMAND_LINES} >= {"generate", "compare", "train"}
    assert FIRST and DECODES


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_every_command_line_parses(line: str) -> None:
    name, argv = command_name(shlex.split(line, comments=True)[1:])
    assert name in COMMANDS, f"no command {name!r}"
    if "--config" in argv:
        argv = [word for n, word in enumerate(argv) if "--config" not in argv[max(0, n - 1) : n + 1]]
    kind = named(COMMANDS[name].settings)
    parsed, _ = settings.parse(kind, argv, prog=f"adjust {name}", description="")
    assert isinstance(parsed, kind)


@pytest.mark.parametrize("file", [file for file in FILES if any(b.file == file and LINES[b] for b in BLOCKS)], ids=str)
def test_every_printed_command_runs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page, with small numbers on tiny bases, or there is a reason why not."""
    monkeypatch.chdir(tmp_path)
    printed.fill(tmp_path, monkeypatch)
    blocks = [block for block in BLOCKS if block.file == file]
    monkeypatch.setattr(Server, "run", functools.partialmethod(answer_all, blocks))
    for line in printed.BEFORE.get(file.name, []):
        assert cli.main(shlex.split(line)) == 0, (line, capfd.readouterr().err)
    for line in [line for block in blocks for line in LINES[block]]:
        if line.startswith("curl ") or any(part in line for part in printed.CANNOT):
            continue
        assert line.startswith("adjust "), f"neither run nor explained: {line}"
        argv = shlex.split(line, comments=True)[1:]
        if argv[0] in ("train", "trajectories"):  # a run of its own
            shutil.rmtree(argv[argv.index("--output") + 1], ignore_errors=True)
        code, shown = cli.main(argv), capfd.readouterr()
        assert code == 0, (line, shown.err)


def answer_all(server: Server, blocks: list[Block], sockets: list[socket.socket]) -> None:
    """Serves until every request of a page has its answer."""
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    serving = threading.Thread(target=uvicorn.Server.run, args=(server, sockets))
    serving.start()
    try:
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        for block in blocks:
            for line in LINES[block]:
                if line.startswith("curl "):
                    path = re.findall(r"http://127.0.0.1:8000(\S+)", line)[0]
                    check_answer(url + path, json.loads(shlex.split(line)[-1]))
            if block.language == "json":
                check_answer(f"{url}/v1/infill", json.loads(block.text))
            elif block.language == "python" and "openai" in block.text:
                names: dict[str, Any] = {}
                exec(compile(block.text.replace("http://127.0.0.1:8000", url), str(block.file), "exec"), names)
                assert names["ask"]("Why?")
    finally:
        server.should_exit = True
        serving.join(20)


def check_answer(url: str, body: Any) -> None:
    answer = httpx.post(url, json=body, timeout=20)
    assert answer.status_code == 200 and "error" not in answer.text, (url, body, answer.text)


def test_printed_flags_of_the_load_recipe_are_its_own() -> None:
    recipe = load_recipe("serve_load")
    lines = [line for lines in LINES.values() for line in lines if line.startswith("python recipes/serve_load.py")]
    urls = [recipe.parse(shlex.split(line.replace(" PID", " 1"))[2:]).url for line in lines]  # type: ignore[attr-defined]
    assert len(urls) > 4 and all(url.startswith("http://127.0.0.1:8") for url in urls)


@pytest.mark.parametrize("part", printed.CANNOT)
def test_every_reason_is_one_for_a_printed_line(part: str) -> None:
    assert any(part in line for lines in LINES.values() for line in lines)


@pytest.mark.parametrize("block", SNIPPETS, ids=name_of)
def test_every_python_block_compiles_and_its_imports_work(block: Block) -> None:
    tree = ast.parse(block.text)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(tree.body) > len(imports)
    exec(compile(ast.Module(imports, []), str(block.file), "exec"), {})


@pytest.mark.smol
def test_the_blocks_that_generate_run_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in [*FIRST, *DECODES]:
        run_block(block, names)
        assert capsys.readouterr().out.strip()
    assert names["result"].tokens_BL.shape[0] == 2


def test_the_block_that_trains_runs_on_the_exact_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for the base and sizes that make it quick."""
    from adjust_dlm.data import trajectories
    from adjust_dlm.train import trainer

    class Tiny(trajectories.TrajectoriesConfig):
        def __init__(self, **given: Any) -> None:
            super().__init__(**{**given, "base": "exact", "num": 40, "max_new_tokens": 4})

    class Short(trainer.TrainConfig):
        def __init__(self, **given: Any) -> None:
            quick = {"base": "exact", "steps": 1, "heldout": 8, "slices": 2, "slice_states": 4}
            super().__init__(**{**given, **quick})

    monkeypatch.setattr(trajectories, "TrajectoriesConfig", Tiny)
    monkeypatch.setattr(trainer, "TrainConfig", Short)
    monkeypatch.chdir(tmp_path)
    run_block(TRAINS, {})
    assert (tmp_path / "runs" / "g" / "sampler" / "sampler.safetensors").is_file()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_that_a_document_links_to_are_there(file: Path) -> None:
    targets = [link for link in _LINK.findall(_CODE.sub("", file.read_text(encoding="utf-8"))) if "://" not in link]
    missing = [link for link in targets if not os.path.exists(file.parent / link)]
    assert not missing
