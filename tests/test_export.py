"""The exported repository in transformers' own hands: same tokens as our decode, and other models refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, Qwen2ForCausalLM

from adjust_dlm import cli, exported
from adjust_dlm.artifacts import CARD, RUN, from_pretrained, save_pretrained
from adjust_dlm.bases import Base
from adjust_dlm.bases import base as registry
from adjust_dlm.bases.adapted import wrap_adapted
from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import decode
from adjust_dlm.exported import FACTS, GENERATE, REQUIREMENTS, export, wrap_model
from adjust_dlm.sampler import CONFIG, WEIGHTS, Sampler
from adjust_dlm.types import DecodeConfig, InputError
from helpers import BOS, END, LIMIT, MASK, VOCAB, exact_base, tiny_base, tiny_config, tiny_sampler

PROMPT = [2, 5, 7]
PAD = 23  # of the tokenizer, not of the base


def qwen(base: TransformerBase) -> Qwen2ForCausalLM:
    """A plain transformers model with the weights of the tiny Dream."""
    model = Qwen2ForCausalLM(tiny_config("dream")).eval()
    model.model.load_state_dict(base.model.state_dict())
    model.lm_head.weight.data.copy_(base.head_matrix)
    return model


ADAPTED = {
    "mask_id": MASK, "end_ids": [END], "pad_id": END, "bos_id": BOS, "token_limit": LIMIT, "context": 64,
    "order": "entropy", "order_on": "processed",
}  # fmt: skip


def llama(seed: int = 0) -> LlamaForCausalLM:
    """A tied head, as bases that were adapted have it."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB, num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=True, **shape
        )
        return LlamaForCausalLM(config).eval()


def adapted(model: LlamaForCausalLM) -> TransformerBase:
    """As `load_adapted` makes it: the fingerprint is of files."""
    body = Body(Shape.of(model.config))
    body.load_state_dict(model.model.state_dict())
    return wrap_adapted(body, ADAPTED, tokenizer=None, fingerprint="f" * 64, name="/home/me/adapted")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code it loads into this folder, not into the user's."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


class Setup:
    """A base, its sampler, a transformers model of the same weights, and the exported folder."""

    def __init__(self, family: str, folder: Path) -> None:
        self.base = tiny_base("dream") if family == "dream" else adapted(llama())
        self.model: Any = qwen(self.base) if family == "dream" else llama()
        form: dict[str, Any] = {} if family == "dream" else {"layers": 2, "features": (1,)}  # the default model's, too
        self.sampler = tiny_sampler(self.base, **form)
        self.folder = export(self.sampler, self.base, folder)
        self.stored: Sampler = from_pretrained(self.folder, self.base)

    def generate(self, ids: Any, **settings: Any) -> Tensor:
        ids = torch.tensor(ids) if isinstance(ids, list) else ids
        out: Tensor = self.model.generate(ids, custom_generate=str(self.folder), trust_remote_code=True, **settings)
        return out

    def ours(self, prompts: list[list[int]], decoder: str = "adjust", **settings: Any) -> list[list[int]]:
        """Rows without their padding."""
        result = decode(self.base, prompts, DecodeConfig(**settings), decoder=decoder, sampler=self.stored)
        return [row[real].tolist() for row, real in zip(result.tokens_BL, result.real_BL, strict=True)]


@pytest.fixture(params=["dream", "adapted"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    return Setup(request.param, tmp_path / "export")


@pytest.fixture
def dream(tmp_path: Path) -> Setup:
    return Setup("dream", tmp_path / "g")


# Tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens_per_step": 3, "max_new_tokens": 8, "temperature": 0},
        {"tokens_per_step": 3, "max_new_tokens": 8, "temperature": 0.7, "seed": 5, "top_p": 0.9, "top_k": 6},
        {"tokens_per_step": 4, "max_new_tokens": 9, "suppress_eos": True, "order": "confidence", "seed": 1},
    ],
)
def test_transformers_generates_our_tokens(setup: Setup, settings: dict[str, Any]) -> None:
    out = setup.generate([PROMPT], **settings)
    assert out.dtype == torch.long and out.tolist() == setup.ours([PROMPT], **settings)


