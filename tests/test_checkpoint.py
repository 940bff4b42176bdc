"""Published checkpoints: written here with the families' own names, loaded by `load_base`, compared and damaged."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from adjust_dlm import DecodeConfig, decode
from adjust_dlm.bases import family as family_module
from adjust_dlm.bases import load_base, shape
from adjust_dlm.bases.layers import new_model, read_model
from adjust_dlm.bases.tokenizers import FileTokenizer, read_tokenizer
from adjust_dlm.bases.transformer import TransformerBase, weights_fingerprint
from adjust_dlm.sampler import Sampler, load_sampler
from adjust_dlm.types import InputError
from helpers import FAMILIES, IN_BLOCKS, KNOWN, left_pad, tiny_config, tiny_sampler

VOCAB, MASK, END, BOS = 40, 36, 34, 35
ROWS = [[2, 5, 6, 7, MASK, MASK, 9, MASK], [3, MASK, 4]]
DREAM_CONFIG = {
    "model_type": "Dream", "architectures": ["DreamModel"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "max_position_embeddings": 64,
    "use_sliding_window": False, "tie_word_embeddings": False, "hidden_act": "silu", "mask_token_id": MASK,
    "bos_token_id": END, "eos_token_id": END, "pad_token_id": END,
}  # fmt: skip
LLADA_CONFIG = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 32, "mlp_hidden_size": 64, "n_layers": 2,
    "n_heads": 4, "n_kv_heads": 4, "vocab_size": VOCAB, "embedding_size": VOCAB, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "max_sequence_length": 64, "layer_norm_type": "rms", "block_type": "llama",
    "activation_type": "silu", "include_bias": False, "include_qkv_bias": False, "rope": True, "alibi": False,
    "weight_tying": False, "mask_token_id": MASK, "eos_token_id": END, "pad_token_id": END,
}  # fmt: skip
# As the releases write them, but for the numbers; Fast-dLLM's has no MASK.
FAST_CONFIG = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"], "attention_dropout": 0.0, "bd_size": 8, "bos_token_id": BOS,
    "eos_token_id": END, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64,
    "layer_types": ["full_attention"] * 2, "max_position_embeddings": 64, "max_window_layers": 2,
    "model_type": "Fast_dLLM_Qwen", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "pad_token_id": END, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": VOCAB, "mask_token_id": MASK,
}  # fmt: skip
SDAR_CONFIG = {
    "architectures": ["SDARForCausalLM"], "attention_bias": False, "attn_implementation": "flex_attention",
    "block_size": 8, "bos_token_id": END, "debug": False, "ep_size": 1, "eos_token_id": END,
    "fuse_cross_entropy": True, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 64,
    "mask_token_id": MASK, "max_position_embeddings": 64, "max_window_layers": 2, "micro_forward": False,
    "model_type": "sdar", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6, "skip_checkpoint": False, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": False, "use_deepep": False,
    "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "dream": DREAM_CONFIG, "llada": LLADA_CONFIG, "fast_dllm_qwen": FAST_CONFIG, "sdar": SDAR_CONFIG,
}  # fmt: skip
ALL = tuple(CONFIGS)
HEADS = dict.fromkeys(ALL, "lm_head.weight") | {"llada": "model.transformer.ff_out.weight"}


def weights_of(family: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Our names: a random body with norms and biases that show, and a head."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = new_model(tiny_config(family, vocab_size=VOCAB))
        state = {k: v + (torch.randn_like(v) / 4 if v.ndim == 1 else 0) for k, v in body.state_dict().items()}
        return state | {"lm_head.weight": torch.randn(VOCAB, 32) / 2}


def published(family: str, ours: str) -> str:
    """Written out from the families' published lists of tensors, apart from the loader's own map."""
    if ours == "lm_head.weight":
        return HEADS[family]
    if family != "llada":
        return f"model.{ours}"
    fixed = {"embed_tokens.weight": "model.transformer.wte.weight", "norm.weight": "model.transformer.ln_f.weight"}
    if ours in fixed:
        return fixed[ours]
    layer, part = ours.split(".")[1], ours.split(".")[-2]
    short = {
        "q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "attn_out", "gate_proj": "ff_proj",
        "up_proj": "up_proj", "down_proj": "ff_out", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
    }[part]  # fmt: skip
    return f"model.transformer.blocks.{layer}.{short}.{ours.split('.')[-1]}"


def write(folder: Path, family: str, *, shards: int = 2, tied: bool = False, **changes: Any) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tie = "weight_tying" if family == "llada" else "tie_word_embeddings"
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | {tie: tied} | changes))
    named = {published(family, k): v.contiguous() for k, v in weights_of(family).items()}
    if tied:
        del named[HEADS[family]]
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    names, index = sorted(named), {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: named[name] for name in names[n::shards]}, folder / file)
        index |= dict.fromkeys(names[n::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def same_states(a: Any, b: Any, atol: float = 1e-6) -> None:
    state = left_pad(ROWS, mask_id=MASK, pad_id=END)
    h_a, h_b = a.hidden(state)[state.real_BL], b.hidden(state)[state.real_BL]
    torch.testing.assert_close(h_a, h_b, atol=atol, rtol=0)
    torch.testing.assert_close(a.head(h_a), b.head(h_b), atol=10 * atol, rtol=0)


def reference(family: str, *, tied: bool = False) -> TransformerBase:
    """The same weights put together by hand."""
    weights, block = weights_of(family), 8 if family in IN_BLOCKS else None
    head = weights.pop("lm_head.weight")
    body = new_model(replace(shape.Shape.of(tiny_config(family, vocab_size=VOCAB)), block=block))
    body.load_state_dict(weights)
    return KNOWN[family].make(
        tiny_config(family, vocab_size=VOCAB), block=block, mask_id=MASK, end_ids=(END,), bos_id=BOS, model=body,
        head_weight=body.embed_tokens.weight if tied else head,
    )  # fmt: skip


# What is loaded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "tied"), [(1, False), (3, False), (1, True), (2, True)])
@pytest.mark.parametrize("family", ALL)
def test_a_folder_gives_the_states_of_its_tensors(tmp_path: Path, family: str, shards: int, tied: bool) -> None:
    base = load_base(str(write(tmp_path, family, shards=shards, tied=tied)))
    same_states(base, reference(family, tied=tied))
    order, on, frame, block, bos = {
        "dream": ("entropy", "processed", True, None, None), "llada": ("confidence", "raw", False, None, None),
        "fast_dllm_qwen": ("entropy", "processed", True, 8, BOS), "sdar": ("entropy", "processed", False, 8, None),
    }[family]  # fmt: skip
    spec = base.spec
    assert (spec.block, base.lag) == (block, int(family == "fast_dllm_qwen"))
    assert (spec.order, spec.order_on, base.next_frame) == (order, on, frame)
    assert (spec.mask_id, spec.end_ids, spec.pad_id, spec.vocab_size) == (MASK, (END,), END, VOCAB)
    assert (spec.bos_id, spec.context) == (bos, 64)  # the config's bos is the end token: not believed


@pytest.mark.parametrize("family", ALL)
def test_the_fingerprint_follows_the_weights_not_the_files(tmp_path: Path, family: str) -> None:
    one, three = (load_base(str(write(tmp_path / str(n), family, shards=n))) for n in (1, 3))
    half, other_half = (load_base(str(tmp_path / "1"), dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
    assert one.fingerprint == three.fingerprint == half.fingerprint == other_half.fingerprint
    assert one.fingerprint == weights_fingerprint(one.model, one.head_matrix, MASK)
    assert half.dtype == torch.bfloat16
    sampler = Sampler(one)
    sampler.save(tmp_path / "g")
    load_sampler(tmp_path / "g", half)
    file = tmp_path / "1" / "model.safetensors"
    save_file(load_file(file) | {HEADS[family]: torch.zeros(VOCAB, 32)}, file)
    other = load_base(str(tmp_path / "1"))
    with pytest.raises(InputError, match="belongs to a base with fingerprint"):
        load_sampler(tmp_path / "g", other)


SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALED, ids=lambda scaling: scaling["rope_type"])
def test_scaled_rotary_embeddings_load(tmp_path: Path, scaling: dict[str, Any]) -> None:
    base = load_base(str(write(tmp_path, "dream", rope_scaling=scaling)))
    body = new_model(tiny_config("dream", vocab_size=VOCAB, rope_parameters={"rope_theta": 1e6, **scaling}))
    torch.testing.assert_close(base.model.rotary.inverse_F, body.rotary.inverse_F)
    weights = weights_of("dream")
    del weights["lm_head.weight"]
    body.load_state_dict(weights)
    tokens_BL, positions_BL = torch.tensor([ROWS[0]]), torch.arange(8)[None]
    with torch.no_grad():
        ours, theirs = (m(tokens_BL, None, positions_BL) for m in (base.model, body))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert (ours - reference("dream").model(tokens_BL, None, positions_BL)).abs().max() > 1e-3


def test_old_buffers_and_a_tied_head_are_harmless(tmp_path: Path) -> None:
    write(tmp_path, "dream", shards=1, tied=True)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | old | {"lm_head.weight": head}, file)
    same_states(load_base(str(tmp_path)), reference("dream", tied=True))
    save_file(weights | {"lm_head.weight": head.double()}, file)
    same_states(load_base(str(tmp_path)), reference("dream", tied=True))


@pytest.mark.parametrize("family", ALL)
def test_a_tied_head_that_differs_in_one_number_is_refused(tmp_path: Path, family: str) -> None:
    write(tmp_path, family, shards=1, tied=True)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights[published(family, "embed_tokens.weight")].clone()
    for row in range(VOCAB):
        other = head.clone()
        other[row, row % 32] += 1e-3
        save_file(weights | {HEADS[family]: other}, file)
        with pytest.raises(InputError, match="has a head that is not the embedding"):
            load_base(str(tmp_path))
    save_file(weights | {HEADS[family]: head[:1].clone()}, file)
    with pytest.raises(InputError, match="has a head that is not the embedding"):
        load_base(str(tmp_path))


# H14: what is not loaded -----------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the tensors of a single-file checkpoint."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.update({new: weights.pop(old)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"lacks model\.layers\.1\.mlp\.up_proj\.weight$"),
        (lambda w: w.pop("lm_head.weight"), r"lacks lm_head\.weight$"),
        (rename("model.norm.weight", "model.nrom.weight"), r"lacks model\.norm\.weight$"),
        (lambda w: w.update(extra=torch.zeros(1)), r"do not belong to this model: extra$"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(31)}),
            r"model\.norm\.weight is \(31,\), wanted \(32,\)$",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            r"model\.norm\.weight is I8; weights must be one of F16",
        ),
        (
            lambda w: w.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(64, 32)}),
            r"do not belong to this model: model\.layers\.2\.mlp\.up_proj\.weight$",
        ),
    ],
)
def test_h14_tensors_that_are_not_those_of_the_config(tmp_path: Path, change: Any, said: str) -> None:
    rewrite(write(tmp_path, "dream", shards=1), change)
    with pytest.raises(InputError, match=said):
        load_base(str(tmp_path))


@pytest.mark.parametrize(("value", "dtype"), [(math.nan, torch.float32), (math.inf, torch.bfloat16), (1e6, torch.half)])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(write(tmp_path, "dream", shards=1), lambda w: w[name][3, 5].fill_(value))
    with pytest.raises(InputError, match=rf"{re.escape(name)} holds numbers that are not finite in {dtype}"):
        load_base(str(tmp_path), dtype=dtype)


def test_shards_beside_a_whole_file_are_refused(tmp_path: Path) -> None:
    write(write(tmp_path, "dream", shards=2), "dream", shards=1)
    with pytest.raises(InputError, match=r"of which libraries read one or the other; delete one$"):
        load_base(str(tmp_path))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
def test_a_name_twice_in_a_file_is_refused(tmp_path: Path, file: str) -> None:
    write_dream_tokenizer(write(tmp_path, "dream"))
    text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(text.replace("{", '{"twice": 1, "twice": 2, ', 1))
    with pytest.raises(InputError, match="'twice' stands there twice"):
        load_base(str(tmp_path))


def test_the_body_of_an_adapted_base_is_read_from_floats_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DREAM_CONFIG, "model_type": "qwen2"}))
    weights = weights_of("dream")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    read_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    rewrite(tmp_path, lambda w: w.update({"norm.weight": torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(InputError, match=r"norm\.weight is torch\.int8; weights must be floats"):
        read_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


def test_h14_a_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, "llada", shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"not complete: model-00002-of-00002\.safetensors missing"):
        load_base(str(tmp_path))


def test_h14_a_truncated_shard_and_a_lying_index_are_named(tmp_path: Path) -> None:
    write(tmp_path, "llada", shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors is damaged"):
        load_base(str(tmp_path))
    shard.write_bytes(whole)
    index = tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"]["ghost"] = shard.name
    index.write_text(json.dumps(names))
    with pytest.raises(InputError, match="names tensors that are not in their shards: ghost"):
        load_base(str(tmp_path))
    for content in ("{}", '{"weight_map": null}', '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}'):
        index.write_text(content)
        with pytest.raises(InputError, match="is not an index of shards"):
            load_base(str(tmp_path))


def test_h14_nothing_is_printed_before_a_refusal(tmp_path: Path) -> None:
    write(tmp_path, "dream", shards=2)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    command = [sys.executable, "-m", "adjust_dlm.cli", "generate", "1 2", "--base", str(tmp_path), "--decoder", "joint"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "model-00001-of-00002.safetensors" in done.stderr


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json is missing"):
        load_base(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        load_base(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(InputError, match=r"of family 'bert'; known are dream, llada.*docs/adding-a-base\.md"):
        load_base(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(DREAM_CONFIG))
    with pytest.raises(InputError, match="it has no weights at all"):
        load_base(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"it has pytorch_model\.bin"):
        load_base(str(tmp_path))
    with pytest.raises(InputError, match="no file or folder"):
        load_base(str(tmp_path / "absent.gguf"))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("dream", {"mask_token_id": None}, r"no mask_token_id in config\.json"),
        ("dream", {"mask_token_id": 99}, r"'mask_id': 99.*; ids run from 0 to 39"),
        ("dream", {"eos_token_id": None}, "names a token that ends a text"),
        ("dream", {"pad_token_id": 99}, "'pad_id': 99"),
        ("dream", {"eos_token_id": [END, -1]}, r"'end_ids\[1\]': -1"),
        ("dream", {"eos_token_id": MASK}, "is MASK and an end"),
        ("dream", {"eos_token_id": "34"}, "end_ids is '34'; it must be a whole number"),
        ("dream", {"mask_token_id": 36.7}, "mask_id is 36.7; it must be a whole number"),
        ("dream", {"tie_word_embeddings": "false"}, "says 'false' on tied embeddings"),
        ("dream", {"quantization_config": {"bits": 4}}, "is quantized"),
        ("dream", {"num_attention_heads": 0}, "num_attention_heads is 0; it must be at least 1"),
        ("dream", {"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ("dream", {"hidden_size": 32.0}, "hidden_size is 32.0"),
        ("dream", {"num_hidden_layers": None}, "num_hidden_layers is None"),
        ("dream", {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide the 4 heads"),
        ("dream", {"head_dim": 7}, "head_dim is 7; rotary pairs need an even one"),
        ("dream", {"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ("dream", {"rope_theta": 0}, "rope_theta is 0"),
        ("llada", {"rope_theta": None}, "rope_theta is None"),
        ("dream", {"rms_norm_eps": None}, "rms_norm_eps is None"),
        ("dream", {"rope_scaling": "linear"}, "rotary settings are .'linear'."),
        ("dream", {"rope_scaling": {"type": "linear"}}, "type linear lacks factor"),
        (
            "dream",
            {"rope_theta": None, "rope_scaling": {"full_attention": {"rope_theta": 1e6}}},
            "have {'full_attention':",
        ),
        ("dream", {"rope_scaling": {"rope_type": ["linear"]}}, "rope_type is .'linear'.; known are"),
        ("dream", {"rope_scaling": {"factor": 4.0}}, "have {'factor': 4.0}; one rotary of type default has none"),
        (
            "dream",
            {"rope_scaling": {"type": "linear", "factor": 4.0, "mrope_section": [1, 1]}},
            "have {'mrope_section'",
        ),
        (
            "dream",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": "32"}},
            "beta_fast is '32'; it must be",
        ),
        ("llada", {"d_model": [32]}, r"hidden_size is \[32\]"),
        ("llada", {"alibi": True}, "'alibi': True"),
        ("llada", {"block_type": "sequential"}, "'block_type': 'sequential'"),
        ("llada", {"attention_layer_norm": True}, "'attention_layer_norm': True"),
        ("llada", {"n_layers": None}, "lacks n_layers"),
        ("dream", {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_base(str(write(tmp_path, family, **changes)))


ELSEWHERE: list[tuple[dict[str, Any], str]] = [
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"rope_parameters": {"rope_theta": 3e5}}, "rope_theta is .* in one place of the config and 300000.0 in another"),
    ({"rope_scaling": {"rope_theta": 3e5}}, "rope_theta is .* in one place of the config and 300000.0 in another"),
    (
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_type is 'linear' in one place of the config and 'default' in another",
    ),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4.0}}, "rope_type is 'linear' in one place"),
    ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "have {'sliding_attention':"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
]


@pytest.mark.parametrize(("changes", "said"), ELSEWHERE)
@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_settings_are_refused_wherever_they_stand(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        load_base(str(write(tmp_path, family, **changes)))


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_settings_are_applied_wherever_they_stand(tmp_path: Path, family: str, place: str) -> None:
    top = CONFIGS[family]["rope_theta"]
    base = load_base(str(write(tmp_path / "theta", family, rope_theta=None, **{place: {"rope_theta": top}})))
    same_states(base, reference(family))
    for n, scaling in enumerate(SCALED):
        whole = {place: {"rope_theta": 3e5, "partial_rotary_factor": 1.0, **scaling}}
        ours = load_base(str(write(tmp_path / str(n), family, rope_theta=None, **whole))).model.rotary
        theirs = new_model(tiny_config(family, vocab_size=VOCAB, rope_parameters={"rope_theta": 3e5, **scaling})).rotary
        assert torch.equal(ours.inverse_F, theirs.inverse_F) and ours.scale == theirs.scale
    scaling = {key: value for key, value in SCALED[1].items() if key != "original_max_position_embeddings"}
    top_level = {place: scaling, "rope_theta": 3e5, "original_max_position_embeddings": 16}
    ours = load_base(str(write(tmp_path / "original", family, **top_level))).model.rotary
    theirs = new_model(tiny_config(family, vocab_size=VOCAB, rope_parameters={"rope_theta": 3e5, **SCALED[1]})).rotary
    assert torch.equal(ours.inverse_F, theirs.inverse_F)


# Families that write in blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", IN_BLOCKS)
def test_the_block_is_read_from_the_config_or_the_releases_own(tmp_path: Path, family: str) -> None:
    key, size = {"fast_dllm_qwen": ("bd_size", 32), "sdar": ("block_size", 4)}[family]
    assert load_base(str(write(tmp_path, family, **{key: 16}))).spec.block == 16
    assert load_base(str(write(tmp_path, family, **{key: None}))).spec.block == size
    prints = {load_base(str(write(tmp_path, family, **{key: n}))).fingerprint for n in (4, 8)}
    assert len(prints) == 2
    for wrong in (0, "32", 8.0, True):
        with pytest.raises(InputError, match=f"block is {wrong!r}; it must be"):
            load_base(str(write(tmp_path, family, **{key: wrong})))


@pytest.mark.parametrize("family", IN_BLOCKS)
def test_a_mask_that_no_file_names_is_the_releases_own(tmp_path: Path, family: str) -> None:
    """MASK is named by the config, else by the tokenizer, else it is the published id, unless a token has that."""
    tokens, ids = {"fast_dllm_qwen": "|<MASK>|", "sdar": "<|MASK|>"}, {"fast_dllm_qwen": 151665, "sdar": 151669}
    with pytest.raises(InputError, match=f"'mask_id': {ids[family]}"):  # a tiny vocabulary has no such row
        load_base(str(write(tmp_path, family, mask_token_id=None)))
    known = replace(KNOWN[family], mask_id=38)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KNOWN, family, known)
        assert load_base(str(tmp_path)).spec.mask_id == 38
        write_dream_tokenizer(tmp_path)
        with pytest.raises(InputError, match="no mask_token_id in config"):  # 38 is <|im_end|> there
            load_base(str(tmp_path))
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        settings["added_tokens_decoder"]["36"]["content"] = settings["mask_token"] = tokens[family]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert load_base(str(tmp_path)).spec.mask_id == 36


@pytest.mark.parametrize(("family", "ends"), [("fast_dllm_qwen", (38,)), ("sdar", (34, 38))])
def test_where_a_text_ends(tmp_path: Path, family: str, ends: tuple[int, ...]) -> None:
    """Fast-dLLM v2 stops at <|im_end|> alone; SDAR also at what generation_config.json names."""
    write(tmp_path, family)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [34, 33]}))
    more = (33,) if family == "sdar" else ()
    assert load_base(str(tmp_path)).spec.end_ids == (END, *more)
    write_dream_tokenizer(tmp_path)
    spec = load_base(str(tmp_path)).spec
    assert (spec.end_ids, spec.bos_id) == ((*ends, *more), BOS)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": None}))  # as Qwen's
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": 34}))
    assert load_base(str(tmp_path)).spec.bos_id == {"fast_dllm_qwen": 34, "sdar": None}[family]  # no end of Fast-dLLM's
    (tmp_path / "generation_config.json").write_text("[")
    if family == "sdar":
        with pytest.raises(InputError, match=r"generation_config\.json is not JSON"):
            load_base(str(tmp_path))


def test_relatives_in_blocks_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for kind in ("llada2_moe", "sdar_moe", "a2d-qwen3"):
        (tmp_path / "config.json").write_text(json.dumps({**SDAR_CONFIG, "model_type": kind}))
        with pytest.raises(InputError, match=rf"'{kind}'; known are dream, llada, fast_dllm_qwen, sdar, .*Another"):
            load_base(str(tmp_path))
    for family, key in (("sdar", "num_experts"), ("sdar", "bd_size"), ("fast_dllm_qwen", "block_size")):
        with pytest.raises(InputError, match=f"has {{'{key}': 8}}: not known here"):
            load_base(str(write(tmp_path, family, **{key: 8})))
    with pytest.raises(InputError, match="the config lacks head_dim"):
        load_base(str(write(tmp_path, "sdar", head_dim=None)))


@pytest.mark.parametrize("family", IN_BLOCKS)
def test_a_gguf_of_a_family_in_blocks_is_refused(tmp_path: Path, family: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", family)
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match=f"'{family}', which has no GGUF form; load the folder of safetensors"):
        load_base(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("family", IN_BLOCKS)
def test_a_checkpoint_in_blocks_decodes_with_a_sampler(tmp_path: Path, family: str) -> None:
    base = load_base(str(write(tmp_path, family, initializer_range=0.3)))  # g's, too
    config = DecodeConfig(max_new_tokens=21, tokens_per_step=4, seed=3)
    out = [decode(b, [[2, 3, 4]], config, sampler=tiny_sampler(b)) for b in (base, reference(family))]
    assert torch.equal(out[0].tokens_BL, out[1].tokens_BL)


# What a config may say: the table of docs/models.md ---------------------------------------------------------------

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
NAMES = {"Dream": "dream", "LLaDA": "llada", "Fast-dLLM v2": "fast_dllm_qwen", "SDAR": "sdar", "all": "all"}
ROWS_OF_KEYS = [
    (NAMES[who], re.findall(r"`([^`]+)`", keys), said)
    for who, keys, said in re.findall(rf"^\| ({'|'.join(NAMES)}) \| (`[^|]*) \| ([^|]*) \|$", DOCS.read_text(), re.M)
]


def tables(family: str) -> tuple[str, ...]:
    """Whose rows count for a family: those in blocks have Dream's keys, too."""
    return ("all", family, "dream") if family in IN_BLOCKS else ("all", family)


