"""Rows that come and go between rounds are decoded as if alone; what a canvas keeps for each row."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from adjust_dlm.decoders import DECODERS, decode, make_plan, read_variant
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.fast.rounds import Rounds
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.machinery.rows import RoundCanvas, join, take
from adjust_dlm.types import DecodeConfig, DecodeResult, InputError
from helpers import BOS, FAMILIES, MASK, row_of, tiny_base, writer
from test_every_decoder import OPTIONS, ORDERS, setup
from test_fast import Replayed

RESUMABLE = [name for name, entry in DECODERS.items() if entry.resumable]
# Prompt, new tokens, seed, row id: all differ.
ROWS = [
    ([BOS, 5, 6], 5, 1, 0), ([BOS, 9, 7, 4, 11, 8], 7, -9, 4), ([BOS], 3, 2**63, 2),
    ([BOS, 9, MASK, 7, MASK, 4], 3, 7, 7), ([BOS, 4, 4], 6, 1, 1), ([BOS, 12], 1, 0, 0),
]  # fmt: skip


def test_which_decoders_keep_nothing_between_rounds() -> None:
    assert set(DECODERS) - set(RESUMABLE) == {"klass", "origin", "sdar"}


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {}, "blocks": {"block_length": 2, "temperature": 0.7, "top_p": 0.9}, "cache": {"cache_period": 3},
    "window": {"block_length": 4, "cache_period": 2, "cache_window": 2},
}  # fmt: skip
# Settings are the canvas's and passes the base's: each family has half of the settings, and of those with captured
# passes the other half.
CELLS = [
    (captured, family, name)
    for captured in (False, True)
    for family in FAMILIES
    for name in CHANGES
    if (name in ("plain", "window")) == ((family == "dream") == captured)
]


def planned(variant: str, name: str) -> tuple[str, dict[str, Any], DecodeConfig]:
    """Decoder, its options, and settings."""
    decoder, _, settings = read_variant(variant)
    order = "margin" if settings else ORDERS.get(decoder)
    config = DecodeConfig(tokens_per_step=2, order=order, **CHANGES[name])  # type: ignore[arg-type]
    return decoder, OPTIONS.get(decoder, {}) | settings, config


@functools.cache
def alone_once(variant: str, family: str, name: str, n: int) -> DecodeResult:
    (base, helpers), (ids, new, seed, row) = setup(family), ROWS[n]
    decoder, options, config = planned(variant, name)
    own = config.but(seed=seed, max_new_tokens=new)
    return decode(base, [ids], own, decoder=decoder, rows=[row], **helpers, **options)


@pytest.mark.parametrize(("captured", "family", "name"), CELLS)
@pytest.mark.parametrize("variant", [*RESUMABLE, "verified:match=law"])
def test_rows_come_and_go_and_none_notices(
    variant: str, family: str, name: str, monkeypatch: pytest.MonkeyPatch, *, captured: bool
) -> None:
    """A row joins in every round, three at most stay together; tokens, order and calls are those of a decode alone."""
    base, helpers = setup(family)
    monkeypatch.setattr(fast, "Graphs", Replayed)
    decoder, options, config = planned(variant, name)
    plan = make_plan(base, config, decoder=decoder, **helpers, **options)
    if captured:  # base passes and steps of g, in buffers of few shapes
        rounds = Rounds(base, helpers["sampler"], tokens=8 * 16)
        twin, g = rounds.passes(plan.base)
        plan = make_plan(twin, config, decoder=decoder, sampler=g, partner=helpers["partner"], **options)
    fresh = [
        RoundCanvas(plan.base, [ids], plan.config, rows=[row], seeds=[seed], new=[new]) for ids, new, seed, row in ROWS
    ]
    waiting, here, canvas, widths = list(range(len(ROWS))), [], None, set()
    done: dict[int, RoundCanvas] = {}
    while waiting or here:
        if waiting and len(here) < 3:
            here.append(waiting.pop(0))
            canvas = join([*([canvas] if canvas else []), fresh[here[-1]]])
        assert canvas is not None
        with torch.no_grad():
            canvas.play(plan.run)
        widths.add(canvas.tokens_BL.shape)
        open_B = canvas.open_B.tolist()
        done |= {here[b]: take(canvas, [b]) for b in range(len(here)) if not open_B[b]}
        kept = [b for b in range(len(here)) if open_B[b]]
        here = [here[b] for b in kept]
        canvas = take(canvas, kept) if kept else None
    assert len(widths) >= 3  # batches of several shapes
    assert not captured or config.cache_period or 1 <= rounds.held.shapes <= 8  # cached passes are not captured
    for n in range(len(ROWS)):
        alone = alone_once(variant, family, name, n)
        assert not done[n].padded and row_of(done[n], 0) == row_of(alone, 0)  # type: ignore[arg-type]
        for calls in ("partner_calls_B", "rounds_B"):
            assert getattr(done[n], calls).tolist() == getattr(alone, calls).tolist()


def test_a_batch_may_have_seeds_and_lengths_of_its_own() -> None:
    base, helpers = setup("dream")
    plan = make_plan(base, DecodeConfig(tokens_per_step=3, block_length=4), decoder="adjust", **helpers)
    ids, new, seeds, rows = (list(part) for part in zip(*ROWS, strict=True))
    canvas = Canvas(plan.base, ids, plan.config, rows=rows, seeds=seeds, new=new)
    with torch.no_grad():
        plan.run(canvas)
    for b, (prompt, count, seed, row) in enumerate(ROWS):
        alone = decode(
            base, [prompt], plan.config.but(seed=seed, max_new_tokens=count), decoder="adjust", rows=[row], **helpers
        )
        assert row_of(canvas, b) == row_of(alone, 0)  # type: ignore[arg-type]


def test_take_drops_shared_pads_and_join_puts_them_back() -> None:
    base = tiny_base("dream")
    canvas = RoundCanvas(base, [[BOS, 5, 6, 7], [BOS]], DecodeConfig(), seeds=[4, 5], new=[2, 3])
    assert canvas.padded and canvas.tokens_BL.shape == (2, 6)
    short = take(canvas, [1])
    assert not short.padded and short.tokens_BL.tolist() == [[BOS, MASK, MASK, MASK]]
    assert (
        short.order_BL.tolist() == [[-1, -2, -2, -2]] and short.new_B.tolist() == [3] and short.seeds_B.tolist() == [5]
    )
    back = join([take(canvas, [0]), short])
    for name in ("tokens_BL", "real_BL", "masked_BL", "order_BL", "rows_B", "seeds_B", "new_B", "commits_B"):
        assert torch.equal(getattr(back, name), getattr(canvas, name))
    copied = take(canvas, [0, 1])
    copied.tokens_BL[0, 0] = 9
    assert canvas.tokens_BL[0, 0] == BOS


@torch.no_grad()
def test_a_round_can_be_played_again_from_a_copy() -> None:
    """As a server does after a fault: keys and values are written in place, and a copy has its own."""
    base, helpers = setup("llada")
    plan = make_plan(base, DecodeConfig(tokens_per_step=2, cache_period=8), decoder="adjust", **helpers)
    canvas = join([RoundCanvas(base, [ids], plan.config, rows=[row], new=[9]) for ids, _, _, row in ROWS[:3]])
    canvas.play(plan.run)
    before = take(canvas, range(3))
    canvas.play(plan.run)
    again = join([take(before, [b]) for b in range(3)])
    again.play(plan.run)
    assert torch.equal(again.tokens_BL, canvas.tokens_BL)
    for one, other in zip(again.memory.kept, canvas.memory.kept, strict=True):
        real_BL = canvas.real_BL.view(3, *[1] * (one.ndim - 3), -1, 1)
        torch.testing.assert_close(one * real_BL, other * real_BL, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_is_refused() -> None:
    base, reference = tiny_base("dream"), DecodeConfig(schedule="reference", max_new_tokens=2)
    with pytest.raises(InputError, match="one max_new_tokens for all rows"):
        Canvas(base, [[BOS]], reference, new=[3])
    with pytest.raises(InputError, match="exact schedule only"):
        take(RoundCanvas(base, [[BOS]], reference), [0])
    with pytest.raises(InputError, match="2 seeds for 1 prompts"):
        Canvas(base, [[BOS]], DecodeConfig(), seeds=[1, 2])
    with pytest.raises(InputError, match="2 lengths for 1 prompts"):
        Canvas(base, [[BOS]], DecodeConfig(), new=[1, 2])
    with pytest.raises(InputError, match="prompt of 1 tokens plus 64 new ones make 65; base 'dream' takes at most 64"):
        Canvas(base, [[BOS], [BOS, 5]], DecodeConfig(max_new_tokens=2), new=[64, 2])


@pytest.mark.parametrize("decoder", ["parallel", "threshold"])
def test_the_chance_of_a_token_is_noted_for_who_asks(decoder: str) -> None:
    """8 words, one with logit z: at T=0 the plain softmax, e^z / (e^z + 7)."""
    certainty = [1.0, 3.0, 2.0]
    canvas = Canvas(writer([1, 2, 3], certainty), [[]], DecodeConfig(max_new_tokens=3, temperature=0))
    assert canvas.chance_BL is None
    canvas.chance_BL = torch.full(canvas.tokens_BL.shape, torch.nan)
    make_plan(canvas.base, canvas.config, decoder=decoder).run(canvas)
    expected = torch.tensor(certainty).exp() / (torch.tensor(certainty).exp() + 7)
    assert canvas.chance_BL is not None and torch.allclose(canvas.chance_BL[0], expected, atol=1e-6)


def test_chances_follow_their_rows() -> None:
    base, helpers = setup("dream")
    plan = make_plan(base, DecodeConfig(tokens_per_step=2, temperature=0.8), decoder="adjust", **helpers)
    order = list(range(len(ROWS)))
    random.Random(0).shuffle(order)
    made = []
    for n in order:
        ids, new, seed, row = ROWS[n]
        part = RoundCanvas(plan.base, [ids], plan.config, rows=[row], seeds=[seed], new=[new])
        part.chance_BL = torch.full(part.tokens_BL.shape, torch.nan)
        made.append(part)
    together = join(made)
    with torch.no_grad():
        for canvas in (together, *made):
            canvas.play(plan.run)
    for b, alone in enumerate(made):
        noted = take(together, [b]).chance_BL
        assert noted is not None and alone.chance_BL is not None
        committed_BL = alone.order_BL >= 0
        assert torch.allclose(noted[committed_BL], alone.chance_BL[committed_BL], atol=1e-5)
        assert bool(((noted[committed_BL] > 0) & (noted[committed_BL] <= 1)).all())
