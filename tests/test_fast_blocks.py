"""The fast form on block bases: the reference's results, whatever the blocks, prompts and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import decode
from adjust_dlm.decoders.fast import blocks, work
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.fast.rounds import Rounds
from adjust_dlm.decoders.machinery.rows import RoundCanvas
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import DecodeConfig
from helpers import BOS, CORE, FAMILIES, MASK, tiny_base, tiny_sampler
from test_block_bases import NO_END, prompts
from test_fast import FORMS, Replayed, both
from test_fast_rounds import lockstep
from test_properties import configs, heeded

KINDS = [*FAMILIES, "sdar"]
SIZES = [1, 2, 4, 8]
TOKENS = st.integers(2, 20).filter(lambda token: token != MASK)


@pytest.fixture(autouse=True)
def _replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "Graphs", Replayed)
    monkeypatch.setattr(work, "COMPACT", 0)  # rows that enter a block have a pass of their own where they are few,
    monkeypatch.setattr(work, "FEW", 1)  # however few there are of others


BASES = {
    (family, size): tiny_base(family, block=size, end_ids=(1, 5), num_hidden_layers=3)
    for family in KINDS
    for size in SIZES
}
ALL = {
    (family, size, form): tiny_sampler(base, **FORMS[form]) for (family, size), base in BASES.items() for form in FORMS
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", KINDS)
def test_prompts_of_every_length_and_every_k(family: str, size: int, temperature: float) -> None:
    """Left pads, rows in different blocks, waiting rows, texts to the end and texts that end early.

    Half of the k for each temperature, which changes its half with the family.
    """
    base = tiny_base(family, block=size, end_ids=NO_END if temperature else (1, 5))
    g = tiny_sampler(base)
    for k in range(1 + (KINDS.index(family) + bool(temperature)) % 2, 9, 2):
        config = DecodeConfig(max_new_tokens=2 * size + 3, tokens_per_step=k, temperature=temperature, seed=k)
        decoder = {1: "joint", 3: "parallel", 8: "parallel"}.get(k, "adjust")
        both(base, prompts(size), config, decoder, sampler=g, slots=(None, 3)[(k - 1) // 2 % 2])


@settings(max_examples=100)
@given(
    family=st.sampled_from(KINDS), size=st.sampled_from(SIZES), decoder=st.sampled_from(CORE), config=configs,
    given_=st.lists(st.lists(TOKENS, max_size=11), min_size=1, max_size=5), parts=st.integers(0, 3),
    slots=st.sampled_from([None, 1, 2]), sparse=st.booleans(), form=st.sampled_from(sorted(FORMS)),
    gaps=st.integers(0, 3),
)  # fmt: skip
def test_the_same_results_whatever_the_settings(
    family: str, size: int, decoder: str, config: DecodeConfig, given_: list[list[int]], parts: int,
    slots: int | None, sparse: bool, form: str, gaps: int,
) -> None:  # fmt: skip
    """Every form of g on bases that keep buffers and graphs; masks among the last tokens of a prompt; sub-blocks."""
    config = heeded(config, decoder).but(schedule="exact", block_length=max(1, size >> parts) if parts else None)
    base = BASES[family, size]
    options: dict[str, Any] = {"sparse": sparse and config.candidates != 0} if decoder == "adjust" else {}
    rows = [[BOS, *ids] for ids in given_]
    for row in rows:
        for n in range(gaps):
            place = len(row) - 1 - 2 * n
            if place > 0 and place // size == (len(row) - 1) // size:
                row[place] = MASK
    both(base, rows, config, decoder, sampler=ALL[family, size, form], slots=slots, **options)


class NoQuestions(TorchDispatchMode):
    """Refuses whatever would wait for a card."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_a_round_asks_the_device_nothing(family: str, sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Replayed.run

    def watched(graphs: Replayed, key: Any, function: Callable[[], None], buffers: Callable[[], list[Tensor]]) -> None:
        with NoQuestions():
            run(graphs, key, function, buffers)

    monkeypatch.setattr(Replayed, "run", watched)
    base = tiny_base(family, block=4, end_ids=(1, 5))
    config = DecodeConfig(max_new_tokens=11, tokens_per_step=3, candidates=3)
    both(base, prompts(4), config, "adjust", sampler=tiny_sampler(base), slots=3, sparse=sparse)
    assert fast.captures(base) > 3