def must_of(family: str) -> dict[str, Any]:
    return family_module.LLADA_MUST if family == "llada" else shape.MUST


def documented(family: str, done: str) -> dict[str, str]:
    """Key -> what the table says, of rows that begin with `done`."""
    rows = [row for row in ROWS_OF_KEYS if row[0] in tables(family) and row[2].startswith(done)]
    return {key: said for _, keys, said in rows for key in keys}


@pytest.mark.parametrize("family", ALL)
def test_the_table_of_keys_is_the_one_in_the_code(family: str) -> None:
    must = must_of(family)
    known = {
        "dream": shape.KNOWN, "llada": (*family_module.LLADA_KNOWN, *family_module.LLADA_IGNORED),
        "fast_dllm_qwen": (*shape.KNOWN, "bd_size"), "sdar": (*shape.KNOWN, "block_size", *family_module.SDAR_IGNORED),
    }[family]  # fmt: skip
    assert len(documented(family, "")) == sum(len(keys) for who, keys, _ in ROWS_OF_KEYS if who in tables(family))
    assert documented(family, "").keys() == {*must, *known, *shape.IGNORED}
    said = {key: re.search(r"must be `(.*?)`", text) for key, text in documented(family, "must be").items()}
    values = {key: json.loads(found[1]) for key, found in said.items() if found}
    assert values == {**must, "partial_rotary_factor": 1}


