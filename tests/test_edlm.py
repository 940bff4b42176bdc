"""EDLM: its laws by enumeration on a base that is its own partner, its limits, and what it costs."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from adjust_dlm.bases.exact import ExactBase
from adjust_dlm.decoders import DECODERS, Canvas, decode
from adjust_dlm.decoders.edlm import Completions, EdlmOptions, _energies
from adjust_dlm.sampling import draw, process
from adjust_dlm.types import DecodeConfig, DecodeResult, InputError
from helpers import (
    BOS,
    END,
    FAMILIES,
    MASK,
    RULES,
    VOCAB,
    Law,
    Partial,
    assert_law,
    conditionals,
    count_passes,
    distance,
    distance_bound,
    empirical,
    exact_base,
    follow,
    parallel_law,
    target,
    temper,
    tiny_base,
)
from tiny_ar import tiny_partner

N = 10_000
WORDS, LENGTH = 3, 3
EVERYWHERE = {"rule": "resample", "window_end": 0.0}
PROMPTS = [[BOS, 3], [BOS, 4, 5, 6, 7], [BOS, 8, MASK, 9]]


# Laws by enumeration -------------------------------------------------------------------------------------------

Weights = Callable[[list[float], list[float], float], list[float]]  # (log p, log q, share of masks) -> chances


def best(log_p: list[float], _log_q: list[float], _share: float) -> list[float]:
    return [float(c == log_p.index(max(log_p))) for c in range(len(log_p))]


def resample(
    log_p: list[float], log_q: list[float], share: float, *, heat: float = 1.0, sign: float = 1.0, end: float = 0.0
) -> list[float]:
    if share < end:
        return [1.0] + [0.0] * (len(log_p) - 1)
    weight = [math.exp(sign * (p - q) / heat) for p, q in zip(log_p, log_q, strict=True)]
    return [w / sum(weight) for w in weight]


def committed(p_LV: Any, open_: list[int], rule: str, tokens: dict[int, int], count: int) -> tuple[int, ...]:
    """The `count` open positions that a rule takes first, ties to the lowest."""
    score = {
        "left_to_right": lambda i: -i,
        "confidence": lambda i: p_LV[i, tokens[i]],
        "entropy": lambda i: sum(q * math.log(q) for q in p_LV[i] if q > 0),
        "margin": lambda i: float(sorted(p_LV[i])[-1] - sorted(p_LV[i])[-2]),
    }[rule]
    return tuple(sorted(open_, key=lambda i: (-round(score(i), 6), i))[:count])


def left_to_right(p: Law, s: tuple[int, ...], i: int) -> float:
    """p(s_i | s_<i)."""
    return float(conditionals(p, (*s[:i], *[None] * (LENGTH - i)))[i, s[i]])


@functools.cache
def edlm_law(
    weights: Weights, rule: str, tokens_per_step: int, completions: int, *, temperature: float = 1.0,
    prompt: tuple[int, ...] = (), likelihood: str = "row",
) -> Law:  # fmt: skip
    """Distribution of what EDLM writes, by following every tuple of completions."""
    p = target(exact_base(WORDS, LENGTH))

    def commits(state: Partial, open_: list[int]) -> Iterator[tuple[float, dict[int, int]]]:
        p_LV = temper(conditionals(p, state), temperature, 1.0)
        ways = []
        for tokens in itertools.product(range(WORDS), repeat=len(open_)):
            drawn = dict(zip(open_, tokens, strict=True))
            whole = tuple(drawn.get(i, token) for i, token in enumerate(state))
            log_q = sum(math.log(p_LV[i, t]) for i, t in drawn.items())
            log_p = math.log(p[whole])  # type: ignore[index]
            if likelihood == "masked":
                log_p = sum(math.log(left_to_right(p, whole, i)) for i in open_)
            ways.append((drawn, log_p, log_q))
        share = len(open_) / (LENGTH - len(prompt))
        for chosen in itertools.product(ways, repeat=completions):
            chance = math.exp(sum(log_q for _, _, log_q in chosen))
            split = weights([w[1] for w in chosen], [w[2] for w in chosen], share)
            for (drawn, _, _), kept in zip(chosen, split, strict=True):
                if kept:
                    taken = committed(p_LV, open_, rule, drawn, min(tokens_per_step, len(open_)))
                    yield chance * kept, {i: drawn[i] for i in taken}

    return follow((*prompt, *[None] * (LENGTH - len(prompt))), commits)


def run(order: str, tokens_per_step: int, *, n: int = N, prompt: tuple[int, ...] = (), **more: Any) -> DecodeResult:
    """n rows on the random joint, with the joint itself as the partner."""
    base = exact_base(WORDS, LENGTH, end_ids=more.pop("end_ids", ()))
    config = DecodeConfig(
        tokens_per_step=tokens_per_step, max_new_tokens=LENGTH - len(prompt), order=order, seed=5,
        temperature=more.pop("temperature", 1.0),
    )  # fmt: skip
    return decode(base, [list(prompt)] * n, config, decoder="edlm", partner=base.partner(), **more)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3])
@pytest.mark.parametrize("rule", ["entropy", "confidence", "margin", "left_to_right"])
def test_the_best_of_two_has_the_enumerated_law(rule: str, tokens_per_step: int) -> None:
    law, p = edlm_law(best, rule, tokens_per_step, 2), target(exact_base(WORDS, LENGTH))
    plain = parallel_law(p, rule, tokens_per_step)
    assert sum(law.values()) == pytest.approx(1)
    assert distance(law, plain) > 2 * distance_bound(law, N)  # far enough from parallel that the next line could fail
    assert_law(run(rule, tokens_per_step).tokens_BL, law)


def test_the_best_of_three_and_of_a_prompt_and_at_another_temperature() -> None:
    assert_law(run("entropy", 2, completions=3).tokens_BL, edlm_law(best, "entropy", 2, 3))
    law = edlm_law(best, "left_to_right", 1, 2, prompt=(2,))
    assert_law(run("left_to_right", 1, prompt=(2,)).tokens_BL, law)
    law = edlm_law(best, "confidence", 2, 2, temperature=0.6)
    assert_law(run("confidence", 2, temperature=0.6).tokens_BL, law)


released = functools.partial(resample, sign=-1.0)
warm = functools.partial(resample, heat=2.0)
early = functools.partial(resample, end=0.6)


@pytest.mark.parametrize(
    ("weights", "options", "tokens_per_step"),
    [
        (resample, {}, 3),
        (resample, {}, 2),
        (resample, {}, 1),
        (warm, {"importance_temperature": 2.0}, 2),
        (early, {"window_end": 0.6}, 1),  # shares 1, 2/3 and 1/3: two rounds of three
        (released, {"as_released": True}, 3),
    ],
)
@pytest.mark.parametrize("rule", ["entropy", "confidence"])
def test_importance_resampling_has_the_enumerated_law(
    weights: Weights, options: dict[str, Any], tokens_per_step: int, rule: str
) -> None:
    law = edlm_law(weights, rule, tokens_per_step, 2)
    assert sum(law.values()) == pytest.approx(1)
    assert_law(run(rule, tokens_per_step, **EVERYWHERE | options).tokens_BL, law)


def test_the_release_counts_masked_positions_alone() -> None:
    law = edlm_law(released, "entropy", 1, 2, likelihood="masked")
    assert distance(law, edlm_law(released, "entropy", 1, 2)) > 2 * distance_bound(law, N)
    assert_law(run("entropy", 1, **EVERYWHERE, as_released=True).tokens_BL, law)


def test_more_completions_come_closer_to_the_joint_and_the_release_goes_away_from_it() -> None:
    p = target(exact_base(WORDS, LENGTH))
    far = [distance(edlm_law(resample, "entropy", 3, n), p) for n in (1, 2, 3)]
    assert far[0] == pytest.approx(distance(parallel_law(p, "entropy", 3), p))
    assert far[0] > far[1] > far[2]
    assert distance(edlm_law(released, "entropy", 3, 2), p) > 1.2 * far[0]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3])
def test_many_completions_are_the_joint_whatever_k(tokens_per_step: int) -> None:
    """Rounds after the first too: the tokens that stand there already weigh in."""
    p, n = target(exact_base(WORDS, LENGTH)), 2500
    seen = run("entropy", tokens_per_step, n=n, **EVERYWHERE, completions=60).tokens_BL
    off = distance(empirical(seen), p)
    assert off < distance_bound(p, n)
    if tokens_per_step > 1:
        assert distance(parallel_law(p, "entropy", tokens_per_step), p) > 2 * distance_bound(p, n)


def cut(law: Law) -> Law:
    """Of texts that end at their first 2."""
    out: Law = {}
    for s, q in law.items():
        text = s[: s.index(2)] if 2 in s else s
        padded = (*text, *[2] * (LENGTH - len(text)))
        out[padded] = out.get(padded, 0.0) + q
    return out


def test_text_ends_at_its_first_end_token() -> None:
    """All at once: the best by the mean up to the end, and many completions give the joint's law of texts."""
    p = target(exact_base(WORDS, LENGTH))
    first = conditionals(p, (None,) * LENGTH)
    law: Law = {}

    def mean(s: tuple[int, ...]) -> float:
        length = s.index(2) + 1 if 2 in s else LENGTH
        chance = sum(q for t, q in p.items() if t[:length] == s[:length])
        return math.log(chance) / length

    def chance(s: tuple[int, ...]) -> float:
        return math.prod(first[i, v] for i, v in enumerate(s))

    for pair in itertools.product(p, repeat=2):
        kept = max(pair, key=mean)
        law[kept] = law.get(kept, 0.0) + chance(pair[0]) * chance(pair[1])
    for expected, options in ((cut(law), {}), (cut(p), {**EVERYWHERE, "completions": 60})):
        result = run("entropy", LENGTH, n=N if not options else 2500, end_ids=(2,), **options)
        ended_BL = (result.tokens_BL == 2).cumsum(-1) > 0
        assert_law(torch.where(ended_BL, 2, result.tokens_BL), expected)
    whole = cut(edlm_law(best, "entropy", LENGTH, 2))  # read past its end, the best is another one
    assert distance(cut(law), whole) > 2 * distance_bound(whole, N)


