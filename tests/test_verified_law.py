"""`verified` with `match=law`: its texts have exactly the law of joint decoding, whatever g drafts.

The law is enumerated through the decoder's own code: every draw is replaced by all its outcomes, each with its chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases.exact import ExactBase
from adjust_dlm.decoders import decode, make_plan
from adjust_dlm.decoders import verified as module
from adjust_dlm.decoders.machinery import pick
from adjust_dlm.decoders.machinery.canvas import Canvas, Picks
from adjust_dlm.sampling import coupled, draw_from
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import (
    BOS,
    FAMILIES,
    MASK,
    Law,
    assert_law,
    distance,
    exact_base,
    oracle,
    parallel_law,
    row_of,
    target,
    tiny_base,
    tiny_sampler,
)

MODULE: Any = module
G = Callable[[Tensor, State], Tensor]
PROMPTS = [[BOS, 5, 6], [BOS, 9, 7, 4, 11, MASK, 8], [BOS]]
IMPOSSIBLE = 1e-12  # chance of a token that the exact base calls impossible: it says exp(-60)


class Outcomes:
    """`draw` with every outcome: a row of a batch is one way through the draws, and those it passed by come later."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        uniforms, again = Canvas.uniforms, MODULE._coupled
        self.same_B = torch.tensor(True)

        def seen(canvas: Canvas, *args: Any) -> Tensor:
            self.counts = (canvas.busy_B & self.same_B).tolist()  # other draws decide nothing
            return uniforms(canvas, *args)

        def beside(own: Picks, draft: Picks, canvas: Canvas) -> Picks:
            self.same_B = (draft.valid_BN & (draft.position_BN == own.position_BN))[:, 0]
            out = again(own, draft, canvas)
            self.same_B = torch.tensor(True)
            return out

        patch.setattr(Canvas, "uniforms", seen)
        patch.setattr(MODULE, "_coupled", beside)
        patch.setattr(pick, "draw", self.draw)
        patch.setattr(MODULE, "draw_from", lambda mass_RV, u_R: self.draw(mass_RV.log(), u_R, 1.0))

    def law(self, base: ExactBase, config: DecodeConfig, prompt: list[int], **how: Any) -> Law:
        todo, law = [()], dict[tuple[int, ...], float]()
        while todo:
            here, todo = todo[:4096], todo[4096:]
            self.ways, self.at = [list[int](way) for way in here], [0] * len(here)
            self.chance, self.passed_by = [1.0] * len(here), list[Any]()
            rows = [0] * len(here)  # one row: an order that is drawn is the same in all
            result = decode(base, [prompt] * len(here), config, rows=rows, **how)
            for text, chance in zip(result.tokens_BL.tolist(), self.chance, strict=True):
                law[tuple(text)] = law.get(tuple(text), 0.0) + chance
            todo += self.passed_by
        return law

    def draw(self, processed_RV: Tensor, _u_R: Tensor, temperature: float) -> Tensor:
        token_R = processed_RV.nan_to_num(-1e9).argmax(-1)
        if temperature:
            for b, (p_V, counts) in enumerate(
                zip(processed_RV.double().softmax(-1).tolist(), self.counts, strict=True)
            ):
                if counts:
                    able = [token for token, chance in enumerate(p_V) if chance > IMPOSSIBLE]
                    way, at = self.ways[b], self.at[b]
                    if at == len(way):
                        self.passed_by += [(*way, token) for token in able[1:]]
                        way.append(able[0])
                    token_R[b], self.at[b] = way[at], at + 1
                    self.chance[b] *= p_V[way[at]]
        return token_R


def opposite(base: ExactBase) -> G:
    """A g that likes best what the base likes least."""
    return lambda _h_BLD, state: torch.where(base.hidden(state) == 0, 0, -base.hidden(state).clamp_min(-5))