@pytest.mark.parametrize("family", ALL)
def test_every_key_does_what_the_table_says(tmp_path: Path, family: str) -> None:
    must = must_of(family)
    same_states(load_base(str(write(tmp_path, family, **must))), reference(family))
    nothing = {key: ["odd", 7] for key in documented(family, "ignored")}
    same_states(load_base(str(write(tmp_path, family, **nothing))), reference(family))
    for key, value in must.items():
        for other in (not value if isinstance(value, bool) else "other", [value, "other"]):
            with pytest.raises(InputError, match=rf"the config has {{'{key}': .*; the body is built for {{'{key}':"):
                load_base(str(write(tmp_path, family, **{key: other})))
    for key in documented(family, "refused"):
        with pytest.raises(InputError, match=key):
            load_base(str(write(tmp_path, family, **{key: {"bits": 4}})))
    for key in documented(family, "applied"):  # nonsense is noticed in every one of them
        with pytest.raises(InputError):
            load_base(str(write(tmp_path, family, **{key: {"nonsense": 1}})))


@pytest.mark.parametrize("family", ALL)
def test_a_key_that_is_not_in_the_table_is_refused_by_name(tmp_path: Path, family: str) -> None:
    for key in ("logit_scale", "qk_norm", "final_logit_softcapping", "per_layer_config", "embedding_multiplier"):
        with pytest.raises(InputError, match=rf"has {{'{key}': False}}: not known here, so they may change"):
            load_base(str(write(tmp_path, family, **{key: False})))
    same_states(load_base(str(write(tmp_path, family, logit_scale=None, _name_or_path="x"))), reference(family))


