"""Attention by runs: what a dense mask gives, for all columns of a canvas and for those of a cached pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adjust_dlm.bases import layers
from adjust_dlm.bases.attention import Runs, attend, visible
from adjust_dlm.bases.blocks import block_mask
from adjust_dlm.bases.memory import apart, side_by_side
from adjust_dlm.decoders import DECODERS, decode
from adjust_dlm.decoders.divergence import observe
from adjust_dlm.decoders.fast import engine
from adjust_dlm.decoders.machinery.cache import with_cache
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.types import DecodeConfig, State
from flash import by_runs
from helpers import BOS, CORE, FAMILIES, left_pad, tiny_base, tiny_sampler
from test_block_bases import NO_END, played, prompts
from test_fast import Replayed
from test_fast_blocks import NoQuestions

SAME = ("tokens_BL", "order_BL", "base_calls_B", "sampler_calls_B")


def canvas_of(left: list[int], real: list[int], length: int) -> State:
    """Rows of so many tokens behind so many pads."""
    place_L = torch.arange(length)
    real_BL = torch.stack([(place_L >= a) & (place_L < a + n) for a, n in zip(left, real, strict=True)])
    return State(torch.ones(real_BL.shape, dtype=torch.long), real_BL, torch.zeros_like(real_BL))


@settings(max_examples=300)
@given(
    size=st.integers(1, 5), more=st.integers(0, 7), data=st.data(), causal=st.booleans(),
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 17), st.integers(0, 5)), min_size=1, max_size=4),
)  # fmt: skip
def test_columns_up_to_an_edge_see_what_the_mask_shows(
    size: int, more: int, data: st.DataObject, causal: bool, rows: list[tuple[int, int, int]]
) -> None:
    """Pads on both sides, blocks that the canvas cuts, rows that are closed, columns that only fill up and may wrap."""
    length = max(sum(row) for row in rows)
    state = canvas_of([row[0] for row in rows], [row[1] for row in rows], length)
    edge, first = list[int](), list[int]()
    for left, real, _ in rows:
        last = data.draw(st.integers(0, (real - 1) // size))
        edge.append(left + min(real, (last + 1) * size))
        first.append(data.draw(st.sampled_from([left + size * data.draw(st.integers(0, last)), edge[-1]])))
    count = min(length, max(1, more + max(b - a for a, b in zip(first, edge, strict=True))))
    place_BN = torch.tensor(edge)[:, None] - count + torch.arange(count)
    column_BN, valid_BN = place_BN % length, place_BN >= torch.tensor(first)[:, None]
    check(state, size, column_BN, valid_BN, causal=causal)


@settings(max_examples=100)
@given(
    size=st.integers(1, 5), causal=st.booleans(),
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 17), st.integers(0, 5)), min_size=1, max_size=4),
)  # fmt: skip
def test_all_columns_see_what_the_mask_shows(size: int, causal: bool, rows: list[tuple[int, int, int]]) -> None:
    length = max(sum(row) for row in rows)
    state = canvas_of([row[0] for row in rows], [row[1] for row in rows], length)
    check(state, size, None, state.real_BL, causal=causal)
    check(state, size, torch.arange(length).expand(len(rows), -1), state.real_BL, causal=causal)


def check(state: State, size: int, column_BN: Tensor | None, valid_BN: Tensor, *, causal: bool) -> None:
    """Grouped heads; keys and values as they are kept; nothing that is not wanted is NaN."""
    shape: Any = tiny_base("dream", block=size, causal=causal).layer_config
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(*valid_BN.shape, 4, 8, generator=draw).transpose(1, 2)
    k, v = torch.randn(2, len(valid_BN), 2, state.real_BL.shape[1], 8, generator=draw)
    kept_k, kept_v = apart(side_by_side(k, v), 8)
    assert torch.equal(kept_k, k) and torch.equal(kept_v, v)
    with pytest.MonkeyPatch.context() as patch:
        by_runs(patch)
        chosen = None if column_BN is None else valid_BN
        runs = visible(state, q, shape, column_BN, chosen)
        groups = 1 if shape.sees == 1 else -(-valid_BN.shape[1] // size)
        assert isinstance(runs, Runs) and len(runs.seen_G) == len(valid_BN) * groups
        got = attend(q, kept_k, kept_v, runs)
    wanted = attend(q, k, v, block_mask(state, shape.sees, column_BN))
    torch.testing.assert_close(got[valid_BN], wanted[valid_BN], rtol=1e-5, atol=1e-5)
    assert got.isfinite().all()


@pytest.mark.parametrize("decoder", [name for name in DECODERS if name != "origin"])
@pytest.mark.parametrize(("size", "block_length"), [(1, None), (4, None), (8, 4)])
def test_every_decoder_writes_the_same_by_runs(decoder: str, size: int, block_length: int | None) -> None:
    """Prompts of every length modulo S, rows in different blocks, early ends; for S = 4 also without the cache.

    `verified` drafts from what a pass with the cache has looked at.
    """
    base = tiny_base("dream", block=size, end_ids=(1, 5))
    order = {"guided": "confidence"}.get(decoder)
    config = DecodeConfig(
        max_new_tokens=2 * size + 3, tokens_per_step=3, block_length=block_length, seed=4, order=order
    )
    plain = played(base, config, decoder, prompts(size), cached=True)
    for cached in (True, False) if size == 4 and decoder != "verified" else (True,):
        with pytest.MonkeyPatch.context() as patch:
            seen = by_runs(patch)
            got = played(base, config, decoder, prompts(size), cached=cached)
        assert seen and all(torch.equal(getattr(plain, name), getattr(got, name)) for name in SAME)


@pytest.mark.parametrize("decoder", CORE)
@pytest.mark.parametrize("family", [*FAMILIES, "sdar"])
def test_the_fast_form_writes_the_same_by_runs(decoder: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Graphs", Replayed)
    base = tiny_base(family, block=4, end_ids=(1, 5))
    config = DecodeConfig(max_new_tokens=11, tokens_per_step=1 if decoder == "joint" else 3, seed=2)
    forms: list[dict[str, Any]] = [{}, {"sparse": True}] if decoder == "adjust" else [{}]
    for options in forms:
        how: dict[str, Any] = {"decoder": decoder, "sampler": tiny_sampler(base, layers=2), **options}
        plain = decode(base, prompts(4), config, eager=True, **how)
        with pytest.MonkeyPatch.context() as patch:
            seen = by_runs(patch)
            got = decode(base, prompts(4), config, eager=False, slots=3, **how)
        assert seen and all(torch.equal(getattr(plain, name), getattr(got, name)) for name in SAME)


@pytest.mark.parametrize("size", [None, 4])
def test_runs_lie_in_the_memory_and_are_as_long_as_their_rows(
    size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 2 and 7 tokens, of which the canvas has nine more columns; then the same with the prefix cache."""
    base = tiny_base("llada", block=size, end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=9, cache_period=None if size else 3)
    canvas, seen = Canvas(base, [[BOS, 5], [BOS, 5, 6, 7, 8, 9, 10]], config), by_runs(monkeypatch)
    cached = with_cache(base, config)
    assert torch.allclose(cached.hidden(canvas), cached.hidden(canvas), atol=1e-5)  # other columns, other rounding
    kept = [part.untyped_storage().data_ptr() for part in canvas.memory.kept]
    assert [k.untyped_storage().data_ptr() for k, _ in seen] == kept[:-1] * 2
    counts = [count_G.tolist() for _, count_G in seen]
    assert counts == ([[1, 4, 4, 8]] * 2 + [[4, 8]] * 2 if size else [[11, 16]] * 4)


