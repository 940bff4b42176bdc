"""The documents do what they say: every command line parses, every Python block runs, every file they name is there."""

import ast
import importlib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm.cli import _name as command_name
from adjust_dlm.commands import COMMANDS, settings

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#]+)")
_TORCHRUN = re.compile(r"^torchrun .*-m adjust_dlm\.cli ")
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


def command_lines() -> list[str]:
    """Every line of a shell block that calls `adjust`, also by torchrun; lines joined, comments dropped."""
    texts = [block.text.replace("\\\n", " ") for block in BLOCKS if block.language in SHELL]
    lines = [line.strip().removeprefix("$ ") for text in texts for line in text.splitlines()]
    lines = [_TORCHRUN.sub("adjust ", line) for line in lines]
    return [line for line in lines if line.startswith("adjust ")]


def name_of(block: Block) -> str:
    return f"{block.file.name}-{BLOCKS.index(block)}"


def run_block(block: Block, names: dict[str, Any]) -> None:
    exec(compile(block.text, str(block.file), "exec"), names)


def test_there_is_something_to_test() -> None:
    assert {shlex.split(line, comments=True)[1] for line in command_lines()} >= {"generate", "compare", "train"}
    assert FIRST and DECODES


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_parses(line: str) -> None:
    name, argv = command_name(shlex.split(line, comments=True)[1:])
    assert name in COMMANDS, f"no command {name!r}"
    if "--config" in argv:
        argv = [word for n, word in enumerate(argv) if "--config" not in argv[max(0, n - 1) : n + 1]]
    command = COMMANDS[name]
    kind = getattr(importlib.import_module(command.module), command.config)
    parsed, _ = settings.parse(kind, argv, prog=f"adjust {name}", description="")
    assert isinstance(parsed, kind)


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
