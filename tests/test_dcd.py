"""Discrete copula diffusion: its law by enumeration, its tokens by hand, its cost; and the causal pass of a base."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaModel, Qwen2Model

from adjust_dlm.bases.attention import causal_mask
from adjust_dlm.bases.exact import ExactBase
from adjust_dlm.bases.layers import shift_right
from adjust_dlm.bases.partner import CausalPartner
from adjust_dlm.decoders import decode
from adjust_dlm.sampling import ORDER, draw, process, uniform
from adjust_dlm.types import DecodeConfig, DecodeResult, InputError
from helpers import (
    BOS,
    END,
    FAMILIES,
    MASK,
    VOCAB,
    Counted,
    Law,
    Partial,
    TableBase,
    assert_law,
    conditionals,
    count_passes,
    distance,
    distance_bound,
    empirical,
    exact_base,
    left_pad,
    parallel_law,
    row_of,
    target,
    temper,
    tiny_base,
    tiny_config,
)
from tiny_ar import tiny_partner

N, WORDS, LENGTH = 6000, 3, 4
OPEN: Partial = (None,) * LENGTH
GAP: Partial = (None, None, 1, None)
KEEP = ("random", "left_to_right")


# Its law, by following every branch ----------------------------------------------------------------------------


def completions(p: Law, q: Law, state: Partial, last: int, alpha: float, **filters: float) -> dict[Partial, float]:
    """Chances of what is drawn up to position `last`: q's next token times (p given all) / (p given the left)."""
    drawn: dict[Partial, float] = {(): 1.0}
    given_all = conditionals(p, state)
    for i in range(last + 1):
        rest = (None,) * (len(state) - i)
        following: dict[Partial, float] = {}
        for prefix, chance in drawn.items():
            if state[i] is not None:
                following[*prefix, state[i]] = chance
                continue
            correction = given_all[i] / conditionals(p, (*state[:i], *rest))[i]
            weights = conditionals(q, (*prefix, *rest))[i] * correction**alpha
            p_V = temper(weights[None] / weights.sum(), **{"temperature": 1.0, "top_p": 1.0, **filters})[0]
            following |= {(*prefix, v): chance * w for v, w in enumerate(p_V) if w > 0}
        drawn = following
    return drawn


def dcd_law(
    p: Law, q: Law, state: Partial, tokens_per_step: int, keep: str, *, alpha: float = 1.0, **filters: float
) -> Law:
    """Distribution of what is written from `state` on, over all subsets that may be kept."""
    front, done = {state: 1.0}, {}
    while front:
        following: dict[Partial, float] = {}
        for now, mass in front.items():
            open_ = [i for i, token in enumerate(now) if token is None]
            if not open_:
                done[now] = done.get(now, 0.0) + mass
                continue
            count = min(tokens_per_step, len(open_))
            sets = [tuple(open_[:count])] if keep == "left_to_right" else list(itertools.combinations(open_, count))
            for kept in sets:
                for text, chance in completions(p, q, now, max(kept), alpha, **filters).items():
                    after = tuple(text[i] if i in kept else token for i, token in enumerate(now))
                    following[after] = following.get(after, 0.0) + mass * chance / len(sets)
        front = following
    return done  # type: ignore[return-value]


def posterior(p: Law, state: Partial) -> Law:
    inside = {s: q for s, q in p.items() if all(t is None or t == v for t, v in zip(state, s, strict=True))}
    return {s: q / sum(inside.values()) for s, q in inside.items()}


def marginals(p: Law) -> np.ndarray:
    out = np.zeros((LENGTH, WORDS))
    for s, weight in p.items():
        out[range(LENGTH), s] += weight
    return out


@functools.cache
def joint(seed: int = 0) -> Law:
    return target(exact_base(WORDS, LENGTH, seed=seed))


def run(
    state: Partial, tokens_per_step: int = LENGTH, *, partner: ExactBase | None = None, end_ids: tuple[int, ...] = (),
    options: dict[str, Any] | None = None, n: int = N, **settings: Any,
) -> DecodeResult:  # fmt: skip
    """n rows from a state whose last position is open; the partner is the base's own unless given."""
    base = exact_base(WORDS, LENGTH, end_ids=end_ids)
    prompt = [base.spec.mask_id if token is None else token for token in state[:-1]]
    config = DecodeConfig(**{"tokens_per_step": tokens_per_step, "max_new_tokens": 1, "seed": 5, **settings})
    ar = (partner or base).partner()
    return decode(base, [prompt] * n, config, decoder="dcd", partner=ar, **(options or {}))


