"""Decoders: what they commit, in which order, at what cost, and that a row is the same in any company."""

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.bases.exact import ExactBase
from adjust_dlm.decoders import Canvas, decode, generate
from adjust_dlm.types import GIVEN, MASKED, DecodeConfig, DecodeResult, InputError, State
from helpers import (
    BOS,
    CORE,
    END,
    FAMILIES,
    MASK,
    RULES,
    Counted,
    TableBase,
    count_passes,
    exact_base,
    guide,
    oracle,
    row_of,
    tiny_base,
    tiny_sampler,
    writer,
)

NONE = (23,)  # an end id beyond the token limit: no row ever ends early


def same(h_BLD: Tensor, state: State) -> Tensor:
    """g = identity."""
    return h_BLD


def masks_at_each_pass(base: Base) -> list[list[int]]:
    """Fills up with the masked positions of every row at each base pass."""
    seen, hidden = [], base.hidden

    def spy(state: State) -> Tensor:
        seen.append(state.masked_BL.sum(-1).tolist())
        return hidden(state)

    base.hidden = spy  # type: ignore[method-assign]
    return seen


# The canvas ----------------------------------------------------------------------------------------------------


def test_a_canvas_is_left_padded_prompts_and_masks() -> None:
    canvas = Canvas(tiny_base("dream"), [[5, MASK, 7], [8]], DecodeConfig(max_new_tokens=2))
    assert canvas.tokens_BL.tolist() == [[5, MASK, 7, MASK, MASK], [END, END, 8, MASK, MASK]]
    assert canvas.real_BL.int().tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert canvas.masked_BL.int().tolist() == [[0, 1, 0, 1, 1], [0, 0, 0, 1, 1]]
    assert canvas.order_BL.tolist() == [
        [GIVEN, MASKED, GIVEN, MASKED, MASKED], [GIVEN, GIVEN, GIVEN, MASKED, MASKED]
    ]  # fmt: skip
    assert (canvas.padded, canvas.rows_B.tolist()) == (True, [0, 1])
    assert not Canvas(tiny_base("dream"), [[5], [8]], DecodeConfig(max_new_tokens=2)).padded


# Algorithm 1 ---------------------------------------------------------------------------------------------------


def test_every_call_of_g_sees_the_last_commit_and_its_own_last_states() -> None:
    """Lines 3-8 with 7 masks and K=3: rounds of 3, 3, 1, one base pass each, g between the commits of a round."""
    base, log = tiny_base("dream"), []
    hidden, g = base.hidden, tiny_sampler(base)

    def f(state: State) -> Tensor:
        log.append(("f", int(state.masked_BL.sum()), None, hidden(state)))
        return log[-1][-1]

    def step(h_BLD: Tensor, state: State) -> Tensor:
        log.append(("g", int(state.masked_BL.sum()), h_BLD, g(h_BLD, state)))
        return log[-1][-1]

    base.hidden = f  # type: ignore[method-assign]
    decode(base, [[BOS, 5]], DecodeConfig(max_new_tokens=7, tokens_per_step=3), sampler=step)
    assert [(name, masks) for name, masks, _, _ in log] == [
        ("f", 7), ("g", 6), ("g", 5), ("f", 4), ("g", 3), ("g", 2), ("f", 1)
    ]  # fmt: skip
    for (_, _, _, before), (name, _, given, _) in itertools.pairwise(log):
        assert name == "f" or given is before


def test_the_tokens_are_read_off_the_states_of_g() -> None:
    """g that points at id 5 + (number of masks left): its logits, not the base's, give tokens 2 and 3 of a round."""
    base = writer([1, 1, 1], [9, 8, 7])

    def g(h_BLD: Tensor, state: State) -> Tensor:
        wanted = 5 + int(state.masked_BL.sum())
        return 20.0 * torch.nn.functional.one_hot(torch.full(h_BLD.shape[:2], wanted), 9)

    result = decode(base, [[]], DecodeConfig(max_new_tokens=3, tokens_per_step=3, temperature=0), sampler=g)
    assert result.tokens_BL.tolist() == [[1, 7, 6]]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 6])
