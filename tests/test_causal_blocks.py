"""Causal blocks: only masks see what stands right of them; one token a pass is the autoregressive model's own law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases.autoregressive import autoregressive_base
from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import DECODERS, decode
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.fast import work
from adjust_dlm.types import DecodeConfig, InputError, State
from flash import by_runs
from helpers import BOS, FAMILIES, MASK, left_pad, tiny_base, tiny_sampler
from test_block_bases import NO_END, cached_and_whole, played, prompts
from test_fast import Replayed, both
from tiny_ar import tiny_model, tiny_tokenizer

SIZE = 4
ROWS = [[BOS, 5, 6, MASK, 7, MASK, 9, MASK, 8], [BOS, 9], [BOS, MASK, 4, 5, MASK, 6, 7, 8, 9, 10, MASK, 3]]


def sees(state: State, size: int) -> Tensor:
    """By hand: [B, L, L], whether column i sees column j."""
    rows, length = state.real_BL.shape
    out = torch.zeros(rows, length, length, dtype=torch.bool)
    for b in range(rows):
        left = int(state.real_BL[b].long().argmax())
        for i in range(left, length):
            edge = left + ((i - left) // size + 1) * size if state.masked_BL[b, i] else i + 1
            out[b, i, left:edge] = True
        out[b, :left, left] = True  # pads would be NaN
    return out


@pytest.mark.parametrize("family", [*FAMILIES, "sdar"])
def test_states_are_those_under_a_mask_by_hand(family: str) -> None:
    """Left pads, masks in any places; the last block's masks beyond the canvas are there."""
    base = tiny_base(family, block=SIZE, causal=True)
    state = left_pad([[*row, *[MASK] * (-len(row) % SIZE)] for row in ROWS])
    plain = base.model(state.tokens_BL, sees(state, SIZE)[:, None], state.positions_BL)
    for row, wanted_LD, real_L in zip(ROWS, plain, state.real_BL, strict=True):
        torch.testing.assert_close(base.hidden(left_pad([row]))[0], wanted_LD[real_L][: len(row)])
    h_BLD, real_BL = base.hidden(left_pad(ROWS)), left_pad(ROWS).real_BL
    for row, h_LD, real_L in zip(ROWS, h_BLD, real_BL, strict=True):
        torch.testing.assert_close(h_LD[real_L], base.hidden(left_pad([row]))[0])


def test_tokens_see_nothing_right_of_them_and_masks_do() -> None:
    base = tiny_base("dream", block=SIZE, causal=True)
    row, other = [BOS, 5, MASK, 6], [BOS, 5, MASK, 7]
    moved_L = (base.hidden(left_pad([row])) - base.hidden(left_pad([other])))[0].abs().amax(-1) > 1e-4
    assert moved_L.tolist() == [False, False, True, True]


def pair(family: str, size: int) -> tuple[TransformerBase, TransformerBase]:
    """An autoregressive model in blocks of one token, and the same weights in causal blocks."""
    model = tiny_model(family)
    one = autoregressive_base(model, tiny_tokenizer())
    shape = Shape.of(model.config, size, causal=True)
    with torch.device("meta"):
        body = Body(shape)
    body.load_state_dict(model.model.state_dict(), assign=True)
    body.rotary.to(model.device)
    spec = replace(one.spec, block=size, causal=True)
    return one, TransformerBase(body, model.lm_head.weight, spec, next_frame=True)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("family", "size"), [("llama", 4), ("qwen2", 8), ("qwen3", 2)])
