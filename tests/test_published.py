"""The models' published code on tiny weights (fixtures/published): equal logits, equal texts, equal steps."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor

from adjust_dlm.bases import Base
from adjust_dlm.bases.family import DREAM, LLADA, dream_base, llada_base
from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders.guided import GuidedOptions, guided
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.decoders.origin import OriginOptions, origin
from adjust_dlm.decoders.parallel import parallel
from adjust_dlm.decoders.soft_order import SoftOrderOptions, soft_order
from adjust_dlm.sampling import DRAW
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import FAMILIES, TableBase, tiny_base, tiny_config, writer

PUBLISHED = Path(__file__).parent / "fixtures" / "published"
VOCAB, MASK, PAD, NEW = 60, 57, 1, 16  # of the fixtures
LLADA_PARTS = {
    "wte": "embed_tokens", "blocks": "layers", "ln_f": "norm", "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm", "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj", "attn_out": "self_attn.o_proj", "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}  # fmt: skip
HEADS = {"dream": "lm_head.weight", "llada": "model.transformer.ff_out.weight"}


def own_name(family: str, name: str) -> str:
    """Our name of a published tensor of the body."""
    if family == "dream":
        return name.removeprefix("model.")
    return ".".join(LLADA_PARTS.get(part, part) for part in name.removeprefix("model.transformer.").split("."))


def published_base(family: str, dtype: torch.dtype = torch.float32) -> TransformerBase:
    """The fixture's weights in our body. It has no end tokens, since the published loops never stop early."""
    config = tiny_config(family, vocab_size=VOCAB, max_position_embeddings=512)
    weights = {name: w.to(dtype) for name, w in load_file(PUBLISHED / f"{family}.safetensors").items()}
    head_weight = weights.pop(HEADS[family])
    body = Body(replace(Shape.of(config), rotate_fp32=family == "llada"))  # as `rope_full_precision` of the release
    body.load_state_dict({own_name(family, name): w for name, w in weights.items()}, assign=True)
    build = {"dream": dream_base, "llada": llada_base}[family]
    base = build(config, mask_id=MASK, end_ids=(PAD,), bos_id=2, model=body, head_weight=head_weight)
    base.spec = replace(base.spec, end_ids=())
    return base


# Logits --------------------------------------------------------------------------------------------------------


