"""Bases: both ways, left pads, scoring frame, forbidden ids, fingerprints, published step counts, the exact joint."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaModel, Qwen2Model, Qwen3Model

from adjust_dlm.bases import base as registry
from adjust_dlm.bases import cut_at_end, known_bases, load_base
from adjust_dlm.bases.blocks import block_mask
from adjust_dlm.bases.exact import ExactBase
from adjust_dlm.bases.family import DreamBase, dream_config, llada_config
from adjust_dlm.bases.layers import BidirectionalLayer, new_model, shift_right
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase, weights_fingerprint
from adjust_dlm.decoders import decode
from adjust_dlm.hub import BASES
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import (
    END,
    FAMILIES,
    LIMIT,
    MASK,
    VOCAB,
    conditionals,
    exact_base,
    left_pad,
    pointer_base,
    target,
    tiny_base,
    tiny_config,
    tiny_sampler,
    two_sentences,
)

ROW = [2, 5, 6, 7, MASK, MASK, 9, MASK]
PLAIN = {"dream": Qwen2Model, "llada": LlamaModel, "sdar": Qwen3Model}


def states(base: TransformerBase, rows: list[list[int]]) -> torch.Tensor:
    """The body's states in its own frame, before any shift."""
    state = left_pad(rows)
    sees = state.real_BL[:, None, None] if state.padded else None
    return base.model(state.tokens_BL, sees, state.positions_BL)


def changed(a: torch.Tensor, b: torch.Tensor) -> list[bool]:
    """Which positions of a single row differ."""
    return ((a - b).abs().amax(-1) > 1e-6)[0].tolist()


# Attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_token_changes_every_earlier_state(family: str, padded: bool) -> None:
    base = tiny_base(family)
    longer = [[3] * 11] if padded else []  # a longer neighbour makes the first row a padded one
    before, after = states(base, [ROW, *longer]), states(base, [[*ROW[:-1], 8], *longer])
    assert changed(before[:1, -8:], after[:1, -8:]) == [True] * 8


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_class_is_causal_without_a_mask(family: str) -> None:
    """The trap in transformers' classes that `new_model` avoids: with no mask nothing looks back."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = PLAIN[family](tiny_config(family)).eval()
    tokens = torch.tensor([ROW, [*ROW[:-1], 8]])
    with torch.no_grad():
        out = plain(input_ids=tokens)[0]
    assert changed(out[:1], out[1:]) == [False] * 7 + [True]
    ours = new_model(tiny_config(family)).eval()
    ours.load_state_dict(plain.state_dict())
    with torch.no_grad():
        both = ours(tokens, None, torch.arange(8)[None])
    assert changed(both[:1], both[1:]) == [True] * 8


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("dream", {}),
    ("llada", {}),
    ("llada", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 16}),
    ("llada", {"rope_parameters": LLAMA3}),
    ("dream", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("dream", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ("sdar", {}),
    ("sdar", {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 4}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_the_body_is_that_of_transformers(family: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    """Same names, same states: alone under an all-visible mask, and left-padded, at positions up to 60."""
    config = tiny_config(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = new_model(config)
        for part in body.parameters():
            if part.ndim == 1:
                part.data += torch.randn_like(part) / 4  # norms and biases that show
    body = body.to(dtype).eval()
    plain = PLAIN[family](config).to(dtype).eval()
    plain.load_state_dict(body.state_dict())
    plain.config.is_causal = False
    state = left_pad([[*ROW * 7, 3, 4], ROW])
    with torch.no_grad():
        sees = state.real_BL[:, None, None]
        ours = body(state.tokens_BL, sees, state.positions_BL)
        padding = {"attention_mask": state.real_BL.long(), "position_ids": state.positions_BL}
        theirs = plain(input_ids=state.tokens_BL, **padding)[0]
        alone = body(torch.tensor([ROW]), None, torch.arange(8)[None])
        everything = torch.zeros(1, 1, 8, 8, dtype=dtype)
        alone_theirs = plain(input_ids=torch.tensor([ROW]), attention_mask=everything)[0]
    if dtype == torch.float32:
        torch.testing.assert_close(ours[state.real_BL], theirs[state.real_BL], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone, alone_theirs, atol=1e-5, rtol=0)
        return
    with torch.no_grad():  # bf16: as near to the fp32 states of the same weights as transformers is
        exact = body.float()(state.tokens_BL, sees, state.positions_BL)[state.real_BL]
    error, error_theirs = ((x[state.real_BL].float() - exact).square().mean().sqrt() for x in (ours, theirs))
    assert error < 1.2 * error_theirs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; known are llama, qwen2, qwen3"),
        ({"model_type": "qwen3"}, "the config lacks head_dim"),
        ({"hidden_act": "gelu"}, "'hidden_act': 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_a_body_that_is_not_built_here_is_refused(changes: dict[str, Any], message: str) -> None:
    facts = {**tiny_config("dream").to_dict(), **changes}
    with pytest.raises(InputError, match=message):
        Shape.of({k: v for k, v in facts.items() if v is not None})


def test_a_shape_reads_old_and_new_rotary_settings() -> None:
    facts = {k: v for k, v in tiny_config("dream").to_dict().items() if k != "rope_parameters"}
    assert Shape.of({**facts, "rope_theta": 7e5}).rope == {"rope_theta": 7e5, "rope_type": "default"}
    old = Shape.of({**facts, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert old.rope == {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    assert Shape.of(tiny_config("dream")) == Shape.of(Shape.of(tiny_config("dream").to_dict()))


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_nothing(family: str) -> None:
    base = tiny_base(family)
    rows = [ROW, [2, MASK, 4], [3] * 12, [MASK]]
    together = base.hidden(left_pad(rows))
    for b, row in enumerate(rows):
        torch.testing.assert_close(together[b, -len(row) :], base.hidden(left_pad([row]))[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_pads_are_invisible_whatever_they_hold(family: str) -> None:
    base = tiny_base(family)
    rows = [[2, MASK, 4], [3] * 9]
    one, other = base.hidden(left_pad(rows, pad_id=1)), base.hidden(left_pad(rows, pad_id=7))
    torch.testing.assert_close(one[0, -3:], other[0, -3:], atol=0, rtol=0)


def test_the_layer_of_g_has_the_norms_of_the_bases_heads_in_both_of_its_ways_to_keys() -> None:
    base = tiny_base("sdar", block=8)
    layer, state = tiny_sampler(base).layer, left_pad([ROW])
    for norm in (layer.layer.self_attn.q_norm, layer.layer.self_attn.k_norm):
        assert norm.weight.shape == (16,)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    z_BLD, made = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0)), list[torch.Tensor]()
    with torch.no_grad():
        place_BL, sees = state.positions_BL, block_mask(state, 8)
        before = layer.beside(z_BLD, place_BL, sees, lambda k, v: (made.extend((k, v)), (k, v))[1])
        torch.testing.assert_close(before, layer(z_BLD, state))
        for own, there in zip(layer.keys(z_BLD, state), made, strict=True):
            torch.testing.assert_close(own, there)
        layer.layer.self_attn.k_norm.weight.mul_(2)
        assert float((layer(z_BLD, state) - before).abs().max()) > 1e-3


def test_the_layer_of_g_is_bidirectional_and_masks_pads() -> None:
    for family in FAMILIES:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = BidirectionalLayer(tiny_config(family)).eval()
            z_BLD = torch.randn(2, 6, 32)
        state = left_pad([[3, 4, 5], [3] * 6])
        together, alone = layer(z_BLD, state), layer(z_BLD[:1, 3:], left_pad([[3, 4, 5]]))
        torch.testing.assert_close(together[:1, 3:], alone, atol=1e-5, rtol=0)
        later = z_BLD.clone()
        later[:, -1] += 1
        assert changed(layer(later, state)[1:], together[1:]) == [True] * 6


def test_the_layer_keeps_its_rotary_frequencies_in_fp32() -> None:
    """bf16 keeps 8 bits: 0.0316 becomes 0.0317, and at position 2000 that turns a pair by 0.23 radians."""
    layer = BidirectionalLayer(tiny_config("dream"))
    before = layer.rotary.inverse_F.clone()
    layer.to(torch.bfloat16)
    assert next(layer.parameters()).dtype == torch.bfloat16
    assert layer.rotary.inverse_F.dtype == torch.float32
    assert torch.equal(layer.rotary.inverse_F, before)
    torch.testing.assert_close(before, 1e6 ** -(torch.arange(4) / 4))  # theta^(-2i/d), d = 8


# The scoring frame ---------------------------------------------------------------------------------------------


def test_shift_right_keeps_the_first_real_row_of_each() -> None:
    state = left_pad([[5, 6, 7], [5], [5, 6, 7, 8]])
    rows = torch.arange(12.0).view(3, 4, 1)
    shifted = shift_right(rows, state)[..., 0]
    assert shifted[0, 1:].tolist() == [1, 1, 2]
    assert shifted[1, 3:].tolist() == [7]
    assert shifted[2].tolist() == [8, 8, 9, 10]
    assert shift_right(rows[:1, :1], left_pad([[5]])).tolist() == [[[0]]]


@pytest.mark.parametrize("family", FAMILIES)
def test_h2_only_the_family_with_a_next_token_frame_is_moved(family: str) -> None:
    base = tiny_base(family)
    rows = [ROW, [2, MASK, 4], [MASK]]
    own, seen = states(base, rows), base.hidden(left_pad(rows))
    for b, row in enumerate(rows):
        own_LD, seen_LD = own[b, -len(row) :], seen[b, -len(row) :]
        wanted = torch.cat([own_LD[:1], own_LD[:-1]]) if family == "dream" else own_LD
        assert torch.equal(seen_LD, wanted)


@pytest.mark.parametrize("decoder", ["joint", "parallel", "adjust"])
@pytest.mark.parametrize(("family", "ahead"), [("dream", 1), ("llada", 0)])
def test_h2_both_families_write_token_i_at_place_i(family: str, ahead: int, decoder: str) -> None:
    """The body's state at place i names token i+1 (Dream) or i (LLaDA); g = identity sees the same frame."""
    base = pointer_base(family, ahead)
    config = DecodeConfig(max_new_tokens=4, temperature=0, tokens_per_step=4)
    result = decode(base, [[9, 9], [9] * 5], config, decoder=decoder, sampler=lambda h_BLD, state: h_BLD)
    assert result.tokens_BL[0, -4:].tolist() == [2, 3, 4, 5]
    assert result.tokens_BL[1, -4:].tolist() == [5, 6, 7, 8]