def test_the_sampler_matters_and_so_do_the_settings(setup: Setup) -> None:
    """What the equality above would not see: each of these gives other tokens."""
    cold: dict[str, Any] = {"tokens_per_step": 4, "max_new_tokens": 16, "suppress_eos": True}
    settings = {**cold, "temperature": 1.5}
    one = setup.generate([PROMPT], **settings).tolist()
    assert setup.generate([PROMPT], **settings).tolist() == one
    assert setup.generate([PROMPT], decoder="parallel", **settings).tolist() != one
    assert setup.generate([PROMPT], seed=1, **settings).tolist() != one
    assert setup.generate([PROMPT], top_k=1, **settings).tolist() != one
    assert setup.generate([PROMPT], **{**settings, "tokens_per_step": 1}).tolist() != one
    greedy = setup.generate([PROMPT], do_sample=False, **cold).tolist()
    assert greedy == setup.generate([PROMPT], temperature=0, **cold).tolist() != one
    assert setup.generate([PROMPT], **cold).tolist() == setup.ours([PROMPT], **{**cold, "temperature": 1.0})


def test_a_left_padded_batch_is_its_rows(setup: Setup) -> None:
    prompts = [[2, 5, 7, 6], [4], [2, MASK, 9]]
    ids = torch.tensor([[PAD] * (6 - len(row)) + row for row in prompts])  # wider than the longest row
    mask = torch.tensor([[0] * (6 - len(row)) + [1] * len(row) for row in prompts])
    settings = {"tokens_per_step": 3, "max_new_tokens": 8, "temperature": 0.8, "suppress_eos": True}
    out = setup.generate(None, input_ids=ids, attention_mask=mask, **settings)
    assert out.shape == (3, 6 + 8) and int((out == MASK).sum()) == 0  # the mask in the prompt is filled, too
    for row, prompt, wanted in zip(out.tolist(), prompts, setup.ours(prompts, **settings), strict=True):
        assert row[: 6 - len(prompt)] == [PAD] * (6 - len(prompt))
        assert row[6 - len(prompt) :] == wanted
    alone = setup.generate([prompts[0]], **settings)
    assert alone[0].tolist() == out[0, 2:].tolist()  # row 0 has the same random numbers in every batch


# Weights -------------------------------------------------------------------------------------------------------


def test_weights_are_shared_and_left_as_they_were(setup: Setup) -> None:
    before = {name: (p.data_ptr(), p.requires_grad, p.clone()) for name, p in setup.model.named_parameters()}
    setup.generate([PROMPT], max_new_tokens=4)
    for name, p in setup.model.named_parameters():
        pointer, grad, value = before[name]
        assert (p.data_ptr(), p.requires_grad) == (pointer, grad) and torch.equal(p, value)
    wrapped = wrap_model(setup.model, json.loads((setup.folder / FACTS).read_text()))
    theirs = {name: p.data_ptr() for name, p in setup.model.base_model.named_parameters()}
    assert {name: p.data_ptr() for name, p in wrapped.model.named_parameters()} == theirs
    assert wrapped.head_matrix.data_ptr() == setup.model.get_output_embeddings().weight.data_ptr()
    assert wrapped.fingerprint == setup.base.fingerprint and wrapped.next_frame
    assert dataclasses.replace(wrapped.spec, name=setup.base.spec.name) == setup.base.spec


def test_bfloat16_is_the_same_base(dream: Setup) -> None:
    model = dream.model.to(torch.bfloat16)
    wrapped = wrap_model(model, json.loads((dream.folder / FACTS).read_text()))
    assert wrapped.dtype == torch.bfloat16
    assert dream.generate([PROMPT], max_new_tokens=4, temperature=0).shape == (1, 7)


def nudge(model: Any, name: str, row: int = 0) -> None:
    with torch.no_grad():
        dict(model.named_parameters())[name].data[row] += 0.25


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("model.layers.1.self_attn.q_proj.weight", 0), ("model.layers.0.mlp.down_proj.weight", 8),
        ("model.norm.weight", 3), ("model.embed_tokens.weight", MASK),
    ],
)  # fmt: skip
def test_other_weights_are_refused(setup: Setup, name: str, row: int) -> None:
    """Also those that only an adapter changes."""
    nudge(setup.model, name, row)
    with pytest.raises(InputError, match=r"the model's weights are not those of base '(dream|adapted)'"):
        setup.generate([PROMPT], max_new_tokens=4)


