"""`verified` is joint decoding, token for token; g decides nothing but the number of passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.decoders import decode
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import BOS, MASK, RULES, count_passes, exact_base, oracle, row_of, tiny_base, tiny_sampler

PROMPTS = [[BOS, 5, 6], [BOS, 9, 7, 4, 11, MASK, 8], [BOS]]


@pytest.mark.parametrize(("family", "depth"), [("dream", 1), ("llada", 2), ("dream", 5), ("llada", 20)])
@pytest.mark.parametrize(
    "changes",
    [
        *({"order": rule} for rule in RULES),
        {"temperature": 0.0},
        {"temperature": 0.5, "top_p": 0.9, "suppress_eos": True},
        {"block_length": 3},
    ],
    ids=str,
)
def test_it_is_joint_decoding_with_any_g(family: str, depth: int, changes: dict[str, Any]) -> None:
    base = tiny_base(family)
    config = DecodeConfig(**{"max_new_tokens": 9, "seed": 4, **changes})
    joint = decode(base, PROMPTS, config, decoder="joint")
    ours = decode(base, PROMPTS, config, decoder="verified", sampler=tiny_sampler(base), depth=depth)
    assert torch.equal(joint.tokens_BL, ours.tokens_BL) and torch.equal(joint.order_BL, ours.order_BL)
    assert bool((ours.rounds_B <= joint.base_calls_B).all())
    assert bool((ours.base_calls_B >= joint.base_calls_B).all())
    if depth == 1:
        assert torch.equal(ours.base_calls_B, joint.base_calls_B) and not ours.sampler_calls_B.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_with_true_drafts_every_pass_commits_as_many_tokens_as_it_looks_at(depth: int, temperature: float) -> None:
    base = exact_base(3, 5)
    passes = count_passes(base)
    g = oracle(exact_base(3, 5))
    config = DecodeConfig(max_new_tokens=5, temperature=temperature, seed=1)
    result = decode(base, [[]] * 6, config, decoder="verified", sampler=g, depth=depth)
    rounds = 1 + -(-4 // depth)  # one token before there is anything to draft from
    assert result.rounds_B.tolist() == [rounds] * 6 and passes.calls == rounds
    assert result.base_calls_B.tolist() == [5] * 6  # no canvas was looked at in vain
    assert torch.equal(result.tokens_BL, decode(base, [[]] * 6, config, decoder="joint").tokens_BL)


def test_with_wrong_drafts_it_costs_canvases_but_no_rounds() -> None:
    """g that names the worst token: every draft is wrong, so each round commits its one exact token."""
    base = exact_base(3, 4)

    def wrong(h_BLD: Tensor, state: State) -> Tensor:
        return -base.hidden(state)

    config = DecodeConfig(max_new_tokens=4, temperature=0.0)
    result = decode(base, [[]], config, decoder="verified", sampler=wrong, depth=2)
    assert torch.equal(result.tokens_BL, decode(base, [[]], config, decoder="joint").tokens_BL)
    assert (result.rounds_B.tolist(), result.base_calls_B.tolist(), result.sampler_calls_B.tolist()) == ([4], [6], [3])


def test_drafts_begin_at_the_last_states_that_were_true() -> None:
    """Every draft is wrong, and the pass looked at canvases with wrong tokens: their states are of no use."""
    base, seen = exact_base(3, 4), []

    def wrong(h_BLD: Tensor, state: State) -> Tensor:
        seen.append(h_BLD.clone())
        return -base.hidden(state)

    config = DecodeConfig(max_new_tokens=4, temperature=0.0)
    result = decode(base, [[]], config, decoder="verified", sampler=wrong, depth=3)
    text = result.trajectory(0)
    assert len(seen) == 5  # two drafts, two, and one for the last mask
    assert result.base_calls_B.tolist() == [1 + 3 + 2 + 1]  # a draft without masks has nothing to be checked
    for t, h_BLD in enumerate(seen[::2]):
        tokens_L, masked_L = text.state(t, base.spec.mask_id)
        state = State(tokens_L[None], torch.ones_like(masked_L)[None], masked_L[None])
        assert torch.equal(h_BLD, base.hidden(state))


def test_a_row_does_not_depend_on_its_batch() -> None:
    base = tiny_base("dream")
    g = tiny_sampler(base)
    config = DecodeConfig(max_new_tokens=9, seed=2)
    together = decode(base, PROMPTS, config, decoder="verified", sampler=g, depth=3)
    for b, prompt in enumerate(PROMPTS):
        alone = decode(base, [prompt], config, decoder="verified", sampler=g, depth=3, rows=[b])
        assert row_of(alone, 0) == row_of(together, b)  # what was booked, too
        assert alone.rounds_B[0] == together.rounds_B[b]


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="depth is 0"):
        decode(exact_base(), [[]], DecodeConfig(max_new_tokens=4), decoder="verified", sampler=oracle, depth=0)