@pytest.mark.parametrize("kind", [transformers.LlamaConfig, transformers.Qwen2Config, transformers.Qwen3Config])
def test_all_that_transformers_writes_for_its_own_classes_is_known(kind: Any) -> None:
    body = shape.Shape.of(kind(head_dim=128).to_dict())
    assert (body.hidden_size, body.head_dim) == (4096, 128)


def test_the_config_of_smollm2_on_the_hub_is_known() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3",
        "use_cache": True, "vocab_size": 49152,
    }  # fmt: skip
    assert shape.Shape.of(config).rope == {"rope_theta": 100000, "rope_type": "default"}


@pytest.mark.parametrize("key", ["block_type", "layer_norm_type", "activation_type", "rope"])
def test_what_has_another_default_in_the_published_code_must_be_there(tmp_path: Path, key: str) -> None:
    """Without these, it takes "sequential", "default", "swiglu" and learned positions."""
    write(tmp_path, "llada")
    config = {name: value for name, value in LLADA_CONFIG.items() if name != key}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"the config lacks {key}$"):
        load_base(str(tmp_path))


@pytest.mark.parametrize("key", ["include_qkv_bias", "rope_full_precision"])
def test_switches_are_true_or_false(tmp_path: Path, key: str) -> None:
    with pytest.raises(InputError, match=f"{key} is 'false'; true or false is wanted"):
        load_base(str(write(tmp_path, "llada", **{key: "false"})))