def test_weights_that_change_between_calls_are_seen(dream: Setup) -> None:
    dream.generate([PROMPT], max_new_tokens=4)
    with torch.no_grad():
        dream.model.model.norm.weight.mul_(2)
    with pytest.raises(InputError, match="weights are not those of base 'dream'"):
        dream.generate([PROMPT], max_new_tokens=4)


def test_the_model_is_wrapped_once(dream: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    wrap = exported.wrap_model
    monkeypatch.setattr(exported, "wrap_model", lambda *args: calls.append(1) or wrap(*args))
    for _ in range(3):
        dream.generate([PROMPT], max_new_tokens=4)
    assert len(calls) == 1
    export(tiny_sampler(dream.base, seed=1), dream.base, dream.folder)  # another sampler in the same place
    dream.stored = from_pretrained(dream.folder, dream.base)
    settings = {"tokens_per_step": 4, "max_new_tokens": 12, "suppress_eos": True}
    assert dream.generate([PROMPT], **settings).tolist() == dream.ours([PROMPT], **settings)


def test_another_architecture_is_refused_by_name(dream: Setup) -> None:
    facts = json.loads((dream.folder / FACTS).read_text())
    with pytest.raises(InputError, match=r"does not fit .*model_type is 'llama', wanted 'qwen2'"):
        wrap_model(llama(), facts)
    odd = Qwen2ForCausalLM(tiny_config("dream", rope_parameters={"rope_type": "default", "rope_theta": 1e4}))
    with pytest.raises(InputError, match=r"does not fit .*rope is .*10000.0"):
        wrap_model(odd, facts)
    body = LlamaModel(llama().config)
    with pytest.raises(InputError, match="the model is a LlamaModel, without a head"):
        wrap_model(body, json.loads(json.dumps(exported.base_facts(adapted(llama())))))


# Arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_beams": 4}, "generate cannot use num_beams here; known are attention_mask"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0; it must be at least 1"),
        ({"do_sample": False, "temperature": 0.5}, "do_sample is False and temperature 0.5; argmax is temperature 0"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, r"a 0 behind a 1 in row \[0\]; pad on the left"),
        ({"attention_mask": torch.ones(1, 2)}, r"attention_mask has shape \(1, 2\), the ids \(1, 3\)"),
        ({"input_ids": torch.tensor([PROMPT])}, "give the prompt ids once"),
        ({"max_new_tokens": 62}, "base 'dream' takes at most 64"),
        ({"decoder": "magic"}, "unknown decoder 'magic'"),
        ({"revision": "v1"}, "revision is 'v1', but"),
    ],
)
def test_arguments_without_a_meaning_are_refused(dream: Setup, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        dream.generate([PROMPT], **given)


def test_the_code_finds_its_repository_or_is_told(dream: Setup, tmp_path: Path) -> None:
    """A moved folder is found; a call past `generate` must name it."""
    moved = dream.folder.rename(tmp_path / "elsewhere")
    dream.folder = moved
    settings = {"max_new_tokens": 4, "temperature": 0}
    assert dream.generate([PROMPT], **settings).tolist() == dream.ours([PROMPT], **settings)
    function = dream.model.load_custom_generate(str(moved), trust_remote_code=True)
    with pytest.raises(InputError, match="give sampler_repo="):
        function(model=dream.model, inputs=torch.tensor([PROMPT]))
    out = function(model=dream.model, sampler_repo=moved, inputs=torch.tensor([PROMPT]), **settings)
    assert out.tolist() == dream.ours([PROMPT], **settings)


def test_a_folder_that_was_not_exported_is_refused(dream: Setup) -> None:
    (dream.folder / FACTS).unlink()
    with pytest.raises(InputError, match=rf"was not written by `adjust export` \({FACTS} is missing\)"):
        dream.generate([PROMPT])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda facts: facts.pop("shape"), "lacks shape"),
        (lambda facts: facts.update(family="bert"), "family is 'bert'; known are dream, llada, adapted"),
        (lambda facts: facts.update(fingerprint="0" * 64), "belongs to a base with fingerprint"),
    ],
)
def test_damaged_facts_are_refused(dream: Setup, change: Callable[[dict], Any], said: str) -> None:
    facts = json.loads((dream.folder / FACTS).read_text())
    change(facts)
    (dream.folder / FACTS).write_text(json.dumps(facts))
    with pytest.raises(InputError, match=said):
        dream.generate([PROMPT])