def other(base: ExactBase) -> G:
    """A g that is exact about another joint, half of whose strings are impossible."""
    joint = exact_base(base.words, base.length, seed=7).joint
    joint = joint * (torch.arange(joint.numel()).reshape(joint.shape) % 2)
    size, lag = base.spec.block, bool(base.lag)
    return oracle(ExactBase(joint, block=size, shifted=lag))


def stale(_base: ExactBase) -> G:
    """No g: drafts from the base's last states."""
    return lambda h_BLD, _state: h_BLD


GS = {"other": other, "opposite": opposite, "stale": stale, "oracle": oracle}
BASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "canvas of 3 words": ({"words": 3, "length": 3}, []),
    "canvas of 4": ({"words": 2, "length": 4}, []),
    "blocks": ({"words": 2, "length": 6, "block": 3}, [0]),
    "blocks of 3 words": ({"words": 3, "length": 4, "block": 2}, [1]),
    "blocks, shifted": ({"words": 2, "length": 6, "block": 3, "shifted": True}, [1]),
    "blocks of 3 words, shifted": ({"words": 3, "length": 4, "block": 2, "shifted": True}, [2]),
}


def half(base: ExactBase) -> ExactBase:
    """The same with a third of its strings impossible."""
    keep = torch.arange(base.joint.numel()).reshape(base.joint.shape) % 3 != 1
    return ExactBase(base.joint * keep, block=base.spec.block, shifted=bool(base.lag))


def given(p: Law, prompt: list[int]) -> Law:
    inside = {s: q for s, q in p.items() if list(s[: len(prompt)]) == prompt}
    return {s: q / sum(inside.values()) for s, q in inside.items()}


# At depth 1 nothing is drafted.
@pytest.mark.parametrize(("g", "depth"), [("other", 1), *((g, depth) for g in GS for depth in (2, 4))])
@pytest.mark.parametrize("kind", BASES)
def test_its_law_is_the_joint(kind: str, g: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options, prompt = BASES[kind]
    outcomes = Outcomes(monkeypatch)
    for base in (exact_base(**options), half(exact_base(**options))):
        config = DecodeConfig(max_new_tokens=base.length - len(prompt))
        how = {"decoder": "verified", "sampler": GS[g](base), "depth": depth, "match": "law"}
        law = outcomes.law(base, config, prompt, **how)
        assert sum(law.values()) == pytest.approx(1, abs=1e-6)
        assert distance(law, given(target(base), prompt)) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"top_k": 2},
        {"order": "random"},
        {"order": "left_to_right", "temperature": 0.5},
        {"order": "margin", "block_length": 2},
        {"suppress_eos": True},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["canvas of 3 words", "canvas of 4", "blocks of 3 words, shifted"])