def test_rows_behind_the_vocabulary_of_a_llada_are_no_tokens(tmp_path: Path) -> None:
    base = load_base(str(write(tmp_path, "llada", vocab_size=38)))
    assert (base.spec.vocab_size, base.spec.token_limit) == (VOCAB, 38)


# GGUF (H15) ------------------------------------------------------------------------------------------------------

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GGUF_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def to_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row j of a head's first half and row j of its second half become rows 2j and 2j + 1, one row at a time."""
    out, d = np.empty_like(weight), len(weight) // heads
    for head in range(heads):
        for j in range(d // 2):
            out[head * d + 2 * j], out[head * d + 2 * j + 1] = weight[head * d + j], weight[head * d + d // 2 + j]
    return out


def write_gguf(
    path: Path, family: str, *, pairs: bool | None = None, facts: dict[str, Any] | None = None, parts: int = 1,
    **metadata: Any,
) -> Path:  # fmt: skip
    """A GGUF as llama.cpp's converter writes it: LLaDA's q and k in pairs, Dream's as they are."""
    writer = gguf.GGUFWriter(path, family)
    for key, value in (facts or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{family}.{key}", value)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    facts = {
        "embedding_length": 32, "feed_forward_length": 64, "block_count": 2, "attention.head_count": 4,
        "attention.head_count_kv": {"dream": 2, "llada": 4}[family], "context_length": 64,
    }  # fmt: skip
    for key, value in facts.items():
        writer.add_uint32(f"{family}.{key}", value)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", {"dream": 1e-6, "llada": 1e-5}[family])
    writer.add_float32(f"{family}.rope.freq_base", {"dream": 1e6, "llada": 5e5}[family])
    writer.add_token_list([f"t{n}" for n in range(VOCAB)])
    writer.add_token_types([1] * (VOCAB - 2) + [5] * 2)
    for key in [key for key in metadata if key.startswith("rope.")]:
        (writer.add_uint32 if key.endswith("count") else writer.add_float32)(f"{family}.{key}", metadata.pop(key))
    ids = {"mask_token_id": MASK, "eos_token_id": END, "bos_token_id": BOS, "padding_token_id": END, **metadata}
    shift = ids.pop("shift_logits", None if family == "dream" else False)
    if shift is not None:
        writer.add_bool("diffusion.shift_logits", shift)
    for key, value in ids.items():
        if value is not None:
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
    heads = {"q_proj": 4, "k_proj": facts["attention.head_count_kv"]}
    for name, weight in weights_of(family).items():
        stem, _, kind = name.rpartition(".")
        part, array = stem.split(".")[-1], weight.numpy()
        if part in heads and (family == "llada" if pairs is None else pairs):
            array = to_pairs(array, heads[part])
        short = GGUF_TOP.get(stem) or f"blk.{stem.split('.')[1]}.{GGUF_NAMES[stem.split('.', 2)[2]]}"
        writer.add_tensor(f"{short}.{kind}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_h15_a_gguf_gives_the_states_of_the_safetensors(tmp_path: Path, family: str) -> None:
    base = load_base(str(write_gguf(tmp_path / "m.gguf", family)))
    same_states(base, load_base(str(write(tmp_path / "folder", family))))
    spec = base.spec
    assert (spec.mask_id, spec.end_ids, spec.bos_id, spec.token_limit) == (MASK, (END,), BOS, VOCAB - 2)
    assert base.next_frame == (family == "dream")
    wrong = load_base(str(write_gguf(tmp_path / "wrong.gguf", family, pairs=family == "dream")))
    with pytest.raises(AssertionError):
        same_states(wrong, base, atol=1e-2)


def test_h15_what_a_gguf_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no metadata tokenizer\.ggml\.mask_token_id"):
        load_base(str(write_gguf(tmp_path / "a.gguf", "dream", mask_token_id=None)))
    with pytest.raises(InputError, match=r"shift_logits = True; llada models do not shift"):
        load_base(str(write_gguf(tmp_path / "b.gguf", "llada", shift_logits=True)))
    assert load_base(str(write_gguf(tmp_path / "c.gguf", "dream", shift_logits=False))).next_frame is False
    whole = (tmp_path / "c.gguf").read_bytes()
    (tmp_path / "d.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"d\.gguf is damaged"):
        load_base(str(tmp_path / "d.gguf"))


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_settings_of_a_gguf_are_applied_or_refused(tmp_path: Path, family: str) -> None:
    path = tmp_path / "m.gguf"
    same_states(load_base(str(write_gguf(path, family, **{"rope.dimension_count": 8}))), reference(family))
    with pytest.raises(InputError, match=rf"{{'rope.dimension_count': 4}} of {family}; beside its shape"):
        load_base(str(write_gguf(path, family, **{"rope.dimension_count": 4})))
    for key in ("rope.scaling.factor", "rope.scale_linear"):  # llama.cpp scales by these also without a type
        with pytest.raises(InputError, match=rf"the GGUF says {{'{key}': 4\.0}}"):
            load_base(str(write_gguf(path, family, **{key: 4.0})))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_facts_of_a_gguf_are_the_bodys_own_or_refused(tmp_path: Path, family: str) -> None:
    path = tmp_path / "m.gguf"
    plain = {"attention.key_length": 8, "attention.value_length": 8, "vocab_size": VOCAB, "attention.causal": False}
    same_states(load_base(str(write_gguf(path, family, facts=plain))), reference(family))
    for key, value in {
        "attention.key_length": 16, "attention.value_length": 4, "vocab_size": VOCAB - 1, "attention.causal": True,
        "attention.sliding_window": 8, "logit_scale": 0.5, "final_logit_softcapping": 30.0, "expert_count": 4,
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=rf"the GGUF says {{'{key}|attention.value_length': 8"):
            load_base(str(write_gguf(path, family, facts={**plain, key: value})))
    with pytest.raises(InputError, match="the GGUF is one of 2 parts; merge them first"):
        load_base(str(write_gguf(path, family, parts=2)))


def test_gguf_tensors_stand_one_behind_the_other(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "dream")
    whole, tensors = path.read_bytes(), gguf.GGUFReader(path).tensors
    same = [t for t in tensors if t.name.endswith("ffn_up.weight")]  # of one shape

    def moved(**to: int) -> None:
        """With other offsets, the file otherwise as it was."""
        changed = bytearray(whole)
        for name, value in to.items():
            field = next(t.field for t in tensors if t.name == name.replace("__", "."))
            end = field.offset + sum(part.nbytes for part in field.parts)
            changed[end - 8 : end] = value.to_bytes(8, "little")
        path.write_bytes(changed)

    old = {t.name: int(t.field.parts[-1][0]) for t in tensors}
    one, two = (t.name for t in same)
    for change in (
        {one: old[one] + 1}, {one: old[one] - 32}, {one: old[two]}, {one: old[two], two: old[one]}, {one: 2**63},
    ):  # fmt: skip
        moved(**change)
        with pytest.raises(InputError, match=r"m\.gguf is damaged"):
            load_base(str(path))
    moved(**{one: old[one] + 1})
    with pytest.raises(InputError, match=rf"damaged: the data of {one} should start at byte \d+, not \d+; download"):
        load_base(str(path))
    moved()
    load_base(str(path))


# Where it lives --------------------------------------------------------------------------------------------------


def test_int8_weights_stay_near_and_keep_the_fingerprint(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    plain = load_base(str(write(tmp_path, "dream")))
    small = load_base(str(tmp_path), quantize="int8")
    assert small.fingerprint == plain.fingerprint
    linear = small.model.layers[0].mlp.up_proj.weight
    assert type(linear) is not torch.nn.Parameter or linear.dtype == torch.int8
    state = left_pad(ROWS, mask_id=MASK, pad_id=END)
    error = (small.hidden(state) - plain.hidden(state))[state.real_BL].norm() / plain.hidden(state)[
        state.real_BL
    ].norm()
    assert 1e-5 < error < 0.05
    with pytest.raises(InputError, match="quantize is 'int3'; it must be one of int8, fp8, fp8-dynamic"):
        load_base(str(tmp_path), quantize="int3")


def test_a_device_map_places_the_layers(tmp_path: Path) -> None:
    plain = load_base(str(write(tmp_path, "llada")))
    placed = load_base(str(tmp_path), device_map={"": "cpu"})
    same_states(placed, plain)
    assert placed.fingerprint == plain.fingerprint
    config = DecodeConfig(max_new_tokens=6, tokens_per_step=2)
    results = [decode(base, [[2, 3]], config, decoder="parallel").tokens_BL for base in (plain, placed)]
    assert torch.equal(*results)
    with pytest.raises(InputError, match="device_map is 'everywhere'"):
        load_base(str(tmp_path), device_map="everywhere")
    with pytest.raises(InputError, match="would lie on disk"):
        load_base(str(tmp_path), device_map={"": "disk"})
    with pytest.raises(InputError, match="does not work here"):
        load_base(str(tmp_path), device_map={"": "nowhere"})
    with pytest.raises(InputError, match="is no Hub id; folders have no revisions"):
        load_base(str(tmp_path), revision="main")


# The Hub ---------------------------------------------------------------------------------------------------------


def test_a_hub_id_comes_from_the_cache_when_offline(tmp_path: Path) -> None:
    commit = "0" * 40
    repo = tmp_path / "hub" / "models--some--dream"
    write(repo / "snapshots" / commit, "dream")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    code = (
        "from adjust_dlm import load_base\nfrom adjust_dlm.types import InputError\n"
        "print(load_base('some/dream').spec.name)\n"
        "try: load_base('some/other')\nexcept InputError as error: print(error)\n"
    )
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    first, second = done.stdout.splitlines()
    assert first == "some/dream"
    assert second.startswith("no folder 'some/other' here, and the Hub gave none: LocalEntryNotFoundError")


# Tokenizers ------------------------------------------------------------------------------------------------------

ADDED = {34: "<|endoftext|>", 35: "<|beginoftext|>", 36: "<|mask|>", 37: "<|im_start|>", 38: "<|im_end|>"}


def write_dream_tokenizer(folder: Path) -> None:
    """Files of Dream's layout over a vocabulary of 34 byte-level words: letters, space, merges."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [*"abcdefghijklmnop", *"0123456789", "\u0120", "\u010a", ".", "'", "ab", "\u0120ab", "\u0120a", "cd"]
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(letters)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n\u0120 ab\n\u0120 a\nc d\n")
    decoder = {
        str(n): {"content": word, "special": True, "lstrip": False, "rstrip": False, "normalized": False}
        for n, word in ADDED.items()
    }
    settings = {
        "tokenizer_class": "DreamTokenizer", "added_tokens_decoder": decoder, "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "mask_token": "<|mask|>",
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_tokenizer_is_built_from_vocabulary_and_merges(tmp_path: Path) -> None:
    write_dream_tokenizer(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.encode("ab ab 12") == [30, 31, 26, 17, 18]  # merged, space kept with the word, digits single
    assert tokenizer.encode("<|im_start|>ab<|mask|>") == [37, 30, 36]
    assert tokenizer.decode([30, 31, 26, 17]) == "ab ab 1"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"cls_token": "[C]"}))
    with pytest.raises(InputError, match=r"\[C\].*has id None in its files, but 39 here"):  # no ids are made up
        read_tokenizer(tmp_path)
    for broken in ("[]", '{"added_tokens_decoder": ["a"]}'):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(InputError, match="cannot read the tokenizer"):
            read_tokenizer(tmp_path)
    settings["added_tokens_decoder"]["39"] = settings["added_tokens_decoder"].pop("38")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"<\|im_end\|>.*has id 39 in its files, but 38 here"):
        read_tokenizer(tmp_path)


def test_ids_come_from_the_tokenizer_and_bos_stands_once(tmp_path: Path) -> None:
    write(tmp_path, "dream")
    write_dream_tokenizer(tmp_path)
    base = load_base(str(tmp_path))
    assert (base.spec.bos_id, base.spec.end_ids, base.spec.token_limit) == (35, (34, 38), 39)
    assert base.encode("ab") == [35, 30]
    assert base.encode("<|beginoftext|>ab") == [35, 30]  # not twice
    assert base.encode("ab", chat=True) == [37, 30, 38, 27]
    with pytest.raises(InputError, match=r"mask_token_id 33, the tokenizer's <\|mask\|> is 36"):
        load_base(str(write(tmp_path, "dream", mask_token_id=33)))


@pytest.mark.parametrize("side", ["tokenizer_config.json", "added_tokens.json"])
def test_added_tokens_count_that_only_a_side_file_names(tmp_path: Path, side: str) -> None:
    core = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.save(str(tmp_path / "tokenizer.json"))
    ids = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    table = {str(n): {"content": token, "special": True, "normalized": False} for token, n in ids.items()}

    def wrote(table: dict[str, Any], ids: dict[str, int]) -> Path:
        content = {"added_tokens_decoder": table} if side == "tokenizer_config.json" else ids
        (tmp_path / side).write_text(json.dumps(content))
        return tmp_path / "tokenizer.json"

    text = "<|im_start|>hi<|im_end|>"
    file = wrote(table, ids)
    for tokenizer in (FileTokenizer(file, None), read_tokenizer(tmp_path)):
        got = tokenizer.encode(text, add_special_tokens=False)
        assert got == [257, 71, 72, 258]
        assert tokenizer.decode(got) == text
    if side == "tokenizer_config.json":
        assert FileTokenizer(file, None).decode([257, 71, 72, 258], skip_special_tokens=True) == "hi"
    file = wrote({"300": table["258"]}, {"<|im_end|>": 300})
    with pytest.raises(InputError, match=r"'<\|im_end\|>' has id 300 in the files beside it, which it cannot get here"):
        FileTokenizer(file, None)
    (tmp_path / side).write_text("[1")
    with pytest.raises(InputError, match="cannot read the tokenizer"):
        FileTokenizer(file, None)


def bytes_tokenizer(folder: Path, change: Callable[[Tokenizer], None] | None = None, **files: Any) -> Path:
    """A byte-level tokenizer with the word [A] (256) and the special tokens <e> (257) and <m> (258)."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "[A]"]
    core = Tokenizer(models.BPE({c: n for n, c in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["<e>", "<m>"])
    if change is not None:
        change(core)
    core.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


WIDE = {"content": "<e>", "lstrip": True, "rstrip": True, "special": True, "normalized": False}


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, [71, 72, 220, 257, 220, 58, 32, 60, 87]),
        ({"tokenizer_config": {"additional_special_tokens": ["[A]"]}}, [71, 72, 220, 257, 220, 256, 87]),
        ({"tokenizer_config": {"extra_special_tokens": {"odd": "[A]"}}}, [71, 72, 220, 257, 220, 256, 87]),
        ({"tokenizer_config": {"eos_token": "[A]"}}, [71, 72, 220, 257, 220, 256, 87]),
        ({"special_tokens_map": {"eos_token": {"content": "[A]"}}}, [71, 72, 220, 257, 220, 256, 87]),
        ({"tokenizer_config": {"added_tokens_decoder": {"257": WIDE}}}, [71, 72, 257, 58, 32, 60, 87]),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"257": WIDE}}, "added_tokens": {"[N]": 259}},
            [71, 72, 257, 58, 32, 60, 87],
        ),
    ],
)  # fmt: skip
def test_files_beside_a_vocabulary_count_in_both_readers(tmp_path: Path, files: Any, wanted: list[int]) -> None:
    folder = bytes_tokenizer(tmp_path, **files)
    ours, theirs = FileTokenizer(folder / "tokenizer.json", None), read_tokenizer(folder)
    text = "hi <e> [A]x"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False) == wanted
    for skip in (False, True):
        decoded = [reader.decode(wanted, skip_special_tokens=skip) for reader in (ours, theirs)]
        assert decoded[0] == decoded[1]


