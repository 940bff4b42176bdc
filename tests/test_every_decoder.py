"""What holds for every decoder in the registry, whatever its rule; a new one is tested here by being registered."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import DECODERS, Decoder, decode
from adjust_dlm.types import GIVEN, MASKED, DecodeConfig, DecodeResult, InputError
from helpers import BOS, CORE, END, FAMILIES, LIMIT, MASK, RULES, row_of, tiny_base, tiny_sampler
from tiny_ar import tiny_partner

PROMPTS = [[BOS, 5, 6], [BOS, 9, 7, 4, 11, MASK, 8], [BOS]]
# Settings under which a decoder does something else than its neighbour, on a random base.
OPTIONS: dict[str, dict[str, Any]] = {
    "adaptive": {"gamma": 3.0}, "cascade": {"tau": 0.3}, "threshold": {"tau": 0.3}, "factor": {"f": 1.0},
    "entropy_bound": {"gamma": 3.0}, "klass": {"tau": 0.2, "epsilon_kl": 1.0, "history": 1},
    "soft_order": {"alg_temp": 0.3},
    "guided": {"cfg_scale": 0.5}, "edlm": {"completions": 3},
}  # fmt: skip
ORDERS = {"guided": "confidence"}  # knows only that rule, and random


def mask_lover(head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A head to which the mask is the likeliest token everywhere."""
    return lambda h_RD: head(h_RD).index_fill(1, torch.tensor([MASK]), 1e4)


@cache
def setup(family: str) -> tuple[TransformerBase, dict[str, Any]]:
    """Base, sampler and partner; the models like their mask best of all."""
    base = tiny_base(family)
    partner = tiny_partner(base)
    base.head, partner.head = mask_lover(base.head), mask_lover(partner.head)  # type: ignore[method-assign]
    return base, {"sampler": tiny_sampler(base), "partner": partner}


def run(
    family: str, decoder: str, prompts: list[list[int]], rows: list[int] | None = None, **changes: Any
) -> DecodeResult:
    base, helpers = setup(family)
    config = DecodeConfig(
        **{"max_new_tokens": 7, "tokens_per_step": 3, "seed": 5, "order": ORDERS.get(decoder), **changes}
    )
    return decode(base, prompts, config, decoder=decoder, rows=rows, **helpers, **OPTIONS.get(decoder, {}))


def check(result: DecodeResult, prompts: list[list[int]], **changes: Any) -> None:
    new = changes.get("max_new_tokens", 7)
    for b, prompt in enumerate(prompts):
        tokens, order, base_calls, _ = row_of(result, b)
        canvas = [*prompt, *[MASK] * new]
        assert len(tokens) == len(canvas) and MASK not in tokens and max(tokens) < LIMIT
        masked = [i for i, token in enumerate(canvas) if token == MASK]
        assert all((tokens[i], order[i]) == (t, GIVEN) for i, t in enumerate(canvas) if t != MASK)
        committed = [i for i in masked if order[i] != MASKED]
        assert sorted(order[i] for i in committed) == list(range(len(committed)))
        assert all(tokens[i] == END for i in masked if order[i] == MASKED)  # filler behind an end
        assert 1 <= int(result.rounds_B[b]) <= min(base_calls, len(masked))
        if changes.get("suppress_eos"):
            assert END not in [tokens[i] for i in masked]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("dream", {"temperature": 1.0}),
        ("llada", {"temperature": 1.0}),
        ("llada", {"temperature": 0.0, "suppress_eos": True}),
        ("dream", {"temperature": 0.7, "top_p": 0.9, "tokens_per_step": 8}),
        ("llada", {"temperature": 1.0, "tokens_per_step": 1, "max_new_tokens": 1}),
        *(
            (
                family,
                {"temperature": 1.0, "block_length": 3, "schedule": "reference", "cache_period": 2, "cache_window": 1},
            )
            for family in FAMILIES
        ),
        ("dream", {"temperature": 1.0, "candidates": 1, "block_length": 2}),
    ],
    ids=str,
)
def test_a_decode_is_whole_and_each_row_its_own(decoder: str, family: str, changes: dict[str, Any]) -> None:
    """Left pads, a mask inside a prompt, a base and a partner whose likeliest token is the mask."""
    refused = "candidates" in changes and not DECODERS[decoder].takes_candidates and decoder != "joint"
    if refused or (decoder == "origin" and "block_length" in changes):
        with pytest.raises(
            InputError, match="of the decoders only adjust, adaptive" if refused else "leave block_length"
        ):
            run(family, decoder, PROMPTS, **changes)
        return
    together = run(family, decoder, PROMPTS, **changes)
    check(together, PROMPTS, **changes)
    for b, prompt in enumerate(PROMPTS):
        alone = run(family, decoder, [prompt], [b], **changes)
        assert row_of(alone, 0) == row_of(together, b)
        assert alone.partner_calls_B[0] == together.partner_calls_B[b]


@pytest.mark.parametrize("decoder", DECODERS)
def test_calls_of_models_that_a_decoder_does_not_ask_are_zero(decoder: str) -> None:
    result = run("dream", decoder, PROMPTS, suppress_eos=True)
    entry = DECODERS[decoder]
    assert bool(result.sampler_calls_B.any()) == entry.needs_sampler
    assert bool(result.partner_calls_B.any()) == entry.needs_partner


@pytest.mark.parametrize("decoder", [name for name in DECODERS if name != "origin"])
def test_a_round_stays_in_its_block(decoder: str) -> None:
    """Of 8 new tokens in blocks of 2 no round commits tokens of two blocks: at least four passes, in order."""
    result = run("dream", decoder, [[BOS, 5]], max_new_tokens=8, block_length=2, tokens_per_step=8, suppress_eos=True)
    order = result.order_BL[0, -8:].tolist()
    assert all(max(order[i : i + 2]) < min(order[i + 2 : i + 4]) for i in (0, 2, 4))
    assert int(result.rounds_B[0]) >= 4


def test_a_decoder_that_leaves_masks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODERS, "lazy", Decoder(lambda base, canvas: None))
    with pytest.raises(RuntimeError, match="decoder 'lazy' left 7 masks on the canvas"):
        run("dream", "lazy", [[BOS]])


@pytest.mark.parametrize("decoder", DECODERS)
def test_another_seed_is_another_text_and_the_same_seed_the_same(decoder: str) -> None:
    first, again, other = (run("llada", decoder, PROMPTS, seed=seed).tokens_BL for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logit", [torch.inf, -torch.inf])
@pytest.mark.parametrize("decoder", DECODERS)
def test_logits_without_a_softmax_are_an_error(decoder: str, logit: float, temperature: float) -> None:
    """What a head in half precision overflows to: one infinite logit, or nothing but -inf."""
    base = tiny_base("dream")
    head, helpers = base.head, {"sampler": tiny_sampler(base), "partner": tiny_partner(base)}
    at = slice(5, 6) if logit > 0 else slice(None)
    base.head = lambda h_RD: head(h_RD).index_fill(1, torch.arange(24)[at], logit)  # type: ignore[method-assign]
    rules = {"soft_order": ("entropy", "confidence"), "guided": ("confidence", "random")}
    for rule in rules.get(decoder, RULES):
        config = DecodeConfig(max_new_tokens=4, tokens_per_step=2, temperature=temperature, order=rule)
        for eager in (True, False) if decoder in CORE else (True,):
            with pytest.raises(FloatingPointError, match=r"gave NaN|no finite logits"):
                decode(base, [[BOS, 5]], config, decoder=decoder, eager=eager, **helpers)