def test_its_law_is_that_of_joint_decoding(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings under which that law is not the table's, or texts end early."""
    options, prompt = BASES[kind]
    base = exact_base(**options, end_ids=(0,))
    config = DecodeConfig(max_new_tokens=base.length - len(prompt), **settings)
    outcomes = Outcomes(monkeypatch)
    joint = outcomes.law(base, config, prompt, decoder="joint")
    for depth in (2, 4):
        law = outcomes.law(base, config, prompt, decoder="verified", sampler=other(base), depth=depth, match="law")
        assert sum(law.values()) == pytest.approx(1, abs=1e-6) and distance(law, joint) < 1e-6


@pytest.mark.parametrize("settings", [{"temperature": 0.6}, {"temperature": 0.7, "top_p": 0.8}], ids=str)
def test_its_law_is_the_enumerated_one(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, against a recursion that shares no code with the decoder."""
    base = exact_base(3, 3)
    how = {"decoder": "verified", "sampler": other(base), "depth": 3, "match": "law"}
    law = Outcomes(monkeypatch).law(base, DecodeConfig(max_new_tokens=3, **settings), [], **how)
    assert distance(law, parallel_law(target(base), "entropy", 1, **settings)) < 1e-6


def test_these_laws_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's own law in place of the residual one, where a draft falls, is another law."""

    def careless(p_RV: Tensor, q_RV: Tensor, token_R: Tensor) -> Tensor:
        p_RV, q_RV, token_R1 = p_RV.double().softmax(-1), q_RV.double().softmax(-1), token_R[:, None]
        stands_R1 = (p_RV.gather(-1, token_R1) / q_RV.gather(-1, token_R1)).clamp_max(1)
        return (p_RV * (1 - stands_R1)).scatter_add(-1, token_R1, stands_R1)

    monkeypatch.setattr(MODULE, "coupled", careless)
    base = exact_base(3, 3)
    how = {"decoder": "verified", "sampler": other(base), "depth": 3, "match": "law"}
    law = Outcomes(monkeypatch).law(base, DecodeConfig(max_new_tokens=3), [], **how)
    assert distance(law, target(base)) > 0.01


@pytest.mark.parametrize("kind", ["canvas of 3 words", "blocks of 3 words, shifted"])
@pytest.mark.parametrize("g", ["other", "stale"])
def test_its_texts_are_samples_of_the_joint(kind: str, g: str) -> None:
    """The uniforms as they are. A right decoder fails one time in a thousand, for a seed; this one is fixed."""
    options, prompt = BASES[kind]
    base = exact_base(**options)
    config = DecodeConfig(max_new_tokens=base.length - len(prompt), seed=3)
    how = {"decoder": "verified", "sampler": GS[g](base), "depth": 3, "match": "law"}
    assert_law(decode(base, [prompt] * 6_000, config, **how).tokens_BL, given(target(base), prompt))


def test_it_takes_fewer_passes_than_token_for_token() -> None:
    base = exact_base(4, 4)
    how: dict[str, Any] = {"decoder": "verified", "sampler": stale(base), "depth": 3}
    law, token = (decode(base, [[]] * 1000, DecodeConfig(max_new_tokens=4), match=m, **how) for m in ("law", "token"))
    saved_B = (token.rounds_B - law.rounds_B).float()
    assert float(saved_B.mean()) > 4 * float(saved_B.std() / 1000**0.5)


def test_a_coupled_draw_has_the_law_and_keeps_the_token_as_often_as_any_can() -> None:
    generator = torch.Generator().manual_seed(0)
    for zeros in (0, 3):
        p_RV, q_RV = torch.randn(2, 50, 8, generator=generator).mul(2)
        p_RV[:, :zeros], q_RV[:, 8 - zeros :] = -torch.inf, -torch.inf
        p, q = p_RV.double().softmax(-1), q_RV.double().softmax(-1)
        out, stays = torch.zeros_like(p), torch.zeros(50, dtype=torch.float64)
        for v in range(8 - zeros):
            law_RV = coupled(p_RV, q_RV, torch.full((50,), v))
            out += q[:, v, None] * law_RV
            stays += q[:, v] * law_RV[:, v]
        assert torch.allclose(out, p, atol=1e-6)
        assert torch.allclose(stays, 1 - (p - q).abs().sum(-1) / 2, atol=1e-6)
    same_R = draw_from(coupled(p_RV, p_RV, p_RV.argmax(-1)), torch.rand(50, generator=generator))
    assert torch.equal(same_R, p_RV.argmax(-1))


# What a draft that is right, and T = 0, make of it -------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 4])
def test_with_true_drafts_every_pass_commits_as_many_tokens_as_it_looks_at(depth: int) -> None:
    base = exact_base(3, 5)
    config = DecodeConfig(max_new_tokens=5, seed=1)
    result = decode(base, [[]] * 6, config, decoder="verified", sampler=oracle(base), depth=depth, match="law")
    assert result.rounds_B.tolist() == [1 + -(-4 // depth)] * 6
    assert torch.equal(result.tokens_BL, decode(base, [[]] * 6, config, decoder="joint").tokens_BL)


@pytest.mark.parametrize("changes", [{}, {"cache_period": 1}, {"block": 4}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bases_own_drafts_stand_through_every_cache(family: str, changes: dict[str, Any]) -> None:
    """Drafts that all stand are joint decoding's own draws."""
    base = tiny_base(family, block=changes.get("block"))
    period = changes.get("cache_period")
    config = DecodeConfig(max_new_tokens=9, seed=5, cache_period=period, suppress_eos=True, order="entropy")
    texts = [[BOS, 5, 6], [BOS, 9, 7, 4, 11], [BOS]]
    how: dict[str, Any] = {"decoder": "verified", "sampler": oracle(base), "depth": 3, "match": "law"}
    result = decode(base, texts, config, **how)
    joint = decode(base, texts, config, decoder="joint")
    assert torch.equal(result.tokens_BL, joint.tokens_BL) and torch.equal(result.order_BL, joint.order_BL)
    assert bool((result.rounds_B <= 6).all())


@pytest.mark.parametrize("changes", [{"depth": 1}, {"temperature": 0.0, "depth": 3}], ids=str)
def test_without_drafts_and_at_temperature_0_it_is_joint_decoding_token_for_token(changes: dict[str, Any]) -> None:
    base, depth = tiny_base("dream"), changes["depth"]
    config = DecodeConfig(max_new_tokens=9, temperature=changes.get("temperature", 1.0), seed=4)
    how: dict[str, Any] = {"decoder": "verified", "sampler": tiny_sampler(base), "depth": depth}
    law, token = (decode(base, PROMPTS, config, match=match, **how) for match in ("law", "token"))
    assert torch.equal(law.tokens_BL, decode(base, PROMPTS, config, decoder="joint").tokens_BL)
    assert torch.equal(law.rounds_B, token.rounds_B)


@pytest.mark.parametrize("block", [None, 4])
def test_a_row_does_not_depend_on_its_batch(block: int | None) -> None:
    base = tiny_base("dream", block=block)
    texts = [[BOS, 5, 6], [BOS, 9, 7, 4, 11], [BOS]]
    config = DecodeConfig(max_new_tokens=9, seed=2, temperature=2.0)
    how: dict[str, Any] = {"decoder": "verified", "sampler": tiny_sampler(base), "depth": 3, "match": "law"}
    together = decode(base, texts, config, **how)
    for b, prompt in enumerate(texts):
        alone = decode(base, [prompt], config, rows=[b], **how)
        assert row_of(alone, 0) == row_of(together, b) and alone.rounds_B[0] == together.rounds_B[b]


def test_settings_are_checked() -> None:
    how: dict[str, Any] = {"decoder": "verified", "sampler": oracle(exact_base())}
    with pytest.raises(InputError, match="match is 'lwa'; it must be one of token, law"):
        decode(exact_base(), [[]], DecodeConfig(max_new_tokens=4), match="lwa", **how)
    sure = DecodeConfig(max_new_tokens=4, order="confidence")
    with pytest.raises(InputError, match="order confidence looks at the drawn tokens"):
        decode(exact_base(), [[]], sure, match="law", **how)
    greedy = sure.but(temperature=0.0)
    result = decode(exact_base(), [[]], greedy, match="law", **how)
    assert torch.equal(result.tokens_BL, decode(exact_base(), [[]], greedy, decoder="joint").tokens_BL)


def test_the_chance_of_a_token_is_noted_where_it_is_drawn() -> None:
    """A token in a draft's place has the base's chance of its own."""
    base = exact_base(3, 4)
    config = DecodeConfig(max_new_tokens=4, seed=1)
    plan = make_plan(base, config, decoder="verified", sampler=opposite(base), depth=3, match="law")
    canvas = Canvas(base, [[]] * 50, config)
    canvas.chance_BL = torch.zeros(canvas.tokens_BL.shape)
    plan.run(canvas)
    p = target(base)
    for text, chance in zip(canvas.tokens_BL.tolist(), canvas.chance_BL.double().prod(-1).tolist(), strict=True):
        assert chance == pytest.approx(p[tuple(text)], rel=1e-4)
