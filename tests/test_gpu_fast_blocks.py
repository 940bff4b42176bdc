"""The fast form on block bases, captured on a card: the reference's results."""

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