def test_texts_of_unlike_lengths_are_weighed_by_the_mean() -> None:
    """A partner to whom all words are alike prefers no length: log 3 a token, of one token or of four."""
    base = ExactBase(torch.ones((3,) * 4), end_ids=(2,))
    canvas = Canvas(base, [[]], DecodeConfig(max_new_tokens=4))
    token_CBL = torch.tensor([[[2, 0, 0, 0]], [[0, 1, 0, 1]]])
    nothing_CBL = torch.zeros(2, 1, 4, dtype=torch.float64)
    made = Completions(token_CBL, nothing_CBL, nothing_CBL)
    energy_CR = _energies(base.partner(), canvas, made, torch.tensor([0]), EdlmOptions())
    assert energy_CR[:, 0].tolist() == pytest.approx([math.log(3)] * 2, rel=1e-5)


# A transformer and a causal partner ----------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["raw", "processed"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_completion_is_parallel_decoding(family: str, rule: str, on: str) -> None:
    base = tiny_base(family)
    for more in (
        {},
        {"temperature": 0.7, "top_p": 0.9, "schedule": "reference"},
        {"suppress_eos": True, "block_length": 4},
    ):
        config = DecodeConfig(max_new_tokens=9, tokens_per_step=2, order=rule, order_on=on, **more)
        plain = decode(base, PROMPTS, config, decoder="parallel")
        for options in ({}, EVERYWHERE):
            ours = decode(
                base,
                PROMPTS,
                config,
                decoder="edlm",
                partner=tiny_partner(base),
                completions=1,
                **options,
            )
            for name in ("tokens_BL", "order_BL", "base_calls_B"):
                assert torch.equal(getattr(ours, name), getattr(plain, name)), name
            assert not ours.partner_calls_B.any()  # there is nothing to choose


