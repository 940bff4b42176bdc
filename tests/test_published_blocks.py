"""Published code of block families on tiny weights (fixtures/published): equal logits, equal texts, equal passes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import decode, make_plan
from adjust_dlm.decoders.fast_dllm import FastDllmOptions
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.sdar import SdarOptions
from adjust_dlm.sampling import DRAW
from adjust_dlm.types import DecodeConfig, InputError
from helpers import BOS, IN_BLOCKS, KNOWN, left_pad, tiny_base, tiny_config, writer
from helpers import MASK as TINY_MASK

PUBLISHED = Path(__file__).parent / "fixtures" / "published"
VOCAB, MASK, NONE = 60, 57, 59  # of the fixtures


def published_base(family: str, block: int, end: int = NONE) -> TransformerBase:
    """The fixture's weights in our body."""
    facts, config = KNOWN[family], tiny_config(family, vocab_size=VOCAB, max_position_embeddings=512)
    weights = load_file(PUBLISHED / f"{family}.safetensors")
    head_VD = weights.pop(facts.head)
    body = Body(replace(facts.plain_shape(config.to_dict()), block=block))
    body.load_state_dict({name.removeprefix("model."): w for name, w in weights.items()}, assign=True)
    return facts.make(
        config, mask_id=MASK, end_ids=(end,), bos_id=None, model=body, head_weight=head_VD, block=block
    )  # fmt: skip


def own_logits(base: TransformerBase, row: Tensor, left: int) -> Tensor:
    """[L, V], row i at position i, of a row with pads before it."""
    state = left_pad([row.tolist(), [2] * (len(row) + left)], mask_id=MASK, pad_id=1)
    return base.head(base.hidden(state))[0, left:]


def near(own: Tensor, published: Tensor) -> None:
    torch.testing.assert_close(own, published, rtol=2e-6, atol=2e-5)


# Logits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 3])
@torch.no_grad()
def test_logits_of_fast_dllm_equal_the_published_ones(left: int) -> None:
    """In the prefill, in an open block behind its cache, in that block when it is whole, and in the next one."""
    base, there = published_base("fast_dllm_qwen", 8), load_file(PUBLISHED / "fast_dllm_qwen_logits.safetensors")
    opened = own_logits(base, there["opened"][0], left)
    near(opened[:16], there["prefill"][0])
    near(opened[16:], there["inside"][0])
    whole = own_logits(base, torch.cat([there["tokens"][0], torch.full((8,), MASK)]), left)
    near(whole[:24], torch.cat([there["prefill"][0], there["finished"][0]]))
    near(whole[24:], there["next"][0])
    assert float((opened[16:] - whole[16:24]).abs().max()) > 1


@pytest.mark.parametrize("left", [0, 3])
@torch.no_grad()
def test_logits_of_sdar_equal_those_of_qwen3_under_a_block_mask(left: int) -> None:
    base, there = published_base("sdar", 4), load_file(PUBLISHED / "sdar_logits.safetensors")
    own = own_logits(base, there["tokens"][0], left)
    near(own, there["whole"][0])
    near(own[20:], there["inside"][0])


@pytest.mark.parametrize("family", IN_BLOCKS)
def test_names_are_those_of_the_published_code(family: str) -> None:
    facts, weights = KNOWN[family], load_file(PUBLISHED / f"{family}.safetensors")
    body = published_base(family, 4).model
    assert {facts.published(name) for name in body.state_dict()} | {facts.head} == set(weights)


def test_the_config_of_the_published_class_gives_the_shape() -> None:
    config = json.loads((PUBLISHED / "fast_dllm_qwen_config.json").read_text())
    known = KNOWN["fast_dllm_qwen"].plain_shape(
        tiny_config("fast_dllm_qwen", vocab_size=VOCAB, max_position_embeddings=512).to_dict()
    )
    shape = KNOWN["fast_dllm_qwen"].shape(config)
    assert replace(shape, initializer_range=known.initializer_range) == replace(known, block=8)


# Texts ---------------------------------------------------------------------------------------------------------


class Replay(Canvas):
    """A canvas that gives the numbers recorded in a case."""

    def __init__(self, case: dict[str, Any], *given: Any) -> None:
        super().__init__(*given)
        self._numbers = torch.tensor(case.get("draw", [])).double() * 2.0**-32

    def uniforms(self, position: Tensor, row: Tensor, stream: int = DRAW) -> Tensor:
        if not len(self._numbers):
            return super().uniforms(position, row, stream)
        return self._numbers[self._round, position]


def cases(family: str) -> dict[str, dict[str, Any]]:
    return json.loads((PUBLISHED / f"{family}_decodes.json").read_text())


FAST_CASES, SDAR_CASES = cases("fast_dllm_qwen"), cases("sdar")


def replay(family: str, decoder: str, case: dict[str, Any], config: DecodeConfig, **options: Any) -> Replay:
    base = published_base(family, case["block"], case["stop"])
    plan = make_plan(base, config, decoder=decoder, **options)
    canvas = Replay(case, plan.base, [case["prompt"]], plan.config)
    plan.run(canvas)
    return canvas