def test_truncation_and_padding_of_a_tokenizer_file_are_off(tmp_path: Path) -> None:
    def change(core: Tokenizer) -> None:
        core.enable_truncation(3)
        core.enable_padding(length=20, pad_id=257, pad_token="<e>")

    folder = bytes_tokenizer(tmp_path, change)
    for reader in (FileTokenizer(folder / "tokenizer.json", None), read_tokenizer(folder)):
        assert reader.encode("hi there", add_special_tokens=False) == [71, 72, 220, 83, 71, 68, 81, 68]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_config": {"eos_token": "[B]"}}, r"\[B\]"),
        ({"special_tokens_map": {"additional_special_tokens": ["[B]"]}}, r"\[B\]"),
        ({"tokenizer_config": {"split_special_tokens": True}}, "split_special_tokens is true"),
    ],
)
def test_tokens_without_an_id_and_split_ones_are_refused(tmp_path: Path, files: Any, said: str) -> None:
    folder = bytes_tokenizer(tmp_path, **files)
    for read in (lambda: FileTokenizer(folder / "tokenizer.json", None), lambda: read_tokenizer(folder)):
        with pytest.raises(InputError, match=said):
            read()


def test_a_folder_with_another_kind_of_vocabulary_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(InputError, match=r"has tokenizer\.model alone; write a tokenizer\.json"):
        read_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(InputError, match="cannot read the tokenizer"):
        read_tokenizer(tmp_path)


