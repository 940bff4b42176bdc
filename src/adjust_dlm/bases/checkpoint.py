"""Published checkpoints: a folder, a GGUF file or a Hub id becomes a base, exactly and without remote code.

The family is recognised by `config.json` (`model_type`) or by the GGUF's architecture. A new transformers family is one
`Family` here; anything else is a base of its own (docs/adding-a-base.md).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.base import BaseSpec, register_base
from adjust_dlm.bases.dream import DREAM
from adjust_dlm.bases.family import Family
from adjust_dlm.bases.hub import PATTERNS, is_hub_id, snapshot
from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.llada import LLADA
from adjust_dlm.bases.placement import DeviceMap, Quantize, check_placement, place, quantize_body
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.tensor_files import Meta, TensorFiles, open_gguf, open_safetensors, unpermute
from adjust_dlm.bases.tokenizers import read_tokenizer
from adjust_dlm.bases.transformer import EMBEDDING, TransformerBase, fingerprint_of, sampled_rows
from adjust_dlm.types import InputError, require

FAMILIES: dict[str, Family] = {"dream": DREAM, "llada": LLADA}
CONFIG, HEAD = "config.json", "lm_head.weight"
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
        quantize: "int8", "fp8" or "fp8-dynamic": see `placement.quantize_body`.
        device_map: spread the layers over devices: "auto", or module -> device (accelerate).

    Raises:
        InputError: nothing there, an unknown family, or weights that are not exactly those of the config.
    """
    require(source is not None, "the base 'checkpoint' is loaded by the path or Hub id of its model")
    assert source is not None
    check_placement(quantize, device_map)
    path = _local(source, revision)
    opened = _open_gguf(path) if path.suffix == ".gguf" else _open_folder(path)
    words = read_tokenizer(Path(tokenizer) if tokenizer else path) if tokenizer or path.is_dir() else None
    require(tokenizer is None or words is not None, f"there is no tokenizer in {tokenizer!r}")
    spec = _spec(opened, words, source)
    body, head_VD, fingerprint = _read(opened, spec.mask_id, device, dtype, device_map)
    base = opened.family.base(
        body, head_VD, spec, next_frame=opened.next_frame, tokenizer=words, fingerprint=fingerprint
    )
    quantize_body(base, quantize)
    return place(base, device_map, device) if device_map is not None else base


def _local(source: str, revision: str | None) -> Path:
    """The path itself, or a Hub id's snapshot (offline: the one in the cache)."""
    path = Path(source)
    if path.exists() or not is_hub_id(source) or path.suffix == ".gguf":
        require(path.exists(), f"there is no file or folder {source!r}")
        require(revision is None, f"revision is {revision!r}, but {source!r} is no Hub id; folders have no revisions")
        return path
    return snapshot(source, PATTERNS, revision=revision)