@pytest.mark.parametrize(
    ("keep", "tokens_per_step"), [("random", 4), ("left_to_right", 1), ("left_to_right", 3), ("left_to_right", 9)]
)
def test_with_the_true_partner_and_nothing_on_the_right_it_is_the_joint(keep: str, tokens_per_step: int) -> None:
    """Given the left context alone or all of it is then the same; also behind a prompt."""
    p = joint()
    for state in (OPEN, (2, None, None, None)):
        wanted = posterior(p, state)
        assert distance(dcd_law(p, p, state, tokens_per_step, keep), wanted) < 1e-12
        assert_law(run(state, tokens_per_step, options={"keep": keep}).tokens_BL, wanted)


@pytest.mark.parametrize("reference", ["causal", "remasked"])
@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("tokens_per_step", [1, 2, 4])
def test_its_law_with_tokens_on_the_right(tokens_per_step: int, keep: str, reference: str) -> None:
    """Not p*: what is drawn before it and what stands behind it meet as if they were independent given x_i."""
    law = dcd_law(joint(), joint(), GAP, tokens_per_step, keep)
    assert sum(law.values()) == pytest.approx(1)
    assert_law(run(GAP, tokens_per_step, options={"keep": keep, "reference": reference}).tokens_BL, law)


@pytest.mark.parametrize("tokens_per_step", [1, 2])
def test_random_subsets_of_completions_have_their_own_law(tokens_per_step: int) -> None:
    law = dcd_law(joint(), joint(), OPEN, tokens_per_step, "random")
    assert distance(law, joint()) > 0.01  # tokens kept on the right are corrected for one by one
    assert distance(law, joint()) < distance(parallel_law(joint(), "random", tokens_per_step + 1), joint()) / 2
    assert_law(run(OPEN, tokens_per_step).tokens_BL, law)


@pytest.mark.parametrize(
    ("state", "tokens_per_step"),
    [
        ((0, None, 1, None), 4),  # each gap is one position
        (GAP, 1),  # the leftmost open position is always exact, and here every one is that in its round
    ],
)
def test_when_it_is_the_posterior(state: Partial, tokens_per_step: int) -> None:
    p = joint()
    wanted = posterior(p, state)
    assert distance(dcd_law(p, p, state, tokens_per_step, "left_to_right"), wanted) < 1e-12
    assert distance(dcd_law(p, p, state, tokens_per_step, "left_to_right", alpha=0), wanted) > 0.3
    assert_law(run(state, tokens_per_step, options={"keep": "left_to_right"}).tokens_BL, wanted)


def test_a_longer_gap_is_nearer_to_the_posterior_than_a_partner_that_cannot_look_right() -> None:
    p = joint()
    laws = [dcd_law(p, p, GAP, 4, "random", alpha=alpha) for alpha in (1, 0)]
    assert [round(distance(law, posterior(p, GAP)), 4) for law in laws] == [0.1869, 0.3161]
    for law, alpha in zip(laws, (1, 0), strict=True):
        assert_law(run(GAP, options={"alpha": alpha}).tokens_BL, law)


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("tokens_per_step", [1, 2, 4])
def test_its_law_with_a_partner_of_another_joint(tokens_per_step: int, keep: str) -> None:
    other = exact_base(WORDS, LENGTH, seed=1)
    for state in (OPEN, GAP):
        law = dcd_law(joint(), joint(1), state, tokens_per_step, keep)
        assert_law(run(state, tokens_per_step, partner=other, options={"keep": keep}).tokens_BL, law)


def test_all_masked_and_all_kept_is_the_partner_itself() -> None:
    """Nothing on the right: nothing to correct, whatever the base thinks."""
    assert distance(dcd_law(joint(), joint(1), OPEN, 4, "random"), joint(1)) < 1e-12
    assert distance(joint(), joint(1)) > 0.5
    assert_law(run(OPEN, partner=exact_base(WORDS, LENGTH, seed=1), seed=6).tokens_BL, joint(1))


