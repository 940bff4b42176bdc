"""The fast form on block bases, and of `verified` on all, captured on a card: the reference's results."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from adjust_dlm.decoders import decode
from adjust_dlm.decoders.fast.engine import captures
from adjust_dlm.types import DecodeConfig
from helpers import tiny_base, tiny_sampler
from test_block_bases import prompts
from test_fast_blocks import ROWS
from test_fast_rounds import lockstep
from test_fast_verified import alike, texts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("family", ["dream", "llada", "sdar"])
def test_captured_steps_in_blocks_write_the_same_tokens(family: str, size: int, temperature: float) -> None:
    """Prompts of every length modulo S, waiting rows, early ends; the second decode replays graphs of the first."""
    base = tiny_base(
        family, block=size, end_ids=(1, 5), num_hidden_layers=3, max_position_embeddings=256, device="cuda"
    )
    for form, more in itertools.product(({}, {"layers": 2, "features": (1, 2)}), ({}, {"candidates": 3})):
        g = tiny_sampler(base, **form)
        for k, decoder, seed in (
            (1, "joint", 0),
            (3, "parallel", 0),
            (3, "adjust", 0),
            (3, "adjust", 1),
            (8, "adjust", 0),
        ):
            config = DecodeConfig(max_new_tokens=2 * size + 3, tokens_per_step=k, temperature=temperature, seed=seed)
            config = config.but(**more) if decoder == "adjust" else config
            for options in ({}, {"sparse": True}) if decoder == "adjust" else ({},):
                how: dict[str, Any] = {"decoder": decoder, "sampler": g, **options}
                slow = decode(base, prompts(size), config, eager=True, **how)
                for slots in (None, 3):
                    quick = decode(base, prompts(size), config, eager=False, slots=slots, **how)
                    where = (slow.tokens_BL != quick.tokens_BL).nonzero().tolist()[:4], k, seed, slots, more, options
                    for name in ("tokens_BL", "order_BL", "base_calls_B", "sampler_calls_B", "rounds_B"):
                        assert torch.equal(getattr(slow, name), getattr(quick, name)), (name, where)
    assert captures(base) > 0 and base.workspace.graphs.works


@pytest.mark.parametrize("decoder", ["joint", "parallel", "adjust"])
def test_single_captured_rounds_in_blocks_are_the_references(decoder: str) -> None:
    base = tiny_base("dream", block=4, end_ids=(1, 5), device="cuda")
    for temperature in (0.0, 1.0):
        config = DecodeConfig(tokens_per_step=3, temperature=temperature)
        lockstep(base, tiny_sampler(base), config, decoder, rows=ROWS)
    assert base.workspace.graphs.works and captures(base) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [None, 4, 16])
@pytest.mark.parametrize("family", ["dream", "llada", "sdar"])
def test_captured_rounds_of_verified_write_the_same_tokens(family: str, size: int | None, temperature: float) -> None:
    """Waiting rows, early ends, drafts that stand and that fall; the second seed replays graphs of the first."""
    if family == "sdar" and size is None:
        return
    base, plain = alike(family, size, end_ids=(1, 5), max_position_embeddings=256, device="cuda")
    for g in (plain, tiny_sampler(base, output_norm_init=0.05, layers=2, features=(1, 2))):
        modes = ((1, "token"), (4, "token"), (4, "law"))
        for (depth, match), (seed, slots) in itertools.product(modes, ((0, None), (1, 3))):
            config = DecodeConfig(
                max_new_tokens=2 * (size or 8) + 3, temperature=temperature, seed=seed, order="entropy",
                suppress_eos=seed == 1,
            )  # fmt: skip
            how: dict[str, Any] = {"decoder": "verified", "sampler": g, "depth": depth, "match": match}
            slow = decode(base, texts(size), config, eager=True, **how)
            quick = decode(base, texts(size), config, eager=False, slots=slots, **how)
            where = (slow.tokens_BL != quick.tokens_BL).nonzero().tolist()[:4], depth, match, seed, slots
            for name in ("tokens_BL", "order_BL", "base_calls_B", "sampler_calls_B", "rounds_B"):
                assert torch.equal(getattr(slow, name), getattr(quick, name)), (name, where)
    assert captures(base) > 0 and base.workspace.graphs.works


@pytest.mark.parametrize("match", ["token", "law"])
@pytest.mark.parametrize("size", [None, 4])
def test_single_captured_rounds_of_verified_are_the_references(size: int | None, match: str) -> None:
    base, g = alike(size=size, end_ids=(1, 5), device="cuda")
    for temperature, chance in ((0.0, False), (1.0, True)):
        config = DecodeConfig(temperature=temperature)
        lockstep(base, g, config, "verified", rows=ROWS, chance=chance, depth=3, match=match)
    assert base.workspace.graphs.works and captures(base) > 0