def test_h2_place_zero_keeps_its_own_logits() -> None:
    """An all-mask canvas: place 0 cannot be scored by a place before it, so it names what its own state names."""
    config = DecodeConfig(max_new_tokens=3, temperature=0, order="left_to_right")
    assert decode(pointer_base("dream", 1), [[]], config, decoder="joint").tokens_BL.tolist() == [[1, 1, 2]]
    assert decode(pointer_base("llada", 0), [[]], config, decoder="joint").tokens_BL.tolist() == [[0, 1, 2]]
    one = config.but(max_new_tokens=1)
    assert decode(pointer_base("dream", 1), [[]], one, decoder="joint").tokens_BL.tolist() == [[1]]


# Heads and ids -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forbidden_ids_are_minus_infinity_and_nothing_else(dtype: torch.dtype) -> None:
    base = tiny_base("dream", end_ids=(END, 4))
    h_RD = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    forms = ((base.logits, torch.float32), (base.plain_logits, base.dtype))  # the latter: training, the fused draw
    for (form, kind), suppress_eos in itertools.product(forms, (False, True)):
        banned = {MASK, 22, 23, END, 4} if suppress_eos else {MASK, 22, 23}
        logits_RV = form(h_RD, suppress_eos=suppress_eos)
        assert (logits_RV.dtype, logits_RV.shape) == (kind, (5, VOCAB))
        assert set((logits_RV == -torch.inf).all(0).nonzero()[:, 0].tolist()) == banned
        allowed = [i for i in range(VOCAB) if i not in banned]
        torch.testing.assert_close(logits_RV[:, allowed], base.head(h_RD)[:, allowed].to(kind), atol=0, rtol=0)
    assert LIMIT == 22


def test_suppressing_ends_on_a_base_without_any_changes_nothing() -> None:
    base = exact_base()
    h_RD = torch.randn(4, base.width)
    assert torch.equal(base.logits(h_RD, suppress_eos=True), base.logits(h_RD))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_canvas_beyond_the_context_is_refused(family: str) -> None:
    with pytest.raises(InputError, match=rf"canvas of 65 tokens; base '{family}' takes at most 64"):
        tiny_base(family).hidden(left_pad([[3] * 65]))


