"""Adaptive parallel decoding: its law by enumeration, on a base and a partner whose joints are known."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from adjust_dlm.bases import Base
from adjust_dlm.bases.exact import ExactBase, ExactPartner
from adjust_dlm.bases.partner import CausalPartner
from adjust_dlm.cli import main
from adjust_dlm.decoders import Canvas, decode
from adjust_dlm.sampling import NOISE, gumbel, uniform
from adjust_dlm.types import DecodeConfig, DecodeResult, InputError
from helpers import (
    BOS,
    END,
    FAMILIES,
    LIMIT,
    MASK,
    VOCAB,
    Counted,
    Law,
    Partial,
    assert_law,
    chi_square,
    conditionals,
    count_passes,
    distance,
    distance_bound,
    empirical,
    exact_base,
    parallel_law,
    target,
    temper,
    tiny_base,
)
from tiny_ar import tiny_partner

N, WORDS, LENGTH = 8000, 3, 4
Coupling = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (p [V], q [V]) -> chance that both draw each token [V]


# The law by following every branch -------------------------------------------------------------------------------


def shared_noise(p_V: np.ndarray, q_V: np.ndarray) -> np.ndarray:
    """P(both argmaxes are a): of exponentials with rates max_b(p_b / p_a, q_b / q_a), the one at a comes first."""
    both = [a for a in range(len(p_V)) if p_V[a] > 0 and q_V[a] > 0]
    out = np.zeros_like(p_V)
    for a in both:
        out[a] = 1 / np.maximum(p_V / p_V[a], q_V / q_V[a]).sum()
    return out


def own_noise(p_V: np.ndarray, q_V: np.ndarray) -> np.ndarray:
    return p_V * q_V


def mix(p_V: np.ndarray, q_V: np.ndarray, weight: float) -> np.ndarray:
    """p^R q^(1-R), normalised; zeros if no token has both."""
    product = np.where((p_V > 0) | (weight == 0), p_V**weight, 0) * np.where(
        (q_V > 0) | (weight == 1), q_V ** (1 - weight), 0
    )
    return product / product.sum() if product.sum() > 0 else product


@dataclass(frozen=True, kw_only=True)
class Enumerated:
    """The law of apd with base p and partner q, branch by branch."""

    p: Law
    q: Law
    mixture: float
    lookahead: int | None
    correct: bool
    prompt: Partial = ()
    temperature: float = 1.0
    top_p: float = 1.0
    coupling: Coupling = shared_noise

    def heated(self, law: Law, state: Partial) -> np.ndarray:
        return temper(conditionals(law, state), self.temperature, self.top_p)

    def later(self, p_LV: np.ndarray, state: Partial, todo: list[int]) -> Iterator[tuple[Partial, float]]:
        """How a round goes on behind its first token: (state at its end, chance)."""
        if not todo:
            yield state, 1.0
            return
        i = todo[0]
        before = (*state[:i], *[None] * (len(state) - i))
        q_V = mix(p_LV[i], self.heated(self.q, before)[i], self.mixture)
        accepted = self.coupling(p_LV[i], q_V)
        corrected = (q_V - accepted).clip(0) * self.correct
        for a in accepted.nonzero()[0].tolist():
            for end, chance in self.later(p_LV, put(state, i, a), todo[1:]):
                yield end, accepted[a] * chance
        for a in (corrected > 1e-15).nonzero()[0].tolist():
            yield put(state, i, a), corrected[a]
        left = 1 - accepted.sum() - corrected.sum()
        if left > 1e-12:
            yield state, left

    def law(self) -> Law:
        """Of rows of tokens with the number of passes behind them."""
        length = len(next(iter(self.p)))
        front: dict[Partial, float] = {(*self.prompt, *[None] * (length - len(self.prompt)), 0): 1.0}
        done: Law = {}
        while front:
            following: dict[Partial, float] = {}
            for (*tokens, passes), mass in front.items():
                p_LV = self.heated(self.p, tuple(tokens))
                i, *rest = [i for i, token in enumerate(tokens) if token is None][: self.lookahead]
                for a in p_LV[i].nonzero()[0].tolist():
                    for end, chance in self.later(p_LV, put(tuple(tokens), i, a), rest):
                        into = following if None in end else done
                        key = (*end, passes + 1)
                        into[key] = into.get(key, 0.0) + mass * float(p_LV[i][a] * chance)
            front = following
        return done


def put(tokens: Partial, i: int, token: int) -> Partial:
    return (*tokens[:i], token, *tokens[i + 1 :])


def of_tokens(law: Law) -> Law:
    """The passes left out."""
    out: Law = {}
    for key, q in law.items():
        out[key[:-1]] = out.get(key[:-1], 0.0) + q
    return out


def with_passes(result: DecodeResult) -> torch.Tensor:
    return torch.cat([result.tokens_BL, result.base_calls_B[:, None]], dim=1)


def other_partner(base: ExactBase) -> ExactPartner:
    """Of another joint, over the base's ids."""
    partner = ExactPartner(exact_base(WORDS, LENGTH, seed=9))
    partner.spec = base.spec
    return partner


