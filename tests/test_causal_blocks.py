"""Causal blocks: a column sees what stands left of it; one token a pass is the autoregressive model's own law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases.autoregressive import autoregressive_base
from adjust_dlm.bases.layers import new_model
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import DECODERS, decode
from adjust_dlm.decoders import verified as checked
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.decoders.fast import work
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import DecodeConfig, InputError
from flash import by_runs
from helpers import BOS, FAMILIES, MASK, left_pad, tiny_base, tiny_sampler
from test_block_bases import NO_END, cached_and_whole, played, prompts
from test_fast import Replayed, both
from tiny_ar import tiny_model, tiny_tokenizer

SIZE = 4
ROWS = [[BOS, 5, 6, 7, 8, 9, *[MASK] * 6], [BOS, 9], [BOS, 3, 4, 5, MASK]]
RULES = {"threshold": {"tau": 0.4}, "factor": {"f": 3.0}, "entropy_bound": {"gamma": 2.0}}


@pytest.mark.parametrize("family", [*FAMILIES, "sdar"])
def test_states_are_those_of_a_causal_pass(family: str) -> None:
    """Left pads, masks; the last block's masks beyond the canvas change nothing."""
    base = tiny_base(family, block=SIZE, causal=True)
    h_BLD, real_BL = base.hidden(left_pad(ROWS)), left_pad(ROWS).real_BL
    for row, h_LD, real_L in zip(ROWS, h_BLD, real_BL, strict=True):
        length = len(row)
        sees_LL = torch.tensor([[j <= i for j in range(length)] for i in range(length)])
        plain = base.model(torch.tensor([row]), sees_LL[None, None], torch.arange(length)[None])
        torch.testing.assert_close(h_LD[real_L], plain[0])


def pair(family: str, size: int) -> tuple[TransformerBase, TransformerBase]:
    """An autoregressive model in blocks of one token, and the same weights in causal blocks, with adapters of masks."""
    model = tiny_model(family)
    one = autoregressive_base(model, tiny_tokenizer())
    body = new_model(replace(Shape.of(model.config, size, causal=True), lora_rank=2))
    body.load_state_dict(model.model.state_dict(), strict=False)
    spec = replace(one.spec, block=size, causal=True)
    return one, TransformerBase(body, model.lm_head.weight, spec, next_frame=True)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("decoder", ["joint", "parallel"])