@pytest.mark.parametrize("options", [{}, EVERYWHERE])
def test_at_temperature_zero_all_completions_are_one(options: dict[str, Any]) -> None:
    base, config = tiny_base("llada"), DecodeConfig(max_new_tokens=9, tokens_per_step=2, temperature=0.0)
    plain = decode(base, PROMPTS, config, decoder="parallel")
    ours = decode(base, PROMPTS, config, decoder="edlm", partner=tiny_partner(base), completions=3, **options)
    assert torch.equal(ours.tokens_BL, plain.tokens_BL)
    assert torch.equal(ours.order_BL, plain.order_BL)


def test_outside_of_its_window_it_is_parallel_and_asks_nobody() -> None:
    """6, 5 and 4 of 8 masks left lie inside, bounds included."""
    base, config = tiny_base("dream"), DecodeConfig(max_new_tokens=8, suppress_eos=True, order="random")
    settings = {"decoder": "edlm", "partner": tiny_partner(base), "rule": "resample"}
    ours = decode(base, [[BOS, 3]] * 8, config, **settings, window_start=0.75, window_end=0.5)
    assert ours.partner_calls_B.tolist() == [2 * 3] * 8
    plain = decode(base, [[BOS, 3]] * 8, config, decoder="parallel")
    assert torch.equal(ours.order_BL, plain.order_BL)
    same_BL = ours.tokens_BL == plain.tokens_BL
    assert same_BL[plain.order_BL < 2].all()
    assert not same_BL[plain.order_BL == 2].all()
    inner = decode(base, [[BOS, MASK, 3]], config.but(max_new_tokens=3), **settings, window_start=1.0, window_end=0.7)
    assert inner.partner_calls_B.tolist() == [2 * 2]  # masks of the prompt count: 4 and 3 of 4