def run(*, partner: str = "other", n: int = N, prompt: Partial = (), seed: int = 3, **settings: Any) -> DecodeResult:
    base = exact_base(WORDS, LENGTH)
    shared = {k: settings.pop(k) for k in ("temperature", "top_p") if k in settings}
    ids = [base.spec.mask_id if token is None else token for token in prompt]
    config = DecodeConfig(max_new_tokens=LENGTH - len(prompt), seed=seed, **shared)
    ar = base.partner() if partner == "own" else other_partner(base)
    return decode(base, [ids] * n, config, decoder="apd", partner=ar, **settings)


@functools.cache
def law_of(partner: str = "other", **settings: Any) -> Law:
    p = target(exact_base(WORDS, LENGTH))
    return Enumerated(p=p, q=p if partner == "own" else target(exact_base(WORDS, LENGTH, seed=9)), **settings).law()


RULES = [
    {"mixture": mixture, "lookahead": lookahead, "correct": correct}
    for mixture in (0.0, 0.4, 1.0)
    for lookahead in (1, 2, None)
    for correct in (False, True)
]
HEATS = [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8}]


# Both models' conditionals are processed before a rule sees them; a mixture of 0 or 1 uses one of the two alone.
@pytest.mark.parametrize(
    ("rule", "heat"),
    [(rule, heat) for rule in RULES for heat in HEATS if heat == HEATS[0] or rule["mixture"] == 0.4],
    ids=str,
)
def test_the_law_is_that_of_the_rule(rule: dict[str, Any], heat: dict[str, float]) -> None:
    law = law_of(**rule, **heat)
    assert sum(law.values()) == pytest.approx(1)
    assert_law(with_passes(run(**rule, **heat)), law)


def test_the_laws_that_are_told_apart_are_far_apart() -> None:
    """Else the test above could not fail: the two rules, the mixtures, the partner, and the base alone."""
    seen = [of_tokens(law_of(mixture=r, lookahead=None, correct=c)) for r in (0.0, 0.4) for c in (False, True)]
    seen += [of_tokens(law_of(mixture=1.0, lookahead=None, correct=False)), target(exact_base(WORDS, LENGTH))]
    seen += [target(exact_base(WORDS, LENGTH, seed=9))]
    seen += [of_tokens(law_of("own", mixture=0.0, lookahead=None, correct=False))]
    for i, p in enumerate(seen):
        for q in seen[:i]:
            assert distance(p, q) > distance_bound(p, N)


def test_noise_that_comes_back_after_a_rejection_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's rule with one noise per position for good: selection bias."""
    keys = Canvas._counters
    monkeypatch.setattr(Canvas, "_counters", lambda *a: (*keys(*a)[:2], torch.zeros_like(keys(*a)[2]), keys(*a)[3]))
    rule: dict[str, Any] = {"mixture": 0.0, "lookahead": None, "correct": False}
    law = of_tokens(law_of(**rule))
    assert chi_square(law, empirical(run(**rule).tokens_BL), N) < 1e-9


# Limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [2, None])
def test_a_mixture_of_one_is_parallel_decoding_from_the_left(lookahead: int | None) -> None:
    """The target is the base's marginal: every draft stands, M tokens a pass."""
    rounds = 2 if lookahead else 1
    law = parallel_law(target(exact_base(WORDS, LENGTH)), "left_to_right", lookahead or LENGTH)
    assert distance(law, of_tokens(law_of(mixture=1.0, lookahead=lookahead, correct=True))) < 1e-12
    result = run(mixture=1.0, lookahead=lookahead, seed=11)
    assert_law(result.tokens_BL, law)
    assert set(result.base_calls_B.tolist()) == {rounds}
    assert not result.partner_calls_B.any()  # whose word would not count
    assert result.order_BL.tolist() == [list(range(LENGTH))] * N


def test_one_token_a_pass_is_the_joint_and_asks_no_partner() -> None:
    result = run(mixture=0.2, lookahead=1, seed=12)
    assert_law(result.tokens_BL, target(exact_base(WORDS, LENGTH)))
    assert set(result.base_calls_B.tolist()) == {LENGTH}
    assert set(result.partner_calls_B.tolist()) == {0}


def test_a_mixture_of_zero_with_the_true_partner_is_the_joint_if_mismatches_are_corrected() -> None:
    """And not by the paper's rule, whose accepted tokens are not a fair sample."""
    p = target(exact_base(WORDS, LENGTH))
    rule: dict[str, Any] = {"mixture": 0.0, "lookahead": None}
    assert distance(of_tokens(law_of("own", **rule, correct=True)), p) < 1e-12
    assert distance(of_tokens(law_of("own", **rule, correct=False)), p) > distance_bound(p, N)
    result = run(partner="own", correct=True, seed=13, **rule)
    assert_law(result.tokens_BL, p)
    assert result.base_calls_B.max() <= LENGTH // 2  # two tokens a pass at least
    assert_law(with_passes(run(partner="own", seed=14, **rule)), law_of("own", **rule, correct=False))


def test_a_mixture_of_zero_writes_the_partners_law_behind_the_first_token() -> None:
    """Two tokens a pass are then the base's first, and the partner's second given it."""
    p, q = target(exact_base(WORDS, LENGTH)), target(exact_base(WORDS, LENGTH, seed=9))
    result = run(mixture=0.0, lookahead=2, correct=True, seed=15)
    law = {}
    for a in range(WORDS):
        first = conditionals(p, (None,) * LENGTH)[0][a]
        law |= {(a, b): first * conditionals(q, (a, None, None, None))[1][b] for b in range(WORDS)}
    assert_law(result.tokens_BL[:, :2], law)


def test_shared_noise_accepts_more_than_noise_of_its_own() -> None:
    rule: dict[str, Any] = {"mixture": 0.4, "lookahead": None, "correct": False}
    means = []
    for more in ({}, {"coupling": own_noise}):
        law = law_of(**rule, **more)
        mean = sum(key[-1] * q for key, q in law.items())
        sigma = math.sqrt(sum((key[-1] - mean) ** 2 * q for key, q in law.items()) / N)
        means.append(mean)
        assert (abs(float(run(**rule, seed=16).base_calls_B.double().mean()) - mean) < 5 * sigma) == (not more)
    assert means[0] < means[1]


def test_models_that_share_no_token_agree_on_nothing() -> None:
    """Base and partner each sure of another word (top_p leaves one): a pass is one token, and nothing is corrected."""
    sure, other = torch.full((2, 2, 2), 0.01), torch.full((2, 2, 2), 0.01)
    sure[:, 0, 0], other[:, 1, 1], other[:, 0, 1] = 1.0, 3.0, 1.0
    base = ExactBase(sure)
    for correct in (False, True):
        result = decode(
            base, [[]] * 50, DecodeConfig(max_new_tokens=3, top_p=0.6), decoder="apd",
            partner=ExactPartner(ExactBase(other)), mixture=0.5, correct=correct,
        )  # fmt: skip
        assert result.tokens_BL[:, 1:].tolist() == [[0, 0]] * 50
        assert set(result.base_calls_B.tolist()) == {3}


