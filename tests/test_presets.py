"""`adjust train --preset`: what each sets, what it refuses, and the g that is built from it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from adjust_dlm.commands import settings
from adjust_dlm.sampler import Sampler, SamplerConfig
from adjust_dlm.train.config import TrainConfig
from adjust_dlm.types import InputError
from helpers import FAMILIES, left_pad, tiny_base, tiny_sampler
from test_sampler import ROWS, by_hand

SHARED: dict[str, Any] = {
    "optimizer": "adamw", "lr": 5e-5, "warmup": 250, "decay": 0.0, "clip": 1.0, "weights": "uniform", "rollout": 3,
    "slice_states": 4, "slices": 32, "pairing": "token", "output_norm_init": 1.0,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "printed": {"norms": False, "residual": False, "loss": "sum"},
    "released": {"norms": True, "residual": True, "loss": "released"},
}
NORMS = {"norm_embed.weight", "norm_hidden.weight", "norm_out.weight"}
MATRICES = {f"self_attn.{x}_proj.weight" for x in "qkvo"} | {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
LAYER = MATRICES | {"input_layernorm.weight", "post_attention_layernorm.weight"}
BIASES = {"dream": {f"self_attn.{x}_proj.bias" for x in "qkv"}, "llada": set[str]()}


def parse(*argv: str) -> TrainConfig:
    return settings.parse(TrainConfig, list(argv), prog="adjust train", description="")[0]


@pytest.mark.parametrize("preset", OWN)
def test_a_preset_sets_these_values_and_no_others(preset: str) -> None:
    wanted = {**asdict(TrainConfig()), "preset": preset, **SHARED, **OWN[preset]}
    config = parse("--preset", preset)
    assert asdict(config) == wanted
    assert config.slices * (config.slice_states - config.rollout) * config.accumulate == 32
    again = parse("--preset", preset, *(f"--{name}={SHARED[name]}" for name in ("lr", "rollout", "clip")), "--steps=9")
    assert asdict(again) == {**wanted, "steps": 9}


@pytest.mark.parametrize(
    ("preset", "flags", "said"),
    [
        ("printed", ["--lr=1e-4"], r"preset printed sets lr to 5e-05; 0\.0001 was asked for"),
        ("printed", ["--layers=2"], "preset printed sets layers to 1; 2 was"),
        ("printed", ["--loss=released"], "preset printed sets loss to 'sum'; 'released' was"),
        ("printed", ["--output-norm-init=0.5"], r"preset printed sets output_norm_init to 1\.0; 0\.5 was"),
        ("released", ["--no-norms"], "preset released sets norms to True; False was"),
        ("released", ["--no-residual"], "preset released sets residual to True; False was"),
        ("released", ["--loss=last"], "preset released sets loss to 'released'; 'last' was"),
        ("released", ["--slices=16"], "preset released sets slices to 32; 16 was"),
        ("released", ["--reverse=0.9"], r"preset released sets reverse to 0\.0; 0\.9 was"),
        ("released", ["--init=DIR"], "preset released sets init to 'fresh'; 'DIR' was"),
        ("default", ["--output-norm-init=nan"], "output_norm_init is nan; it must be a finite number"),
    ],
)
def test_a_flag_that_contradicts_a_preset_is_refused(preset: str, flags: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse("--preset", preset, *flags)


def test_the_form_of_g_is_set_by_flags_and_files(tmp_path: Path) -> None:
    assert parse().sampler_config() == SamplerConfig()
    given = parse("--no-norms", "--no-residual", "--output-norm-init", "0.5")
    assert given.sampler_config() == SamplerConfig(norms=False, residual=False, output_norm_init=0.5)
    file = tmp_path / "run.yaml"
    file.write_text("norms: false\nresidual: false\n")
    given = parse("--config", str(file), "--norms")
    assert given.sampler_config() == SamplerConfig(norms=True, residual=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", OWN)
def test_g_of_a_preset_has_these_parameters_and_this_formula(preset: str, family: str) -> None:
    base, form = tiny_base(family), parse("--preset", preset).sampler_config()
    fresh = Sampler(base, form)
    layer = {f"layer.layer.{name}" for name in LAYER | BIASES[family]}
    assert set(fresh.state_dict()) == {"mix.weight", "mix.bias"} | layer | (NORMS if OWN[preset]["norms"] else set())
    assert all(bool((fresh.get_parameter(n) == 1).all()) for n in NORMS if OWN[preset]["norms"])
    assert {n: p.shape for n, p in fresh.named_parameters()}["mix.weight"] == (base.width, 2 * base.width)
    g = tiny_sampler(base, **asdict(form))
    state, row = left_pad(ROWS[:1]), ROWS[0]
    h_BLD = base.hidden(state)
    own = {name: OWN[preset][name] for name in ("norms", "residual")}
    with torch.no_grad():
        wanted_LD = by_hand(base, family, g, h_BLD[0], row, SamplerConfig(pairing="token", **own))
        torch.testing.assert_close(g(h_BLD, state)[0], wanted_LD, atol=2e-5, rtol=1e-4)