def _open_folder(folder: Path) -> _Opened:
    require((folder / CONFIG).is_file(), f"{folder} is no model: {CONFIG} is missing")
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{folder / CONFIG} is not JSON: {error}") from error
    require(isinstance(config, dict), f"{folder / CONFIG} holds a {type(config).__name__}; an object is wanted")
    family = _family(str(config.get("model_type")), folder)
    shape = family.shape(config)
    require(
        not config.get("quantization_config"),
        f"{folder} is quantized ({CONFIG} has quantization_config); load the unquantized checkpoint with quantize=",
    )
    tied = family.tied(config)
    require(isinstance(tied, bool), f"{folder / CONFIG} says {tied!r} on tied embeddings; true or false is wanted")
    return _Opened(
        family, config, shape, open_safetensors(folder), _published(family, shape), tied,
        next_frame=family.next_frame, rotary_pairs=False,
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
    shape = family.gguf_shape(config)
    names = {name: name for name in _published(family, shape)}
    shift = meta.get("diffusion.shift_logits", family.next_frame)
    require(
        bool(shift) == family.next_frame or kind == "dream",
        f"{path} says diffusion.shift_logits = {shift}; {kind} models do not shift",
    )
    return _Opened(
        family, config, shape, files, names, HEAD not in files.shapes,
        next_frame=bool(shift), rotary_pairs=family.rotary_pairs,
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
    if opened.tied and opened.published[HEAD] in opened.files.shapes:
        same = torch.equal(sampled_rows(opened.read(HEAD, first)), rows[HEAD])
        require(same, f"{opened.files.where} has a head that is not the embedding, though its config ties the two")
    head_VD = weights.pop(HEAD, None)
    body.load_state_dict(weights, assign=True)
    body.rotary.to(first)
    fingerprint = fingerprint_of(opened.shape, rows)
    return body, body.embed_tokens.weight if head_VD is None else head_VD, fingerprint


def _harmless(name: str, opened: _Opened) -> bool:
    """Buffers that old releases saved, and the head of a tied model (the embedding again)."""
    return name.endswith("rotary_emb.inv_freq") or (opened.tied and name == opened.published[HEAD])


def _spec(opened: _Opened, tokenizer: Any, name: str) -> BaseSpec:
    """Ids from the tokenizer where there is one, else from the config; all are rows of the model."""
    family, config, vocab = opened.family, opened.config, opened.shape.vocab_size
    known = tokenizer.get_vocab() if tokenizer is not None else {}
    mask = _mask_id(family, config, known, name)
    ends = [known[token] for token in family.end_tokens if token in known] or _end_ids(config)
    require(bool(ends), f"{name}: neither the tokenizer nor config.json (eos_token_id) names a token that ends a text")
    pad = _id(config, "pad_token_id")
    limit = max(known.values()) + 1 if known else config.get("token_limit", vocab)
    bos = _bos_id(opened, tokenizer, ends)
    ids = {"mask": mask, "pad": ends[0] if pad is None else pad, "start": bos, "last": limit - 1}
    ids |= {f"end {n}": token for n, token in enumerate(ends)}
    wrong = {what: token for what, token in ids.items() if token is not None and not 0 <= token < vocab}
    require(not wrong, f"{name}: token ids {wrong} lie outside the model's {vocab} rows; another model's tokenizer?")
    require(mask not in ends, f"{name}: id {mask} is both MASK and an end of texts")
    return BaseSpec(
        name=name, mask_id=mask, end_ids=tuple(ends), pad_id=ends[0] if pad is None else pad, bos_id=bos,
        vocab_size=vocab, token_limit=limit, context=opened.shape.max_position_embeddings, order=family.order,
        order_on=family.order_on,
    )  # fmt: skip


def _mask_id(family: Family, config: Mapping[str, Any], known: Mapping[str, int], name: str) -> int:
    said, has = _id(config, "mask_token_id"), known.get(family.mask_token)
    require(
        said is not None or has is not None,
        f"{name} has no mask_token_id in config.json and no {family.mask_token} in its tokenizer",
    )
    require(
        said is None or has is None or said == has,
        f"{name}: config.json says mask_token_id {said}, the tokenizer's {family.mask_token} is {has}",
    )
    return said if said is not None else int(has)  # type: ignore[arg-type]


def _bos_id(opened: _Opened, tokenizer: Any, ends: list[int]) -> int | None:
    """The tokenizer's start token; without a tokenizer the file's, unless that is an end, or the family's own.

    Configs of Dream-v0 name the end token there.
    """
    if tokenizer is not None:
        return None if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)
    said, own = _id(opened.config, "bos_token_id"), opened.family.bos_id
    if said is not None and said not in ends:
        return said
    return own if own < opened.shape.vocab_size and own not in ends else None


def _end_ids(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    many = value if isinstance(value, list) else [value]
    found = [_id({"eos_token_id": token}, "eos_token_id") for token in many]
    return [token for token in found if token is not None]


def _id(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    good = value is None or (isinstance(value, int) and not isinstance(value, bool))
    require(good, f"{key} is {value!r}; a token id is wanted")
    return value