@pytest.mark.parametrize("decoder", CORE)
def test_positions_come_in_the_order_of_certainty(decoder: str, tokens_per_step: int) -> None:
    base = writer([3, 1, 4, 2, 5, 6], [2, 6, 3, 5, 1, 4])
    config = DecodeConfig(max_new_tokens=6, tokens_per_step=tokens_per_step, temperature=0)
    result = decode(base, [[]], config, decoder=decoder, sampler=same)
    assert result.tokens_BL.tolist() == [[3, 1, 4, 2, 5, 6]]
    assert result.order_BL.tolist() == [[4, 0, 3, 1, 5, 2]]


def test_parallel_takes_all_of_a_round_from_one_pass() -> None:
    """On the two-token base x0 = x1 one pass gives independent tokens: 1/2 of the rows disagree."""
    base = ExactBase(torch.eye(2))
    config = DecodeConfig(max_new_tokens=2, tokens_per_step=2)
    for decoder, torn in (("parallel", 500), ("adjust", 0)):
        result = decode(base, [[]] * 1000, config, decoder=decoder, sampler=oracle(base))
        assert abs(int((result.tokens_BL[:, 0] != result.tokens_BL[:, 1]).sum()) - torn) <= 5 * 250**0.5 * (torn > 0)
        assert set(result.base_calls_B.tolist()) == {1}


# Steps and costs (H22) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "tokens_per_step", "masks"),
    [(10, 4, [10, 6, 2]), (3, 8, [3]), (8, 8, [8]), (9, 8, [9, 1]), (1, 1, [1]), (5, 1, [5, 4, 3, 2, 1])],
)
@pytest.mark.parametrize("decoder", ["parallel", "adjust"])
def test_h22_the_last_round_takes_the_rest(decoder: str, length: int, tokens_per_step: int, masks: list[int]) -> None:
    base = TableBase(torch.randn(length, 5, generator=torch.Generator().manual_seed(0)))
    seen, g = masks_at_each_pass(base), Counted(same)
    config = DecodeConfig(max_new_tokens=length, tokens_per_step=tokens_per_step)
    result = decode(base, [[]], config, decoder=decoder, sampler=g)
    assert [m for (m,) in seen] == masks
    assert result.base_calls_B.tolist() == [len(masks)]
    assert result.tokens_BL.shape == (1, length)
    wanted = length - len(masks) if decoder == "adjust" else 0  # K-1 per full round, one less than the rest in the last
    assert (g.calls, result.sampler_calls_B.tolist()) == (wanted, [wanted])


def test_costs_are_those_of_each_row_alone() -> None:
    base = tiny_base("dream", end_ids=NONE)
    prompts = [[BOS, MASK, 5, MASK], [BOS], [MASK] * 7]
    config = DecodeConfig(max_new_tokens=4, tokens_per_step=3)
    passes, g = count_passes(base), Counted(tiny_sampler(base))
    result = decode(base, prompts, config, sampler=g)
    # 6, 4 and 11 masks: 2, 2 and 4 rounds; g runs masks - rounds times for each.
    assert result.base_calls_B.tolist() == [2, 2, 4]
    assert result.sampler_calls_B.tolist() == [4, 2, 7]
    assert (passes.calls, g.calls) == (4, 7)


