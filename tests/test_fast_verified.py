"""The fast form of `verified`: the reference's results, on whole canvases and in blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adjust_dlm.decoders import decode, make_plan
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.fast import lane
from adjust_dlm.decoders.fast import verified as fast_verified
from adjust_dlm.decoders.fast.rounds import Rounds
from adjust_dlm.decoders.machinery.rows import RoundCanvas
from adjust_dlm.types import DecodeConfig, InputError
from helpers import BOS, MASK, row_of, tiny_base, tiny_sampler
from test_block_bases import NO_END, prompts
from test_fast import FORMS, PROMPTS, Replayed, both
from test_fast_blocks import ROWS, TOKENS, NoQuestions
from test_fast_rounds import SHORT, STATE, lockstep
from test_properties import configs

KINDS = ["dream", "llada", "sdar"]
SIZES = [None, 1, 2, 4, 8]
MATCHES = st.sampled_from(["token", "law"])
DEPTHS = st.sampled_from([1, 2, 4])


@pytest.fixture(autouse=True)
def _replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "Graphs", Replayed)


def alike(family: str = "dream", size: int | None = None, **more: Any) -> tuple[Any, Any]:
    """A base whose states change little from one commit to the next, and a g that changes them little: drafts stand."""
    base = tiny_base(family, block=size, num_hidden_layers=3, initializer_range=0.1, **more)
    return base, tiny_sampler(base, output_norm_init=0.05)


PAIRS = {
    (family, size): alike(family, size, end_ids=(1, 5))
    for family in KINDS
    for size in SIZES
    if family != "sdar" or size
}
ALL = {
    (size, form): (base, tiny_sampler(base, output_norm_init=0.1, **FORMS[form]))
    for size in SIZES
    for base in [tiny_base("dream", block=size, end_ids=(1, 5), num_hidden_layers=3, initializer_range=0.1)]
    for form in FORMS
}


def texts(size: int | None) -> list[list[int]]:
    return PROMPTS if size is None else prompts(size)


def able(config: DecodeConfig, size: int | None, parts: int, match: str) -> DecodeConfig:
    """What `verified` takes of any settings; sub-blocks divide a base's blocks."""
    config = config.but(
        candidates=None, order="entropy" if match == "law" and config.order == "confidence" else config.order
    )
    return (
        config if size is None else config.but(schedule="exact", block_length=max(1, size >> parts) if parts else None)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("family", "size"), sorted(PAIRS, key=str))
def test_every_depth_and_both_matches(family: str, size: int | None, temperature: float) -> None:
    """Left pads, rows in different blocks, waiting rows, texts to the end and texts that end early.

    Two depths for each pair; among the families, every block length has all four.
    """
    base, g = PAIRS[family, size]
    depths = (1, 4) if (KINDS.index(family) + bool(temperature)) % 2 else (2, 8)
    for depth, match in itertools.product(depths, ("token", "law") if temperature else ("token",)):
        config = DecodeConfig(
            max_new_tokens=(size or 4) + 3, temperature=temperature, seed=depth, order="entropy",
            suppress_eos=depth == 4,
        )  # fmt: skip
        how: dict[str, Any] = {"sampler": g, "depth": depth, "match": match, "slots": {2: 3}.get(depth)}
        both(base, texts(size), config, "verified", **how)


@pytest.mark.parametrize("match", ["token", "law"])
@pytest.mark.parametrize("size", [None, 8])
def test_rounds_commit_several_tokens(size: int | None, match: str) -> None:
    """Else the tests above would prove little."""
    base, g = alike(size=size, end_ids=NO_END)
    for temperature in (0.0, 1.0):
        config = DecodeConfig(max_new_tokens=24, temperature=temperature, order="left_to_right")
        result = both(base, [[BOS, 5, 6], [BOS] * 5] * 2, config, "verified", sampler=g, match=match)
        assert int(result.rounds_B.sum()) < 0.8 * 4 * 24