def test_a_partner_without_dependence_gets_exactly_the_marginals_of_the_base() -> None:
    """By hand: independent words with p's marginals given what stands left of them are moved onto those given all."""
    p = joint()
    p_LV, given_LV = conditionals(p, OPEN), conditionals(p, GAP)
    q = torch.from_numpy(np.einsum("a,b,c,d->abcd", *p_LV[:3], given_LV[3]))
    free = itertools.product(range(WORDS), repeat=3)
    law = {(a, b, 1, d): float(given_LV[0, a] * given_LV[1, b] * given_LV[3, d]) for a, b, d in free}
    assert np.abs(p_LV[:2] - given_LV[:2]).sum() > 0.3
    assert_law(run(GAP, partner=ExactBase(q)).tokens_BL, law)


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_a_wrong_partner_is_pulled_towards_the_marginals_of_the_base(seed: int) -> None:
    p = joint()
    partner = ExactBase((exact_base(WORDS, LENGTH).joint + exact_base(WORDS, LENGTH, seed=seed).joint) / 2)
    corrected, alone = (
        np.abs(
            marginals(empirical(run(GAP, partner=partner, options={"alpha": alpha}).tokens_BL)) - conditionals(p, GAP)
        ).sum()
        for alpha in (1, 0)
    )
    assert corrected < 0.75 * alone


def test_temperature_nucleus_and_alpha() -> None:
    filters = {"temperature": 0.7, "top_p": 0.9}
    law = dcd_law(joint(), joint(), GAP, 2, "random", alpha=0.5, **filters)
    assert len(law) < len(posterior(joint(), GAP))  # the nucleus forbids some
    assert distance(law, dcd_law(joint(), joint(), GAP, 2, "random", **filters)) > 2 * distance_bound(law, N)
    assert_law(run(GAP, 2, options={"alpha": 0.5}, **filters).tokens_BL, law)