@pytest.mark.parametrize("decoder", ["parallel", "adjust"])
def test_the_reference_schedule_is_the_published_count_of_each_row(decoder: str) -> None:
    prompts = [[BOS, 5], [BOS, MASK, 6, MASK, MASK]]
    for family in FAMILIES:
        base = tiny_base(family, end_ids=NONE)
        seen = masks_at_each_pass(base)
        config = DecodeConfig(max_new_tokens=16, tokens_per_step=2, schedule="reference", order="entropy")
        result = decode(base, prompts, config, decoder=decoder, sampler=tiny_sampler(base))
        wanted = [base.reference_schedule(masks, 8) for masks in (16, 19)]
        left = [[masks - sum(counts[:s]) for s in range(8)] for masks, counts in zip((16, 19), wanted, strict=True)]
        assert seen == [list(both) for both in zip(*left, strict=True)]
        assert result.base_calls_B.tolist() == [8, 8]
        if family == "dream":
            assert wanted[0] == [1, 2, 2, 2, 2, 2, 2, 3]
        else:
            assert wanted[1] == [3, 3, 3, 2, 2, 2, 2, 2]


def test_dream_reference_with_a_step_per_token_commits_none_first_and_two_last() -> None:
    base = tiny_base("dream", end_ids=NONE)
    seen = masks_at_each_pass(base)
    config = DecodeConfig(max_new_tokens=8, schedule="reference", temperature=0)
    decode(base, [[BOS]], config, decoder="parallel")
    assert [m for (m,) in seen] == [8, 8, 7, 6, 5, 4, 3, 2]


def test_joint_is_one_token_a_pass_whatever_the_settings_say() -> None:
    base = tiny_base("dream", end_ids=NONE)
    plain = decode(base, [[BOS]], DecodeConfig(max_new_tokens=8), decoder="joint")
    seen = masks_at_each_pass(base)
    config = DecodeConfig(max_new_tokens=8, tokens_per_step=4, schedule="reference")
    result = decode(base, [[BOS]], config, decoder="joint")
    assert [m for (m,) in seen] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert torch.equal(result.tokens_BL, plain.tokens_BL)
    assert result.config == DecodeConfig(max_new_tokens=8)