# Greedy, against a loop of its own ---------------------------------------------------------------------------------


def greedy(
    base: Base,
    partner: CausalPartner,
    prompt: list[int],
    new: int,
    *,
    mixture: float,
    lookahead: int | None,
    correct: bool,
) -> tuple[list[int], list[int], int, int]:
    """One row, one token at a time, from the models' plain logits; end tokens are suppressed."""
    tokens, order, passes, asked = [*prompt, *[MASK] * new], [-1] * (len(prompt) + new), 0, 0
    forbidden = [MASK, END, *range(LIMIT, VOCAB)]
    while MASK in tokens:
        passes += 1
        ids = torch.tensor([tokens])
        canvas = Canvas(base, [tokens[:-1]], DecodeConfig(max_new_tokens=1))
        canvas.tokens_BL, canvas.masked_BL = ids, ids == MASK
        own = base.head(base.hidden(canvas)[0])
        own[:, forbidden] = -math.inf
        open_ = [i for i, token in enumerate(tokens) if token == MASK][:lookahead]
        asked += len(open_) > 1 and mixture < 1
        for rank, i in enumerate(open_):
            draft = wanted = int(own[i].argmax())
            if rank:
                ar = partner.model(input_ids=torch.tensor([tokens[:i]])).logits[0, -1].clone()
                ar[forbidden] = -math.inf
                score = torch.zeros(VOCAB).index_fill(0, torch.tensor(forbidden), -math.inf)
                allowed = score == 0
                score[allowed] = (mixture * own[i].log_softmax(-1) + (1 - mixture) * ar.log_softmax(-1))[allowed]
                wanted = int(score.argmax())
            if wanted == draft or correct:
                tokens[i], order[i] = wanted, max(order) + 1
            if wanted != draft:
                break
    return tokens, order, passes, asked


