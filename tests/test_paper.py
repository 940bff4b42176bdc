"""Every run of the paper as a file: the command of its first line reads the paper's settings from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from adjust_dlm.commands import COMMANDS, named, settings
from adjust_dlm.decoders import read_variant
from adjust_dlm.decoders.edlm import EdlmOptions
from adjust_dlm.eval.downstream import DownstreamConfig
from adjust_dlm.eval.table import TableConfig
from adjust_dlm.train.config import TrainConfig
from adjust_dlm.types import InputError

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "paper").rglob("*.yaml"))
BASES = {
    "dream-base": "Dream-org/Dream-v0-Base-7B", "dream-instruct": "Dream-org/Dream-v0-Instruct-7B",
    "dream-coder": "Dream-org/Dream-Coder-v0-Instruct-7B", "llada-base": "GSAI-ML/LLaDA-8B-Base",
}  # fmt: skip
RUNS = "runs/paper"
PRINTED: dict[str, Any] = {
    "optimizer": "adamw", "lr": 5e-5, "warmup": 250, "decay": 0.0, "clip": 1.0, "rollout": 3,
    "slices": 32, "slice_states": 4, "accumulate": 1, "weights": "uniform", "loss": "sum", "reverse": 0.0,
    "preset": "printed", "norms": False, "residual": False, "pairing": "token", "layers": 1, "init": "fresh",
}  # fmt: skip
UNCONDITIONAL: dict[str, Any] = {
    "prompts": "unconditional", "num": 100_000, "max_new_tokens": 128, "temperature": (1.0,), "top_p": 1.0,
    "chat": False, "suppress_eos": True,
}  # fmt: skip
QUESTIONS: dict[str, Any] = {
    "num": 20_000, "max_new_tokens": 256, "temperature": (0.1,), "top_p": 0.9, "chat": True, "suppress_eos": False,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "temperatures": (1.0, 0.6), "n": 1024, "max_new_tokens": 128, "top_p": 1.0, "suppress_eos": True,
    "partner": "Qwen/Qwen2.5-0.5B", "judge": "Qwen/Qwen2.5-7B",
}  # fmt: skip
APD = tuple(f"apd:mixture={share}" for share in (0.3, 0.5, 0.7, 0.9))


ADJUST = "adjust:candidates=0"  # Algorithm 1: g chooses the positions


def edlm(*ks: int, adjust: tuple[int, ...] = ()) -> dict[str, Any]:
    own = tuple(f"{ADJUST},tokens_per_step={k}" for k in adjust)
    return {"variants": own + tuple(f"edlm:tokens_per_step={k}" for k in ks)}


def task(temperature: float, top_p: float, length: int, shots: int, limit: int, *, chat: bool) -> dict[str, Any]:
    """Of the appendix: temperature, top-p, length, examples; problems, 0 for all of them."""
    return {
        "decoders": ("parallel", ADJUST), "tokens_per_step": (1, 2, 4, 8), "temperature": temperature, "top_p": top_p,
        "max_new_tokens": length, "shots": shots, "limit": limit, "chat": chat,
    }  # fmt: skip


# What every run must be, from the paper's text and from the choices that paper/README.md names; base and output apart.
WANTED: dict[str, dict[str, Any]] = {
    "dream-base/trajectories": UNCONDITIONAL,
    "llada-base/trajectories": UNCONDITIONAL,
    "dream-instruct/trajectories": QUESTIONS | {"prompts": "data/metamath-questions.jsonl"},
    "dream-coder/trajectories": QUESTIONS | {"prompts": "data/opc-sft-stage2-prompts.jsonl"},
    "dream-base/train": PRINTED | {"steps": 793_750, "suppress_eos": True},
    "llada-base/train": PRINTED | {"steps": 793_750, "suppress_eos": True},
    "dream-instruct/train": PRINTED | {"steps": 318_750, "suppress_eos": False},
    "dream-coder/train": PRINTED | {"steps": 318_750, "suppress_eos": False},
    "dream-base/nll": TEXT | {"tokens_per_step": (2, 4, 8)} | edlm(1, 2, 4, 8, adjust=(2, 4, 8)),
    "dream-base/nll-all": TEXT
    | {"tokens_per_step": (2, 3, 4, 5, 6, 7, 8)}
    | edlm(1, 2, 3, 4, 5, 6, 7, 8, adjust=(2, 3, 4, 5, 6, 7, 8)),
    "dream-base/edlm": TEXT | {"tokens_per_step": (), "top_p": 0.95} | edlm(2, 3, 4),
    "dream-base/edlm-big": TEXT | {"tokens_per_step": (), "top_p": 0.95, "partner": "Qwen/Qwen2.5-7B"} | edlm(2, 3, 4),
    "dream-base/apd": TEXT
    | {
        "temperatures": (1.0,),
        "tokens_per_step": (2, 3, 4),
        "variants": (
            *APD,
            "joint:order=left_to_right",
            *(f"parallel:order=left_to_right,tokens_per_step={k}" for k in (2, 3, 4)),
        ),
    },
    "dream-base/gsm8k": task(0.0, 1.0, 256, 8, 250, chat=False),
    "dream-base/mbpp": task(0.2, 1.0, 512, 3, 250, chat=False),
    "dream-base/parallelbench": task(0.0, 1.0, 0, 1, 0, chat=True)
    | {
        "tokens_per_step": (1, 4),
        "tasks": ("words_to_sentence", "waiting_line"),
        "data": "data/parallelbench",
        "grammar": "languagetool",
    },
    "llada-base/gsm8k": task(0.0, 1.0, 256, 8, 132, chat=False),
    "llada-base/mbpp": task(0.2, 1.0, 512, 3, 0, chat=False),
    "llada-base/humaneval": task(0.2, 1.0, 512, 0, 0, chat=False),
    "dream-instruct/gsm8k": task(0.1, 0.9, 256, 0, 250, chat=True) | {"tokens_per_step": (1, 2, 3, 4, 8)},
    "dream-instruct/math": task(0.1, 0.9, 512, 4, 0, chat=True)
    | {"per_subject": 50, "data": "data/math_test_5000.jsonl", "shots_data": "data/minerva-shots.jsonl"},
    "dream-instruct/apd": task(1.0, 0.9, 256, 0, 250, chat=True)
    | {"tokens_per_step": (1, 2, 3, 4), "decoders": ("parallel", ADJUST, *APD), "partner": "Qwen/Qwen2.5-0.5B"},
    "dream-coder/humaneval": task(0.2, 0.9, 512, 4, 0, chat=True) | {"examples": "data/humaneval-shots.jsonl"},
    "dream-coder/mbpp": task(0.2, 0.9, 512, 4, 0, chat=True),
}


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
    kind = named(COMMANDS[name].settings)
    parsed, common = settings.parse(kind, ["--config", str(file)], prog=f"adjust {name}", description="")
    assert isinstance(parsed, kind) and common.config == file
    return parsed


def test_every_run_is_there_and_no_other() -> None:
    assert {name_of(file) for file in FILES} == set(WANTED)
    assert {file.parent.name for file in FILES} == set(BASES)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_file_resolves_to_the_papers_settings(file: Path) -> None:
    """As the command reads it, its preset filled in; and it sets nothing that the table does not know."""
    folder = f"{RUNS}/{file.parent.name}"
    where = {"base": BASES[file.parent.name], "output": f"{RUNS}/{name_of(file)}"}
    if file.stem == "train":
        where["trajectories"] = (f"{folder}/trajectories",)  # type: ignore[assignment]
    elif file.stem != "trajectories":
        where["sampler"] = f"{folder}/train/sampler"
    wanted = WANTED[name_of(file)] | where
    parsed = load(file)
    assert {name: getattr(parsed, name) for name in wanted} == wanted
    assert yaml.safe_load(file.read_text(encoding="utf-8")).keys() <= wanted.keys()


@pytest.mark.parametrize("base", BASES)
def test_g_and_its_batches_are_the_papers(base: str) -> None:
    config = load(ROOT / "paper" / base / "train.yaml")
    assert isinstance(config, TrainConfig)
    assert config.slices * (config.slice_states - config.rollout) * config.accumulate == 32
    form = config.sampler_config()
    assert (form.norms, form.residual, form.pairing, form.layers, form.features) == (False, False, "token", 1, ())


def test_k_is_one_to_four_where_a_figure_has_them() -> None:
    """K = 1 of a table is its joint row."""
    for name, first in (
        ("dream-base/nll-all", 2), ("dream-base/apd", 2), ("dream-instruct/gsm8k", 1), ("dream-instruct/apd", 1),
    ):  # fmt: skip
        config: Any = load(ROOT / "paper" / f"{name}.yaml")
        assert set(config.tokens_per_step) >= set(range(first, 5)), name
    read = load(ROOT / "paper" / "dream-instruct" / "gsm8k.yaml")
    assert isinstance(read, DownstreamConfig) and read.variants()[0] == "joint"


def test_edlm_draws_two_completions_and_keeps_the_better() -> None:
    for stem in ("nll", "nll-all", "edlm", "edlm-big"):
        config = load(ROOT / "paper" / "dream-base" / f"{stem}.yaml")
        assert isinstance(config, TableConfig) and config.variants
        variants = [variant for variant in config.variants if not variant.startswith(ADJUST)]
        assert variants
        for variant in map(read_variant, variants):
            options = EdlmOptions(**variant.options)
            assert (variant.name, options.rule, options.completions) == ("edlm", "best", 2)


def test_the_map_names_every_file_and_no_other() -> None:
    text = (ROOT / "paper" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:dream|llada)[a-z-]*/[a-z0-9-]+)\.yaml`", text))
    assert named == {name_of(file) for file in FILES}


def test_a_wrong_key_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text((ROOT / "paper" / "dream-base" / "nll.yaml").read_text() + "tokens_per_stop: [2]\n")
    with pytest.raises(InputError, match="unknown setting tokens_per_stop"):
        settings.parse(TableConfig, ["--config", str(file)], prog="", description="")