def test_the_prefix_cache_and_steps_of_g_on_whole_canvases_give_the_same_by_runs() -> None:
    base = tiny_base("dream", end_ids=NO_END)
    g = tiny_sampler(base, layers=2)
    config = DecodeConfig(max_new_tokens=9, tokens_per_step=3, block_length=3, cache_period=2, seed=1)
    for options in ({}, {"sparse": True}):
        texts = [[BOS, 5, 6, 7], [BOS], [BOS, 8, 9]]
        plain = decode(base, texts, config, decoder="adjust", sampler=g, **options)
        with pytest.MonkeyPatch.context() as patch:
            seen = by_runs(patch)
            got = decode(base, texts, config, decoder="adjust", sampler=g, **options)
        assert seen and all(torch.equal(getattr(plain, name), getattr(got, name)) for name in SAME)


def test_other_columns_keep_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns in any order, of which nobody says which are wanted."""
    base, state = tiny_base("dream", block=2), left_pad([[BOS, 5, 6], [BOS, 7, 8, 9]])
    by_runs(monkeypatch)
    column_BN = torch.tensor([[3, 1], [0, 2]])
    sees = visible(state, torch.zeros(1), base.layer_config, column_BN, seen=3)
    assert isinstance(sees, Tensor) and torch.equal(sees, block_mask(state, 2, column_BN)[..., :3])


def test_columns_that_see_what_stands_left_are_one_group_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of one token, and in causal ones; a single column shares its tile with the heads of its keys."""
    state = left_pad([[BOS, 5, 6, 7], [BOS, 7, 8, 9]])
    by_runs(monkeypatch)
    for base in (tiny_base("dream", block=1), tiny_base("dream", block=4, causal=True)):
        for count in (1, 2, 4):
            column_BN = torch.arange(4 - count, 4).expand(2, -1)
            runs = visible(state, torch.zeros(1), base.layer_config, column_BN, torch.ones_like(column_BN).bool())
            assert isinstance(runs, Runs) and runs.seen_G.tolist() == [4, 4]
            assert (runs.causal, runs.packed) == ((False, 2) if count == 1 else (True, 1))


def test_runs_are_found_without_a_question_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    base, state = tiny_base("dream", block=2), left_pad([[BOS, 5, 6], [BOS, 7, 8, 9]])
    by_runs(monkeypatch)
    column_BN = torch.tensor([[1, 2, 3], [1, 2, 3]])
    with NoQuestions():
        runs = visible(state, torch.zeros(1), base.layer_config, column_BN, column_BN > 1)
    assert isinstance(runs, Runs) and runs.packed == 2  # four heads share two of keys
    assert [part.tolist() for part in runs[2:]] == [[0, 4, 6, 8, 12], [1, 1, 4, 4, 0], [2, 3, 2, 4]]


@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_runs_go_through_autocast(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training on a card: a base in bf16, a g in fp32, autocast; the norms of q and k give fp32."""
    base = tiny_base(family, block=4, end_ids=(1, 5))
    base.model.to(torch.bfloat16)
    base.head_matrix = base.head_matrix.bfloat16()
    kept = by_runs(monkeypatch)
    monkeypatch.setattr(layers, "frozen_linear", torch.nn.functional.linear)
    config = DecodeConfig(max_new_tokens=7, tokens_per_step=3, order="entropy")
    how: dict[str, Any] = {"decoder": "adjust", "sampler": tiny_sampler(base), "temperature": 1.0}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        observe(base, [[BOS, 5, 6], [BOS]], config, rows=[0, 1], new=[7, 7], **how)
    assert kept and {k.dtype for k, _ in kept} == {torch.bfloat16}