def test_a_pass_computes_one_block_or_two_and_prompts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 21 behind which 9 tokens come, S = 4, two tokens a pass; then one of 2, whose first block it is."""
    base, columns, steps = tiny_base("dream", block=4, end_ids=NO_END), list[int](), list[int]()
    renew, rows = TransformerBase.renew, Sampler.rows

    def spy(base: Any, state: Any, memory: Any, column_BN: Tensor, valid_BN: Tensor) -> Tensor:
        columns.append(column_BN.shape[1])
        return renew(base, state, memory, column_BN, valid_BN)

    def spy_g(g: Any, h_BLD: Tensor, state: Any, column_BN: Tensor, keys: Any, valid_BN: Tensor) -> Tensor:
        steps.append(column_BN.shape[1])
        return rows(g, h_BLD, state, column_BN, keys, valid_BN)

    monkeypatch.setattr(TransformerBase, "renew", spy)
    monkeypatch.setattr(Sampler, "rows", spy_g)
    config = DecodeConfig(max_new_tokens=9, tokens_per_step=2)
    for prompt, passes, of_g in (
        ([BOS, *[5] * 20], [20, 4, 4, 8, 4, 8], [20, 4, 8, 4, 8]),
        ([BOS, 5], [4, 8, 4, 8, 4], [4, 8, 4, 8]),
    ):
        columns.clear()
        steps.clear()
        decode(base, [prompt], config, decoder="adjust", sampler=tiny_sampler(base), eager=False)
        assert (columns, steps) == (passes, of_g)


@pytest.mark.parametrize("slots", [3, 6])
@pytest.mark.parametrize("at_once", [8, 40])
@pytest.mark.parametrize("size", [1, 4])
def test_rows_that_come_together_may_be_of_several_passes_over_prompts(
    size: int, at_once: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fourteen prompts of 1 to 14 tokens, one or some in a pass; texts that end early and, in step, all at once."""
    monkeypatch.setattr(blocks, "_AT_ONCE", at_once)
    many = [[BOS, *[5 + n] * n] for n in range(14)]
    for ends in (NO_END, (1, 5)):
        base = tiny_base("dream", block=size, end_ids=ends)
        for decoder in ("joint", "adjust"):
            config = DecodeConfig(max_new_tokens=7, tokens_per_step=2, temperature=1.3)
            both(base, many, config, decoder, sampler=tiny_sampler(base), slots=slots)