@settings(max_examples=30)
@given(
    size=st.sampled_from(SIZES), config=configs, given_=st.lists(st.lists(TOKENS, max_size=11), min_size=1, max_size=5),
    parts=st.integers(0, 3), slots=st.sampled_from([None, 1, 2]), form=st.sampled_from(sorted(FORMS)),
    gaps=st.integers(0, 3), depth=DEPTHS, match=MATCHES,
)  # fmt: skip
def test_the_same_results_whatever_the_settings(
    size: int | None, config: DecodeConfig, given_: list[list[int]], parts: int, slots: int | None, form: str,
    gaps: int, depth: int, match: str,
) -> None:  # fmt: skip
    """Every form of g on bases that keep buffers and graphs; masks among the last tokens of a prompt; sub-blocks."""
    base, g = ALL[size, form]
    rows = [[BOS, *ids] for ids in given_]
    for row, n in itertools.product(rows, range(gaps)):
        place = len(row) - 1 - 2 * n
        if place > 0 and place // (size or 99) == (len(row) - 1) // (size or 99):
            row[place] = MASK
    both(base, rows, able(config, size, parts, match), "verified", sampler=g, slots=slots, depth=depth, match=match)


@pytest.mark.parametrize("size", [None, 4])
def test_rows_that_wait_for_a_slot_are_what_they_are_alone(size: int | None) -> None:
    base, g = PAIRS["dream", size]
    config = DecodeConfig(max_new_tokens=9, seed=3)
    rows = texts(size) * 2
    together = both(base, rows, config, "verified", sampler=g, slots=3)
    for b, prompt in enumerate(rows):
        alone = decode(base, [prompt], config, decoder="verified", sampler=g, rows=[b], eager=True)
        assert row_of(alone, 0) == row_of(together, b)


@pytest.mark.parametrize("match", ["token", "law"])
@pytest.mark.parametrize("size", [None, 4])
def test_a_round_asks_the_device_nothing_and_is_one_function(
    size: int | None, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Replayed.run

    def watched(*args: Any) -> None:
        with NoQuestions():
            run(*args)

    monkeypatch.setattr(Replayed, "run", watched)
    base, g = alike(size=size, end_ids=(1, 5))
    config = DecodeConfig(max_new_tokens=11, order="margin")
    both(base, texts(size), config, "verified", sampler=g, slots=3, match=match)
    # Not more than 16 masks on a canvas, 4 in a block: widths of 16 and 8.
    assert fast.captures(base) == (2 if size is None else 1)


@pytest.mark.parametrize("order", ["left_to_right", "entropy"])
@pytest.mark.parametrize("size", [None, 4])
def test_from_left_to_right_one_product_with_the_head_serves_all_checks(
    size: int | None, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base, g), rows, play = alike(size=size, end_ids=NO_END), list[list[int]](), fast_verified.play
    head = type(base).head

    def played(*args: Any, **how: Any) -> None:
        rows.append([])
        play(*args, **how)

    def counted(base: Any, h_RD: Any) -> Any:
        if rows:
            rows[-1].append(len(h_RD))
        return head(base, h_RD)

    monkeypatch.setattr(fast_verified, "play", played)
    monkeypatch.setattr(type(base), "head", counted)
    config = DecodeConfig(max_new_tokens=4, order=order)
    decode(base, [[BOS, 3]] * 2, config, decoder="verified", sampler=g, depth=3, match="law", eager=False)
    assert rows and all(len(calls) == (3 if order == "left_to_right" else 5) for calls in rows)
    if order == "left_to_right":  # two drafts, then three looks at two rows
        assert all(calls == [2, 2, 6] for calls in rows)


def test_logits_behind_a_wrong_draft_may_be_nan() -> None:
    """The reference never looks at them."""
    base, _ = alike(end_ids=NO_END)
    rows = lane.Lane(base, 2, 4, padded=False, config=DecodeConfig(order="left_to_right"))
    rows.masked_BL[:, 2:] = True
    logits_BV = torch.zeros(2, base.spec.vocab_size)
    logits_BV[1] = torch.nan
    for quota in (0, 1):
        rows.start_round(torch.tensor([1, quota]))
        picks = fast_verified._pick_first(rows, logits_BV)
        assert picks.position_BN.tolist() == [[2], [2]] and picks.valid_BN.tolist() == [[True], [quota == 1]]
        assert bool(rows.bad) == (quota == 1)


@pytest.mark.parametrize("size", [None, 4])
def test_a_row_that_gave_nan_is_forgotten(size: int | None) -> None:
    """Its last states, too, from which idle rows are drafted."""
    base, g = alike(size=size, end_ids=NO_END)
    with torch.no_grad():
        base.model.embed_tokens.weight[7] = torch.nan
    base.head_matrix[7] = 0
    config = DecodeConfig(max_new_tokens=6)
    how: dict[str, Any] = {"decoder": "verified", "sampler": g, "eager": False}
    with pytest.raises(FloatingPointError, match="gave NaN"):
        decode(base, [[BOS, 7, 3], *[[BOS, 3, 3]] * 6, [BOS, 3, 7]], config, **how)
    both(base, [[BOS, 3, 3], *[[BOS, 3]] * 4], config.but(temperature=0), "verified", sampler=g)
    assert len(base.workspace.lanes) == 1


@pytest.mark.parametrize("size", [None, 4])
def test_rows_that_are_left_move_to_a_smaller_batch_with_their_drafts(
    size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "COMPACT", 0)
    monkeypatch.setattr(fast, "_PAYS", 1)
    (base, g), moves = alike(size=size, end_ids=NO_END), list[int]()
    smaller = fast.Engine._smaller
    monkeypatch.setattr(fast.Engine, "_smaller", lambda *args: (moves.append(args[-1]), smaller(*args))[1])
    rows = [[BOS, *[4] * 9]] * 3 + [[BOS, *[4] * 4, *[MASK] * 5]] + [[BOS, *[4] * 9]] * 4
    both(base, rows, DecodeConfig(max_new_tokens=3, temperature=0.0), "verified", sampler=g)
    assert moves == [1]


def test_a_law_needs_an_order_that_looks_at_no_draw() -> None:
    base, g = PAIRS["dream", None]
    for eager in (True, False):
        with pytest.raises(InputError, match=r"match is 'law', and at temperature .* order confidence"):
            decode(
                base, [[BOS]], DecodeConfig(max_new_tokens=2, order="confidence"), decoder="verified", sampler=g,
                eager=eager, match="law",
            )  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "temperature", "match", "size"),
    [("entropy", 0.0, "token", None), ("entropy", 0.0, "token", 4), ("margin", 0.7, "token", 4),
     ("confidence", 0.7, "token", None), ("entropy", 1.0, "law", 4), ("random", 1.0, "law", None),
     ("left_to_right", 0.7, "law", 4), ("left_to_right", 1.0, "law", None)],
)  # fmt: skip
def test_the_kernels_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, rule: Any, temperature: float, match: str, size: int | None
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(lane, "has_kernels", lambda device: True)
    base, g = alike(size=size, end_ids=(1, 5))
    config = DecodeConfig(max_new_tokens=4, temperature=temperature, order=rule, suppress_eos=size is None)
    both(base, texts(size)[:2], config, "verified", sampler=g, depth=3, match=match)


