"""Published checkpoints: a folder, a GGUF file or a Hub id becomes a base, exactly and without remote code.

The family is recognised by `config.json` (`model_type`) or by the GGUF's architecture. A new transformers family is one
`Family` here; anything else is a base of its own (docs/adding-a-base.md).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.base import BaseSpec, register_base
from adjust_dlm.bases.dream import DREAM
from adjust_dlm.bases.family import Family
from adjust_dlm.bases.layers import Body, Shape
from adjust_dlm.bases.llada import LLADA
from adjust_dlm.bases.placement import DeviceMap, Quantize, place, quantized
from adjust_dlm.bases.tensor_files import Meta, TensorFiles, open_gguf, open_safetensors, unpermute
from adjust_dlm.bases.tokenizers import read_tokenizer
from adjust_dlm.bases.transformer import EMBEDDING, TransformerBase, fingerprint_of, sampled_rows
from adjust_dlm.types import InputError, require

FAMILIES: dict[str, Family] = {"dream": DREAM, "llada": LLADA}
CONFIG, HEAD = "config.json", "lm_head.weight"
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja"]  # what is fetched from the Hub: no code, no pickles
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Opened:
    """A checkpoint before its weights are read. `config` holds a `config.json`'s fields, also for a GGUF."""

    family: Family
    config: Mapping[str, Any]
    shape: Shape
    files: TensorFiles
    published: Mapping[str, str]  # our name -> name in the files
    tied: bool
    next_frame: bool
    rotary_pairs: bool
    bos_id: int | None  # where no tokenizer says it

    def wanted(self, body: Body) -> dict[str, tuple[int, ...]]:
        """Names in the files and the shapes they must have."""
        shapes = {self.published[name]: tuple(tensor.shape) for name, tensor in body.state_dict().items()}
        head = {} if self.tied else {self.published[HEAD]: (self.shape.vocab_size, self.shape.hidden_size)}
        return shapes | head

    def read(self, name: str, device: torch.device) -> Tensor:
        """One of our tensors, in the dtype of the file."""
        tensor = self.files.read(self.published[name], device)
        part = name.split(".")[-2]
        if self.rotary_pairs and part in ("q_proj", "k_proj"):
            shape = self.shape
            tensor = unpermute(tensor, shape.num_attention_heads if part == "q_proj" else shape.num_key_value_heads)
        return tensor


@register_base("checkpoint", "Dream, LLaDA and relatives: a folder, a .gguf file or a Hub id instead of this name")
def load_checkpoint(
    *,
    device: torch.device,
    dtype: torch.dtype,
    source: str | None = None,
    revision: str | None = None,
    tokenizer: str | None = None,
    quantize: Quantize | None = None,
    device_map: DeviceMap | None = None,
) -> TransformerBase:
    """Loads a published checkpoint.

    Args:
        device: where to put it (with a device map: where canvases live).
        dtype: floating type of the weights.
        source: folder with `config.json`, `.gguf` file, or Hub id.
        revision: commit, tag or branch of a Hub id.
        tokenizer: folder of the tokenizer; by default that of the checkpoint. A GGUF has none.
        quantize: "int8" or "fp8": weights of the body's linear layers only (torchao).
        device_map: spread the layers over devices: "auto", or module -> device (accelerate).

    Raises:
        InputError: nothing there, an unknown family, or weights that are not exactly those of the config.
    """
    require(source is not None, "the base 'checkpoint' is loaded by the path or Hub id of its model")
    assert source is not None
    path = _local(source, revision)
    opened = _open_gguf(path) if path.suffix == ".gguf" else _open_folder(path)
    words = read_tokenizer(Path(tokenizer) if tokenizer else path) if tokenizer or path.is_dir() else None
    spec = _spec(opened, words, source)
    body, head_VD, fingerprint = _read(opened, spec.mask_id, device, dtype, device_map)
    if quantize is not None:
        quantized(body, quantize)
    base = opened.family.base(
        body, head_VD, spec, next_frame=opened.next_frame, tokenizer=words, fingerprint=fingerprint
    )
    return place(base, device_map, device) if device_map is not None else base


def _local(source: str, revision: str | None) -> Path:
    """The path itself, or a Hub id's snapshot (offline: the one in the cache)."""
    path = Path(source)
    if path.exists() or _HUB_ID.fullmatch(source) is None or path.suffix == ".gguf":
        require(path.exists(), f"there is no file or folder {source!r}")
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise InputError(f"there is no folder {source!r}, and the Hub gave no such model: {said}") from error


def _open_folder(folder: Path) -> _Opened:
    require((folder / CONFIG).is_file(), f"{folder} is no model: {CONFIG} is missing")
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{folder / CONFIG} is not JSON: {error}") from error
    require(isinstance(config, dict), f"{folder / CONFIG} holds a {type(config).__name__}; an object is wanted")
    family = _family(str(config.get("model_type")), folder)
    shape = family.shape(config)
    # The family's own id: configs of Dream-v0 name the end token as the start.
    bos_id = family.bos_id if family.bos_id < shape.vocab_size else None
    return _Opened(
        family, config, shape, open_safetensors(folder), _published(family, shape), family.tied(config),
        next_frame=family.next_frame, rotary_pairs=False, bos_id=bos_id,
    )  # fmt: skip


def _family(kind: str, where: Path) -> Family:
    family = FAMILIES.get(kind.lower())
    if family is None:
        raise InputError(
            f"{where} is of family {kind!r}; known are {', '.join(FAMILIES)}. Another one is registered in one file: "
            "docs/adding-a-base.md"
        )
    return family


def _published(family: Family, shape: Shape) -> dict[str, str]:
    with torch.device("meta"):
        names = Body(shape).state_dict().keys()
    return {name: family.published(name) for name in names} | {HEAD: family.head}