# The command ---------------------------------------------------------------------------------------------------


def test_an_exported_folder_is_complete_and_says_so(setup: Setup) -> None:
    files = {p.relative_to(setup.folder).as_posix() for p in setup.folder.rglob("*") if p.is_file()}
    assert files == {CONFIG, WEIGHTS, CARD, FACTS, GENERATE, REQUIREMENTS}
    assert (setup.folder / REQUIREMENTS).read_text() == "adjust-dlm>=0.1.0\n"
    card = (setup.folder / CARD).read_text()
    assert "- custom_generate\n" in card and f"model = {type(setup.model).__name__}.from_pretrained" in card
    assert "/home/me" not in "".join(p.read_text() for p in setup.folder.rglob("*.*") if p.suffix != ".safetensors")


def test_bases_and_samplers_that_cannot_be_exported_are_refused(tmp_path: Path) -> None:
    base: Base = exact_base()
    sampler = tiny_sampler(tiny_base("dream"))
    with pytest.raises(InputError, match=f"belongs to a base with fingerprint {sampler.base_fingerprint[:16]}"):
        export(sampler, base, tmp_path / "g")
    sampler.base_fingerprint = base.fingerprint
    with pytest.raises(
        InputError, match="base 'exact' is of class ExactBase; only DreamBase, LladaBase, TransformerBase"
    ):
        export(sampler, base, tmp_path / "g")
    assert not (tmp_path / "g").exists()


def test_the_command_writes_what_transformers_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    registry.register_base("tiny", "a random Dream")(lambda **_: tiny_base("dream"))
    base = tiny_base("dream")
    g = tiny_sampler(base)
    save_pretrained(g, tmp_path / "g", run={"lr": 1}, training={"base": "tiny", "trajectories": 3, "data_digest": "ab"})
    (tmp_path / "result.json").write_text(json.dumps({"results": {"nll": 4.25}}))
    argv = ["export", "--base", "tiny", "--sampler", str(tmp_path / "g"), "--output", str(tmp_path / "out")]
    assert cli.main([*argv, "--results", str(tmp_path / "result.json"), "--license", "mit"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    assert not (tmp_path / "out" / "result.json").exists()  # what is shared, and nothing of this machine
    assert (tmp_path / "out" / RUN).read_text() == "lr: 1\n"
    card = (tmp_path / "out" / CARD).read_text()
    assert (
        "| NLL (nats/token) | 4.25 |" in card
        and "license: mit" in card
        and "| data | 3 trajectories of the base" in card
    )
    model = qwen(base)
    settings = {"tokens_per_step": 3, "max_new_tokens": 8, "temperature": 0.5}
    out = model.generate(
        torch.tensor([PROMPT]), custom_generate=str(tmp_path / "out"), trust_remote_code=True, **settings
    )
    stored = from_pretrained(tmp_path / "g", base)
    assert out.tolist() == decode(base, [PROMPT], DecodeConfig(**settings), sampler=stored).tokens_BL.tolist()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--base", "exact"], "no sampler ships for base 'exact'; name one with --sampler"),
        (["--private"], "--private is about --push, which is not given"),
        (["--push", "noname"], "push is 'noname'; it must be a Hub id, ORG/NAME"),
        (["--results", "/nowhere.json"], "cannot read /nowhere.json: [Errno 2] No such file"),
        (["--run", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
    ],
)
def test_bad_flags_are_refused_in_one_line(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", "--output", str(tmp_path / "out"), *argv]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not (tmp_path / "out").exists()