def test_a_llada_tokenizer_is_read_from_its_own_file(tmp_path: Path) -> None:
    write(tmp_path, "llada", vocab_size=400, embedding_size=VOCAB)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|startoftext|>", "<|mdm_mask|>", "<|eot_id|>"]
    core.train_from_iterator(["ab"], trainers.BpeTrainer(vocab_size=10, special_tokens=special))
    core.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ bos_token if loop.first }}{{ m.content | trim }}<|eot_id|>{% endfor %}"
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": template}))
    base = load_base(str(write(tmp_path, "llada", mask_token_id=2)))
    assert (base.spec.mask_id, base.spec.end_ids, base.spec.bos_id) == (2, (0, 3), 1)
    assert base.encode(" a ", chat=True) == [1, base.tokenizer.get_vocab()["a"], 3]  # the template's own start, once
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"cannot read the tokenizer"):
        load_base(str(tmp_path))


def test_another_folder_may_give_the_tokenizer(tmp_path: Path) -> None:
    write_dream_tokenizer(tmp_path / "words")
    base = load_base(str(write_gguf(tmp_path / "m.gguf", "dream")), tokenizer=str(tmp_path / "words"))
    assert base.decode([30, 31, END, 3]) == "ab ab"
    shutil.rmtree(tmp_path / "words")
    with pytest.raises(InputError, match="there is no tokenizer in"):
        load_base(str(tmp_path / "m.gguf"), tokenizer=str(tmp_path / "words"))
    assert load_base(str(tmp_path / "m.gguf")).tokenizer is None