def test_one_token_a_pass_is_the_autoregressive_model(
    family: str, size: int, temperature: float, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens from the same random numbers, prompts of every length modulo S, texts that end."""
    monkeypatch.setattr(fast, "Graphs", Replayed)
    one, base = pair(family, size)
    texts = [[4 + (7 * n + 3 * i) % 96 for i in range(n)] for n in (1, 2, 3, 5, 9, 14)]
    config = DecodeConfig(max_new_tokens=21, tokens_per_step=1, temperature=temperature, seed=3)
    own, wanted = (decode(b, texts, config, decoder="joint", eager=eager) for b in (base, one))
    assert len(own.tokens_BL.unique()) > 20
    assert torch.equal(own.tokens_BL, wanted.tokens_BL) and torch.equal(own.order_BL, wanted.order_BL)
    assert torch.equal(own.base_calls_B, wanted.base_calls_B)


@pytest.mark.parametrize("family", [*FAMILIES, "sdar"])
def test_cached_states_are_those_of_the_whole_canvas(family: str) -> None:
    base = tiny_base(family, block=SIZE, causal=True, max_position_embeddings=256, end_ids=NO_END)
    for h_RD, whole_RD in cached_and_whole(base, SIZE):
        torch.testing.assert_close(h_RD, whole_RD, rtol=0, atol=2e-5)


@pytest.mark.parametrize("decoder", [name for name in DECODERS if name != "origin"])
def test_every_decoder_writes_the_same_with_the_cache_and_by_runs(decoder: str) -> None:
    """By the base's own order, in which masks stand between tokens."""
    base = tiny_base("dream", block=SIZE, causal=True, end_ids=(1, 5))
    order = {"guided": "confidence"}.get(decoder)
    config = DecodeConfig(max_new_tokens=2 * SIZE + 3, tokens_per_step=3, seed=4, order=order)
    kept, plain = (played(base, config, decoder, prompts(SIZE), cached=cached) for cached in (True, False))
    with pytest.MonkeyPatch.context() as patch:
        seen = by_runs(patch)
        runs = played(base, config, decoder, prompts(SIZE), cached=True)
    assert seen
    for other in (plain, runs):
        assert torch.equal(kept.tokens_BL, other.tokens_BL) and torch.equal(kept.order_BL, other.order_BL)


@pytest.mark.parametrize("order", ["left_to_right", "entropy"])
@pytest.mark.parametrize(
    ("decoder", "options"), [("joint", {}), ("parallel", {}), ("adjust", {}), ("adjust", {"sparse": True})]
)
def test_the_fast_form_writes_the_same(
    decoder: str, options: dict[str, Any], order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn with passes of their own for rows that enter a block, and without."""
    monkeypatch.setattr(fast, "Graphs", Replayed)
    for few in (0, 8):
        monkeypatch.setattr(work, "COMPACT", few)
        monkeypatch.setattr(work, "FEW", 1)
        base = tiny_base("dream", block=SIZE, causal=True, end_ids=(1, 5), num_hidden_layers=3)
        config = DecodeConfig(max_new_tokens=11, tokens_per_step=3, seed=2, order=order)
        both(base, prompts(SIZE), config, decoder, sampler=tiny_sampler(base, layers=2), slots=3, **options)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_verified_writes_what_joint_writes(depth: int, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "Graphs", Replayed)
    base = tiny_base("dream", block=8, causal=True, end_ids=NO_END, num_hidden_layers=3, initializer_range=0.1)
    g, config = tiny_sampler(base, output_norm_init=0.05), DecodeConfig(max_new_tokens=19, seed=5)
    joint = decode(base, prompts(8), config, decoder="joint")
    checked = decode(base, prompts(8), config, decoder="verified", sampler=g, depth=depth, eager=eager)
    assert torch.equal(joint.tokens_BL, checked.tokens_BL) and torch.equal(joint.order_BL, checked.order_BL)
    assert depth == 1 or int(checked.rounds_B.sum()) < int(joint.rounds_B.sum())


def test_g_sees_its_block_both_ways() -> None:
    base = tiny_base("dream", block=SIZE, causal=True)
    g = tiny_sampler(base)
    x, y = left_pad([[BOS, 5, MASK, 6]]), left_pad([[BOS, 5, MASK, 7]])
    h_BLD = base.hidden(x)
    assert bool(((g(h_BLD, x) - g(h_BLD, y))[0].abs().amax(-1) > 1e-5).all())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="causal is true; it is about columns of a block: give block"):
        tiny_base("dream", causal=True)
    base = tiny_base("dream", block=SIZE, causal=True)
    spec = replace(base.spec, causal=False)
    with pytest.raises(InputError, match="causal is False; the body has True"):
        TransformerBase(base.model, base.head_matrix, spec, next_frame=True)
    plain = tiny_base("dream", block=SIZE)
    assert base.fingerprint != plain.fingerprint
