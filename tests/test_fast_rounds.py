"""Single rounds in the fast form: after every one of them the canvas is what the reference makes of it."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.decoders import decode, make_plan
from adjust_dlm.decoders.adjust import AdjustOptions
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.fast import lane
from adjust_dlm.decoders.fast.rounds import Rounds, column_bucket
from adjust_dlm.decoders.machinery.rows import RoundCanvas, join, take
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import DecodeConfig, InputError
from helpers import BOS, CORE, FAMILIES, LIMIT, MASK, left_pad, tiny_base, tiny_sampler
from test_fast import ALL, BASES, DEEP, FORMS, SAMPLERS, Replayed
from test_properties import configs, heeded

TOKENS = 1 << 20
# Prompt, new tokens, seed, row id: all differ; a gap with nothing behind it, and a row with nothing to fill.
ROWS = [
    ([BOS, 5, 6], 5, 1, 0), ([BOS, 9, 7, 4, 11, 8], 8, -9, 4), ([BOS], 3, 2**63, 2),
    ([BOS, 9, MASK, 7, MASK], 0, 7, 7), ([BOS, 4, 4], 6, 1, 1), ([BOS, 12], 0, 0, 0), ([BOS, 12], 1, 0, 0),
]  # fmt: skip
SHORT = [([BOS, 5, 6], 3, 1, 0), ([BOS, 9], 4, -9, 4), ([BOS], 3, 2**63, 2)]
STATE = (
    "tokens_BL", "order_BL", "masked_BL", "real_BL", "commits_B", "rows_B", "seeds_B", "new_B", "base_calls_B",
    "sampler_calls_B", "partner_calls_B", "rounds_B", "quota_B",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "Graphs", Replayed)


def rows_of(base: Base, config: DecodeConfig, rows: list[Any], *, chance: bool = False) -> list[RoundCanvas]:
    out = [RoundCanvas(base, [ids], config, rows=[row], seeds=[seed], new=[new]) for ids, new, seed, row in rows]
    for canvas in out if chance else ():
        canvas.chance_BL = torch.full(canvas.tokens_BL.shape, torch.nan, device=base.device)
    return out


def lockstep(
    base: Base, sampler: Sampler, config: DecodeConfig, decoder: str, *, rows: list[Any] = ROWS, chance: bool = False,
    together: int = 3, rounds: Rounds | None = None, mixed: bool = False, **options: Any,
) -> Rounds:  # fmt: skip
    """A row joins in every round, finished ones leave: the fast canvas is compared with the reference's each time.

    `mixed`: the reference plays every third round of the fast canvas, too.
    """
    rounds = rounds or Rounds(base, sampler, tokens=TOKENS)
    plan = make_plan(base, config, decoder=decoder, sampler=sampler, **options)
    waiting, want, canvas = rows_of(plan.base, plan.config, rows, chance=chance), None, None
    for number in itertools.count():
        if not waiting and canvas is None:
            break
        if waiting and (canvas is None or len(canvas.rows_B) < together):
            more = waiting.pop(0)
            want, canvas = (join([*([] if one is None else [one]), more]) for one in (want, canvas))
        assert canvas is not None and want is not None
        with torch.no_grad():
            want.play(plan.run)
            if mixed and number % 3 == 2:
                canvas.play(plan.run)
            else:
                rounds.play(canvas, decoder=decoder, options=plan.own[0] if plan.own else None)
        for name in STATE:
            assert torch.equal(getattr(want, name), getattr(canvas, name)), name
        if chance:
            assert want.chance_BL is not None and canvas.chance_BL is not None
            made_BL = want.order_BL >= 0
            torch.testing.assert_close(want.chance_BL[made_BL], canvas.chance_BL[made_BL], rtol=1e-5, atol=1e-6)
        kept = canvas.open_B.nonzero()[:, 0].tolist()
        if len(kept) < len(canvas.rows_B):
            want, canvas = (take(one, kept) if kept else None for one in (want, canvas))
    return rounds


@settings(max_examples=25)
@given(
    family=st.sampled_from(FAMILIES), decoder=st.sampled_from(CORE), config=configs, together=st.integers(1, 5),
    sparse=st.booleans(), chance=st.booleans(),
)  # fmt: skip
def test_every_round_is_the_references_whatever_the_settings(
    family: str, decoder: str, config: DecodeConfig, together: int, sparse: bool, chance: bool
) -> None:
    """Buffers and graphs of all settings stay with the base, so one that is missing from a key shows."""
    config = heeded(config, decoder).but(schedule="exact", cache_period=None, cache_window=None)
    options = {"sparse": sparse and config.candidates != 0} if decoder == "adjust" else {}
    lockstep(BASES[family], SAMPLERS[family], config, decoder, together=together, chance=chance, **options)


def test_chances_of_a_row_stay_when_others_commit_more_than_it_has_left() -> None:
    """One mask beside four, three tokens a pass: what is looked at beyond the one was drawn long ago."""
    rows = [([BOS], 4, seed, seed) for seed in range(6)]
    config = DecodeConfig(tokens_per_step=3, suppress_eos=True)
    lockstep(BASES["dream"], SAMPLERS["dream"], config, "parallel", rows=rows, chance=True)


@pytest.mark.parametrize("form", FORMS)
def test_every_round_is_the_references_whatever_g_sees(form: str) -> None:
    base, g = DEEP["dream"], ALL["dream", form]
    for temperature, sparse in itertools.product((0.0, 0.8), (False, True)):
        config = DecodeConfig(tokens_per_step=4, temperature=temperature, candidates=3, block_length=5)
        lockstep(base, g, config, "adjust", sparse=sparse)


@pytest.mark.parametrize(
    ("changes", "chance"),
    [({"temperature": 0.7}, False), ({"temperature": 0.0, "block_length": 3}, False), ({}, True)],
)
def test_the_kernels_draw_for_rows_with_seeds_of_their_own(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], chance: bool
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(lane, "has_kernels", lambda device: True)
    base = tiny_base("dream", end_ids=(1, 5))
    config = DecodeConfig(**{"tokens_per_step": 3, **changes})
    lockstep(base, tiny_sampler(base), config, "adjust", rows=SHORT, chance=chance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("decoder", ["joint", "parallel", "adjust", "verified"])
def test_rows_of_block_bases_join_and_leave(decoder: str, causal: bool) -> None:
    """Prompts that end one short of a sub-block, too: no step of g in their first round, a block more in the next."""
    base = tiny_base("dream", block=4, causal=causal, end_ids=(1,), num_hidden_layers=3, max_position_embeddings=128)
    rows = [([BOS, *range(3, 2 + n)], 5 + n % 4, 3 * n, n) for n in (5, 1, 9, 4, 6, 13, 2, 7)]
    for changes in ({}, {"block_length": 2, "tokens_per_step": 2}):
        config = DecodeConfig(**{"tokens_per_step": 3, "order": "left_to_right", **changes})
        for chance in (False, True):
            lockstep(base, tiny_sampler(base, layers=2), config, decoder, rows=rows, chance=chance)


def test_a_row_that_spoils_a_pass_leaves_nothing_behind() -> None:
    """A token that is never drawn is NaN: the round fails and changes nothing; its buffers then serve the others."""
    base = tiny_base("dream", end_ids=(5,))
    g = tiny_sampler(base)
    with torch.no_grad():
        base.model.embed_tokens.weight[LIMIT] = torch.nan
    config = DecodeConfig(tokens_per_step=2, temperature=0.0)
    good, bad, other = rows_of(base, config, [([BOS, 5], 6, 1, 0), ([BOS, LIMIT], 6, 2, 0), ([BOS, 7, 7], 6, 3, 0)])
    rounds = Rounds(base, g, tokens=TOKENS)
    for parts in ([good, *[other] * 6, bad], [good, bad]):
        canvas = join(parts)
        before = take(canvas, range(len(parts)))
        with pytest.raises(FloatingPointError, match="gave NaN"):
            rounds.play(canvas, decoder="adjust")
        assert all(torch.equal(getattr(canvas, name), getattr(before, name)) for name in STATE)
    lockstep(base, g, config, "adjust", rows=[([BOS, 5 + n], 20, n, 0) for n in range(5)], together=5, rounds=rounds)


def test_shapes_are_few_and_so_are_captures() -> None:
    """Canvases of 4 to 40 columns, one at a time: those of 32 and of 64 columns; other seeds and T = 0.5 add picks."""
    base = tiny_base("llada", end_ids=(23,))
    rounds, seen = Rounds(base, None, tokens=TOKENS), []
    for temperature, seed in ((1.0, 0), (1.0, 1), (0.5, 0)):
        config = DecodeConfig(temperature=temperature)
        for length in range(1, 38):
            (canvas,) = rows_of(base, config, [([BOS] * length, 3, seed, 0)])
            rounds.play(canvas, decoder="joint")
        seen.append((rounds.held.shapes, rounds.held.captures))
    assert seen == [(2, 4), (2, 4), (2, 6)]  # a base pass and a pick for each shape, then a pick each
    assert rounds.held.functions == 6
    assert [column_bucket(n, 2048) for n in (1, 32, 33, 257, 1000, 1025, 2047)] == [32, 32, 64, 320, 1024, 1152, 2048]
    assert column_bucket(50, 60) == 60


def test_a_round_whose_results_do_not_fit_leaves_the_canvas_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base("dream")
    canvas = join(rows_of(base, DecodeConfig(tokens_per_step=2), [([BOS, 4], 6, 0, 0)]))
    before = dict(vars(canvas))
    rounds, give, clone, calls = Rounds(base, None, tokens=TOKENS), lane.Lane.give, Tensor.clone, itertools.count()

    def full(part: Tensor) -> Tensor:
        if next(calls) == 5:
            raise torch.OutOfMemoryError
        return clone(part)

    def failing(buffers: lane.Lane, canvas: Any, **how: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "clone", full)
            give(buffers, canvas, **how)

    monkeypatch.setattr(lane.Lane, "give", failing)
    with pytest.raises(torch.OutOfMemoryError):
        rounds.play(canvas, decoder="parallel")
    assert all(vars(canvas)[name] is value for name, value in before.items())


def test_what_is_held_is_bounded_and_told(caplog: pytest.LogCaptureFixture) -> None:
    base = tiny_base("dream", end_ids=(23,))  # 64 columns at most
    config, rounds = DecodeConfig(), Rounds(base, None, tokens=75)
    with caplog.at_level(logging.INFO):
        for rows in (1, 2, 4):
            rounds.play(join(rows_of(base, config, [([BOS] * 40, 3, n, 0) for n in range(rows)])), decoder="joint")
        assert rounds.held.shapes == 3 and "dropped" not in caplog.text
        cell = 4 * base.width + 3 * 8 + 4 + 3  # states; tokens, order, schedule; chance; three masks
        assert 7 * 64 * cell < rounds.held.buffer_bytes < 1.2 * 7 * 64 * cell
        rounds.play(join(rows_of(base, config, [([BOS] * 40, 3, n, 0) for n in range(8)])), decoder="joint")
    assert [shape.shape[:2] for shape in rounds._engine.lanes] == [(8, 64)]  # larger than allowed, but needed
    assert rounds.held.shapes == 1 and rounds.held.functions == 2 and rounds.held.captures == 8
    assert "dropped buffers and graphs of 1 x 64: 24 shapes of 450 positions are kept at most" in caplog.text
    assert "3 shapes of batches: " in caplog.text


def test_whole_decodes_in_between_do_not_disturb() -> None:
    """The same base decodes with another g, in the fast form and with buffers of its own."""
    base = tiny_base("dream")
    g, other = tiny_sampler(base), tiny_sampler(base, seed=5)
    config, rounds = (
        DecodeConfig(tokens_per_step=3, max_new_tokens=8, temperature=0.0),
        Rounds(base, g, tokens=TOKENS),
    )
    given_ = [[BOS], [BOS, 4]]
    for _ in range(2):
        lockstep(base, g, config, "adjust", rounds=rounds)
        slow, quick = (decode(base, given_, config, sampler=other, eager=eager) for eager in (True, False))
        assert torch.equal(slow.tokens_BL, quick.tokens_BL)


def test_sparse_steps_without_candidates_are_refused() -> None:
    base = tiny_base("dream")
    (canvas,) = rows_of(base, DecodeConfig(candidates=0), ROWS[:1])
    with pytest.raises(InputError, match="candidates must not be 0"):
        Rounds(base, tiny_sampler(base), tokens=TOKENS).play(
            canvas, decoder="adjust", options=AdjustOptions(sparse=True)
        )


# Passes alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_passes_on_buffers_are_those_of_the_models(form: str) -> None:
    """States of every width, rows and columns that change, pads or none, and what a NaN left in the buffers."""
    base, g = DEEP["dream"], ALL["dream", form]
    rounds, seen = Rounds(base, g, tokens=TOKENS), g.on(base)
    twin, step = rounds.passes(seen)
    batches = [[BOS, 5, MASK, 7]], [[BOS], [BOS, 5, MASK, 9, 4]], [[BOS, 4, MASK]] * 3, [[BOS, *[7] * 40], [BOS]]
    for rows in batches * 2:
        state = left_pad(rows)
        h_BLD, want_BLD = twin.hidden(state), seen.hidden(state)
        for _ in range(3):
            real_BL = state.real_BL  # what stands on pads means nothing
            torch.testing.assert_close(h_BLD[real_BL], want_BLD[real_BL], rtol=1e-4, atol=1e-4)
            before_BLD = h_BLD.clone()
            with torch.no_grad():
                next_BLD, want_BLD = step(h_BLD, state), g(want_BLD, state)
            assert torch.equal(before_BLD, h_BLD)  # what it was given stays as it was
            h_BLD = next_BLD
        for buffers in rounds._engine.lanes:
            buffers.h_BLD.fill_(torch.nan)


def test_passes_over_many_canvases_are_not_captured() -> None:
    base = tiny_base("dream")
    g = tiny_sampler(base)
    rounds = Rounds(base, g, tokens=3 * 6)
    twin, step = rounds.passes(base)
    for rows, shapes in ((4, 0), (3, 1)):
        state = left_pad([[BOS, 5, 6, 7, MASK, 8]] * rows)
        with torch.no_grad():
            torch.testing.assert_close(step(twin.hidden(state), state), g(base.hidden(state), state))
        assert rounds.held.shapes == shapes
    assert Rounds(base, None, tokens=1).passes(base)[1] is None