def _open_gguf(path: Path) -> _Opened:
    meta, files = open_gguf(path)
    family = _family(kind := str(meta.get("general.architecture")), path)
    config = _gguf_config(meta, kind)
    shape = Shape.of(config)
    names = {name: name for name in _published(family, shape)}
    shift = meta.get("diffusion.shift_logits", family.next_frame)
    require(
        bool(shift) == family.next_frame or kind == "dream",
        f"{path} says diffusion.shift_logits = {shift}; {kind} models do not shift",
    )
    return _Opened(
        family, config, shape, files, names, HEAD not in files.shapes,
        next_frame=bool(shift), rotary_pairs=family.rotary_pairs, bos_id=config["bos_token_id"],
    )  # fmt: skip


def _gguf_config(meta: Meta, kind: str) -> dict[str, Any]:
    """A GGUF's metadata under the names of a `config.json`."""

    def fact(key: str) -> Any:
        require(key in meta, f"the GGUF has no metadata {key}")
        return meta[key]

    words: list[str] = fact("tokenizer.ggml.tokens")
    scaling = meta.get(f"{kind}.rope.scaling.type")
    require(scaling in (None, "none"), f"the GGUF scales its rotary embedding ({scaling}); not supported")
    heads = fact(f"{kind}.attention.head_count")
    return {
        "model_type": "qwen2" if kind == "dream" else "llama",
        "hidden_size": fact(f"{kind}.embedding_length"),
        "intermediate_size": fact(f"{kind}.feed_forward_length"),
        "num_hidden_layers": fact(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(f"{kind}.attention.head_count_kv", heads),
        "max_position_embeddings": fact(f"{kind}.context_length"),
        "rms_norm_eps": fact(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": fact(f"{kind}.rope.freq_base"),
        "vocab_size": len(words),
        "mask_token_id": fact("tokenizer.ggml.mask_token_id"),
        "eos_token_id": [
            meta[f"tokenizer.ggml.{key}_token_id"] for key in ("eos", "eot") if f"tokenizer.ggml.{key}_token_id" in meta
        ],
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "token_limit": _last_used(meta.get("tokenizer.ggml.token_type"), len(words)),
    }


_UNUSED = 5  # GGUF's type of rows that are no token


def _last_used(types: list[int] | None, words: int) -> int:
    return max((n + 1 for n, kind in enumerate(types or []) if kind != _UNUSED), default=words)


def _read(
    opened: _Opened, mask_id: int, device: torch.device, dtype: torch.dtype, spread: DeviceMap | None
) -> tuple[Body, Tensor, str]:
    """(body, head, fingerprint): every tensor is read once, straight to its place; a spread model first to the CPU."""
    with torch.device("meta"):
        body = Body(opened.shape)
    opened.files.check(opened.wanted(body), ignored=lambda name: _harmless(name, opened))
    first = torch.device("cpu") if spread is not None else device
    weights, rows = {}, {}
    for name in [*body.state_dict(), *([] if opened.tied else [HEAD])]:
        tensor = opened.read(name, device if name == HEAD else first)
        rows[name] = sampled_rows(tensor, mask_id if name == EMBEDDING else None)
        if name == EMBEDDING and opened.tied:
            rows[HEAD] = sampled_rows(tensor)
        weights[name] = tensor.to(dtype)
    head_VD = weights.pop(HEAD, None)
    body.load_state_dict(weights, assign=True)
    body.rotary.to(first)
    fingerprint = fingerprint_of(opened.shape, rows)
    return body, body.embed_tokens.weight if head_VD is None else head_VD, fingerprint


def _harmless(name: str, opened: _Opened) -> bool:
    """Buffers that old releases saved, and the head of a tied model (the embedding again)."""
    return name.endswith("rotary_emb.inv_freq") or (opened.tied and name == opened.published[HEAD])


def _spec(opened: _Opened, tokenizer: Any, name: str) -> BaseSpec:
    """Ids from the tokenizer where there is one, else from the config."""
    family, config, vocab = opened.family, opened.config, opened.shape.vocab_size
    known = tokenizer.get_vocab() if tokenizer is not None else {}
    mask = _mask_id(family, config, known, name)
    ends = [known[token] for token in family.end_tokens if token in known] or _ids(config.get("eos_token_id"))
    require(bool(ends), f"{name}: neither the tokenizer nor config.json (eos_token_id) names a token that ends a text")
    limit = max(known.values()) + 1 if known else config.get("token_limit", vocab)
    ids = {"mask": mask, "end": max(ends), "last": limit - 1}
    wrong = {what: token for what, token in ids.items() if not 0 <= token < vocab}
    require(not wrong, f"{name}: token ids {wrong} lie outside the model's {vocab} rows; another model's tokenizer?")
    pad = config.get("pad_token_id")
    return BaseSpec(
        name=name, mask_id=mask, end_ids=tuple(ends), pad_id=ends[0] if pad is None else pad,
        bos_id=opened.bos_id if tokenizer is None else tokenizer.bos_token_id, vocab_size=vocab, token_limit=limit,
        context=opened.shape.max_position_embeddings, order=family.order, order_on=family.order_on,
    )  # fmt: skip


def _mask_id(family: Family, config: Mapping[str, Any], known: Mapping[str, int], name: str) -> int:
    found = {config.get("mask_token_id"), known.get(family.mask_token)} - {None}
    require(bool(found), f"{name} has no mask_token_id in config.json and no {family.mask_token} in its tokenizer")
    require(len(found) == 1, f"{name}: config.json says mask_token_id {config.get('mask_token_id')}, the tokenizer's "
            f"{family.mask_token} is {known.get(family.mask_token)}")  # fmt: skip
    return int(found.pop())  # type: ignore[arg-type]


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