# Single rounds -------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    size=st.sampled_from(SIZES), config=configs, together=st.integers(1, 5), chance=st.booleans(),
    form=st.sampled_from(sorted(FORMS)), parts=st.integers(0, 3), depth=DEPTHS, match=MATCHES,
)  # fmt: skip
def test_every_round_is_the_references_whatever_the_settings(
    size: int | None, config: DecodeConfig, together: int, chance: bool, form: str, parts: int, depth: int, match: str
) -> None:
    base, g = ALL[size, form]
    config = able(config, size, parts, match).but(schedule="exact")
    lockstep(base, g, config, "verified", rows=ROWS, together=together, chance=chance, depth=depth, match=match)


@pytest.mark.parametrize("size", [None, 4])
def test_the_reference_may_take_over_between_rounds(size: int | None) -> None:
    base, g = alike(size=size, end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=14, seed=1)
    plan = make_plan(base, config, decoder="verified", sampler=g)
    rounds = Rounds(base, g, tokens=1 << 20)
    want, canvas = (RoundCanvas(plan.base, texts(size), config) for _ in "ab")
    turns = itertools.chain([False] * 2, [True] * 3, itertools.repeat(False))
    while super(RoundCanvas, want).open:
        with torch.no_grad():
            want.play(plan.run)
            if next(turns):
                rounds.play(canvas, decoder="verified", options=plan.own[0])
            else:
                canvas.play(plan.run)
        for name in STATE:
            assert torch.equal(getattr(want, name), getattr(canvas, name)), name


def test_the_kernels_play_single_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(lane, "has_kernels", lambda device: True)
    base, g = alike(end_ids=(1, 5))
    for match, chance in (("token", False), ("law", True)):
        lockstep(base, g, DecodeConfig(), "verified", rows=SHORT, chance=chance, match=match)
