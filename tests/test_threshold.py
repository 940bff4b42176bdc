"""Rules that commit as many tokens as the base is certain of: limits, counts by hand, rows apart from their batch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adjust_dlm.cli import main
from adjust_dlm.decoders import DECODERS, Canvas, decode
from adjust_dlm.decoders.machinery.proposals import fill_by_rule, largest_probability
from adjust_dlm.types import DecodeConfig, InputError
from helpers import BOS, FAMILIES, TableBase, exact_base, tiny_base, two_sentences

RULES = ("threshold", "factor", "entropy_bound")
ONE_BY_ONE: dict[str, dict[str, float]] = {
    "threshold": {"tau": 2.0},
    "factor": {"f": 0.0},
    "entropy_bound": {"gamma": 0.0},
}
AT_ONCE: dict[str, dict[str, float]] = {
    "threshold": {"tau": 1e-9},
    "factor": {"f": 99.0},
    "entropy_bound": {"gamma": 99.0},
}


def config_for(rule: str, **changes: Any) -> DecodeConfig:
    """The order that the rule itself ranks by."""
    order = {"order": "entropy"} if rule == "entropy_bound" else {"order": "confidence", "order_on": "raw"}
    return DecodeConfig(**{"max_new_tokens": 6, "suppress_eos": True, **order, **changes})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", RULES)
def test_the_strictest_rule_is_joint_decoding(rule: str, family: str, temperature: float) -> None:
    base, prompts = tiny_base(family), [[BOS, 3], [BOS, 4, 5, 6]]
    config = config_for(rule, temperature=temperature)
    ours = decode(base, prompts, config, decoder=rule, **ONE_BY_ONE[rule])
    joint = decode(base, prompts, config, decoder="joint")
    assert torch.equal(ours.tokens_BL, joint.tokens_BL)
    assert torch.equal(ours.order_BL, joint.order_BL)
    assert ours.base_calls_B.tolist() == [6, 6]


@pytest.mark.parametrize("rule", RULES)
def test_the_loosest_rule_is_one_parallel_pass(rule: str) -> None:
    base = tiny_base("dream")
    config = config_for(rule, tokens_per_step=6)
    ours = decode(base, [[BOS, 3]] * 4, config, decoder=rule, **AT_ONCE[rule])
    parallel = decode(base, [[BOS, 3]] * 4, config, decoder="parallel")
    assert torch.equal(ours.tokens_BL, parallel.tokens_BL)
    assert torch.equal(ours.order_BL, parallel.order_BL)
    assert ours.base_calls_B.tolist() == [1] * 4


@pytest.mark.parametrize("options", [{"tau": 0.65}, {"tau": 0.65, "score": "likeliest"}], ids=str)
def test_a_threshold_is_held_against_probabilities_before_temperature_and_filters(options: dict[str, Any]) -> None:
    """.6 for the likeliest token, which T = .5 makes .77 and a nucleus of half the mass 1: below .65 all the same."""
    base = TableBase(torch.tensor([[0.6, 0.3, 0.1]]).log().repeat(4, 1))
    for changes in ({"temperature": 0.5}, {"top_p": 0.5}):
        config = DecodeConfig(max_new_tokens=4, **changes)
        assert decode(base, [[]] * 3, config, decoder="threshold", **options).base_calls_B.tolist() == [4] * 3


def test_a_pass_commits_up_to_the_first_rank_that_is_not_allowed() -> None:
    base = TableBase(torch.tensor([[3.0, 0], [2.5, 0], [2, 0], [1.5, 0], [1, 0]]))
    canvas = Canvas(base, [[]], DecodeConfig(max_new_tokens=5))

    def gap(score_BN: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.tensor([True, True, False, True, True])[: score_BN.shape[1]].expand_as(score_BN)

    fill_by_rule(base, canvas, largest_probability, gap)
    assert canvas.rounds_B.tolist() == [3]  # of two, two and one


def naive_counts(logits: torch.Tensor, stop: Callable[[list[tuple[float, float]]], int]) -> list[int]:
    """Commits per pass at T=0 on logits that never change, from (probability, entropy) of each position."""
    facts = []
    for row in logits.softmax(-1).tolist():
        facts.append((max(row), -sum(p * math.log(p) for p in row)))
    counts = []
    while facts:
        n = stop(facts)
        counts.append(n)
        facts = facts[n:]
    return counts


def by_threshold(facts: list[tuple[float, float]]) -> int:
    return max(1, sum(p >= 0.6 for p, _ in facts))


def by_factor(facts: list[tuple[float, float]]) -> int:
    n = 0
    while n < len(facts) and (n + 2) * (1 - facts[n][0]) < 1.2:
        n += 1
    return max(1, n)


def by_bound(facts: list[tuple[float, float]]) -> int:
    allowed = [
        n for n in range(1, len(facts) + 1) if sum(h for _, h in facts[:n]) - max(h for _, h in facts[:n]) <= 0.9
    ]
    return max(allowed)


@pytest.mark.parametrize(
    ("rule", "options", "stop", "column"),
    [
        ("threshold", {"tau": 0.6}, by_threshold, 0),
        ("factor", {"f": 1.2}, by_factor, 0),
        ("entropy_bound", {"gamma": 0.9}, by_bound, 1),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_counts_per_pass_by_hand(rule: str, options: dict[str, float], stop: Any, column: int, seed: int) -> None:
    logits = 3 * torch.randn(9, 5, generator=torch.Generator().manual_seed(seed))
    p = logits.softmax(-1)
    key = p.amax(-1) if column == 0 else (p * p.log()).sum(-1)
    ranked = key.argsort(descending=True)
    counts = naive_counts(logits[ranked], stop)
    assert len(counts) < 9 and max(counts) > 1  # the rule is neither of its limits
    seen: list[int] = []
    result = decode(
        TableBase(logits), [[]], config_for(rule, max_new_tokens=9, temperature=0.0, suppress_eos=False), decoder=rule,
        watch=lambda canvas: seen.append(int(canvas.commits_B[0])), **options,
    )  # fmt: skip
    assert [b - a for a, b in zip([0, *seen[:-1]], seen, strict=True)] == counts
    assert result.base_calls_B.tolist() == [len(counts)]
    assert result.order_BL[0, ranked].tolist() == list(range(9))
    assert torch.equal(result.tokens_BL[0], logits.argmax(-1))


@pytest.mark.parametrize("rule", RULES)
def test_rows_do_not_depend_on_their_batch(rule: str) -> None:
    base, prompts = tiny_base("dream"), [[BOS, 3], [BOS, 4, 5, 6, 7], [BOS]]
    options = {"threshold": {"tau": 0.3}, "factor": {"f": 1.5}, "entropy_bound": {"gamma": 1.0}}[rule]
    config = config_for(rule, max_new_tokens=10, suppress_eos=False)
    together = decode(base, prompts, config, decoder=rule, **options)
    for row, prompt in enumerate(prompts):
        alone = decode(base, [prompt], config, decoder=rule, rows=[row], **options)
        width = len(prompt) + 10
        assert torch.equal(together.tokens_BL[row, -width:], alone.tokens_BL[0])
        assert torch.equal(together.order_BL[row, -width:], alone.order_BL[0])
        assert together.base_calls_B[row] == alone.base_calls_B[0]
    assert together.base_calls_B.max() < 10


@pytest.mark.parametrize("seed", range(6))
def test_an_entropy_bound_of_zero_loses_nothing(seed: int) -> None:
    """The paper's figure: "The" and "the" are certain and go along with one free choice; then all is certain."""
    base, words = two_sentences()
    config = DecodeConfig(max_new_tokens=6, order="entropy", seed=seed)
    result = decode(base, [[]], config, decoder="entropy_bound", gamma=1e-6)
    text = " ".join(words[token] for token in result.tokens_BL[0].tolist())
    assert text in ("The cat sat on the mat", "The dog ran in the yard")
    assert result.base_calls_B.tolist() == [2]