@pytest.mark.parametrize("suppress_eos", [False, True])
def test_the_winner_by_hand(suppress_eos: bool) -> None:
    """One round on unlike rows: completions drawn anew, scored by the AR model's own logits, the prompt left out."""
    base, new = tiny_base("dream"), 6
    partner = tiny_partner(base)
    config = DecodeConfig(max_new_tokens=new, tokens_per_step=20, seed=3, suppress_eos=suppress_eos)
    head, likes_ends, winners = partner.head, 4.0 * (torch.arange(VOCAB) == END), set()
    partner.head = lambda h_RD: head(h_RD) + likes_ends  # type: ignore[method-assign]
    for row in range(30):
        prompt = PROMPTS[row % 3]
        result = decode(
            base, [prompt, [BOS] * 9], config, rows=[row, 99], decoder="edlm", partner=partner, completions=3
        )
        seen: list[list[int]] = []
        canvas = Canvas(base, [prompt], config, rows=[row])
        p_RV = process(base.logits(base.hidden(canvas)[0], suppress_eos=suppress_eos), config)
        at = canvas.masked_BL[0].nonzero()[:, 0]
        scores = []
        for stream in (1, 4, 5):
            u_R = canvas.uniforms(at, torch.zeros_like(at), stream)
            tokens = canvas.tokens_BL[0].clone()
            tokens[at] = draw(p_RV[at], u_R, 1.0)
            seen.append(tokens.tolist())
            with torch.no_grad():
                log_LV = partner.model(input_ids=tokens[None]).logits[0, :, : base.spec.token_limit]
            log_LV += likes_ends[: base.spec.token_limit]
            log_LV[:, [MASK, END] if suppress_eos else [MASK]] = -torch.inf
            log_LV = log_LV.log_softmax(-1)
            first = int(at[0])
            ends = [i for i in at.tolist() if tokens[i] == END]
            last = ends[0] if ends else len(tokens) - 1
            scores.append(sum(float(log_LV[i - 1, tokens[i]]) for i in range(first, last + 1)) / (last + 1 - first))
        kept = scores.index(max(scores))
        winners.add(kept)
        ours = result.tokens_BL[0][result.real_BL[0]].tolist()
        assert ours == seen[kept]
    assert winners == {0, 1, 2}


