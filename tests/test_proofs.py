"""Algorithm 1 on a base whose joint is known: what each decoder samples from, without any training."""

import functools
import math

import pytest
import torch

from adjust_dlm.decoders import decode
from adjust_dlm.sampler import Sampler, SamplerConfig
from adjust_dlm.types import DecodeConfig, DecodeResult
from helpers import (
    RULES,
    Law,
    assert_law,
    count_passes,
    distance,
    distance_bound,
    exact_base,
    oracle,
    parallel_law,
    target,
    tiny_base,
    tiny_sampler,
    two_sentences,
)

N = 20_000
WORDS, LENGTH = 3, 4
# The confidence rule looks at the drawn tokens to choose the position, so even one token per pass is not p*.
UNBIASED = tuple(rule for rule in RULES if rule != "confidence")


@functools.cache
def run(
    decoder: str, rule: str, tokens_per_step: int = 1, *, n: int = N, prompt: tuple[int, ...] = (), **settings
) -> DecodeResult:
    """n rows on the random joint; `adjust` gets the oracle for g."""
    base = exact_base(WORDS, LENGTH, **{k: settings.pop(k) for k in ("end_ids",) if k in settings})
    config = DecodeConfig(
        tokens_per_step=tokens_per_step, max_new_tokens=LENGTH - len(prompt), order=rule, **{"seed": 5, **settings}
    )
    sampler = oracle(base) if decoder == "adjust" else None
    return decode(base, [list(prompt)] * n, config, decoder=decoder, sampler=sampler)


@functools.cache
def law_of(rule: str, tokens_per_step: int, **settings) -> Law:
    return parallel_law(target(exact_base(WORDS, LENGTH)), rule, tokens_per_step, **settings)


# 1. Which distribution -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", UNBIASED)
def test_joint_decoding_is_the_joint(rule: str) -> None:
    p = target(exact_base(WORDS, LENGTH))
    assert distance(law_of(rule, 1), p) < 1e-12  # enumeration: whatever the order, one token per pass is p*
    assert_law(run("joint", rule).tokens_BL, p)


def test_joint_decoding_by_confidence_is_not_the_joint_but_its_own_law() -> None:
    p = target(exact_base(WORDS, LENGTH))
    assert distance(law_of("confidence", 1), p) == pytest.approx(0.4814, abs=1e-4)
    assert distance(law_of("confidence", 1), p) > 2 * distance_bound(p, N)
    assert_law(run("joint", "confidence").tokens_BL, law_of("confidence", 1))


@pytest.mark.parametrize("tokens_per_step", [2, 4])
@pytest.mark.parametrize("rule", RULES)
def test_parallel_decoding_is_the_product_of_marginals(rule: str, tokens_per_step: int) -> None:
    p, law = target(exact_base(WORDS, LENGTH)), law_of(rule, tokens_per_step)
    assert sum(law.values()) == pytest.approx(1)
    assert distance(law, p) > 2 * distance_bound(p, N)  # far enough from p* that the next line could fail
    assert_law(run("parallel", rule, tokens_per_step).tokens_BL, law)


def test_all_at_once_is_the_product_of_the_first_marginals() -> None:
    base = exact_base(WORDS, LENGTH)
    p_LV = [[float(base.joint.movedim(i, 0)[v].sum()) for v in range(WORDS)] for i in range(LENGTH)]
    law = {s: math.prod(p_LV[i][v] for i, v in enumerate(s)) for s in target(base)}
    assert distance(law, law_of("entropy", LENGTH)) < 1e-12
    assert_law(run("parallel", "entropy", LENGTH, seed=6).tokens_BL, law)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("rule", RULES)
def test_adjust_with_an_oracle_is_joint_decoding_token_for_token(rule: str, tokens_per_step: int) -> None:
    """As printed: g, which is exact here, chooses the positions that the base would."""
    joint, adjust = run("joint", rule, n=4000), run("adjust", rule, tokens_per_step, n=4000, candidates=0)
    assert torch.equal(adjust.tokens_BL, joint.tokens_BL)
    assert torch.equal(adjust.order_BL, joint.order_BL)
    rounds = -(-LENGTH // tokens_per_step)
    assert set(adjust.base_calls_B.tolist()) == {rounds}
    assert set(adjust.sampler_calls_B.tolist()) == {LENGTH - rounds}


@pytest.mark.parametrize("rule", UNBIASED)
def test_adjust_with_an_oracle_is_the_joint(rule: str) -> None:
    # A seed of its own, so that this is a second witness and not the same samples again.
    assert_law(run("adjust", rule, 3, seed=7).tokens_BL, target(exact_base(WORDS, LENGTH)))


@pytest.mark.parametrize(("decoder", "rule"), [("joint", "entropy"), ("joint", "margin"), ("parallel", "entropy")])
def test_temperature_and_nucleus_give_the_law_of_the_processed_conditionals(decoder: str, rule: str) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9}
    tokens_per_step = 1 if decoder == "joint" else 2
    law = law_of(rule, tokens_per_step, **settings)
    assert len(law) < WORDS**LENGTH  # the nucleus forbids some strings
    assert_law(run(decoder, rule, tokens_per_step, **settings).tokens_BL, law)


def test_a_prompt_conditions_the_joint() -> None:
    p = target(exact_base(WORDS, LENGTH))
    inside = {s: q for s, q in p.items() if s[:2] == (2, 0)}
    given = {s: q / sum(inside.values()) for s, q in inside.items()}
    for decoder in ("joint", "adjust"):
        assert_law(run(decoder, "entropy", 2, prompt=(2, 0), seed=len(decoder)).tokens_BL, given)


