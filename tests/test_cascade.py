"""The threshold on g's states: what it commits, when it stops, what it costs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from adjust_dlm.decoders import Canvas, decode
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import BOS, FAMILIES, MASK, Counted, TableBase, row_of, tiny_base, tiny_sampler, writer

PROMPTS = [[BOS, 5, 6], [BOS, 9, 7, 4, 11, MASK, 8], [BOS]]
EVEN = 8  # words of the writers: without any certainty each has probability 1/8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_calls_of_g_it_is_the_threshold(family: str, temperature: float) -> None:
    base = tiny_base(family)
    config = DecodeConfig(max_new_tokens=9, temperature=temperature, seed=3, block_length=5)
    plain = decode(base, PROMPTS, config, decoder="threshold", tau=0.4)
    ours = decode(base, PROMPTS, config, decoder="cascade", sampler=tiny_sampler(base), tau=0.4, calls=0)
    for name in ("tokens_BL", "order_BL", "base_calls_B", "sampler_calls_B"):
        assert torch.equal(getattr(plain, name), getattr(ours, name))


def test_a_threshold_that_none_meets_is_joint_decoding_with_a_call_a_round() -> None:
    base = tiny_base("llada", end_ids=(23,))
    config = DecodeConfig(max_new_tokens=6, temperature=0, order="confidence", order_on="raw")
    joint = decode(base, PROMPTS, config, decoder="joint")
    ours = decode(base, PROMPTS, config, decoder="cascade", sampler=tiny_sampler(base), tau=2)
    assert torch.equal(joint.tokens_BL, ours.tokens_BL) and torch.equal(joint.order_BL, ours.order_BL)
    assert torch.equal(joint.base_calls_B, ours.base_calls_B)
    assert torch.equal(ours.sampler_calls_B, ours.base_calls_B - 1)  # none after the last token


def growing(base: object, by: float) -> Counted:
    """g that is a little more certain with every call: logits grow by `by`."""
    return Counted(lambda h_BLD, state: h_BLD + by * (h_BLD > 0))


def test_rounds_by_hand() -> None:
    """Logits 6, 5, 1, 0.5, 0 of one word each among eight (probabilities .983, .955, .28, .19, .125), tau .9.

    Pass: two tokens. g adds 3.5 a call: 4.5 and 4 are .93 and .89, so one token; 8 and 7.5 (the flat place stays flat):
    the other; then the last is certain of nothing. Second pass: the flat place goes as the likeliest.
    """
    base = writer([1, 2, 3, 4, 5], [6.0, 5.0, 1.0, 0.5, 0.0], words=EVEN)
    g = growing(base, 3.5)
    result = decode(base, [[]], DecodeConfig(max_new_tokens=5, temperature=0), decoder="cascade", sampler=g)
    assert result.order_BL.tolist() == [[0, 1, 2, 3, 4]]
    assert result.tokens_BL[0, :4].tolist() == [1, 2, 3, 4]
    assert (result.base_calls_B.tolist(), result.sampler_calls_B.tolist(), g.calls) == ([2], [3], 3)
    strict = decode(base, [[]], DecodeConfig(max_new_tokens=5, temperature=0), decoder="cascade", sampler=g, tau_g=0.95)
    assert (strict.base_calls_B.tolist(), strict.sampler_calls_B.tolist()) == ([4], [3])
    few = decode(base, [[]], DecodeConfig(max_new_tokens=5, temperature=0), decoder="cascade", sampler=g, calls=1)
    assert (few.base_calls_B.tolist(), few.sampler_calls_B.tolist()) == ([3], [2])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_length", [None, 4])
def test_a_row_does_not_depend_on_its_batch(family: str, block_length: int | None) -> None:
    base = tiny_base(family)
    g = tiny_sampler(base)
    config = DecodeConfig(max_new_tokens=11, seed=7, block_length=block_length, cache_period=2)
    together = decode(base, PROMPTS, config, decoder="cascade", sampler=g, tau=0.35)
    assert bool((together.sampler_calls_B > 0).all())
    for b, prompt in enumerate(PROMPTS):
        assert row_of(decode(base, [prompt], config, decoder="cascade", sampler=g, rows=[b], tau=0.35), 0) == row_of(
            together, b
        )


def test_the_probability_may_equal_tau() -> None:
    base, config = writer([1] * 3, [2.0] * 3), DecodeConfig(max_new_tokens=3, temperature=0)
    p = base.logits(base.hidden(Canvas(base, [[]], config))[0]).softmax(-1).max().item()
    for tau, passes in ((p, 1), (math.nextafter(p, 1), 3)):
        made = decode(base, [[]], config, decoder="cascade", sampler=lambda h, _: h, tau=tau)
        assert made.base_calls_B.tolist() == [passes]


def test_a_round_ends_with_its_block() -> None:
    """All six tokens are certain: a pass a block of two, and nothing is left for g, which would fill the next block."""
    base, g = writer([1, 2, 3, 4, 5, 6], [9.0] * 6), growing(None, 1.0)
    config = DecodeConfig(max_new_tokens=6, temperature=0, block_length=2)
    result = decode(base, [[]], config, decoder="cascade", sampler=g)
    assert (result.base_calls_B.tolist(), result.sampler_calls_B.tolist(), g.calls) == ([3], [0], 0)


def test_what_g_drew_and_did_not_commit_is_not_drawn_again() -> None:
    """Word 0 is certain at position 0; at 1 it has 1/2, after g's call 0.91: word 1 then comes from a pass of its own.

    Were it that pass's draw too, word 1 would come with 0.09 and not with half of it; 4000 rows, 5 standard deviations.
    """
    base, n = TableBase(torch.tensor([[30.0, 0.0], [0.0, 0.0]])), 4000
    up = torch.tensor([[0.0, 0.0, 0.0], [math.log(10), 0.0, 0.0]])
    config = DecodeConfig(max_new_tokens=2, seed=1)
    result = decode(base, [[]] * n, config, decoder="cascade", sampler=lambda h_BLD, _: h_BLD + up, tau=0.9)
    p = 1 / 11 / 2
    assert abs(float((result.tokens_BL[:, 1] == 1).float().mean()) - p) < 5 * math.sqrt(p / n)


def test_g_sees_every_token_committed_before_its_call() -> None:
    base, seen = writer([1, 2, 3], [6.0, 5.0, 1.0]), []

    def g(h_BLD: Tensor, state: State) -> Tensor:
        seen.append(state.masked_BL.int().tolist())
        return h_BLD

    decode(base, [[]], DecodeConfig(max_new_tokens=3, temperature=0), decoder="cascade", sampler=g)
    assert seen == [[[0, 0, 1]]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tau": 0}, "tau is 0"),
        ({"tau_g": -1}, "tau_g is -1"),
        ({"calls": -1}, "calls is -1"),
        ({"tau": None}, "tau is No"),
    ],
)
def test_settings_are_checked(options: dict[str, float], said: str) -> None:
    base = writer([1], [1.0])
    with pytest.raises(InputError, match=said):
        decode(base, [[]], DecodeConfig(max_new_tokens=1), decoder="cascade", sampler=lambda h, s: h, **options)
