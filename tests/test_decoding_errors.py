"""The recipe that measures how far from exact states are, on tiny bases: errors are 0 where nothing is approximated."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from adjust_dlm import DecodeConfig
from helpers import load_recipe, tiny_base, tiny_sampler

CONFIG = DecodeConfig(max_new_tokens=6, suppress_eos=True, seed=1)


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("decoding_errors")


def test_a_base_is_as_exact_as_itself(recipe: ModuleType) -> None:
    base, other = tiny_base("dream"), tiny_base("dream")
    with torch.no_grad():
        next(iter(other.model.parameters())).add_(0.5)  # type: ignore[attr-defined]
    errors = recipe.quantized(base, {"same": base, "other": other}, CONFIG, 3, 2)
    assert {key for key in errors if key[0] == "same"} == {("same", step) for step in (0, 2, 4)}
    assert all(errors["same", step] == errors["same entropy", step] == [0.0] for step in (0, 2, 4))
    assert all(errors["same argmax", step] == [1.0] for step in (0, 2, 4))
    assert all(errors["other", step][0] > 1e-3 for step in (0, 2, 4))


def test_entropy_is_that_of_the_other_distribution(recipe: ModuleType) -> None:
    base = tiny_base("dream")
    h_BLD = torch.randn(2, 3, base.width, generator=torch.Generator().manual_seed(0))
    at_BL = torch.tensor([[True, False, True], [False, True, True]])
    kl, _, wider = recipe.divergences(base, h_BLD, h_BLD / 2, at_BL)
    p, q = (torch.distributions.Categorical(logits=base.logits(h[at_BL])) for h in (h_BLD, h_BLD / 2))
    assert wider == pytest.approx(float((q.entropy() - p.entropy()).mean()), rel=1e-4) and wider > 0.1
    assert kl == pytest.approx(float(torch.distributions.kl_divergence(p, q).mean()), rel=1e-4)


def test_a_cache_that_is_never_old_is_exact(recipe: ModuleType) -> None:
    errors = recipe.cache_errors(tiny_base("llada"), CONFIG.but(block_length=3), 2, [1, 3])
    assert all(kl < 1e-6 for (name, _), kls in errors.items() for kl in kls if name == "1")
    assert any(age > 0 and max(kls) > 1e-9 for (name, age), kls in errors.items() if name == "3")


@pytest.mark.parametrize("features", [(), (1,)])
def test_drift_is_measured_with_features_and_without(recipe: ModuleType, features: tuple[int, ...]) -> None:
    base = tiny_base("dream", num_hidden_layers=3)
    errors = recipe.drift(base, tiny_sampler(base, features=features), CONFIG, 2, 3, 2)
    assert set(errors) == {(name, k) for name in ("g", "g, restart=2", "stale") for k in (1, 2)}
    assert all(math.isfinite(kl) and kl > 0 for kls in errors.values() for kl in kls)
    assert errors["g", 1] == errors["g, restart=2", 1]  # the first call after a base pass is the same
    assert recipe.table(errors, "commits").splitlines()[0] == "| commits | 1 | 2 |"


def test_its_command_line_prints_the_tables_it_is_asked_for(
    recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_base("dream")
    monkeypatch.setattr(recipe, "load_base", lambda name, **how: base)
    monkeypatch.setattr(recipe, "load_sampler", lambda name, base: tiny_sampler(base))
    flags = ["--rows=1", "--new=4", "--block-length=2", "--depth=3", "--periods=2"]
    recipe.main(flags)
    assert [line.split(" |")[0] for line in capsys.readouterr().out.splitlines() if "|---" not in line] == [
        "| period, passes since computed whole", "| 2", "| 2 argmax", "",
        "| commits since the base pass", "| g", "| g, restart=3", "| stale", "",
    ]  # fmt: skip
    recipe.main(["--tables=quantized", "--kinds=int8", *flags])
    assert "| int8 | 0.0000 |" in capsys.readouterr().out