@pytest.mark.parametrize(("keep", "tokens_per_step"), [("random", 4), ("left_to_right", 2)])
def test_a_row_ends_with_its_text(keep: str, tokens_per_step: int) -> None:
    """Texts as from the joint cut at its first 2; the partner is not asked for what comes after it."""
    result = run(OPEN, tokens_per_step, end_ids=(2,), options={"keep": keep})
    law: Law = {}
    for s, q in joint().items():
        text = s[: s.index(2)] if 2 in s else s
        padded = (*text, *[2] * (LENGTH - len(text)))
        law[padded] = law.get(padded, 0.0) + q
    ended_BL = (result.tokens_BL == 2).cumsum(-1) > 0
    assert_law(torch.where(ended_BL, 2, result.tokens_BL), law)
    written_B = (~ended_BL).sum(-1)
    asked_B = (written_B + 1).clamp_max(LENGTH)
    assert torch.equal(result.partner_calls_B, asked_B)
    assert torch.equal(result.base_calls_B, 2 * (-(-asked_B // tokens_per_step)))


# What it costs -------------------------------------------------------------------------------------------------


def costs(order: list[int], tokens_per_step: int) -> tuple[int, int]:
    """(rounds, partner passes) of a finished row, from the order of its commits."""
    rounds = partner = 0
    left = {i: n for i, n in enumerate(order) if n >= 0}
    while left:
        kept = [i for i, n in left.items() if n < (rounds + 1) * tokens_per_step]
        partner += sum(i <= max(kept) for i in left)
        left = {i: n for i, n in left.items() if i not in kept}
        rounds += 1
    return rounds, partner


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 8])
def test_passes_are_booked_as_they_happen(tokens_per_step: int, keep: str) -> None:
    base, ar = tiny_base("dream"), partner()
    config = DecodeConfig(tokens_per_step=tokens_per_step, max_new_tokens=4, suppress_eos=True)
    for row in range(4):
        passes, ar.read = count_passes(base), Counted(ar.read)  # type: ignore[method-assign]
        causal = base.hidden_causal = Counted(base.hidden_causal)  # type: ignore[method-assign]
        result = decode(base, [[BOS, MASK, MASK, 9]], config, decoder="dcd", partner=ar, rows=[row], keep=keep)
        rounds, asked = costs(result.order_BL[0].tolist(), tokens_per_step)
        assert passes.calls == causal.calls == rounds
        assert result.base_calls_B.tolist() == [2 * rounds]
        assert ar.read.calls == asked == int(result.partner_calls_B)


def test_nobody_asks_once_all_texts_have_ended() -> None:
    joint_VVVV = torch.zeros(3, 3, 3, 3)
    joint_VVVV[0, 2, 2, 2] = 1
    base = ExactBase(joint_VVVV, end_ids=(2,))
    ar = base.partner()
    ar.read = Counted(ar.read)  # type: ignore[method-assign]
    result = decode(base, [[0]] * 2, DecodeConfig(tokens_per_step=3, max_new_tokens=3), decoder="dcd", partner=ar)
    assert result.tokens_BL.tolist() == [[0, 2, 2, 2]] * 2
    assert result.order_BL.tolist() == [[-1, 0, -2, -2]] * 2
    assert (ar.read.calls, result.partner_calls_B.tolist()) == (1, [1, 1])


def test_remasked_references_cost_a_pass_a_gap() -> None:
    """_ a _ _ b _: three gaps, the last of which sees all there is. Nothing given on the right: no further pass."""
    base, config = tiny_base("dream"), DecodeConfig(tokens_per_step=9, max_new_tokens=1)
    passes = count_passes(base)
    settings: dict[str, Any] = {"decoder": "dcd", "partner": partner(), "reference": "remasked"}
    result = decode(base, [[BOS, MASK, 3, MASK, MASK, 4], [BOS, 5]], config, **settings)
    assert result.base_calls_B.tolist() == [3, 1]
    assert passes.calls == 3
    assert result.partner_calls_B.tolist() == [4, 1]


def test_an_empty_round_of_a_published_schedule_draws_nothing() -> None:
    base, ar = tiny_base("dream"), partner()
    config = DecodeConfig(max_new_tokens=8, schedule="reference", suppress_eos=True)
    schedule = base.reference_schedule(8, 8)
    assert schedule[0] == 0
    causal = base.hidden_causal = Counted(base.hidden_causal)  # type: ignore[method-assign]
    result = decode(base, [[BOS, 3]], config, decoder="dcd", partner=ar, keep="left_to_right")
    assert causal.calls == len(schedule) - schedule.count(0)
    assert result.base_calls_B.tolist() == [len(schedule) + causal.calls]
    assert result.partner_calls_B.tolist() == [8]
    settings: dict[str, Any] = {"decoder": "dcd", "partner": ar, "keep": "left_to_right"}
    both = decode(base, [[BOS, 3], [BOS, MASK]], config, **settings)  # nine masks have no empty round
    assert base.reference_schedule(9, 8)[0] > 0
    assert both.base_calls_B.tolist() == [*result.base_calls_B.tolist(), 2 * len(schedule)]


# Its tokens on tiny transformers -------------------------------------------------------------------------------


def partner(vocab: int = VOCAB) -> CausalPartner:
    return tiny_partner(tiny_base("dream"), vocab=vocab)


ROWS = [[BOS, 3, MASK, MASK, 5, MASK, 7], [BOS, MASK, 9], [BOS, 4], [BOS, 6, 7, 8, MASK, 10]]


def by_hand(family: str, tokens: list[int], row: int, config: DecodeConfig, keep: str) -> list[int]:
    """One row, the partner reading everything anew for each token."""
    base, ar = tiny_base(family), partner()
    tokens, commit = [*tokens, *[MASK] * config.max_new_tokens], 0

    def number(i: int, stream: int) -> torch.Tensor:
        return uniform(config.seed, torch.tensor([row]), torch.tensor([commit]), torch.tensor([i]), stream)

    while MASK in tokens:
        state = left_pad([tokens])
        all_LV, left_LV = (
            base.logits(h_BLD[0], suppress_eos=True) for h_BLD in (base.hidden(state), base.hidden_causal(state))
        )
        masked = [i for i, token in enumerate(tokens) if token == MASK]
        ranked = sorted(masked, key=lambda i: -float(number(i, ORDER))) if keep == "random" else masked
        kept, text = ranked[: config.tokens_per_step], list(tokens)
        for i in (i for i in masked if i <= max(kept)):
            own_V = ar.logits(ar.hidden(left_pad([text]))[0, i : i + 1], suppress_eos=True)[0]
            p_V = own_V.softmax(-1) * all_LV[i].softmax(-1) / left_LV[i].softmax(-1)
            logits_V = torch.where(p_V > 0, p_V, 0).log()
            text[i] = int(draw(process(logits_V[None], config), number(i, 1), config.temperature))
            if i in kept:
                tokens[i], commit = text[i], commit + 1
    return tokens


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_left_padded_batch_is_each_row_by_hand(family: str, temperature: float, keep: str) -> None:
    for tokens_per_step in (2, 9):
        config = DecodeConfig(
            tokens_per_step=tokens_per_step, max_new_tokens=3, temperature=temperature, seed=3, suppress_eos=True
        )
        result = decode(tiny_base(family), ROWS, config, decoder="dcd", partner=partner(), keep=keep)
        for b, row in enumerate(ROWS):
            assert row_of(result, b)[0] == by_hand(family, row, b, config, keep)


@pytest.mark.parametrize("reference", ["causal", "remasked"])
@pytest.mark.parametrize("keep", KEEP)
def test_rows_do_not_depend_on_their_batch(keep: str, reference: str) -> None:
    base, ar = tiny_base("llada"), partner()
    config = DecodeConfig(tokens_per_step=2, max_new_tokens=5, seed=1)
    settings: dict[str, Any] = {"decoder": "dcd", "partner": ar, "keep": keep, "reference": reference}
    together = decode(base, ROWS, config, **settings)
    for b, row in enumerate(ROWS):
        alone = decode(base, [row], config, rows=[b], **settings)
        assert row_of(together, b) == row_of(alone, 0)
        assert together.partner_calls_B[b] == alone.partner_calls_B[0]
    assert len(set(together.partner_calls_B.tolist())) > 1


def test_alone_with_the_left_context_the_partner_writes_by_itself() -> None:
    """Remasked marginals are those of the canvas then, to the bit; under a causal mask a real base thinks otherwise."""
    base, ar = tiny_base("dream"), partner()
    config = DecodeConfig(tokens_per_step=8, max_new_tokens=8, seed=2)
    settings: dict[str, Any] = {"decoder": "dcd", "partner": ar}
    prompts = [[BOS, 3, 4], [BOS, 5]]
    alone = decode(base, prompts, config, alpha=0, **settings)
    assert torch.equal(decode(base, prompts, config, reference="remasked", **settings).tokens_BL, alone.tokens_BL)
    assert not torch.equal(decode(base, prompts, config, **settings).tokens_BL, alone.tokens_BL)
    assert alone.base_calls_B.tolist() == [1, 1]  # nothing to correct, so no causal pass


def test_forbidden_tokens_stay_out() -> None:
    """End tokens on demand, and ids that the partner lacks; neither makes NaN."""
    base, config = tiny_base("dream"), DecodeConfig(tokens_per_step=3, max_new_tokens=12)
    prompts = [[BOS, 3]] * 32
    free = decode(base, prompts, config, decoder="dcd", partner=partner(), keep="left_to_right")
    assert bool((free.tokens_BL == END).any())
    small = decode(base, prompts, config.but(suppress_eos=True), decoder="dcd", partner=partner(vocab=10))
    assert not bool((small.tokens_BL == END).any())
    assert int(small.tokens_BL.max()) < 10
    assert int(free.tokens_BL.max()) >= 10
    banned, logits = int(free.tokens_BL[0, 2]), base.logits
    base.logits = lambda h_RD, **options: logits(h_RD, **options).index_fill(  # type: ignore[method-assign]
        1, torch.tensor([banned]), -torch.inf
    )
    without = decode(base, prompts, config, decoder="dcd", partner=partner(), keep="left_to_right")
    assert not bool((without.tokens_BL[:, 2:] == banned).any() or (without.order_BL[:, 2:] == -1).any())


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_no_token_in_common_and_nan_are_errors(value: float) -> None:
    base, ar = tiny_base("dream"), partner()
    ar.head = lambda h_RD: torch.full((len(h_RD), VOCAB), value)  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="'dream' and partner 'tiny' leave no finite logits"):
        decode(base, [[BOS]], DecodeConfig(max_new_tokens=2), decoder="dcd", partner=ar)