PROMPTS = [[BOS, 3], [BOS, 4, 5, 6, MASK, MASK, 7, MASK, 8], [BOS, MASK, 9, 9]]


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize(("mixture", "lookahead"), [(0.0, None), (0.5, 4), (0.85, None), (1.0, 3), (0.7, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_rows_equal_a_plain_loop(family: str, mixture: float, lookahead: int | None, correct: bool) -> None:
    """Tokens, order and passes; prompts of several lengths in one batch, masks between given tokens."""
    base = tiny_base(family)
    partner, rule = tiny_partner(base), {"mixture": mixture, "lookahead": lookahead, "correct": correct}
    config = DecodeConfig(max_new_tokens=8, temperature=0, suppress_eos=True)
    result = decode(base, PROMPTS, config, decoder="apd", partner=partner, **rule)
    for b, prompt in enumerate(PROMPTS):
        expected = greedy(base, partner, prompt, 8, **rule)
        real_L = result.real_BL[b]
        got = (result.tokens_BL[b][real_L].tolist(), result.order_BL[b][real_L].tolist())
        assert (*got, int(result.base_calls_B[b]), int(result.partner_calls_B[b])) == expected


# Rows, masks and books -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correct", [False, True])
def test_rows_do_not_depend_on_their_batch(correct: bool) -> None:
    base = tiny_base("dream")
    config, rule = DecodeConfig(max_new_tokens=12, suppress_eos=True, seed=4), {"mixture": 0.7, "correct": correct}
    partner = tiny_partner(base)
    together = decode(base, PROMPTS, config, decoder="apd", partner=partner, rows=[7, 8, 9], **rule)
    for b, prompt in enumerate(PROMPTS):
        alone = decode(base, [prompt], config, decoder="apd", partner=partner, rows=[7 + b], **rule)
        width = len(prompt) + 12
        assert torch.equal(together.tokens_BL[b, -width:], alone.tokens_BL[0])
        assert torch.equal(together.order_BL[b, -width:], alone.order_BL[0])
        assert together.base_calls_B[b] == alone.base_calls_B[0]
        assert together.partner_calls_B[b] == alone.partner_calls_B[0]
    open_B = torch.tensor([12, 15, 13])
    assert (together.base_calls_B > 1).all() and (together.base_calls_B < open_B).all()  # neither limit


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base, config = tiny_base("dream"), DecodeConfig(max_new_tokens=9, seed=2)
    whole, pieces = [], []
    for kept, rows in ((whole, 1000), (pieces, 16)):  # two places at a time, as each takes eight times its logits
        monkeypatch.setattr("adjust_dlm.decoders.machinery.pick._CHUNK_BYTES", rows * 4 * VOCAB)
        kept.append(decode(base, PROMPTS, config, decoder="apd", partner=tiny_partner(base)).tokens_BL)
    assert torch.equal(whole[0], pieces[0])


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("prompt", [(None, 1), (None, 1, None), (None, None, 2)])
def test_masks_between_given_tokens_have_their_law(prompt: Partial, correct: bool) -> None:
    """The base sees the given tokens on both sides, the partner those on the left."""
    rule: dict[str, Any] = {"mixture": 0.3, "lookahead": None, "correct": correct, "prompt": prompt}
    assert_law(with_passes(run(**rule, seed=21)), law_of(**rule))


def test_passes_are_booked_and_none_is_wasted() -> None:
    """A row that drafts one token, such as its last, asks no partner; a batch asks once for all its rows."""
    base = tiny_base("dream")
    partner, passes = tiny_partner(base), count_passes(base)
    asked = Counted(partner.hidden)
    partner.hidden = asked  # type: ignore[method-assign]
    rounds: list[list[int]] = []
    result = decode(
        base, PROMPTS, DecodeConfig(max_new_tokens=12, seed=4, suppress_eos=True), decoder="apd", partner=partner,
        watch=lambda canvas: rounds.append(canvas.commits_B.tolist()),
    )  # fmt: skip
    masks = [12, 15, 13]
    for b in range(3):
        left = [masks[b] - before for before in [0, *(commits[b] for commits in rounds[:-1])]]
        assert int(result.base_calls_B[b]) == sum(n > 0 for n in left)
        assert int(result.partner_calls_B[b]) == sum(n > 1 for n in left)
    assert passes.calls == len(rounds) == int(result.base_calls_B.max())
    assert asked.calls == int(result.partner_calls_B.max())
    config = DecodeConfig(max_new_tokens=1, suppress_eos=True)
    unlike = decode(base, [[BOS, 3, 4], [BOS, MASK, MASK]], config, decoder="apd", partner=partner)
    assert unlike.partner_calls_B[0] == 0 < unlike.partner_calls_B[1]  # its last token is its first


def test_only_open_positions_are_drafted_and_never_over_a_shut_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """In front of a mask that may not be committed two tokens a pass, behind it one: the partner cannot read it."""

    def open_now(canvas: Canvas) -> torch.Tensor:
        rank_BL = canvas.masked_BL.cumsum(-1)
        return canvas.masked_BL & ((rank_BL != shut) | (canvas.masked_BL.sum(-1, keepdim=True) == 1)) & (rank_BL <= 3)

    monkeypatch.setattr(Canvas, "open_BL", property(open_now))
    for shut, order in ((3, [0, 1, 2, 3]), (1, [3, 0, 1, 2])):
        result = run(mixture=1.0, n=5)
        assert result.order_BL.tolist() == [order] * 5
        assert set(result.base_calls_B.tolist()) == {2 if shut == 3 else 4}


def test_a_row_ends_with_its_text() -> None:
    """The base ends every text at its second word: the rest is filler, and no pass is spent on it."""
    joint = torch.zeros((3,) * 4)
    joint[0, 2] = joint[1, 2] = 1.0
    base = ExactBase(joint, end_ids=(2,))
    result = decode(
        base, [[]] * 20, DecodeConfig(max_new_tokens=4), decoder="apd", partner=base.partner(), mixture=0.0, lookahead=2
    )
    assert set(result.base_calls_B.tolist()) == {1}
    assert result.order_BL.tolist() == [[0, 1, -2, -2]] * 20
    assert (result.tokens_BL[:, 1:] == 2).all()


# Noise -------------------------------------------------------------------------------------------------------------


def test_gumbel_noise_draws_from_the_softmax_and_is_its_own_for_every_key() -> None:
    p_V, n = torch.tensor([0.5, 0.3, 0.15, 0.05]), 20_000
    noise_RV = gumbel(
        uniform(5, torch.arange(n)[:, None], torch.tensor([[2]]), torch.tensor([[1]]), NOISE, torch.arange(4))
    )
    assert_law((p_V.log() + noise_RV).argmax(-1, keepdim=True), {(v,): float(q) for v, q in enumerate(p_V)})
    assert len(noise_RV.double().unique()) > 0.99 * noise_RV.numel()
    assert torch.corrcoef(noise_RV.T).fill_diagonal_(0).abs().max() < 5 / math.sqrt(n)
    ends = gumbel(torch.tensor([0.0, 1 - 2.0**-32], dtype=torch.float64))
    assert ends.tolist() == pytest.approx([-math.log(33 * math.log(2)), 33 * math.log(2)], rel=1e-6)


def test_noise_belongs_to_row_commit_position_and_token_and_not_to_the_padding() -> None:
    base, config = tiny_base("dream"), DecodeConfig(max_new_tokens=4, seed=6)
    canvas, alone = Canvas(base, [[BOS], [BOS, 5, 6]], config), Canvas(base, [[BOS]], config)
    rows, token_V = torch.tensor([0, 0, 1, 1]), torch.arange(VOCAB)
    noise_RV = canvas.gumbels(torch.tensor([3, 4, 3, 4]), rows, token_V)
    assert torch.equal(noise_RV[:2], alone.gumbels(torch.tensor([1, 2]), rows[:2], token_V))
    assert len(noise_RV.unique()) == 4 * VOCAB
    canvas.commits_B += 1
    assert not torch.isin(canvas.gumbels(torch.tensor([3, 4, 3, 4]), rows, token_V), noise_RV).any()


# What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixture": -0.1}, "mixture is -0.1; it must lie in"),
        ({"mixture": 1.1}, "mixture is 1.1"),
        ({"mixture": "all"}, "mixture is 'all'; it must be a number"),
        ({"mixture": math.nan}, "mixture is nan"),
        ({"lookahead": 0}, "lookahead is 0; it must be at least 1"),
        ({"lookahead": 2.5}, "lookahead is 2.5"),
        ({"lookahead": math.inf}, "lookahead is inf"),
        ({"lookahead": True}, "lookahead is True"),
        ({"correct": "yes"}, "correct is 'yes'; it must be true or false"),
        ({"window": 16}, "decoder 'apd' has no option window; it has mixture, lookahead, correct"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(n=1, **options)


def test_a_partner_is_needed_and_something_for_it_to_read() -> None:
    base, config = tiny_base("dream"), DecodeConfig(max_new_tokens=3)
    with pytest.raises(InputError, match="'apd' needs an autoregressive partner"):
        decode(base, [[BOS]], config, decoder="apd")
    for prompt in ([], [MASK, 5]):
        with pytest.raises(InputError, match="begins with a mask"):
            decode(base, [[BOS], prompt], config, decoder="apd", partner=tiny_partner(base))


def test_a_partner_that_gives_nan_is_an_error() -> None:
    base = tiny_base("dream")
    partner = tiny_partner(base)
    partner.model.get_output_embeddings().weight.data[5] = math.nan
    with pytest.raises(FloatingPointError, match="or its partner gave NaN"):
        decode(base, [[BOS]], DecodeConfig(max_new_tokens=3), decoder="apd", partner=partner)


def test_the_command_line_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["generate", "--base", "exact", "--decoder", "apd", "--max-new-tokens", "4", "--json"]
    assert main([*flags, "--set", "mixture=1.0", "--set", "lookahead=2"]) == 0
    assert '"base_calls": 2' in capsys.readouterr().out
    assert main([*flags, "--set", "mixture=2"]) == 2
    assert "mixture is 2; it must lie in" in capsys.readouterr().err