@pytest.mark.parametrize(
    ("decoder", "options", "said"),
    [
        ("threshold", {"tau": 0}, "tau is 0; it must be a finite number above 0"),
        ("threshold", {"tau": "high"}, "tau is 'high'"),
        ("factor", {"f": -1}, "f is -1"),
        ("entropy_bound", {"gamma": math.nan}, "gamma is nan"),
        ("threshold", {"gamma": 1}, "decoder 'threshold' has no option gamma; it has tau"),
        ("origin", {"cfg_scale": 2}, "decoder 'origin' has no option cfg_scale; it has eps"),
        ("joint", {"tau": 1}, "decoder 'joint' has no option tau; it has none"),
    ],
)
def test_options_are_checked(decoder: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        decode(exact_base(), [[]], DecodeConfig(max_new_tokens=3), decoder=decoder, **options)


def test_options_come_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["generate", "--base", "exact", "--decoder", "threshold", "--max-new-tokens", "4", "--json"]
    assert main([*flags, "--set", "tau=1e-9"]) == 0
    assert '"base_calls": 1' in capsys.readouterr().out
    for bad, said in (("tau", "are NAME=VALUE"), ("tua=1", "has no option tua"), ("tau=[", "tau is ")):
        assert main([*flags, "--set", bad]) == 2
        assert said in capsys.readouterr().err


def test_every_decoder_with_options_has_defaults() -> None:
    built = {name: entry.options() for name, entry in DECODERS.items() if entry.options is not None}
    assert {"adaptive", "threshold", "factor", "entropy_bound", "guided", "apd"} <= set(built)