# What it refuses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": "best"}, "keep is 'best'; it must be one of random, left_to_right"),
        ({"reference": "none"}, "reference is 'none'; it must be one of causal, remasked"),
        ({"alpha": -1}, "alpha is -1; it must be a finite number >= 0"),
        ({"alpha": float("inf")}, "alpha is inf"),
        ({"alpha": "much"}, "alpha is 'much'"),
        ({"chunks": 2}, "has no option chunks; it has keep, reference, alpha"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(OPEN, n=1, options=options)


def test_it_needs_a_partner_and_something_in_front() -> None:
    base, config = tiny_base("dream"), DecodeConfig(max_new_tokens=2)
    with pytest.raises(InputError, match="decoder 'dcd' needs an autoregressive partner of base 'dream'"):
        decode(base, [[BOS]], config, decoder="dcd")
    with pytest.raises(InputError, match="a canvas begins with a mask"):
        decode(base, [[BOS], []], config, decoder="dcd", partner=partner())


def test_a_base_without_a_causal_pass_says_so_and_can_be_remasked() -> None:
    base, ar = TableBase(torch.zeros(LENGTH, WORDS)), exact_base(WORDS, LENGTH).partner()
    config = DecodeConfig(tokens_per_step=4, max_new_tokens=4, seed=9)
    with pytest.raises(InputError, match="base 'table' has no causal pass"):
        decode(base, [[]], config, decoder="dcd", partner=ar)
    result = decode(base, [[]] * N, config, decoder="dcd", partner=ar, reference="remasked")
    assert_law(result.tokens_BL, joint())


# The causal pass of a base -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_causal_pass_is_the_causal_model_of_transformers(family: str) -> None:
    """Left pads included. Their classes are causal as they come; ours sees both ways in `hidden`."""
    base = tiny_base(family)
    model = {"dream": Qwen2Model, "llada": LlamaModel}[family](tiny_config(family)).eval()
    model.load_state_dict(base.model.state_dict())
    state = left_pad(ROWS)
    with torch.no_grad():
        theirs_BLD = model(
            input_ids=state.tokens_BL, attention_mask=state.real_BL.long(), position_ids=state.positions_BL
        ).last_hidden_state
    wanted_BLD = shift_right(theirs_BLD, state) if family == "dream" else theirs_BLD
    ours_BLD = base.hidden_causal(state)
    torch.testing.assert_close(ours_BLD[state.real_BL], wanted_BLD[state.real_BL], atol=1e-5, rtol=1e-4)
    assert not ours_BLD.isnan().any()


def test_the_causal_mask_by_hand() -> None:
    """A pad sees itself: what kernels make of a row that sees nothing differs, and NaN would spread."""
    state = left_pad([[5, 6], [5, 6, 7]])
    seen = causal_mask(state.tokens_BL, state.real_BL[:, None, None, :])[:, 0].int().tolist()
    assert seen == [[[1, 0, 0], [0, 1, 0], [0, 1, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_causal_pass_does_not_see_later_tokens(family: str, padded: bool) -> None:
    base, row = tiny_base(family), [BOS, 3, MASK, 5, MASK, 7]
    longer = [[3] * 9] if padded else []
    for at in range(1, 6):
        other = [*row[:at], 11, *row[at + 1 :]]
        before, after = (base.hidden_causal(left_pad([tokens, *longer]))[0, -6:] for tokens in (row, other))
        first = at + 1 if family == "dream" else at  # row i of the shifted frame ends at token i - 1
        assert torch.equal(before[:first], after[:first])
        assert bool(((before - after).abs().amax(-1) > 1e-6)[first:].all())


def test_the_causal_pass_of_the_exact_base_is_its_conditionals() -> None:
    base, p = exact_base(WORDS, LENGTH), joint()
    mask = base.spec.mask_id
    for text in ([mask, mask, 1, mask], [0, mask, mask, 2], [mask, 2, mask, 0]):
        p_LV = base.logits(base.hidden_causal(left_pad([text], mask_id=mask))[0]).softmax(-1)[:, :WORDS]
        for i in range(LENGTH):
            left: Partial = tuple(None if token == mask or j >= i else token for j, token in enumerate(text))
            assert p_LV[i].numpy() == pytest.approx(conditionals(p, left)[i], abs=1e-5)
