"""Adaptive ADJUST: its two limits are joint decoding and ADJUST, with an oracle g it is joint whatever the budget."""

import math
from typing import Any

import pytest
import torch

from adjust_dlm.decoders import decode
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.pick import pick
from adjust_dlm.sampling import process
from adjust_dlm.types import DecodeConfig, InputError
from helpers import BOS, FAMILIES, exact_base, oracle, tiny_base, tiny_sampler, writer

PROMPTS = [[BOS, 3], [BOS, 4, 5, 6]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_bound_it_is_adjust(family: str, temperature: float) -> None:
    base = tiny_base(family)
    config = DecodeConfig(max_new_tokens=10, tokens_per_step=3, temperature=temperature)
    plain = decode(base, PROMPTS, config, decoder="adjust", sampler=tiny_sampler(base))
    ours = decode(base, PROMPTS, config, decoder="adaptive", sampler=tiny_sampler(base), gamma=math.inf, most=3)
    for name in ("tokens_BL", "order_BL", "base_calls_B", "sampler_calls_B"):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_with_no_budget_it_is_joint(family: str) -> None:
    base = tiny_base(family)
    config = DecodeConfig(max_new_tokens=6, suppress_eos=True)
    joint = decode(base, PROMPTS, config, decoder="joint")
    ours = decode(base, PROMPTS, config, decoder="adaptive", sampler=tiny_sampler(base), gamma=0.0)
    assert torch.equal(ours.tokens_BL, joint.tokens_BL)
    assert torch.equal(ours.order_BL, joint.order_BL)
    assert ours.base_calls_B.tolist() == [6, 6]
    assert ours.sampler_calls_B.tolist() == [5, 5]  # one for each round but the last, to find out that it is over


@pytest.mark.parametrize("gamma", [0.0, 0.7, 2.0, math.inf])
def test_with_the_oracle_it_is_joint_whatever_the_budget(gamma: float) -> None:
    base = exact_base()
    config = DecodeConfig(max_new_tokens=base.joint.ndim, seed=3)
    joint = decode(base, [[]] * 64, config, decoder="joint")
    ours = decode(base, [[]] * 64, config, decoder="adaptive", sampler=oracle(base), gamma=gamma)
    assert torch.equal(ours.tokens_BL, joint.tokens_BL)
    assert torch.equal(ours.order_BL, joint.order_BL)
    calls = ours.base_calls_B
    assert calls.max() == (1 if gamma == math.inf else calls.max())
    assert (calls.float().mean() < base.joint.ndim) == (gamma > 0)


def test_a_round_spends_no_more_than_its_budget() -> None:
    """The entropies of the tokens from g, recomputed pass by pass."""
    base, gamma = tiny_base("dream"), 1.0
    sampler, config = tiny_sampler(base), DecodeConfig(max_new_tokens=12, suppress_eos=True)
    result = decode(base, [PROMPTS[0]], config, decoder="adaptive", sampler=sampler, gamma=gamma)
    canvas, rounds = Canvas(base, [PROMPTS[0]], config), []
    while canvas.open:
        h_BLD, spent, n = base.hidden(canvas), 0.0, 0
        canvas.start_round(torch.tensor([12]))
        while canvas.open:
            if n:
                h_BLD = sampler(h_BLD, canvas)
            picks = pick(base, h_BLD, canvas)
            if n:
                position = int(picks.position_BN[0, 0])
                p = process(base.logits(h_BLD[:, position], suppress_eos=True), config).softmax(-1)[0]
                spent += -sum(x * math.log(x) for x in p.tolist() if x > 0)
                if spent > gamma:
                    break
            canvas.commit(picks)
            n += 1
        rounds.append(n)
    assert torch.equal(result.tokens_BL, canvas.tokens_BL)
    assert result.base_calls_B.tolist() == [len(rounds)]
    assert len(set(rounds)) > 1  # rounds of different lengths


def test_certain_tokens_are_free() -> None:
    """Their entropy is 0 to the last bit, so that even a budget of 0 is not overspent."""
    config = DecodeConfig(max_new_tokens=3)
    result = decode(writer([1, 2, 3], [200.0] * 3), [[]], config, decoder="adaptive", sampler=lambda h, _: h, gamma=0.0)
    assert (result.base_calls_B.tolist(), result.sampler_calls_B.tolist()) == ([1], [2])


def test_rows_do_not_depend_on_their_batch() -> None:
    base, prompts = tiny_base("llada"), [*PROMPTS, [BOS]]
    config = DecodeConfig(max_new_tokens=10)
    settings: dict[str, Any] = {"decoder": "adaptive", "sampler": tiny_sampler(base), "gamma": 3.0, "most": 5}
    together = decode(base, prompts, config, **settings)
    for row, prompt in enumerate(prompts):
        alone = decode(base, [prompt], config, rows=[row], **settings)
        assert torch.equal(together.tokens_BL[row, -len(prompt) - 10 :], alone.tokens_BL[0])
        for name in ("base_calls_B", "sampler_calls_B"):
            assert getattr(together, name)[row] == getattr(alone, name)[0], name


@pytest.mark.parametrize(
    ("options", "said"),
    [({"gamma": -1}, "gamma is -1"), ({"gamma": math.nan}, "gamma is nan"), ({"most": 0}, "most is 0"),
     ({"most": 2.5}, "most is 2.5")],
)  # fmt: skip
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        decode(exact_base(), [[]], DecodeConfig(max_new_tokens=3), decoder="adaptive", sampler=len, **options)