@pytest.mark.parametrize("name", FAST_CASES)
def test_fast_dllm_writes_what_generate_writes(name: str) -> None:
    """And the same passes, but for a prefill that gives no token. The release runs whole blocks and one token more."""
    case = FAST_CASES[name]
    length, made, size = case["length"], case["tokens"], case["block"]
    config = DecodeConfig(
        max_new_tokens=(length // size + case["new"] // size) * size + 1 - length, block_length=case["sub"],
        temperature=case.get("temperature", 0.0), top_p=case.get("top_p", 1.0),
    )  # fmt: skip
    canvas = replay("fast_dllm_qwen", "fast_dllm", case, config, threshold=case["threshold"])
    assert canvas.tokens_BL[0, length : length + len(made)].tolist() == made
    assert len(made) == config.max_new_tokens if case["stop"] == NONE else made[-1] == case["stop"]
    assert canvas.base_calls_B.tolist() == [case["passes"]]


def test_the_prompts_of_fast_dllm_have_every_length_modulo_the_block_but_the_one_that_the_release_loses() -> None:
    assert {case["length"] % 8 for case in FAST_CASES.values() if case["block"] == 8} == set(range(8))
    assert all(case["length"] != case["block"] for case in FAST_CASES.values())


@pytest.mark.parametrize("name", SDAR_CASES)
def test_sdar_writes_what_generate_writes(name: str) -> None:
    """And the same passes, unless a text ends: the release then fills its block."""
    case = SDAR_CASES[name]
    filters = {key: case[key] for key in ("temperature", "top_p", "top_k")}
    whole = -(-(case["length"] + case["new"]) // case["block"]) * case["block"] - case["length"]
    config = DecodeConfig(max_new_tokens=whole, **filters)
    canvas = replay("sdar", "sdar", case, config, remasking=case["remasking"], denoising_steps=case["steps"])
    own, made = canvas.tokens_BL[0, case["length"] :].tolist(), case["tokens"]
    if case["stop"] == NONE:
        assert own == made
        assert canvas.base_calls_B.tolist() == [case["passes"]]
    else:
        end = made.index(case["stop"]) + 1
        assert own[:end] == made[:end]
        assert canvas.base_calls_B[0] <= case["passes"]


# What the releases do not show -----------------------------------------------------------------------------------


def test_a_threshold_is_passed_by_larger_probabilities_alone() -> None:
    """Two words at logit 0 and one at log 2: its probability is 1/2 to the last bit."""
    base = writer([1] * 4, [0.0] * 4, words=2)
    config = DecodeConfig(max_new_tokens=4, temperature=0.0)
    for decoder, name in (("fast_dllm", "threshold"), ("sdar", "confidence_threshold")):
        for value, passes in ((0.5, 4), (0.49, 1)):
            done = decode(base, [[]], config, decoder=decoder, **{name: value})
            assert done.base_calls_B.tolist() == [passes]


def test_a_blocks_first_token_is_the_likeliest_at_every_temperature_and_alone_in_its_pass() -> None:
    base, heat = tiny_base("dream", block=4, end_ids=(23,)), DecodeConfig(max_new_tokens=11, temperature=5.0)
    done = decode(base, [[BOS]] * 40, heat, decoder="fast_dllm", threshold=0.0)
    assert len(done.tokens_BL[:, 1:4].unique(dim=0)) > 30
    for place in (4, 8):
        seen = left_pad([row[:place] for row in done.tokens_BL.tolist()])
        logits_BV = base.logits(base.hidden(seen)[:, -1])
        assert torch.equal(done.tokens_BL[:, place], logits_BV.argmax(-1))
        alone_BL = done.order_BL == done.order_BL[:, place : place + 1]
        assert alone_BL.sum(-1).tolist() == [1] * 40
    assert done.base_calls_B.tolist() == [5] * 40  # 3, then 1 and 3, then 1 and 3, in one pass each


@pytest.mark.parametrize(("steps", "passes"), [(1, 2), (2, 4), (3, 6), (8, 16), (20, 16)])
def test_the_steps_of_sdar_share_a_block(steps: int, passes: int) -> None:
    base = tiny_base("sdar", block=8, end_ids=(23,))
    how: dict[str, Any] = {"remasking": "low_confidence_static", "denoising_steps": steps}
    done = decode(base, [[BOS] * 8], DecodeConfig(max_new_tokens=16), decoder="sdar", **how)
    assert done.base_calls_B.tolist() == [passes]


@pytest.mark.parametrize("decoder", ["fast_dllm", "sdar"])
@pytest.mark.parametrize("family", IN_BLOCKS)
def test_a_row_does_not_depend_on_its_batch(family: str, decoder: str) -> None:
    base = tiny_base(family, block=4)
    prompts = [[BOS], [BOS, 3, 4, 5, 6], [BOS, 7, 8, 9]]
    config = DecodeConfig(max_new_tokens=9, seed=5)
    together = decode(base, prompts, config, decoder=decoder)
    assert TINY_MASK not in together.tokens_BL
    for b, prompt in enumerate(prompts):
        alone = decode(base, [prompt], config, decoder=decoder, rows=[b])
        real_L = together.real_BL[b]
        assert alone.tokens_BL[0].tolist() == together.tokens_BL[b][real_L].tolist()
        assert alone.base_calls_B[0] == together.base_calls_B[b]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (FastDllmOptions, {"threshold": float("nan")}, "threshold is nan"),
        (FastDllmOptions, {"threshold": -1}, "threshold is -1"),
        (SdarOptions, {"remasking": "entropy_bounded"}, "remasking is 'entropy_bounded'; it must be one of low_con"),
        (SdarOptions, {"denoising_steps": 0}, "denoising_steps is 0"),
        (SdarOptions, {"confidence_threshold": "x"}, "confidence_threshold is 'x'; it must be a number"),
    ],
)
def test_wrong_settings_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kind(**settings)