def test_an_unknown_base_is_refused_with_the_known_names(tmp_path) -> None:
    assert set(BASES) == known_bases().keys()  # what is known before torch is loaded
    with pytest.raises(InputError, match=r"unknown base 'dreem'; known are .*exact.*Hub id of a published"):
        load_base("dreem")
    with pytest.raises(InputError, match=r"is no model: config\.json is missing"):
        load_base(str(tmp_path))
    with pytest.raises(InputError, match="bases of kind 'smol' do not take length, words"):
        load_base("smol", words=3, length=2)
    with pytest.raises(InputError, match="bases of kind 'exact' do not take quantize, revision"):
        load_base("exact", quantize="int8", revision="main")
    assert load_base("exact", width=9, end_ids=(1,), order="margin").spec.order == "margin"
    with pytest.raises(InputError, match="'adapted' is loaded by the path of its folder"):
        load_base("adapted")


class Words:
    """A tokenizer of space-separated numbers, 0 as a special token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(str(i) for i in ids if i or not skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: bool) -> str:
        assert kwargs == {"tokenize": False, "add_generation_prompt": True}
        return f"7 {messages[0]['content']} 8"


def test_prompts_carry_one_bos_and_texts_stop_at_the_first_end() -> None:
    base = tiny_base("dream", end_ids=(1, 3))
    with pytest.raises(InputError, match="base 'dream' has no tokenizer; give token ids"):
        base.encode("5")
    base.tokenizer = Words()
    assert base.encode("5 6") == [2, 5, 6]
    assert base.encode("2 5 6") == [2, 5, 6]
    assert base.encode("") == [2]
    assert base.encode("5 6", chat=True) == [7, 5, 6, 8]  # the template brings its own beginning
    assert base.decode([5, 0, 6, 3, 9, 1]) == "5 6"
    assert base.decode([1, 5]) == ""
    exact = exact_base()
    exact.tokenizer = Words()
    assert exact.encode("1 2") == [1, 2]  # a family without BOS


@pytest.mark.parametrize(("ids", "text"), [([], []), ([4, 5], [4, 5]), ([4, 9, 5, 8], [4]), ([8], [])])
def test_cut_at_end(ids: list[int], text: list[int]) -> None:
    assert cut_at_end(ids, (8, 9)) == text


# Fingerprints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fingerprint_is_the_same_in_every_dtype_and_differs_for_other_weights(family: str) -> None:
    base = tiny_base(family)
    assert base.fingerprint == tiny_base(family).fingerprint
    head, body = base.head_matrix.bfloat16(), tiny_base(family).model.bfloat16()
    assert type(base)(body, head, base.spec, next_frame=base.next_frame).fingerprint == base.fingerprint
    others = {tiny_base(family, seed=1).fingerprint, tiny_base("dream" if family == "llada" else "llada").fingerprint}
    for name in ("embed_tokens.weight", "norm.weight", "layers.1.input_layernorm.weight"):
        model = tiny_base(family).model
        with torch.no_grad():
            model.get_parameter(name)[0].add_(0.5)
        others.add(type(base)(model, base.head_matrix, base.spec, next_frame=base.next_frame).fingerprint)
    moved = base.head_matrix.clone()
    moved[0, 0] += 0.5
    others.add(type(base)(base.model, moved, base.spec, next_frame=base.next_frame).fingerprint)
    assert len(others | {base.fingerprint}) == 7


def test_a_fingerprint_looks_into_every_matrix_and_at_the_masks_embedding() -> None:
    base = tiny_base("dream", vocab_size=330)

    def now() -> str:
        return weights_fingerprint(base.model, base.head_matrix, 37)

    seen = {now()}
    matrices = [name for name, p in base.model.named_parameters() if p.ndim == 2]
    with torch.no_grad():
        for name in matrices:
            base.model.get_parameter(name)[0].add_(0.25)
            seen.add(now())
        base.model.embed_tokens.weight[37].add_(0.25)
        seen.add(now())
        assert len(seen) == len(matrices) + 2
        base.model.embed_tokens.weight[38].add_(0.25)  # of many rows only some count
    assert now() in seen


def test_exact_bases_have_one_fingerprint_each() -> None:
    joint = exact_base().joint
    same_numbers = joint.flip(0)  # another table with the same probabilities in other places
    prints = {ExactBase(joint).fingerprint, ExactBase(same_numbers).fingerprint, ExactBase(joint, width=16).fingerprint}
    assert len(prints) == 3
    assert ExactBase(joint).fingerprint == ExactBase(5 * joint).fingerprint


# The real shapes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape", "millions"),
    [
        # D, F, layers, width of k and v, biases; body, head and g in millions (the last as counted in the release)
        (dream_config, (3584, 18944, 28, 512, True), (6525.6, 545.0, 258.76)),
        (llada_config, (4096, 12288, 32, 4096, False), (6979.6, 518.0, 251.70)),
    ],
)
def test_parameter_counts_of_the_real_shapes(make, shape, millions) -> None:
    d, f, layers, kv, biases = shape
    layer = 2 * d * d + 2 * d * kv + 3 * d * f + 2 * d + biases * (d + 2 * kv)
    body, g = layers * layer + d, layer + (2 * d * d + d) + 3 * d
    config = make()
    with torch.device("meta"):
        model = new_model(config)
        stub = SimpleNamespace(fingerprint="", embed=None, to_frame=None, width=d, layer_config=config, lag=0)
        stub.spec = SimpleNamespace(block=None, causal=False, name="stub")
        sampler = Sampler(stub)
    head = model.embed_tokens.weight.numel()
    assert sum(p.numel() for p in model.parameters()) - head == body
    assert sum(p.numel() for p in sampler.parameters()) == g
    assert (body / 1e6, head / 1e6, g / 1e6) == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(
    ("masked", "steps", "counts"),
    [
        (128, 128, [0, *[1] * 126, 2]),
        (128, 32, [3, *[4] * 30, 5]),
        (128, 64, [1, *[2] * 62, 3]),
        (127, 32, [3, 3, *[4] * 29, 5]),
        (5, 1, [5]),
    ],
)
def test_dream_step_counts_are_the_published_loop(masked: int, steps: int, counts: list[int]) -> None:
    dream = DreamBase.__new__(DreamBase)
    assert dream.reference_schedule(masked, steps) == counts
    assert sum(counts) == masked


@pytest.mark.parametrize("steps", [256, 512, 768])
def test_dream_with_a_step_per_token_starts_with_none_and_ends_with_two(steps: int) -> None:
    assert DreamBase.__new__(DreamBase).reference_schedule(steps, steps) == [0, *[1] * (steps - 2), 2]


@pytest.mark.parametrize(
    ("masked", "steps", "counts"), [(10, 4, [3, 3, 2, 2]), (8, 4, [2, 2, 2, 2]), (3, 5, [1, 1, 1, 0, 0])]
)
def test_llada_step_counts_spread_evenly_first_steps_first(masked: int, steps: int, counts: list[int]) -> None:
    assert tiny_base("llada").reference_schedule(masked, steps) == counts


# The exact base ------------------------------------------------------------------------------------------------


def test_marginals_are_the_true_conditionals_of_every_state() -> None:
    base = exact_base(3, 4)
    states_BL = list(itertools.product(range(4), repeat=4))  # id 3 is the mask
    got = base.marginals(torch.tensor(states_BL))
    p = target(base)
    assert sum(p.values()) == pytest.approx(1, abs=1e-12)
    for b, state in enumerate(states_BL):
        wanted = conditionals(p, tuple(None if t == 3 else t for t in state))
        np.testing.assert_allclose(got[b], wanted, atol=1e-12)


def test_the_head_reads_the_log_conditionals() -> None:
    base = exact_base(3, 3, seed=2)
    tokens_BL = torch.tensor([[3, 1, 3]])
    state = State(tokens_BL, torch.ones(1, 3, dtype=torch.bool), tokens_BL == 3, padded=False)
    logits_RV = base.logits(base.hidden(state)[0])
    torch.testing.assert_close(logits_RV.softmax(-1)[:, :3].double(), base.marginals(tokens_BL)[0], atol=1e-6, rtol=0)
    assert logits_RV[:, 3].tolist() == [-torch.inf] * 3
    assert base.embed(tokens_BL)[0, :, :4].tolist() == np.eye(4)[[3, 1, 3]].tolist()


def test_tokens_that_cannot_stand_together_count_as_far_as_possible() -> None:
    base, words = two_sentences()
    ids = {word: i for i, word in enumerate(words)}
    mask = base.spec.mask_id
    # "cat" and "ran": each sentence agrees with one of the two, so both still count.
    torn = torch.tensor([[mask, ids["cat"], ids["ran"], mask, mask, mask]])
    assert float(base.marginals(torn)[0, 5, ids["mat"]]) == 0.5
    # "cat", "ran", "on": the first sentence agrees with two of the three.
    torn[0, 3] = ids["on"]
    assert float(base.marginals(torn)[0, 5, ids["mat"]]) == 1.0


def test_an_exact_base_names_what_is_wrong_with_it() -> None:
    with pytest.raises(InputError, match=r"joint has shape \(2, 3\); all axes must be equal"):
        ExactBase(torch.ones(2, 3))
    for bad in (torch.zeros(2, 2), torch.tensor([[1.0, -1.0], [1.0, 1.0]])):
        with pytest.raises(InputError, match="joint must be non-negative with a positive sum"):
            ExactBase(bad)
    with pytest.raises(InputError, match="width is 3; it must be at least 4"):
        ExactBase(torch.ones(3, 3), width=3)
    with pytest.raises(InputError, match=r"100\*\*9 strings are too many"):
        load_base("exact", words=100, length=9)
    with pytest.raises(InputError, match="runs on the CPU in float32"):
        load_base("exact", dtype=torch.bfloat16)
    for options, said in (
        ({"length": 10**9}, "strings are too many"), ({"length": -1}, "length is -1; it must be at least 1"),
        ({"words": "3"}, "words is '3'; it must be a whole number"), ({"seed": 0.5}, "seed is 0.5"),
        ({"width": "wide"}, "width is 'wide'"), ({"order": "best"}, "order is 'best'; it must be one of entropy"),
        ({"end_ids": (9,)}, r"'end_ids\[0\]': 9.*; ids run from 0 to 4"), ({"size": 3}, "do not take size"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            load_base("exact", **options)  # type: ignore[arg-type]
    base = exact_base(3, 4)
    for rows in ([[0, 1, 3]], [[0, 1, 3, 3], [1, 3, 3]]):
        with pytest.raises(InputError, match="canvases of exactly 4 tokens without padding"):
            base.hidden(left_pad(rows, mask_id=3, pad_id=0))


def test_the_registered_exact_base_is_seeded() -> None:
    assert torch.equal(exact_base(seed=1).joint, exact_base(seed=1).joint)
    assert not torch.equal(exact_base(seed=1).joint, exact_base(seed=2).joint)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_is_frozen(family: str) -> None:
    base = tiny_base(family)
    assert not base.model.training
    assert not any(p.requires_grad for p in base.model.parameters())
    assert not base.head_matrix.requires_grad
    assert isinstance(base.model.layers[0].self_attn.q_proj, nn.Linear)
    assert (base.spec.order, base.spec.order_on) == {
        "dream": ("entropy", "processed"), "llada": ("confidence", "raw")
    }[family]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "placed", "said"),
    [
        (Path("/nowhere/at/all"), {}, "there is no file or folder '/nowhere/at/all'"),
        (None, {}, "unknown base 'None'"),
        ("exact", {"device": None}, "device is 'None'; it must be auto, cpu, cuda or cuda:N"),
        ("exact", {"dtype": torch.int8}, "dtype is torch.int8; it must be a floating type of torch"),
        ("exact", {"dtype": "bfloat61"}, "dtype is 'bfloat61'; it must be a floating type of torch"),
        ("exact", {"dtype": "int8"}, "dtype is 'int8'; it must be a floating type of torch"),
        ("exact", {"dtype": "bfloat16"}, "the exact base runs on the CPU in float32"),
    ],
)
def test_names_and_places_that_are_none_are_refused(name: Any, placed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_base(name, **placed)


def test_a_floating_type_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    given: list[torch.dtype] = []
    registry.register_base("mine", "notes its type")(lambda dtype, **_: given.append(dtype))
    for dtype in ("auto", None, "float16", torch.float16):
        load_base("mine", dtype=dtype)
    assert given == [torch.float32, torch.float32, torch.float16, torch.float16]
