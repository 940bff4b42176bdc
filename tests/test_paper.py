"""Every run of the paper as a file: it parses into the settings of the command that its first line names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from adjust_dlm.commands import COMMANDS, settings
from adjust_dlm.eval.downstream import DownstreamConfig, variants
from adjust_dlm.eval.table import TableConfig
from adjust_dlm.types import InputError

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "paper").rglob("*.yaml"))
BASES = {
    "dream-base": "Dream-org/Dream-v0-Base-7B", "dream-instruct": "Dream-org/Dream-v0-Instruct-7B",
    "dream-coder": "Dream-org/Dream-Coder-v0-Instruct-7B", "llada-base": "GSAI-ML/LLaDA-8B-Base",
}  # fmt: skip
# From the paper's appendix on sampling: temperature, top-p, length, examples.
APPENDIX = {
    "dream-base/gsm8k": (0.0, 1.0, 256, 8), "dream-base/mbpp": (0.2, 1.0, 512, 3),
    "llada-base/gsm8k": (0.0, 1.0, 256, 8), "llada-base/mbpp": (0.2, 1.0, 512, 3),
    "dream-instruct/gsm8k": (0.1, 0.9, 256, 0), "dream-instruct/math": (0.1, 0.9, 512, 4),
    "dream-coder/humaneval": (0.2, 0.9, 512, 4), "dream-coder/mbpp": (0.2, 0.9, 512, 4),
}  # fmt: skip


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


def command_of(file: Path) -> str:
    """From the first line, which is the command to run."""
    first = file.read_text(encoding="utf-8").splitlines()[0]
    found = re.fullmatch(r"# adjust ([a-z0-9 ]+) --config (\S+)", first)
    assert found and ROOT / found[2] == file, first
    return found[1]


def load(file: Path) -> object:
    """The settings, as the command line would read them; as it reads them."""
    name = command_of(file)
    assert name in COMMANDS, f"no command {name!r}"
    module = importlib.import_module(COMMANDS[name].module)
    kind = getattr(module, COMMANDS[name].config)
    parsed, common = settings.parse(kind, ["--config", str(file)], prog=f"adjust {name}", description="")
    assert isinstance(parsed, kind) and common.config == file
    return parsed


def test_all_four_bases_are_there() -> None:
    assert {file.parent.name for file in FILES} == set(BASES)
    for base in BASES:
        assert {"trajectories", "train"} <= {file.stem for file in FILES if file.parent.name == base}
    assert {name_of(file) for file in FILES} >= APPENDIX.keys()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_file_parses_into_its_settings(file: Path) -> None:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert content["base"] == BASES[file.parent.name]
    assert content["output"] == f"runs/paper/{name_of(file)}"
    parsed = load(file)
    for key, value in content.items():
        got = getattr(parsed, key)
        assert (list(got) if isinstance(got, tuple) else got) == value, key


@pytest.mark.parametrize("name", APPENDIX)
def test_sampling_settings_are_the_appendixs(name: str) -> None:
    """Read without the command, so that this holds before it exists."""
    content = yaml.safe_load((ROOT / "paper" / f"{name}.yaml").read_text(encoding="utf-8"))
    names = ("temperature", "top_p", "max_new_tokens", "shots")
    assert tuple(content[key] for key in names) == APPENDIX[name]
    assert content["tokens_per_step"] == [1, 2, 4, 8]
    common = {key: value for key, value in content.items() if key in DownstreamConfig.__dataclass_fields__}
    lists = {key: tuple(value) if isinstance(value, list) else value for key, value in common.items()}
    assert variants(DownstreamConfig(**lists))[0] == "joint"


def test_the_tables_rows_are_the_papers() -> None:
    def rows(stem: str) -> tuple[TableConfig, set[str]]:
        config = load(ROOT / "paper" / "dream-base" / f"{stem}.yaml")
        assert isinstance(config, TableConfig)
        return config, set(config.variants)

    config, edlm = rows("nll")
    assert (config.temperatures, config.tokens_per_step, config.top_p) == ((1.0, 0.6), (2, 4, 8), 1.0)
    assert edlm == {f"edlm:tokens_per_step={k}" for k in (1, 2, 4, 8)}
    config, edlm = rows("nll-all")
    assert config.tokens_per_step == (2, 3, 4, 5, 6, 7, 8) and len(edlm) == 8
    assert all(rows(stem)[0].max_new_tokens == 128 for stem in ("nll", "nll-all", "edlm", "edlm-big", "apd"))


def test_the_map_names_every_file_and_no_other() -> None:
    text = (ROOT / "paper" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:dream|llada)[a-z-]*/[a-z0-9-]+)\.yaml`", text))
    assert named == {name_of(file) for file in FILES}


def test_a_wrong_key_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text((ROOT / "paper" / "dream-base" / "nll.yaml").read_text() + "tokens_per_stop: [2]\n")
    with pytest.raises(InputError, match="unknown setting tokens_per_stop"):
        settings.parse(TableConfig, ["--config", str(file)], prog="", description="")