@pytest.mark.parametrize("few", [1, 8])
def test_rows_that_enter_a_block_have_a_pass_of_their_own_where_they_are_few(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four slots, S = 4, a token a pass: prompts of 6, 6, 7 and 8 tokens, then of 9 and 10, all read together."""
    base, passes, renew = tiny_base("dream", block=4, end_ids=NO_END), list[tuple[int, ...]](), TransformerBase.renew

    def spy(base: Any, state: Any, memory: Any, column_BN: Tensor, valid_BN: Tensor) -> Tensor:
        passes.append(tuple(column_BN.shape))
        return renew(base, state, memory, column_BN, valid_BN)

    monkeypatch.setattr(TransformerBase, "renew", spy)
    monkeypatch.setattr(work, "FEW", few)
    rows = [[BOS, *[5] * n] for n in (5, 5, 6, 7, 8, 9)]
    config = DecodeConfig(max_new_tokens=5, tokens_per_step=1)
    decode(base, rows, config, decoder="joint", eager=False, slots=4)
    one, two = ([(1, 4), (4, 4)], [(2, 4), (4, 4)]) if few == 1 else ([(4, 8)], [(4, 8)])
    assert passes == [(6, 8), (4, 4), *one, *two, (4, 4), *one, (4, 4), (4, 4), *one, *one, (4, 4)]


@pytest.mark.parametrize("decoder", CORE)
def test_a_row_that_gave_nan_is_forgotten(decoder: str) -> None:
    """Its keys and values, too: zero times NaN is NaN."""
    base = tiny_base("dream", block=4)
    with torch.no_grad():
        base.model.embed_tokens.weight[7] = torch.nan
    base.head_matrix[7] = 0
    g, config = tiny_sampler(base), DecodeConfig(max_new_tokens=6, tokens_per_step=2)
    with pytest.raises(FloatingPointError, match="gave NaN"):
        decode(
            base,
            [[BOS, 3, 3, 3, 3, 7], *[[BOS, 3]] * 6, [BOS, 3, 3, 3, 3, 7]],
            config,
            decoder=decoder,
            sampler=g,
            eager=False,
        )
    both(base, [[BOS], *[[BOS, 3]] * 3, [BOS, *[MASK] * 5]], config.but(temperature=0), decoder, sampler=g)
    assert len(base.workspace.lanes) == 1


def test_rows_that_are_left_move_to_a_smaller_batch_with_what_they_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "COMPACT", 0)
    monkeypatch.setattr(fast, "_PAYS", 1)
    base, moves = tiny_base("dream", block=4, end_ids=(23,)), list[int]()
    smaller = fast.Engine._smaller

    def spy(engine: Any, base: Any, lane: Any, rows: int) -> Any:
        moves.append(rows)
        return smaller(engine, base, lane, rows)

    monkeypatch.setattr(fast.Engine, "_smaller", spy)
    rows = [[BOS, *[4] * 9]] * 3 + [[BOS, *[4] * 4, *[MASK] * 5]] + [[BOS, *[4] * 9]] * 4
    config = DecodeConfig(max_new_tokens=3, tokens_per_step=2, temperature=0.0)
    for decoder in ("parallel", "adjust"):
        both(base, rows, config, decoder, sampler=tiny_sampler(base))
    assert moves and set(moves) == {1}


# Single rounds -------------------------------------------------------------------------------------------------

ROWS = [
    ([BOS, 5, 6], 7, 1, 0), ([BOS, 9, 7, 4, 11, 8, 9, 9, 3], 12, -9, 4), ([BOS], 3, 2**63, 2), ([BOS, 4, 4], 9, 1, 1),
    ([BOS, *[7, 12] * 9], 13, 7, 7), ([BOS, 12], 0, 0, 0), ([BOS, 12], 1, 0, 0),
]  # fmt: skip


@settings(max_examples=25)
@given(
    family=st.sampled_from(KINDS), size=st.sampled_from(SIZES), decoder=st.sampled_from(CORE), config=configs,
    together=st.integers(1, 5), sparse=st.booleans(), chance=st.booleans(), form=st.sampled_from(sorted(FORMS)),
    parts=st.integers(0, 3),
)  # fmt: skip
def test_every_round_is_the_references_whatever_the_settings(
    family: str, size: int, decoder: str, config: DecodeConfig, together: int, sparse: bool, chance: bool, form: str,
    parts: int,
) -> None:  # fmt: skip
    config = heeded(config, decoder).but(schedule="exact", block_length=max(1, size >> parts) if parts else None)
    options = {"sparse": sparse and config.candidates != 0} if decoder == "adjust" else {}
    base, g = BASES[family, size], ALL[family, size, form]
    lockstep(base, g, config, decoder, rows=ROWS, together=together, chance=chance, **options)


def test_canvases_take_turns_on_the_same_buffers() -> None:
    """Each finds its own keys there, with and without another one's round in between."""
    base = tiny_base("dream", block=4, end_ids=NO_END)
    g = tiny_sampler(base)
    rounds, canvases = Rounds(base, g, tokens=1 << 20), list[RoundCanvas]()
    for seed, temperature in ((1, 0.0), (2, 1.0)):
        config = DecodeConfig(max_new_tokens=13, tokens_per_step=2, temperature=temperature, seed=seed)
        canvases.append(RoundCanvas(base, [[BOS, *[5 + seed] * 9], [BOS, seed]], config))
    for turn in (0, 0, 1, 0, 1, 1, 0, 0, 1, 1, *[0, 1] * 5):
        rounds.play(canvases[turn], decoder="adjust")
    assert rounds.held.shapes == 1
    for canvas, (seed, temperature) in zip(canvases, ((1, 0.0), (2, 1.0)), strict=True):
        config = DecodeConfig(max_new_tokens=13, tokens_per_step=2, temperature=temperature, seed=seed)
        alone = decode(base, [[BOS, *[5 + seed] * 9], [BOS, seed]], config, sampler=g, eager=True)
        assert torch.equal(canvas.tokens_BL, alone.tokens_BL)
        assert torch.equal(canvas.order_BL, alone.order_BL)


def test_the_buffers_take_what_the_docs_say() -> None:
    base = tiny_base("dream", block=4, num_hidden_layers=3)
    g, shape = tiny_sampler(base, layers=2, features=(1,)), base.layer_config
    decode(base, [[BOS, 5]] * 3, DecodeConfig(max_new_tokens=9), sampler=g, eager=False)
    (lane,) = base.workspace.lanes
    slots, length = lane.tokens_BL.shape
    pair = 2 * shape.num_key_value_heads * shape.head_dim
    wanted = slots * ((length + 3) * (3 * pair + 2 * base.width) + length * 2 * pair)
    assert sum(part.numel() for part in (*lane.memory.kept, *lane.sampler_memory.kept)) == wanted
    assert lane.held > 4 * wanted


@pytest.mark.parametrize("decoder", ["joint", "parallel", "adjust", "verified"])
def test_rounds_of_the_reference_may_stand_between_those_of_the_fast_form(decoder: str) -> None:
    """What the reference writes into a canvas's memory, the buffers of its last round do not have."""
    base = tiny_base("dream", block=4, end_ids=(1, 5))
    for temperature in (0.0, 1.0):
        config = DecodeConfig(tokens_per_step=3, temperature=temperature)
        lockstep(base, tiny_sampler(base), config, decoder, rows=ROWS, together=5, mixed=True)