def test_the_command_line_loads_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from adjust_dlm.cli import main

    folder = str(write(tmp_path, "dream"))
    flags = ["generate", "2 3", "--base", folder, "--decoder", "parallel", "--max-new-tokens", "4", "--json"]
    assert main([*flags, "--temperature", "1", "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    base = load_base(folder)
    config = DecodeConfig(max_new_tokens=4, tokens_per_step=4)
    assert record["tokens"] == decode(base, [[2, 3]], config, decoder="parallel").tokens_BL[0, 2:].tolist()
    assert main(["generate", "a", "--base", "smol", "--device-map", "auto"]) == 2
    assert "bases of kind 'smol' do not take device_map" in capsys.readouterr().err


def test_the_fast_tokenizer_answers_as_dreams_own_class() -> None:
    """Code, emoji, CJK, special tokens, chat template; `fixtures/make_tokenizer.py` says where the answers are from."""
    folder = Path(__file__).parent / "fixtures" / "dream_tokenizer"
    tokenizer, said = read_tokenizer(folder), json.loads((folder / "published.json").read_text())
    for case in said["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert tokenizer(case["text"]).input_ids == case["with_special"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=True) == case["plain"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["full"]
    chats = [
        tokenizer.apply_chat_template(
            said["talk"], tokenize=tokenize, add_generation_prompt=more, **({"return_dict": False} if tokenize else {})
        )
        for tokenize in (False, True)
        for more in (False, True)
    ]
    assert chats == said["chats"]