@pytest.mark.parametrize("decoder", ["joint", "adjust"])
def test_ending_early_leaves_the_law_of_the_text(decoder: str) -> None:
    """Rows that stop at a token 2 give the same texts, with the same chances, as the joint cut at its first 2."""
    law: Law = {}
    for s, q in target(exact_base(WORDS, LENGTH)).items():
        text = s[: s.index(2)] if 2 in s else s
        padded = (*text, *[2] * (LENGTH - len(text)))
        law[padded] = law.get(padded, 0.0) + q
    result = run(decoder, "entropy", 3, end_ids=(2,))
    ended_BL = (result.tokens_BL == 2).cumsum(-1) > 0
    assert int((result.order_BL == -2).sum()) > 0  # some rows did end early
    assert_law(torch.where(ended_BL, 2, result.tokens_BL), law)


@pytest.mark.parametrize("tokens_per_step", [2, 4])
def test_a_sampler_that_changes_nothing_has_the_law_of_parallel_decoding(tokens_per_step: int) -> None:
    base = exact_base(WORDS, LENGTH)
    sampler = Sampler(base, SamplerConfig(output_norm_init=0.0)).eval()
    config = DecodeConfig(tokens_per_step=tokens_per_step, max_new_tokens=LENGTH, order="left_to_right", seed=8)
    result = decode(base, [[]] * N, config, decoder="adjust", sampler=sampler)
    assert_law(result.tokens_BL, law_of("left_to_right", tokens_per_step))


# 4. K = 1 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["dream", "llada"])
def test_one_token_per_step_is_joint_decoding_for_any_sampler(family: str, rule: str, temperature: float) -> None:
    base = tiny_base(family)
    config = DecodeConfig(max_new_tokens=7, order=rule, temperature=temperature, seed=3)
    prompts = [[2, 5, 6], [2, 7, 8, 9, 10]]
    joint = decode(base, prompts, config, decoder="joint")
    passes = count_passes(base)
    adjust = decode(base, prompts, config, decoder="adjust", sampler=tiny_sampler(base))
    parallel = decode(base, prompts, config, decoder="parallel")
    for other in (adjust, parallel):
        assert torch.equal(other.tokens_BL, joint.tokens_BL)
        assert torch.equal(other.order_BL, joint.order_BL)
    assert passes.calls == 2 * int(joint.base_calls_B.max())
    assert adjust.sampler_calls_B.tolist() == [0, 0]


# 6. The paper's figure -----------------------------------------------------------------------------------------


def sentences(decoder: str, rule: str, tokens_per_step: int, prompt: tuple[int, ...] = ()) -> list[str]:
    base, words = two_sentences()
    config = DecodeConfig(tokens_per_step=tokens_per_step, max_new_tokens=6 - len(prompt), order=rule, seed=4)
    sampler = oracle(base) if decoder == "adjust" else None
    result = decode(base, [list(prompt)] * 2000, config, decoder=decoder, sampler=sampler)
    return [" ".join(words[t] for t in row) for row in result.tokens_BL.tolist()]


COHERENT = {"The cat sat on the mat", "The dog ran in the yard"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("decoder", "tokens_per_step"), [("joint", 1), ("adjust", 3), ("adjust", 6)])
def test_joint_and_adjust_write_one_of_the_two_sentences(decoder: str, tokens_per_step: int, rule: str) -> None:
    texts = sentences(decoder, rule, tokens_per_step)
    assert set(texts) == COHERENT
    assert abs(texts.count("The cat sat on the mat") - 1000) < 5 * math.sqrt(500)  # 5 sigma


@pytest.mark.parametrize(
    ("rule", "tokens_per_step", "coherent"),
    [
        # The two sure words ("The", "the") and one more fix the sentence before the second pass.
        ("entropy", 3, 1.0),
        # Both sure words and two of the four open ones: they match with chance 1/2.
        ("entropy", 4, 1 / 2),
        # All four open words at once: 2 sentences * (1/2)^4.
        ("entropy", 6, 1 / 8),
        # "The", noun and verb at once match with chance 1/2; a mismatch never comes right again.
        ("left_to_right", 3, 1 / 2),
        # First pass "The" + noun, which fixes the rest.
        ("left_to_right", 2, 1.0),
    ],
)
def test_parallel_mixes_the_two_sentences_as_often_as_computed(
    rule: str, tokens_per_step: int, coherent: float
) -> None:
    base, words = two_sentences()
    law = parallel_law(target(base), rule, tokens_per_step)
    texts = {" ".join(words[t] for t in s): q for s, q in law.items()}
    assert sum(texts.get(s, 0.0) for s in COHERENT) == pytest.approx(coherent)
    seen = sentences("parallel", rule, tokens_per_step)
    hits = sum(text in COHERENT for text in seen)
    assert abs(hits - 2000 * coherent) <= 5 * math.sqrt(2000 * coherent * (1 - coherent))
    assert set(seen) == {s for s, q in texts.items() if q > 0}


def test_parallel_after_the_first_word_mixes_half_of_the_sentences() -> None:
    """The prompt "The": "the" and two open words in one pass."""
    base, words = two_sentences()
    law = parallel_law(target(base), "entropy", 3, prompt=(0,))
    coherent = sum(q for s, q in law.items() if " ".join(words[t] for t in s) in COHERENT)
    assert coherent == pytest.approx(1 / 2)
    hits = sum(text in COHERENT for text in sentences("parallel", "entropy", 3, prompt=(0,)))
    assert abs(hits - 1000) < 5 * math.sqrt(500)
    assert set(sentences("adjust", "entropy", 3, prompt=(0,))) == COHERENT
