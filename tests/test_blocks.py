"""Blocks, candidates and the prefix cache, settings of every decoder: off they change nothing, on they do as told."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases.memory import Memory, renew
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import DECODERS, Canvas, decode
from adjust_dlm.decoders.machinery.cache import with_cache
from adjust_dlm.decoders.machinery.canvas import Picks, best_columns, columns_of
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import (
    BOS,
    FAMILIES,
    MASK,
    TableBase,
    exact_base,
    oracle,
    row_of,
    tiny_base,
    tiny_sampler,
    writer,
)

PLAIN = [name for name, entry in DECODERS.items() if not entry.needs_partner and name not in ("origin", "guided")]
PROMPTS = [[BOS, 5, 6], [BOS, 9, 7, 4, 11, MASK, 8], [BOS]]
NO_END = (23,)


def run(base: Any, prompts: list[list[int]], config: DecodeConfig, decoder: str, **options: Any) -> Any:
    sampler = tiny_sampler(base) if DECODERS[decoder].needs_sampler else None
    return decode(base, prompts, config, decoder=decoder, sampler=sampler, **options)


# Blocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", PLAIN)
@pytest.mark.parametrize("new", [1, 7, 12])
def test_blocks_are_filled_from_left_to_right(decoder: str, new: int) -> None:
    """Blocks of 5 of which the last is shorter; masks in a prompt belong to the first."""
    base = tiny_base("dream", end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=new, tokens_per_step=3, block_length=5, seed=1)
    result = run(base, PROMPTS, config, decoder)
    for b in range(len(PROMPTS)):
        _, order, _, _ = row_of(result, b)
        edges = [0, *range(len(order) - new + 5, len(order), 5), len(order)]
        blocks = [[n for n in order[i:j] if n >= 0] for i, j in itertools.pairwise(edges)]
        assert all(max(left) < min(right) for left, right in itertools.pairwise(blocks))


def test_masks_in_a_prompt_are_of_the_first_block_and_not_before_it() -> None:
    """Two new tokens that are more certain than the mask inside the prompt come first; the second block comes last."""
    base = writer([1] * 5, [9.0, 1.0, 8.0, 7.0, 8.5])
    config = DecodeConfig(max_new_tokens=3, block_length=2, temperature=0.0)
    assert decode(base, [[1, base.spec.mask_id]], config, decoder="joint").order_BL.tolist() == [[-1, 2, 0, 1, 3]]


@pytest.mark.parametrize(("schedule", "rounds"), [("exact", [3, 2, 3, 2, 2]), ("reference", [3, 2, 3, 2, 2])])
def test_a_round_ends_with_its_block(schedule: Any, rounds: list[int]) -> None:
    base = writer([1] * 12, [float(9 + n % 7) for n in range(12)])
    config = DecodeConfig(max_new_tokens=12, tokens_per_step=3, block_length=5, temperature=0, schedule=schedule)
    fills: list[int] = []
    canvas = Canvas(base, [[]], config)
    canvas.watch = lambda c: fills.append(int((c.order_BL >= 0).sum()))
    DECODERS["parallel"].run(base, canvas)
    assert [b - a for a, b in itertools.pairwise([0, *fills])] == rounds


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("tokens_per_step", [1, 2, 4])
def test_with_true_conditionals_blocks_change_the_order_alone(length: int, tokens_per_step: int) -> None:
    """ADJUST with the oracle equals joint decoding in the same blocks, token for token."""
    base = exact_base(3, 5)
    config = DecodeConfig(max_new_tokens=5, tokens_per_step=tokens_per_step, block_length=length, candidates=0, seed=3)
    joint = decode(base, [[]] * 50, config, decoder="joint")
    adjust = decode(base, [[]] * 50, config, decoder="adjust", sampler=oracle(base))
    assert torch.equal(joint.tokens_BL, adjust.tokens_BL)
    assert torch.equal(joint.order_BL, adjust.order_BL)
    rounds = sum(-(-min(length, 5 - first) // tokens_per_step) for first in range(0, 5, length))
    assert set(adjust.base_calls_B.tolist()) == {rounds}


@pytest.mark.parametrize("new", [1, 10, 33])
@pytest.mark.parametrize("prompt", [31, 32, 33])
def test_alignment_never_adds_a_token(new: int, prompt: int) -> None:
    base = TableBase(torch.randn(66, 6, generator=torch.Generator().manual_seed(0)))
    config = DecodeConfig(max_new_tokens=new, tokens_per_step=4, block_length=32)
    result = decode(base, [[1] * prompt], config, decoder="parallel")
    assert result.tokens_BL.shape[1] == prompt + new and int((result.order_BL >= 0).sum()) == new
    with pytest.raises(InputError, match="base 'table' takes at most 66"):
        decode(base, [[1] * (67 - new)], config, decoder="parallel")


def test_origin_has_no_blocks() -> None:
    with pytest.raises(InputError, match="leave block_length out"):
        decode(exact_base(), [[]], DecodeConfig(max_new_tokens=4, block_length=2), decoder="origin")


@pytest.mark.parametrize("field", ["block_length", "cache_period", "cache_window"])
def test_settings_are_checked(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} is 0"):
        DecodeConfig(**{field: 0})
    with pytest.raises(InputError, match="candidates is -1"):
        DecodeConfig(candidates=-1)
    with pytest.raises(InputError, match="cache_window is 2 without a cache"):
        DecodeConfig(cache_window=2)


# Candidates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoder", ["adjust", "adaptive"])
def test_enough_candidates_are_all_positions(family: str, decoder: str) -> None:
    base = tiny_base(family)
    config = DecodeConfig(max_new_tokens=9, tokens_per_step=4, seed=2)
    whole, same = (run(base, PROMPTS, config.but(candidates=m), decoder) for m in (0, 9))
    assert torch.equal(whole.tokens_BL, same.tokens_BL) and torch.equal(whole.order_BL, same.order_BL)


def test_a_round_stays_with_its_candidates() -> None:
    """g turns certainty around, so without candidates a round would go to the least certain positions."""
    candidates, rounds = 1, 5
    base = writer(list(range(1, 10)), [float(20 - 2 * n) for n in range(9)], words=10)

    def turned(h_BLD: Tensor, state: State) -> Tensor:
        return base._h_LD.flip(0).roll(0)[None] * torch.arange(9)[None, :, None] / 4

    config = DecodeConfig(max_new_tokens=9, tokens_per_step=4, temperature=0, candidates=candidates)
    result = decode(base, [[]], config, decoder="adjust", sampler=turned)
    count = min(4, candidates + 1)
    first = {position for position, n in enumerate(result.order_BL[0].tolist()) if n < count}
    assert first == set(range(count))
    assert result.base_calls_B.tolist() == [rounds]
    free = decode(base, [[]], config.but(candidates=0), decoder="adjust", sampler=turned)
    assert {p for p, n in enumerate(free.order_BL[0].tolist()) if n < count} != first


@pytest.mark.parametrize("count", [None, 1, 2, 5, 8, 40])
def test_candidates_are_the_best_of_the_first_pick(count: int | None) -> None:
    """Against a list in plain Python, through a whole round; scores with ties, rows that are nearly full."""
    base = tiny_base("dream")
    config = DecodeConfig(max_new_tokens=20, tokens_per_step=4, candidates=count)
    canvas = Canvas(base, [[BOS, 5, 6]] * 40, config)
    generator = torch.Generator().manual_seed(count or 0)
    share_B1 = torch.linspace(0, 1, 40)[:, None]
    full_BL = canvas.masked_BL & (torch.rand(canvas.tokens_BL.shape, generator=generator) < share_B1)
    full_BL[:, 7] = False  # something is open
    canvas.masked_BL &= ~full_BL
    score_BL = torch.randint(0, 9, canvas.tokens_BL.shape, generator=generator).float()
    score_BL[~canvas.masked_BL] = -math.inf
    canvas.start_round()
    canvas.narrow(score_BL)
    wide = 4 if count is None else count + 1
    left = [
        sorted((c for c, s in enumerate(score) if s > -math.inf), key=lambda c: -score[c])[:wide]
        for score in score_BL.tolist()
    ]
    for _ in range(4):
        assert [{c for c, open_ in enumerate(row) if open_} for row in canvas.open_BL.tolist()] == [
            set(x) for x in left
        ]
        done_B = canvas.busy_B
        at_B = torch.tensor([row[-1] if row else 0 for row in left])  # of the candidates, whichever g likes
        canvas.commit(Picks(at_B[:, None], torch.full((40, 1), 7), done_B[:, None]))
        left = [row[:-1] if done else row for row, done in zip(left, done_B.tolist(), strict=True)]
    assert canvas.commits_B.tolist() == [min(4, wide, n) for n in (score_BL > -math.inf).sum(-1).tolist()]


def test_sets_of_columns_have_their_size_whatever_is_open() -> None:
    """The best open ones, then others from the right; pads never."""
    out = -math.inf
    score_BL = torch.tensor([[1.0, 3.0, out, 2.0, out], [out, out, out, out, 5.0]])
    real_BL = torch.tensor([[True] * 5, [False] + [True] * 4])
    for count, columns in ((1, [[1], [4]]), (2, [[1, 3], [3, 4]]), (4, [[0, 1, 3, 4], [1, 2, 3, 4]])):
        marked_BL = best_columns(score_BL, real_BL, torch.full((2,), count))
        assert [row.nonzero()[:, 0].tolist() for row in marked_BL] == columns
        assert [part.tolist() for part in columns_of(marked_BL, count)] == [columns, [[True] * count] * 2]
    column_BN, valid_BN = columns_of(torch.tensor([[False, True, False, False, True]]), 3)
    assert column_BN.tolist() == [[1, 4, 0]] and valid_BN.tolist() == [[True, True, False]]


def test_only_candidates_pay_for_the_head() -> None:
    base, rows = tiny_base("dream", end_ids=NO_END), []
    logits = base.logits

    def spy(h_RD: Tensor, **options: Any) -> Tensor:
        rows.append(len(h_RD))
        return logits(h_RD, **options)

    base.logits = spy  # type: ignore[method-assign]
    config = DecodeConfig(max_new_tokens=8, tokens_per_step=4, candidates=3)
    run(base, [[BOS, 5]] * 2, config, "adjust")
    assert rows == [16, 6, 4, 2, 8, 6, 4, 2]  # 3 candidates a row, then 2, then 1


# The prefix cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoder", [*PLAIN, "guided"])
def test_a_period_of_one_is_exact(family: str, decoder: str) -> None:
    base = tiny_base(family)
    config = DecodeConfig(max_new_tokens=9, tokens_per_step=2, block_length=4, seed=4, order="confidence")
    options = {"cfg_scale": 0.5} if decoder == "guided" else {}
    exact, cached = (run(base, PROMPTS, config.but(cache_period=p), decoder, **options) for p in (None, 1))
    assert torch.equal(exact.tokens_BL, cached.tokens_BL) and torch.equal(exact.order_BL, cached.order_BL)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoder", ["joint", "adjust", "threshold"])
@pytest.mark.parametrize("block_length", [None, 4])
@pytest.mark.parametrize("window", [None, 2])
def test_a_cached_row_does_not_depend_on_its_batch(
    family: str, decoder: str, block_length: int | None, window: int | None
) -> None:
    """Rows enter their blocks at different passes, so columns that one reuses are computed for another."""
    base = tiny_base(family)
    config = DecodeConfig(
        max_new_tokens=11, tokens_per_step=2, block_length=block_length, cache_period=3, cache_window=window, seed=7
    )
    options = {"tau": 0.3} if decoder == "threshold" else {}
    sampler = tiny_sampler(base)
    together = decode(base, PROMPTS, config, decoder=decoder, sampler=sampler, **options)
    for b, prompt in enumerate(PROMPTS):
        alone = decode(base, [prompt], config, decoder=decoder, sampler=sampler, rows=[b], **options)
        assert row_of(alone, 0) == row_of(together, b)


def spied(base: TransformerBase) -> list[int]:
    """The first column of each pass that a base makes with a memory, from now on."""
    again, firsts = base.hidden_again, list[int]()

    def spy(state: State, memory: Memory, column_BN: Tensor, valid_BN: Tensor) -> Tensor:
        firsts.append(int(column_BN[0, 0]))
        assert bool(valid_BN.all())
        return again(state, memory, column_BN, valid_BN)

    base.hidden_again = spy  # type: ignore[method-assign]
    return firsts


class ByHand:
    """Layers run one by one: what enters each of them is remembered, and taken from there before `stop`."""

    def __init__(self, base: TransformerBase) -> None:
        self.base, self.inputs = base, []

    @torch.no_grad()
    def __call__(self, now: State, stop: int) -> Tensor:
        body = self.base.model
        rotary, h_BLD = body.rotary(now.positions_BL, torch.float32), body.embed_tokens(now.tokens_BL)
        fresh = []
        for n, layer in enumerate(body.layers):
            fresh.append(self._mixed(n, h_BLD, stop))
            h_BLD = layer(fresh[-1], None, rotary)
        fresh.append(self._mixed(len(body.layers), h_BLD, stop))
        self.inputs = fresh
        return self.base.to_frame(body.norm(fresh[-1]), now)

    def _mixed(self, n: int, h_BLD: Tensor, stop: int) -> Tensor:
        return torch.cat([self.inputs[n][:, :stop], h_BLD[:, stop:]], 1) if stop else h_BLD


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("window", "stops"),
    [
        (None, [0, 3, 3, 0, 6, 6]),  # first masks: 4, 5, 5, 7, 7, 9
        (1, [0, 3, 4, 0, 6, 6]),
        (2, [0, 2, 3, 0, 5, 5]),
    ],
)
def test_what_is_reused_and_what_is_not(family: str, window: int | None, stops: list[int]) -> None:
    """Period 3, against layers run by hand: columns before the stop as they last entered every layer."""
    base = tiny_base(family, end_ids=NO_END)
    canvas = Canvas(base, [[BOS, 5, 6, 7]], DecodeConfig(max_new_tokens=6, cache_period=3, cache_window=window))
    firsts, hand = spied(base), ByHand(base)
    cached = with_cache(base, canvas.config)
    for n, (position, stop) in enumerate(zip((4, 6, 5, 8, 7, 9), stops, strict=True)):
        now = State(canvas.tokens_BL.clone(), canvas.real_BL, canvas.masked_BL.clone(), padded=False)
        h_BLD = cached.hidden(canvas)
        assert firsts.pop() == stop
        torch.testing.assert_close(h_BLD, hand(now, stop), atol=1e-5, rtol=1e-4)
        if stop == 0:
            torch.testing.assert_close(h_BLD, base.hidden(now), atol=1e-5, rtol=1e-4)
        canvas.tokens_BL[0, position], canvas.masked_BL[0, position] = 10 + n, False


def test_a_row_that_enters_a_block_is_computed_whole() -> None:
    base = tiny_base("llada", end_ids=NO_END)
    firsts = spied(base)
    config = DecodeConfig(max_new_tokens=9, tokens_per_step=1, block_length=3, cache_period=100)
    decode(base, [[BOS, 5]], config, decoder="joint")
    assert firsts == [0, 1, 1, 0, 4, 4, 0, 7, 7]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("valid", [None, (True, True, True), (True, False, True), (False, False, False)])
def test_columns_are_written_as_they_are_in_several_rows(rows: int, valid: tuple[bool, ...] | None) -> None:
    """One row takes a path of its own on a CPU."""
    old, new = torch.zeros(rows, 5, 4), torch.rand(rows, 3, 4)
    column_BN = torch.tensor([[4, 0, 3], [1, 2, 0]])[:rows]
    valid_BN = None if valid is None else torch.tensor(valid).expand(rows, -1)
    out = renew(old, new, column_BN, valid_BN)
    wanted = torch.zeros(rows, 5, 4)
    for b, n in itertools.product(range(rows), range(3)):
        if valid is None or valid[n]:
            wanted[b, int(column_BN[b, n])] = new[b, n]
    assert out is old and torch.equal(out, wanted)


def test_a_base_without_keys_and_values_says_so() -> None:
    with pytest.raises(InputError, match="keeps no keys and values"):
        decode(exact_base(), [[]], DecodeConfig(max_new_tokens=4, cache_period=2), decoder="joint")