def own_logits(base: TransformerBase, tokens_BL: Tensor, real_BL: Tensor | None = None) -> Tensor:
    """Row i at position i, as the published forward returns them."""
    seen_BL = torch.ones_like(tokens_BL, dtype=torch.bool) if real_BL is None else real_BL
    state = State(tokens_BL, seen_BL, tokens_BL == MASK, padded=real_BL is not None)
    sees = None if real_BL is None else real_BL[:, None, None]
    return base.head(base.model(tokens_BL, sees, state.positions_BL))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fp32_logits_equal_the_published_ones(family: str) -> None:
    base, there = published_base(family), load_file(PUBLISHED / f"{family}_logits.safetensors")
    real_BL = there["padded.real"]
    for own, published in (
        (own_logits(base, there["plain.tokens"]), there["plain.logits"]),
        (own_logits(base, there["padded.tokens"], real_BL)[real_BL], there["padded.logits"][real_BL]),
        (own_logits(base, there["long.tokens"])[:, ::25], there["long.logits"]),
    ):
        torch.testing.assert_close(own, published, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("case", ["plain", "long"])
@pytest.mark.parametrize(
    "family",
    [
        "dream",
        "llada",
    ],
)
@torch.no_grad()
def test_bf16_logits_equal_the_published_ones(family: str, case: str) -> None:
    """Much nearer to them than they are to their own fp32 (equal to the last bit on the machine that made them)."""
    base, there = published_base(family, torch.bfloat16), load_file(PUBLISHED / f"{family}_logits.safetensors")
    every = {"plain": 1, "long": 25}[case]
    words = torch.arange(VOCAB) != MASK  # the mask's logit is some hundred
    own, published, exact = (
        logits_BLV[..., words].float()
        for logits_BLV in (
            own_logits(base, there[f"{case}.tokens"])[:, ::every], there[f"{case}.bf16"], there[f"{case}.logits"],
        )
    )  # fmt: skip
    assert (own - published).abs().mean() < 0.5 * (published - exact).abs().mean()


@torch.no_grad()
def test_left_pads_move_the_frame_as_published() -> None:
    """Dream scores token i with row i-1 of the padded batch; only a row's first real token differs: it has no left."""
    base, there = published_base("dream"), load_file(PUBLISHED / "dream_logits.safetensors")
    tokens_BL, real_BL = there["padded.tokens"], there["padded.real"]
    own_BLV = base.head(base.hidden(State(tokens_BL, real_BL, tokens_BL == MASK)))
    shifted_BLV = there["padded.logits"][:, [0, *range(tokens_BL.shape[1] - 1)]]
    inner_BL = real_BL & real_BL.roll(1, 1)
    inner_BL[:, 0] = real_BL[:, 0]
    torch.testing.assert_close(own_BLV[inner_BL], shifted_BLV[inner_BL], rtol=2e-6, atol=2e-5)
    assert int(real_BL.sum() - inner_BL.sum()) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shape_are_those_of_the_published_code(family: str) -> None:
    facts, weights = {"dream": DREAM, "llada": LLADA}[family], load_file(PUBLISHED / f"{family}.safetensors")
    shape = facts.shape(json.loads((PUBLISHED / f"{family}_config.json").read_text()))
    body = Body(shape)
    assert {facts.published(name) for name in body.state_dict()} | {facts.head} == set(weights)
    assert {facts.published(own_name(family, name)) for name in weights if name != facts.head} == set(weights) - {
        facts.head
    }
    known = Shape.of(tiny_config(family, vocab_size=VOCAB, max_position_embeddings=512))
    fp32 = family == "llada"
    assert replace(shape, initializer_range=known.initializer_range) == replace(known, rotate_fp32=fp32)


# Decoding ------------------------------------------------------------------------------------------------------


class Replay(Canvas):
    """A canvas that gives the numbers recorded in a case, and notes at which step each position was filled."""

    def __init__(self, base: TransformerBase, case: dict[str, Any], config: DecodeConfig) -> None:
        super().__init__(base, case["prompts"], config)
        self._numbers = {
            name: torch.tensor(case[name]).double() * 2.0**-32 for name in ("draw", "order") if name in case
        }
        self.step_BL = torch.full_like(self.tokens_BL, -1)
        self._commits_seen = 0
        self.watch = self._note

    def _note(self, _canvas: Canvas) -> None:
        self.step_BL[(self.order_BL >= 0) & (self.step_BL < 0)] = self._commits_seen
        self._commits_seen += 1

    def uniforms(self, position: Tensor, row: Tensor, stream: int = DRAW) -> Tensor:
        if not self._numbers:  # T=0: drawn by argmax whatever they are
            return super().uniforms(position, row, stream)
        return self._numbers["draw" if stream == DRAW else "order"][self._round - 1, row, position]

    def assert_published(self, case: dict[str, Any]) -> None:
        assert self.tokens_BL.tolist() == case["tokens"]
        assert self.step_BL.tolist() == case["step"]


def cases(family: str) -> dict[str, dict[str, Any]]:
    return json.loads((PUBLISHED / f"{family}_decodes.json").read_text())


DREAM_CASES, LLADA_CASES = cases("dream"), cases("llada")
ALG_ORDERS = {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy", "origin": None}
REMASKING_ORDERS = {"low_confidence": "confidence", "random": "random"}


def dream_config_of(case: dict[str, Any]) -> DecodeConfig:
    return DecodeConfig(
        tokens_per_step=-(-NEW // case["steps"]), max_new_tokens=NEW, temperature=case.get("temperature", 0.0),
        top_p=case.get("top_p", 1.0), top_k=case.get("top_k", 0), order=ALG_ORDERS[case["alg"]], schedule="reference",
    )  # fmt: skip


def llada_config_of(case: dict[str, Any]) -> DecodeConfig:
    block = case["block_length"]
    return DecodeConfig(
        tokens_per_step=-(-block // (case["steps"] * block // NEW)), max_new_tokens=NEW,
        temperature=case.get("temperature", 0.0), order=REMASKING_ORDERS[case.get("remasking", "low_confidence")],
        order_on="raw", schedule="reference", block_length=block,
    )  # fmt: skip


def published_config_of(case: dict[str, Any], **changes: Any) -> GuidedOptions:
    return GuidedOptions(
        **{
            "cfg_scale": case.get("cfg_scale", 0.0),
            "logits_eos_inf": case.get("logits_eos_inf", False),
            "confidence_eos_eot_inf": "faithful" if case.get("confidence_eos_eot_inf") else "off",
            "eos_eot": (case["eos"], case["eot"]) if "eos" in case else None, **changes,
        }
    )  # fmt: skip


def plain_llada(case: dict[str, Any]) -> bool:
    """Whether our own parallel decoder does it: no guidance, no switches."""
    return "cfg_scale" not in case and "eos" not in case


@pytest.mark.parametrize("name", [n for n, c in DREAM_CASES.items() if c["alg"] != "origin" and "alg_temp" not in c])
def test_parallel_writes_what_diffusion_generate_writes(name: str) -> None:
    case, base = DREAM_CASES[name], published_base("dream")
    canvas = Replay(base, case, dream_config_of(case))
    parallel(base, canvas)
    canvas.assert_published(case)


@pytest.mark.parametrize("name", [n for n, c in DREAM_CASES.items() if c["alg"] == "origin"])
def test_origin_writes_what_diffusion_generate_writes(name: str) -> None:
    case, base = DREAM_CASES[name], published_base("dream")
    canvas = Replay(base, case, dream_config_of(case))
    origin(base, canvas, OriginOptions())
    canvas.assert_published(case)


@pytest.mark.parametrize("name", [n for n, c in DREAM_CASES.items() if c["alg"] != "origin"])
def test_soft_order_writes_what_diffusion_generate_writes(name: str) -> None:
    case, base = DREAM_CASES[name], published_base("dream")
    canvas = Replay(base, case, dream_config_of(case))
    soft_order(base, canvas, SoftOrderOptions(alg_temp=case.get("alg_temp", 0.0)))
    canvas.assert_published(case)


@pytest.mark.parametrize("name", [n for n, c in LLADA_CASES.items() if plain_llada(c)])
def test_parallel_writes_what_generate_writes(name: str) -> None:
    case, base = LLADA_CASES[name], published_base("llada")
    canvas = Replay(base, case, llada_config_of(case))
    parallel(base, canvas)
    canvas.assert_published(case)


@pytest.mark.parametrize("name", LLADA_CASES)
def test_guided_writes_what_generate_writes(name: str) -> None:
    case, base = LLADA_CASES[name], published_base("llada")
    canvas = Replay(base, case, llada_config_of(case))
    guided(base, canvas, published_config_of(case))
    canvas.assert_published(case)
    passes = case["steps"] * (2 if "cfg_scale" in case else 1)
    assert canvas.base_calls_B.tolist() == [passes] * len(case["prompts"])


@pytest.mark.parametrize(("masked", "steps", "counts"), json.loads((PUBLISHED / "dream_schedules.json").read_text()))
def test_dream_step_counts_are_the_published_ones(masked: int, steps: int, counts: list[int]) -> None:
    assert tiny_base("dream").reference_schedule(masked, steps) == counts


# What the releases do not show -----------------------------------------------------------------------------------

LOOPS: dict[str, Any] = {
    "origin": (origin, OriginOptions()),
    "soft_order": (soft_order, SoftOrderOptions(alg_temp=0.3)),
    "guided": (guided, GuidedOptions(cfg_scale=0.5)),
}
EOS, EOT = 0, 1  # of the writers below


def run_guided(base: Base, config: DecodeConfig, **published: Any) -> Canvas:
    canvas = Canvas(base, [[]], config)
    guided(base, canvas, GuidedOptions(**published))
    return canvas


@pytest.mark.parametrize(
    ("switch", "temperature", "order"),
    [
        ("off", 1e-3, [0, 1, 2, 3]),
        ("faithful", 1e-3, [0, 3, 1, 2]),  # EOT alone comes last
        ("sane", 1e-3, [2, 3, 0, 1]),
        ("faithful", 0.0, [2, 3, 0, 1]),
        ("sane", 0.0, [2, 3, 0, 1]),
    ],
)
def test_end_tokens_wait_as_asked(switch: str, temperature: float, order: list[int]) -> None:
    """Positions from the most to the least certain: EOS, EOT, two words; at T = .001 a draw is the argmax."""
    base = writer([EOS, EOT, 2, 3], [9.0, 8.0, 7.0, 6.0])
    config = DecodeConfig(max_new_tokens=4, temperature=temperature, order="confidence")
    canvas = run_guided(base, config, confidence_eos_eot_inf=switch, eos_eot=(EOS, EOT))
    assert canvas.tokens_BL.tolist() == [[EOS, EOT, 2, 3]]
    assert canvas.order_BL.tolist() == [order]


@pytest.mark.parametrize(("switch", "first"), [("off", {0, 1, 2, 3}), ("faithful", {0, 1, 2, 3}), ("sane", {2, 3})])
def test_the_random_order_holds_end_tokens_back_only_when_sane(switch: str, first: set[int]) -> None:
    base, seen = writer([EOS, EOT, 2, 3], [9.0] * 4), set()
    for seed in range(40):
        config = DecodeConfig(max_new_tokens=4, temperature=0.0, order="random", seed=seed)
        canvas = run_guided(base, config, confidence_eos_eot_inf=switch, eos_eot=(EOS, EOT))
        seen.add(canvas.order_BL[0].tolist().index(0))
    assert seen == first


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("ends-confidence", ("off",)),  # at T=0 the release does what is sane
        ("ends-both-blocks", ("off",)),
        ("ends-cfg", ("off",)),
        ("ends-confidence-drawn", ("off", "sane")),
        ("ends-confidence-random", ("sane",)),
    ],
)
def test_the_published_texts_tell_the_switches_apart(name: str, others: tuple[str, ...]) -> None:
    case, base = LLADA_CASES[name], published_base("llada")
    for switch in ("off", "faithful", "sane"):
        canvas = Replay(base, case, llada_config_of(case))
        guided(base, canvas, published_config_of(case, confidence_eos_eot_inf=switch))
        assert (canvas.tokens_BL.tolist() != case["tokens"]) == (switch in others)


def test_origin_commits_each_position_at_a_uniform_step() -> None:
    """Probability 1 - s/t of those left at every step: (1 - eps)/N of all at each step, eps more at the last."""
    rows, new, steps, eps = 500, 8, 4, 0.1
    base = writer([1] * new, [5.0] * new)
    canvas = Canvas(base, [[]] * rows, DecodeConfig(tokens_per_step=2, max_new_tokens=new))
    fills: list[int] = []
    canvas.watch = lambda c: fills.append(int((c.order_BL >= 0).sum()))
    origin(base, canvas, OriginOptions(eps=eps))
    assert fills[-1] == rows * new
    counts = np.diff([0, *fills])
    expected = np.full(steps, (1 - eps) / steps) + np.array([0, 0, 0, eps])
    assert len(counts) == steps
    assert stats.chisquare(counts, rows * new * expected).pvalue > 1e-3


def test_soft_order_draws_positions_from_the_softened_certainty() -> None:
    """The first of three positions, whose certainties are their probabilities (order confidence, T=0)."""
    rows, alg_temp = 4000, 0.5
    base = writer([1, 2, 3], [4.0, 3.0, 1.0])
    canvas = Canvas(base, [[]] * rows, DecodeConfig(max_new_tokens=3, temperature=0.0, order="confidence"))
    soft_order(base, canvas, SoftOrderOptions(alg_temp=alg_temp))
    certainty = np.array([math.exp(z) / (math.exp(z) + 7) for z in (4.0, 3.0, 1.0)])  # 8 words, 7 of them at 0
    expected = np.exp(certainty / alg_temp) / np.exp(certainty / alg_temp).sum()
    first = (canvas.order_BL == 0).sum(0).numpy()
    assert stats.chisquare(first, rows * expected).pvalue > 1e-3


def test_a_tiny_alg_temp_takes_the_best_positions_and_ends() -> None:
    canvas = Canvas(writer([1, 2, 3], [3.0, 4.0, 1.0]), [[]], DecodeConfig(max_new_tokens=3, temperature=0.0))
    soft_order(canvas.base, canvas, SoftOrderOptions(alg_temp=1e-320))
    assert canvas.order_BL.tolist() == [[1, 0, 2]]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_depend_on_its_batch(family: str, loop: str) -> None:
    base, prompts = tiny_base(family), [[2, 5, 6], [2, 9, 7, 4, 11], [3]]
    config = DecodeConfig(
        tokens_per_step=2, max_new_tokens=8, order="confidence", order_on="raw", schedule="reference", seed=5
    )
    run, options = LOOPS[loop]
    together = Canvas(base, prompts, config)
    run(base, together, options)
    for b, prompt in enumerate(prompts):
        alone = Canvas(base, [prompt], config, rows=[b])
        run(base, alone, options)
        real_L = together.real_BL[b]
        assert alone.tokens_BL[0].tolist() == together.tokens_BL[b][real_L].tolist()
        assert alone.order_BL[0].tolist() == together.order_BL[b][real_L].tolist()
        assert alone.base_calls_B[0] == together.base_calls_B[b]


def test_guidance_is_a_straight_line_between_two_passes() -> None:
    """One open position, w = 1.5: the token is the argmax of un + 2.5 (cond - un), un under a masked prompt."""
    base, prompt = published_base("llada"), [5, 9, 13, 21]
    canvas = Canvas(base, [prompt], DecodeConfig(max_new_tokens=1, temperature=0.0))
    guided(base, canvas, GuidedOptions(cfg_scale=1.5))
    rows = torch.tensor([[*prompt, MASK], [MASK] * 5])
    with torch.no_grad():
        cond_V, un_V = own_logits(base, rows)[:, -1]
    assert canvas.tokens_BL[0, -1] == (un_V + 2.5 * (cond_V - un_V))[:MASK].argmax()


def test_blocks_stop_at_the_end_of_the_text() -> None:
    """The base ends its text in the first of two blocks: the second costs nothing and is filled with EOS."""
    base = writer([2, EOS, 3, 4], [9.0, 8.0, 7.0, 6.0], end_ids=(EOS,))
    canvas = run_guided(base, DecodeConfig(max_new_tokens=4, temperature=0.0, order="confidence", block_length=2))
    assert canvas.tokens_BL.tolist() == [[2, EOS, EOS, EOS]]
    assert canvas.base_calls_B.tolist() == [2]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (OriginOptions, {"eps": 1.0}, "eps is 1.0"),
        (OriginOptions, {"eps": "x"}, "eps is 'x'"),
        (SoftOrderOptions, {"alg_temp": -0.1}, "alg_temp is -0.1"),
        (GuidedOptions, {"cfg_scale": float("nan")}, "cfg_scale is nan"),
        (GuidedOptions, {"confidence_eos_eot_inf": "on"}, "it must be one of off, faithful, sane"),
    ],
)
def test_wrong_settings_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kind(**settings)


def test_what_a_loop_cannot_do_is_refused() -> None:
    base = writer([1] * 4, [5.0] * 4)
    for order, published, message in (
        ("entropy", {}, "guided knows confidence and random"),
        ("confidence", {"logits_eos_inf": True}, "has no end tokens"),
    ):
        with pytest.raises(InputError, match=message):
            run_guided(base, DecodeConfig(max_new_tokens=4, order=order), **published)
    canvas = Canvas(base, [[]], DecodeConfig(max_new_tokens=4, order="random"))
    with pytest.raises(InputError, match="needs a certainty"):
        soft_order(base, canvas, SoftOrderOptions())


@pytest.mark.parametrize("loop", LOOPS)
def test_nan_is_refused(loop: str) -> None:
    base = TableBase(torch.full((2, 3), torch.nan), order="confidence")
    run, options = LOOPS[loop]
    with pytest.raises(FloatingPointError, match="gave NaN"):
        run(base, Canvas(base, [[]], DecodeConfig(max_new_tokens=2)), type(options)())
