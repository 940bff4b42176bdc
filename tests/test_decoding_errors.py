"""The recipe that measures how far from exact states are, on tiny bases: errors are 0 where nothing is approximated."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from adjust_dlm import DecodeConfig
from adjust_dlm.bases import Base
from adjust_dlm.decoders import decode
from adjust_dlm.types import State
from helpers import (
    BOS,
    MASK,
    Partial,
    conditionals,
    exact_base,
    left_pad,
    load_recipe,
    row_of,
    target,
    tiny_base,
    tiny_sampler,
)

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


class Oracle:
    """A g that knows the true conditionals."""

    def on(self, base: Base) -> Base:
        self.base = base
        return base

    def __call__(self, _: Tensor, state: State) -> Tensor:
        return self.base.hidden(state)


def test_the_oracle_does_not_drift_and_stale_states_do_as_enumeration_has_it(recipe: ModuleType) -> None:
    """Seven of eight masks, looked at from rounds that start at commits 0, 3 and 6."""
    base, rows = exact_base(words=2, length=8, order="random"), 5
    base.spec = dataclasses.replace(base.spec, bos_id=1)
    config = CONFIG.but(max_new_tokens=7)
    errors = recipe.drift(base, Oracle(), config, rows, 3)
    assert {key: kls for key, kls in errors.items() if key[0] != "stale"} == {("g", k): [0.0] * 2 for k in (1, 2)}
    p, texts = target(base), decode(base, [[1]] * rows, config, decoder="joint")
    assert len(set(map(tuple, texts.order_BL.tolist()))) > 1

    def now(b: int, t: int) -> Partial:
        return tuple(token if n < t else None for token, n in zip(*row_of(texts, b)[:2], strict=True))

    for k in (1, 2):
        for start, measured in zip((0, 3), errors["stale", k], strict=True):
            kls = []
            for b in range(rows):
                open_L = [i for i, token in enumerate(now(b, start + k)) if token is None]
                true_LV, stale_LV = (conditionals(p, now(b, t))[open_L] for t in (start + k, start))
                kls += (true_LV * np.log(true_LV / stale_LV)).sum(-1).tolist()
            assert measured == pytest.approx(sum(kls) / len(kls), rel=1e-4) and measured > 1e-3


@pytest.mark.parametrize("features", [(), (1,)])
def test_drift_is_that_of_calls_made_by_hand(recipe: ModuleType, features: tuple[int, ...]) -> None:
    """Commits 0..5 in rounds of four."""
    base = tiny_base("dream", num_hidden_layers=3)
    g = tiny_sampler(base, features=features)
    errors = recipe.drift(base, g, CONFIG, 2, 4)
    seen, texts = g.on(base), decode(base, [[BOS]] * 2, CONFIG, decoder="joint")
    wanted: dict[tuple[str, int], list[float]] = defaultdict(list)
    canvases = [[texts.trajectory(b).state(t, MASK)[0].tolist() for b in range(2)] for t in range(6)]
    states = [left_pad(rows) for rows in canvases]
    h = [seen.hidden(state) for state in states]
    for start, depth in ((0, 4), (4, 2)):
        own = h[start]
        for k in range(1, depth):
            state = states[start + k]
            own = g(own, state)
            for name, got in (("g", own), ("stale", h[start])):
                true, other = (
                    torch.distributions.Categorical(logits=base.logits(part[state.masked_BL]))
                    for part in (h[start + k], got)
                )
                wanted[name, k].append(float(torch.distributions.kl_divergence(true, other).mean()))
    assert errors.keys() == wanted.keys()
    for key, kls in errors.items():
        assert kls == pytest.approx(wanted[key], rel=1e-3) and min(kls) > 1e-3
    assert recipe.table(errors, "commits").splitlines()[0] == "| commits | 1 | 2 | 3 |"


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
        "| commits since the base pass", "| g", "| stale", "",
    ]  # fmt: skip
    recipe.main(["--tables=quantized", "--kinds=int8", *flags])
    assert "| int8 | 0.0000 |" in capsys.readouterr().out