@pytest.mark.parametrize(("family", "size"), [("llama", 4), ("qwen2", 8), ("qwen3", 2)])
def test_one_token_a_pass_is_the_autoregressive_model(
    family: str, size: int, decoder: str, temperature: float, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens from the same random numbers, prompts of every length modulo S, texts that end.

    `joint` computes one column a pass, as the model does; others compute the masks of a block, which change nothing.
    """
    monkeypatch.setattr(fast, "Graphs", Replayed)
    one, base = pair(family, size)
    texts = [[4 + (7 * n + 3 * i) % 96 for i in range(n)] for n in (1, 2, 3, 5, 9, 14)]
    config = DecodeConfig(max_new_tokens=21, tokens_per_step=1, temperature=temperature, seed=3)
    own, wanted = (decode(b, texts, config, decoder=name, eager=eager) for b, name in ((base, decoder), (one, "joint")))
    assert len(own.tokens_BL.unique()) > 20
    assert torch.equal(own.tokens_BL, wanted.tokens_BL) and torch.equal(own.order_BL, wanted.order_BL)
    assert torch.equal(own.base_calls_B, wanted.base_calls_B)


@pytest.mark.parametrize("family", [*FAMILIES, "sdar"])
def test_cached_states_are_those_of_the_whole_canvas(family: str) -> None:
    base = tiny_base(family, block=SIZE, causal=True, max_position_embeddings=256, end_ids=NO_END)
    for h_RD, whole_RD in cached_and_whole(base, SIZE):
        torch.testing.assert_close(h_RD, whole_RD, rtol=0, atol=2e-5)


@pytest.mark.parametrize("decoder", [name for name in DECODERS if name not in ("origin", "guided", "soft_order")])
def test_every_decoder_writes_the_same_with_the_cache_and_by_runs(decoder: str) -> None:
    """Every decoder goes from left to right, whatever it scores by, and leaves no gap; g has no form without keys."""
    base = tiny_base("dream", block=SIZE, causal=True, end_ids=(1, 5))
    config, keys = DecodeConfig(max_new_tokens=2 * SIZE + 3, tokens_per_step=3, seed=4), DECODERS[decoder].needs_sampler
    kept, plain = (played(base, config, decoder, prompts(SIZE), cached=cached) for cached in (True, keys))
    with pytest.MonkeyPatch.context() as patch:
        seen = by_runs(patch)
        runs = played(base, config, decoder, prompts(SIZE), cached=True)
    assert seen
    for order_L, real_L in zip(kept.order_BL, kept.real_BL, strict=True):
        order = order_L[real_L & (order_L >= 0)]
        assert torch.equal(order, order.sort().values)
    for other in (plain, runs):
        assert torch.equal(kept.tokens_BL, other.tokens_BL) and torch.equal(kept.order_BL, other.order_BL)


@pytest.mark.parametrize("decoder", RULES)
def test_a_rule_commits_the_longest_run_of_masks_that_it_allows(decoder: str) -> None:
    """By hand, in the first pass; behind some runs stand masks that score better than the worst of the run."""
    base = tiny_base("dream", block=16, causal=True, end_ids=NO_END)
    config, texts = DecodeConfig(max_new_tokens=15, temperature=0.0), [[BOS, 3 + n] for n in range(12)]
    canvas = Canvas(base, texts, config)
    row_R, position_R = canvas.open_BL.nonzero(as_tuple=True)
    p_BNV = base.logits(base.at(base.hidden(canvas), canvas, row_R, position_R)).softmax(-1).view(12, 15, -1)
    best_BN, entropy_BN = p_BNV.amax(-1), -(p_BNV * p_BNV.clamp_min(1e-30).log()).sum(-1)

    def allowed(b: int, n: int) -> bool:
        if decoder == "entropy_bound":
            return float(entropy_BN[b, :n].sum() - entropy_BN[b, :n].amax()) <= RULES[decoder]["gamma"]
        worst = float(best_BN[b, :n].amin())
        return worst >= RULES[decoder]["tau"] if decoder == "threshold" else (n + 1) * (1 - worst) < RULES[decoder]["f"]

    counts = [next((n - 1 for n in range(2, 16) if not allowed(b, n)), 15) for b in range(12)]
    assert len(set(counts)) > 1
    assert any(count < 15 and best_BN[b, count:].amax() > best_BN[b, :count].amin() for b, count in enumerate(counts))
    assert counts == first_runs(base, texts, config, decoder)


def test_klass_leaves_no_gap_where_a_later_mask_is_calm_first() -> None:
    base, texts = tiny_base("dream", block=8, causal=True, end_ids=NO_END), [[BOS, 3 + n] for n in range(12)]
    config = DecodeConfig(max_new_tokens=22, seed=1)
    for epsilon_kl in (0.05, 1.0):  # rounds of one token, and of several
        out = decode(base, texts, config, decoder="klass", history=1, epsilon_kl=epsilon_kl, tau=0.05)
        assert bool((out.order_BL[:, 2:].diff() > 0).all())
    assert int(out.rounds_B.sum()) < 12 * 20


def first_runs(base: TransformerBase, texts: list[list[int]], config: DecodeConfig, decoder: str) -> list[int]:
    """How many tokens the first pass of each row commits."""
    seen: list[Tensor] = []
    decode(
        base, texts, config, decoder=decoder, eager=True, watch=lambda c: seen.append(c.masked_BL.sum(-1)),
        **RULES[decoder],
    )  # fmt: skip
    return (15 - seen[0]).tolist()


@pytest.mark.parametrize(
    ("decoder", "options"), [("joint", {}), ("parallel", {}), ("adjust", {}), ("verified", {"depth": 3})]
)
def test_the_fast_form_writes_the_same(decoder: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn with passes of their own for rows that enter a block, and without; by runs as well."""
    monkeypatch.setattr(fast, "Graphs", Replayed)
    monkeypatch.setattr(work, "FEW", 1)
    base = tiny_base("dream", block=SIZE, causal=True, end_ids=(1, 5), num_hidden_layers=3)
    config = DecodeConfig(max_new_tokens=11, tokens_per_step=3, seed=2)
    how: dict[str, Any] = {"sampler": tiny_sampler(base, layers=2), "slots": 3, **options}
    for compact in (0, 1024):
        monkeypatch.setattr(work, "COMPACT", compact)
        plain = both(base, prompts(SIZE), config, decoder, **how)
    with pytest.MonkeyPatch.context() as patch:
        seen = by_runs(patch)
        got = decode(base, prompts(SIZE), config, decoder=decoder, eager=False, **how)
        how.pop("slots")
        one, alone = (decode(base, prompts(SIZE)[:1], config, decoder=decoder, eager=e, **how) for e in (False, True))
    assert seen and torch.equal(plain.tokens_BL, got.tokens_BL) and torch.equal(plain.order_BL, got.order_BL)
    assert torch.equal(one.tokens_BL, alone.tokens_BL)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_verified_writes_what_joint_writes(depth: int, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "Graphs", Replayed)
    base = tiny_base("dream", block=8, causal=True, end_ids=NO_END, num_hidden_layers=3, initializer_range=0.1)
    g, config = tiny_sampler(base, output_norm_init=0.05), DecodeConfig(max_new_tokens=19, seed=5)
    joint = decode(base, prompts(8), config, decoder="joint")
    checked = decode(base, prompts(8), config, decoder="verified", sampler=g, depth=depth, eager=eager)
    assert torch.equal(joint.tokens_BL, checked.tokens_BL) and torch.equal(joint.order_BL, checked.order_BL)
    assert depth == 1 or int(checked.rounds_B.sum()) < int(joint.rounds_B.sum())


def drawn_by_hand(base: TransformerBase, g: Sampler, tokens: list[int], known: int, edge: int) -> list[int]:
    """Tokens of ADJUST at T = 0 without caches, up to `edge`, of a round that began with `known`, some of them there.

    All columns of g in one causal pass of its layers. What a column gives g is the base's state as it was when the
    round began: of text, else of MASK at its place.
    """
    h_LD = base.hidden(left_pad([[*tokens[:known], *[MASK] * SIZE]]))[0]
    tokens, first = list(tokens), len(tokens)
    while len(tokens) < edge:
        last_D, length = h_LD[len(tokens) - 1], len(tokens)
        if length > known:
            place_L = torch.arange(length)
            e_LD = g.norm_embed(base.embed(torch.tensor(tokens)))
            norms, parts = [g.norm_hidden, *g.norm_features], h_LD[:length].split(g.width, -1)
            z_LD = g.mix(torch.cat([e_LD, *(norm(part) for norm, part in zip(norms, parts, strict=True))], -1))
            sees = (place_L <= place_L[:, None])[None, None]
            for layer in g.layers:
                z_LD = layer.beside(z_LD[None], place_L[None], sees, lambda *keys: keys)[0]
            last_D = last_D[: g.width] + g.norm_out(z_LD[-1])
        tokens.append(int(base.logits(last_D[None, : g.width])[0].argmax()))
    return tokens[first:]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("form", [{}, {"layers": 2, "features": (1,)}])
def test_a_causal_g_steps_as_one_causal_pass_would(
    form: dict[str, Any], width: int, *, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps compute a column, and none keeps what another round has made of a token that the base has read since."""
    monkeypatch.setattr(fast, "Graphs", Replayed)
    base = tiny_base("dream", block=SIZE, causal=True, end_ids=NO_END, num_hidden_layers=3)
    g, given = tiny_sampler(base, **form), prompts(SIZE)
    config = DecodeConfig(max_new_tokens=13, tokens_per_step=width, temperature=0)
    out = decode(base, given, config, decoder="adjust", sampler=g, eager=eager)
    for prompt, found in zip(given, out.tokens_BL[:, -13:].tolist(), strict=True):
        tokens, end = list(prompt), len(prompt) + 13
        while len(tokens) < end:
            tokens += drawn_by_hand(g.on(base), g, tokens, len(tokens), min(len(tokens) + width, end))
        assert found == tokens[len(prompt) :]
    joint = decode(base, given, config, decoder="joint")
    assert sum(a != b for a, b in zip(joint.tokens_BL.tolist(), out.tokens_BL.tolist(), strict=True)) > len(given) // 2


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("depth", "form"), [(2, {}), (3, {"layers": 2, "features": (1,)}), (6, {})])
def test_verified_drafts_as_one_causal_pass_would(
    depth: int, form: dict[str, Any], *, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft, and as many passes as they save: by what the pass before looked at, without the latest token."""
    monkeypatch.setattr(fast, "Graphs", Replayed)
    base = tiny_base("dream", block=SIZE, causal=True, end_ids=NO_END, num_hidden_layers=3, initializer_range=0.1)
    g, config = tiny_sampler(base, output_norm_init=0.1, **form), DecodeConfig(max_new_tokens=21, temperature=0)
    drafted: dict[tuple[int, ...], list[int]] = {}  # behind a text
    drafts = checked._drafts

    def recorded(base: Any, sampler: Any, canvas: Any, h_BLD: Any, depth: int, drafted_BL: Any, *more: Any) -> Any:
        states, picks = drafts(base, sampler, canvas, h_BLD, depth, drafted_BL, *more)
        for b in (drafted_BL.any(-1) & canvas.open_B).nonzero()[:, 0].tolist() if states else ():
            real_L, count = canvas.real_BL[b], min(len(states), int(drafted_BL[b].sum()))
            at = int(canvas.masked_BL[b][real_L].long().argmax())
            text = tuple(canvas.tokens_BL[b][real_L][:at].tolist())
            drafted[text] = states[count - 1].tokens_BL[b][real_L][at : at + count].tolist()
        return states, picks

    monkeypatch.setattr(checked, "_drafts", recorded)
    given = [[BOS, 3 + n, *range(5, 5 + n % 5)] for n in range(15)]
    out = decode(base, given, config, decoder="verified", sampler=g, depth=depth, eager=eager)
    kept = 0
    for prompt, found, real, rounds in zip(given, out.tokens_BL, out.real_BL, out.rounds_B.tolist(), strict=True):
        text, edge = found[real].tolist(), 0
        at, passes = len(prompt), 0
        while at < len(text):
            passes, right = passes + 1, 0
            if edge > at:
                wanted = drawn_by_hand(g.on(base), g, text[:at], at - 1, min(at + depth - 1, edge, len(text)))
                assert drafted.pop(tuple(text[:at])) == wanted
                same = [a == b for a, b in zip(wanted, text[at:], strict=False)]
                right = same.index(False) if False in same else len(same)
            kept += right
            edge = at + min(SIZE, 2 * depth - 1)
            at = min(at + right + 1, len(text))
        assert passes == rounds
    assert kept > 5 and not drafted


def test_joint_and_adjust_share_a_base_and_steps_are_at_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are kept by S too; a round of four has one wide step and two narrow ones; joint knows no sub-blocks."""
    monkeypatch.setattr(fast, "Graphs", Replayed)
    base = tiny_base("dream", block=SIZE, causal=True, end_ids=NO_END)
    g, config, wide = tiny_sampler(base), DecodeConfig(max_new_tokens=12, tokens_per_step=4), list[int]()
    rows, given = Sampler.rows, [[BOS, 3 + n, 5, 6] for n in range(5)]  # whole blocks, so three rounds of each row

    def spied(self: Sampler, h_BLD: Tensor, state: Any, column_BN: Tensor, *more: Any) -> Tensor:
        wide.append(column_BN.shape[1])
        return rows(self, h_BLD, state, column_BN, *more)

    monkeypatch.setattr(Sampler, "rows", spied)
    first = decode(base, given, config, decoder="joint", eager=False)
    quick = decode(base, given, config, decoder="adjust", sampler=g, eager=False)
    assert wide[-9:] == [2 * SIZE, 1, 1] * 3
    again = decode(base, given, config.but(block_length=2), decoder="joint", eager=False)
    slow = decode(base, given, config, decoder="adjust", sampler=g, eager=True)
    assert torch.equal(first.tokens_BL, again.tokens_BL) and torch.equal(quick.tokens_BL, slow.tokens_BL)
    assert torch.equal(first.base_calls_B, again.base_calls_B)


@pytest.mark.parametrize(
    ("decoder", "options", "ahead", "each"),
    [("joint", {}, 0, 1), ("parallel", {}, 3, 3), ("threshold", {"tau": 2.0}, 8, 1), ("verified", {"depth": 3}, 5, 1)],
)
def test_a_pass_looks_as_far_as_its_decoder_can_use(
    decoder: str, options: dict[str, Any], ahead: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At what has become text, and so many masks; at more or less of them the text is the same."""
    base = tiny_base("dream", block=8, causal=True, end_ids=NO_END)
    how: dict[str, Any] = {"decoder": decoder, "sampler": tiny_sampler(base, output_norm_init=5.0), "eager": True}
    config, seen, again = DecodeConfig(max_new_tokens=12, tokens_per_step=3), list[int](), TransformerBase.hidden_again

    def spied(self: TransformerBase, state: Any, memory: Any, column_BN: Tensor, valid_BN: Tensor) -> Tensor:
        seen.append(int(valid_BN.sum()))
        return again(self, state, memory, column_BN, valid_BN)

    monkeypatch.setattr(TransformerBase, "hidden_again", spied)
    out = decode(base, [[BOS, 3, 4, 5, 6]], config, **how, **options)
    assert seen[0] == 5 + ahead and set(seen[1:]) <= {each + ahead}
    for most in (3, 4, 8):
        other = decode(base, [[BOS, 3, 4, 5, 6]], config.but(block_length=most), **how, **options)
        assert torch.equal(out.tokens_BL, other.tokens_BL)
    if decoder != "joint":
        with pytest.raises(InputError, match="block_length is 9; base 'dream' looks at most 8 tokens ahead"):
            decode(base, [[BOS]], config.but(block_length=9), **how, **options)


@pytest.mark.parametrize("steps", [3, 5, 8])
def test_sdar_takes_as_many_passes_for_s_tokens_as_it_is_told(steps: int) -> None:
    base = tiny_base("dream", block=8, causal=True, end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=48, seed=1)
    out = decode(base, [[BOS, 3, 4]], config, decoder="sdar", denoising_steps=steps, remasking="sequential")
    assert out.rounds_B.tolist() == [48 // 8 * steps]


@pytest.mark.parametrize("form", [{"block": 8, "causal": True}, {}])
def test_a_draft_that_ends_the_text_is_not_looked_at(form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it nothing is left to write, however far a pass looks. All others are, whatever is committed first."""
    ends = tuple(range(3, 9))
    base = tiny_base("dream", **form, end_ids=ends, num_hidden_layers=2)
    g, drafted, drafts = tiny_sampler(base, output_norm_init=0.02), list[int](), checked._drafts

    def recorded(base: Any, sampler: Any, canvas: Any, *more: Any) -> Any:
        states, picks = drafts(base, sampler, canvas, *more)
        if int(canvas.masked_BL.sum()) > 1:  # else the text is full
            drafted.extend(int(state.tokens_BL[0][canvas.masked_BL[0]][0]) for state in states)
        return states, picks

    monkeypatch.setattr(checked, "_drafts", recorded)
    looked = 0
    for n in range(24):
        config = DecodeConfig(max_new_tokens=20, seed=n, order="left_to_right")
        out = decode(base, [[BOS, 10 + n % 4, 9]], config, decoder="verified", sampler=g, depth=2, eager=True)
        looked += int(out.base_calls_B - out.rounds_B)
    assert any(token in ends for token in drafted)
    assert looked == sum(token not in ends for token in drafted)


@pytest.mark.parametrize("decoder", ["joint", "parallel"])
@pytest.mark.parametrize("prompt", [[], [MASK], [MASK, MASK]])
def test_nothing_scores_the_first_token_of_an_empty_prompt(prompt: list[int], decoder: str) -> None:
    """Where passes look at no mask; its own state of MASK does."""
    base = tiny_base("dream", block=SIZE, causal=True, end_ids=NO_END)
    config = DecodeConfig(max_new_tokens=5, tokens_per_step=2)
    if decoder == "joint":
        with pytest.raises(
            InputError, match="a prompt is empty, or begins with a mask; base 'dream' scores a token by"
        ):
            decode(base, [[BOS], prompt], config, decoder=decoder)
    else:
        assert not bool((decode(base, [[BOS], prompt], config, decoder=decoder).tokens_BL == MASK).any())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="causal is true; it is about columns of a block: give block"):
        tiny_base("dream", causal=True)
    base = tiny_base("dream", block=SIZE, causal=True)
    with pytest.raises(InputError, match="causal is False; the body has True"):
        TransformerBase(base.model, base.head_matrix, replace(base.spec, causal=False), next_frame=True)
    with pytest.raises(InputError, match="next_frame is False; in causal blocks state i-1 scores token i"):
        TransformerBase(base.model, base.head_matrix, base.spec, next_frame=False)
    with pytest.raises(InputError, match="needs block, and order left_to_right, not entropy"):
        replace(base.spec, order="entropy")
    with pytest.raises(
        InputError, match="order is entropy; base 'dream' has causal blocks, written from left to right"
    ):
        decode(base, [[BOS]], DecodeConfig(max_new_tokens=9, order="entropy"), decoder="joint")
    with pytest.raises(InputError, match="guided knows confidence and random"):
        decode(base, [[BOS]], DecodeConfig(max_new_tokens=9), decoder="guided")
    with pytest.raises(InputError, match="prompt 0 has a mask at 1 and a token at 2"):
        decode(base, [[BOS, MASK, 5]], DecodeConfig(max_new_tokens=9), decoder="joint")
    assert base.fingerprint != tiny_base("dream", block=SIZE).fingerprint