# The mask is never committed (H6) ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_step", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("decoder", CORE)
def test_h6_the_mask_is_never_committed(decoder: str, temperature: float, tokens_per_step: int) -> None:
    """The largest logit is the mask's at every place, in the base's states and in g's."""
    logits_LV = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    base = TableBase(logits_LV, mask_logit=100.0)
    assert base.head(base.hidden(State(*[torch.ones(1, 10, dtype=torch.bool)] * 3))).argmax(-1).unique().tolist() == [6]

    def g(h_BLD: Tensor, state: State) -> Tensor:
        h_BLD = h_BLD.flip(-1)
        h_BLD[..., 6] = 200.0
        return h_BLD

    passes = count_passes(base)
    config = DecodeConfig(max_new_tokens=10, tokens_per_step=tokens_per_step, temperature=temperature)
    for rule in RULES:
        passes.calls = 0
        result = decode(base, [[]] * 20, config.but(order=rule), decoder=decoder, sampler=g)
        assert int(result.tokens_BL.max()) < 6
        rounds = 10 if decoder == "joint" else -(-10 // tokens_per_step)
        assert passes.calls == rounds
        assert set(result.base_calls_B.tolist()) == {rounds}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoder", CORE)
def test_h6_no_mask_and_no_padding_row_of_the_head_from_a_transformer(family: str, decoder: str) -> None:
    base = tiny_base(family)
    base.head_matrix[[MASK, 22, 23]] *= 20  # loud one way or the other at every place
    config = DecodeConfig(max_new_tokens=12, tokens_per_step=4, temperature=2.0)
    result = decode(base, [[BOS]] * 16, config, decoder=decoder, sampler=tiny_sampler(base))
    new = result.tokens_BL[:, 1:]
    assert int(new.max()) <= 21
    assert not bool((new == MASK).any())


# The company of a row (H4, H7) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("decoder", CORE)
@pytest.mark.parametrize("family", FAMILIES)
def test_h4_a_row_does_not_depend_on_its_batch(family: str, decoder: str, temperature: float) -> None:
    base = tiny_base(family)
    # No canvas of masks alone: its states are all equal but for rounding, so nothing could fix its order.
    prompts = [[BOS, 5, 6], [BOS, 7, 8, 9, 10, 11, 12, 13, 14], [BOS], [BOS, MASK, 4]]
    config = DecodeConfig(max_new_tokens=8, tokens_per_step=3, temperature=temperature, seed=1)
    g = guide(base, decoder)
    together = decode(base, prompts, config, decoder=decoder, sampler=g)
    backwards = decode(base, prompts[::-1], config, decoder=decoder, sampler=g, rows=[3, 2, 1, 0])
    for b, prompt in enumerate(prompts):
        alone = decode(base, [prompt], config, decoder=decoder, sampler=g, rows=[b])
        assert row_of(together, b) == row_of(alone, 0) == row_of(backwards, 3 - b)


def test_h7_samples_of_one_prompt_differ_and_come_back_with_the_seed() -> None:
    base = TableBase(torch.zeros(16, 2))
    config = DecodeConfig(max_new_tokens=16, seed=1)
    for decoder in CORE:
        one, two = (decode(base, [[]] * 8, config, decoder=decoder, sampler=same) for _ in range(2))
        assert len(one.tokens_BL.unique(dim=0)) == 8
        assert torch.equal(one.tokens_BL, two.tokens_BL)
        other = decode(base, [[]] * 8, config.but(seed=2), decoder=decoder, sampler=same)
        assert not (one.tokens_BL[:, None] == other.tokens_BL[None]).all(-1).any()


def test_h7_row_ids_carry_the_randomness_across_ranks() -> None:
    """Two workers with the same seed and prompt, rows 0-99 and 100-199: together what one worker would write."""
    base, config = TableBase(torch.zeros(16, 4)), DecodeConfig(max_new_tokens=16, tokens_per_step=4)
    whole = decode(base, [[]] * 200, config, decoder="parallel")
    halves = [
        decode(base, [[]] * 100, config, decoder="parallel", rows=list(range(start, start + 100))) for start in (0, 100)
    ]
    assert torch.equal(torch.cat([h.tokens_BL for h in halves]), whole.tokens_BL)
    assert len(whole.tokens_BL.unique(dim=0)) == 200
    assert halves[1].rows_B.tolist() == list(range(100, 200))


class Letters:
    """Ids as letters; no special tokens."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return ["abcdefgh".index(c) for c in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join("abcdefgh"[i] for i in ids)


def test_generate_returns_the_new_text_of_every_sample() -> None:
    base = writer([0, 0, 3, 1, 4, 7], [9] * 6, end_ids=(7,))
    base.tokenizer = Letters()
    assert generate(base, "cc", decoder="parallel", max_new_tokens=4, temperature=0) == ["dbe"]
    base = TableBase(torch.zeros(16, 2))
    base.tokenizer = Letters()
    texts = generate(base, decoder="joint", num_samples=8, max_new_tokens=16, seed=1)
    assert len(set(texts)) == 8
    assert {len(text) for text in texts} == {16}
    assert texts == generate(base, decoder="joint", num_samples=8, max_new_tokens=16, seed=1)


def test_generate_takes_a_decoders_own_options_and_a_partner() -> None:
    base = exact_base(words=3, length=4)
    base.tokenizer = Letters()
    made = generate(base, decoder="apd", partner=base.partner(), mixture=0.0, correct=True, max_new_tokens=4)
    assert len(made[0]) == 4
    with pytest.raises(InputError, match="has no option tau; it has mixture"):
        generate(base, decoder="apd", partner=base.partner(), tau=1, max_new_tokens=4)
    with pytest.raises(InputError, match="needs an autoregressive partner"):
        generate(base, decoder="apd", max_new_tokens=4)


# Ends ----------------------------------------------------------------------------------------------------------


def run(certainty: list[float], decoder: str, tokens_per_step: int = 1, **options) -> DecodeResult:
    """Writes 3 END 4 5 6, surest position first."""
    base = writer([3, END, 4, 5, 6], certainty, end_ids=(END,))
    config = DecodeConfig(max_new_tokens=5, tokens_per_step=tokens_per_step, temperature=0)
    return decode(base, [[]], config, decoder=decoder, sampler=same, **options)


def test_a_row_ends_when_all_left_of_its_end_token_is_filled() -> None:
    result = run([8, 9, 5, 3, 4], "joint")
    assert result.order_BL.tolist() == [[1, 0, MASKED, MASKED, MASKED]]
    assert result.tokens_BL.tolist() == [[3, END, END, END, END]]
    assert result.base_calls_B.tolist() == [2]


def test_an_end_token_does_not_end_a_row_with_gaps_before_it() -> None:
    result = run([2, 9, 5, 3, 4], "joint")  # the gap at place 0 is filled last
    assert result.order_BL.tolist() == [[4, 0, 1, 3, 2]]
    assert result.tokens_BL.tolist() == [[3, END, 4, 5, 6]]
    assert result.base_calls_B.tolist() == [5]


def test_what_was_committed_behind_the_end_stays() -> None:
    result = run([4, 5, 6, 3, 2], "joint")  # place 2, then the end, then place 0: three commits
    assert result.order_BL.tolist() == [[2, 1, 0, MASKED, MASKED]]
    assert result.tokens_BL.tolist() == [[3, END, 4, END, END]]


def test_a_round_stops_with_its_last_open_row() -> None:
    """K=4, but the row ends with its second commit: g runs once and is not called for nothing."""
    base = writer([3, END, 4, 5, 6], [8, 9, 5, 3, 4], end_ids=(END,))
    g, commits = Counted(same), []
    config = DecodeConfig(max_new_tokens=5, tokens_per_step=4, temperature=0)
    result = decode(base, [[]], config, sampler=g, watch=lambda canvas: commits.append(canvas.commits_B.tolist()))
    assert (g.calls, result.sampler_calls_B.tolist(), result.base_calls_B.tolist()) == (1, [1], [1])
    assert commits == [[1], [2]]
    assert result.order_BL.tolist() == [[1, 0, MASKED, MASKED, MASKED]]


@pytest.mark.parametrize("decoder", CORE)
def test_a_finished_row_never_changes_while_others_go_on(decoder: str) -> None:
    base = tiny_base("llada", end_ids=tuple(range(10)))  # ends are frequent, so rows end at different times
    snapshots: list[tuple[Tensor, Tensor]] = []
    config = DecodeConfig(max_new_tokens=10, tokens_per_step=2, seed=4)
    result = decode(
        base, [[BOS, 12]] * 12, config, decoder=decoder, sampler=tiny_sampler(base),
        watch=lambda canvas: snapshots.append((canvas.open_B.clone(), canvas.tokens_BL.clone())),
    )  # fmt: skip
    assert len({sum(bool(open_B[b]) for open_B, _ in snapshots) for b in range(12)}) > 2
    for open_B, tokens_BL in snapshots:
        assert torch.equal(tokens_BL[~open_B], result.tokens_BL[~open_B])
    for b in range(12):
        tokens, order, _, _ = row_of(result, b)
        ends = [i for i in range(2, 12) if order[i] >= 0 and tokens[i] < 10]
        never = [i for i in range(12) if order[i] == MASKED]
        assert MASK not in tokens
        assert all(i > ends[0] and tokens[i] == 0 for i in never)  # filler is the first end id
        assert sorted(n for n in order if n >= 0) == list(range(10 - len(never)))


def test_an_end_token_of_the_prompt_does_not_end_the_row() -> None:
    base = writer([0, 0, 3, 4, 5], [9] * 5, end_ids=(END,))
    result = decode(base, [[END, END]], DecodeConfig(max_new_tokens=3, temperature=0), decoder="joint")
    assert result.tokens_BL.tolist() == [[END, END, 3, 4, 5]]
    assert result.order_BL.tolist() == [[GIVEN, GIVEN, 0, 1, 2]]


@pytest.mark.parametrize("decoder", CORE)
def test_masks_inside_a_prompt_are_filled_too(decoder: str) -> None:
    base = writer([3, 4, 5, 6, 2], [9, 5, 8, 6, 7])
    config = DecodeConfig(max_new_tokens=2, tokens_per_step=2, temperature=0)
    mask = base.spec.mask_id
    result = decode(base, [[7, mask, mask], [mask]], config, decoder=decoder, sampler=same)
    assert result.tokens_BL.tolist() == [[7, 4, 5, 6, 2], [0, 0, 3, 4, 5]]
    assert result.order_BL.tolist() == [[GIVEN, 3, 0, 2, 1], [GIVEN, GIVEN, 0, 2, 1]]


@pytest.mark.parametrize("decoder", CORE)
def test_suppressed_ends_are_never_committed_by_base_or_g(decoder: str) -> None:
    base = tiny_base("dream", end_ids=(1, 3, 5))
    base.head_matrix[[1, 3, 5]] *= 10
    config = DecodeConfig(max_new_tokens=12, tokens_per_step=4, seed=2)
    free = decode(base, [[BOS]] * 8, config, decoder=decoder, sampler=tiny_sampler(base))
    assert bool(torch.isin(free.tokens_BL, torch.tensor([1, 3, 5])).any())
    held = decode(base, [[BOS]] * 8, config.but(suppress_eos=True), decoder=decoder, sampler=tiny_sampler(base))
    assert not bool(torch.isin(held.tokens_BL[:, 1:], torch.tensor([1, 3, 5])).any())
    assert not bool((held.order_BL == MASKED).any())


@pytest.mark.parametrize("rule", ["entropy", "margin", "confidence"])
def test_suppressed_ends_have_no_say_in_the_order(rule: str) -> None:
    """Place 0 is sure of an end token and of nothing else; without that token place 1 is the surer one."""
    logits_LV = torch.tensor([[0.0, 9.0, 0.0, 0.1], [0.0, 0.0, 0.0, 2.0]])
    base = TableBase(logits_LV, end_ids=(END,))
    config = DecodeConfig(max_new_tokens=2, temperature=0, order=rule)
    for decoder in CORE:
        free = decode(base, [[]], config, decoder=decoder, sampler=same)
        held = decode(base, [[]], config.but(suppress_eos=True), decoder=decoder, sampler=same)
        assert (free.tokens_BL.tolist(), free.order_BL.tolist()) == ([[END, END]], [[0, MASKED]])
        assert (held.tokens_BL.tolist(), held.order_BL.tolist()) == ([[3, 3]], [[1, 0]])


# Faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([[BOS]], {"decoder": "magic"}, "unknown decoder 'magic'; known are joint, parallel, adjust"),
        ([[BOS]], {"decoder": "adjust"}, "decoder 'adjust' needs a sampler for base 'dream': train one"),
        ([], {}, "no prompts: give at least one (an empty list of ids is a prompt)"),
        ([[BOS] * 60], {}, "prompt of 60 tokens plus 5 new ones make 65; base 'dream' takes at most 64"),
        ([[BOS], [3, 24]], {}, "prompt 1 holds token id [24]; ids run from 0 to 23"),
        ([[BOS], [3, -1]], {}, "prompt 1 holds token id [-1]; ids run from 0 to 23"),
        ([[BOS], [3]], {"rows": [1]}, "1 row ids for 2 prompts; give one each"),
    ],
)
def test_bad_calls_are_refused_by_name_before_any_pass(prompts, options, said: str) -> None:
    base = tiny_base("dream")
    passes = count_passes(base)
    with pytest.raises(InputError, match=re.escape(said)):
        decode(base, prompts, DecodeConfig(max_new_tokens=5), **{"decoder": "joint", **options})
    assert passes.calls == 0


def test_a_canvas_of_exactly_the_context_fits() -> None:
    result = decode(tiny_base("dream"), [[BOS] * 60], DecodeConfig(max_new_tokens=4), decoder="joint")
    assert result.tokens_BL.shape == (1, 64)


@pytest.mark.parametrize("decoder", CORE)
def test_an_empty_prompt_works_with_and_without_a_bos(decoder: str) -> None:
    base = exact_base(3, 4)
    assert base.spec.bos_id is None
    result = decode(base, [[]], DecodeConfig(max_new_tokens=4), decoder=decoder, sampler=oracle(base))
    assert result.tokens_BL.shape == (1, 4)
    assert sorted(result.order_BL[0].tolist()) == [0, 1, 2, 3]
    tiny = tiny_base("dream", end_ids=NONE)
    mixed = decode(tiny, [[], [BOS, 4]], DecodeConfig(max_new_tokens=1), decoder=decoder, sampler=guide(tiny, decoder))
    assert mixed.order_BL.tolist() == [[GIVEN, GIVEN, 0], [GIVEN, GIVEN, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decoder", CORE)
def test_states_that_are_not_numbers_are_an_error_and_not_an_endless_loop(
    decoder: str, rule: str, temperature: float
) -> None:
    table_LV = torch.randn(4, 3)
    table_LV[:, 1] = torch.nan
    config = DecodeConfig(max_new_tokens=4, temperature=temperature, order=rule)
    with pytest.raises(FloatingPointError, match="base 'table' or its sampler gave NaN"):
        decode(TableBase(table_LV), [[]], config, decoder=decoder, sampler=same)


@pytest.mark.parametrize(
    ("prompts", "rows", "said"),
    [
        (["ab"], None, r"prompt 0 holds token id \['a'\]"),
        ([[1.5]], None, r"prompt 0 holds token id \[1.5\]; ids run from 0 to 23"),
        ([3, 4], None, r"\[3\] among the prompts; each is a list of token ids"),
        ([[3]], [0.5], r"row id \[0.5\]: row ids are whole numbers of 64 bits"),
        ([[3]], [2**63], r"row id \[9223372036854775808\]"),
    ],
)
def test_what_is_no_id_is_refused_by_name(prompts: Any, rows: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        decode(tiny_base("dream"), prompts, DecodeConfig(max_new_tokens=2), decoder="joint", rows=rows)


def test_a_row_that_begins_anew_with_a_shorter_prompt_does_not_see_its_pads() -> None:
    base, config = tiny_base("dream"), DecodeConfig(max_new_tokens=3)
    again, fresh = Canvas(base, [[BOS, 4, 5]], config), Canvas(base, [[BOS]], config)
    again.restart(0, [BOS], 0)
    torch.testing.assert_close(base.hidden(again)[:, 2:], base.hidden(fresh))


def test_the_sampler_of_another_base_is_refused() -> None:
    base, other = tiny_base("dream"), tiny_base("dream", 1)
    with pytest.raises(
        InputError, match=f"fingerprint {other.fingerprint[:16]}; base 'dream' has {base.fingerprint[:16]}"
    ):
        decode(base, [[BOS]], DecodeConfig(max_new_tokens=2), decoder="adjust", sampler=tiny_sampler(other))


def test_watch_sees_the_canvas_after_every_commit() -> None:
    base, seen = writer([3, 1, 4], [2, 9, 5]), []
    config = DecodeConfig(max_new_tokens=3, tokens_per_step=2, temperature=0)
    decode(base, [[]], config, decoder="adjust", sampler=same, watch=lambda c: seen.append(c.tokens_BL[0].tolist()))
    assert seen == [[8, 1, 8], [8, 1, 4], [3, 1, 4]]


def test_a_result_carries_its_settings() -> None:
    config = DecodeConfig(max_new_tokens=3, seed=8)
    result = decode(writer([3, 1, 4], [2, 9, 5]), [[]], config, decoder="parallel", rows=[41])
    assert (result.config, result.decoder, result.rows_B.tolist()) == (config, "parallel", [41])
    assert result.seconds > 0
    trajectory = result.trajectory(0)
    assert (trajectory.row, trajectory.seed, trajectory.order_L.tolist()) == (41, 8, result.order_BL[0].tolist())