@pytest.mark.parametrize("options", [{}, {**EVERYWHERE, "completions": 3}, {"rule": "resample"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_do_not_depend_on_their_batch(family: str, options: dict[str, Any]) -> None:
    base = tiny_base(family)
    settings = {"decoder": "edlm", "partner": tiny_partner(base), **options}
    config = DecodeConfig(max_new_tokens=10, tokens_per_step=3, order="random" if family == "dream" else None)
    together = decode(base, PROMPTS, config, **settings)
    for row, prompt in enumerate(PROMPTS):
        alone = decode(base, [prompt], config, rows=[row], **settings)
        for name in ("tokens_BL", "order_BL"):
            assert torch.equal(getattr(together, name)[row, -len(prompt) - 10 :], getattr(alone, name)[0])
        for name in ("base_calls_B", "partner_calls_B"):
            assert getattr(together, name)[row] == getattr(alone, name)[0], name


def test_what_it_costs() -> None:
    """A base pass a round, a partner pass a completion, all completions of a round in one batch."""
    base = tiny_base("dream")
    partner = tiny_partner(base)
    passes, asked = count_passes(base), count_passes(partner)  # type: ignore[arg-type]
    config = DecodeConfig(max_new_tokens=8, tokens_per_step=3, suppress_eos=True)
    result = decode(base, PROMPTS, config, decoder="edlm", partner=partner, completions=4)
    assert result.base_calls_B.tolist() == [3, 3, 3]
    assert result.partner_calls_B.tolist() == [12, 12, 12]
    assert result.sampler_calls_B.tolist() == [0, 0, 0]
    assert (passes.calls, asked.calls) == (3, 3)


@pytest.mark.parametrize("options", [{}, EVERYWHERE])
def test_logits_in_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    base, config = tiny_base("llada"), DecodeConfig(max_new_tokens=9, tokens_per_step=2)
    settings = {"decoder": "edlm", "partner": tiny_partner(base), **options}
    whole = decode(base, PROMPTS, config, **settings)
    monkeypatch.setattr("adjust_dlm.decoders.machinery.pick._CHUNK_BYTES", 4 * VOCAB * 2)
    widest: list[int] = []
    partner = settings["partner"]
    head = partner.head
    monkeypatch.setattr(partner, "head", lambda h_RD: widest.append(len(h_RD)) or head(h_RD))
    assert torch.equal(decode(base, PROMPTS, config, **settings).tokens_BL, whole.tokens_BL)
    assert max(widest) == 2


def test_a_token_that_the_partner_never_writes_loses_and_does_not_blur_the_rest() -> None:
    """A given end token with ends suppressed has no chance in any completion: the others still decide."""
    base = tiny_base("dream")
    partner = tiny_partner(base)
    config = DecodeConfig(max_new_tokens=3, tokens_per_step=9, suppress_eos=True)
    infill = [BOS, MASK, MASK, END, 5]
    some = decode(base, [infill] * 40, config, decoder="edlm", partner=partner)
    plain = decode(base, [infill] * 40, config, decoder="parallel")
    differ = int((some.tokens_BL != plain.tokens_BL).any(-1).sum())
    assert 8 <= differ <= 32  # a fair coin, two of 40 rows in a thousand million outside

    partner.logits = lambda h_RD, *, suppress_eos=False: only(17, len(h_RD))  # type: ignore[method-assign]
    liked = decode(base, [[BOS, 3]] * 40, config, decoder="edlm", partner=partner, completions=8)
    plain = decode(base, [[BOS, 3]] * 40, config, decoder="parallel")
    assert int((liked.tokens_BL == 17).sum()) > 2 * int((plain.tokens_BL == 17).sum()) > 0


def only(token: int, rows: int) -> torch.Tensor:
    logits_RV = torch.full((rows, VOCAB), -torch.inf)
    logits_RV[:, token] = 0.0
    return logits_RV


def test_what_is_refused() -> None:
    base, config = tiny_base("dream"), DecodeConfig(max_new_tokens=2)
    with pytest.raises(InputError, match="decoder 'edlm' needs an autoregressive partner"):
        decode(base, [[BOS]], config, decoder="edlm")
    with pytest.raises(InputError, match="begins with a mask"):
        decode(base, [[]], config, decoder="edlm", partner=tiny_partner(base))
    partner = tiny_partner(base)
    partner.logits = lambda h_RD, *, suppress_eos=False: torch.full((len(h_RD), VOCAB), torch.nan)  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="partner 'tiny' gave NaN"):
        decode(base, [[BOS]], config, decoder="edlm", partner=partner)
    base.hidden = lambda state: torch.full((1, 3, base.width), torch.nan)  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="or its sampler gave NaN"):
        decode(base, [[BOS]], config, decoder="edlm", partner=tiny_partner(base))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rule": "worst"}, "rule is 'worst'; it must be one of best, resample"),
        ({"completions": 0}, "completions is 0"),
        ({"completions": 1.5}, "completions is 1.5"),
        ({"rule": "resample", "importance_temperature": 0}, "importance_temperature is 0"),
        ({"rule": "resample", "window_start": 0.4, "window_end": 0.6}, "the window runs from 0.4 to 0.6"),
        ({"rule": "resample", "window_end": math.nan}, "the window runs from 1.0 to nan"),
        ({"rule": "resample", "as_released": 1}, "as_released is 1"),
        ({"as_released": True, "window_end": 0.1}, "rule 'best' takes no window_end, as_released; 'resample' does"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        DECODERS["edlm"].options(**options)  # type: ignore[misc]
