"""Published checkpoints: a folder, a GGUF file or a Hub id becomes a base, exactly and without remote code.

The family is recognised by `config.json` (`model_type`) or by the GGUF's architecture. A new transformers family is one
`Family` (bases/family.py); anything else is a base of its own (docs/adding-a-base.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.autoregressive import FAMILIES as AUTOREGRESSIVE
from adjust_dlm.bases.autoregressive import autoregressive_base, is_autoregressive, load_ar
from adjust_dlm.bases.base import BaseSpec, register_base
from adjust_dlm.bases.family import FAMILIES, Family
from adjust_dlm.bases.layers import Body
from adjust_dlm.bases.placement import place, quantize_body
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.tensor_files import (
    HEAD,
    Meta,
    TensorFiles,
    body_names,
    check_finite,
    check_shapes,
    gguf_config,
    gguf_names,
    open_gguf,
    open_safetensors,
    unpaired,
)
from adjust_dlm.bases.tokenizers import read_tokenizer
from adjust_dlm.bases.transformer import EMBEDDING, TransformerBase, fingerprint_of, sampled_rows
from adjust_dlm.hub import PATTERNS, local, read_json
from adjust_dlm.types import DeviceMap, InputError, Quantize, check_placement, require

CONFIG, GENERATION = "config.json", "generation_config.json"


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

    def read(self, name: str, device: torch.device) -> Tensor:
        """One of our tensors, in the dtype of the file."""
        tensor = self.files.read(self.published[name], device)
        return unpaired(name, tensor, self.shape) if self.rotary_pairs else tensor


@register_base(
    "checkpoint",
    "Dream, LLaDA, Fast-dLLM v2, SDAR, and autoregressive models: a folder, .gguf file or Hub id instead of this name",
)
def load_checkpoint(
    *, device: torch.device, dtype: torch.dtype, source: str = "", revision: str | None = None,
    tokenizer: str | None = None, quantize: Quantize | None = None, device_map: DeviceMap | None = None,
) -> TransformerBase:  # fmt: skip
    """Loads a published checkpoint; an autoregressive model becomes a base with blocks of one token.

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
    require(source != "", "the base 'checkpoint' is loaded by the path or Hub id of its model")
    check_placement(quantize, device_map)
    path = local(source, PATTERNS, revision=revision)
    if is_autoregressive(path):
        given = [
            name for name, value in {"device_map": device_map, "tokenizer": tokenizer}.items() if value is not None
        ]
        require(not given, f"{source} is an autoregressive model, which takes no {' and no '.join(given)}")
        _require_plain(path, read_json(path / CONFIG))
        base = autoregressive_base(*load_ar(str(path), device=device, dtype=dtype), name=source)
        check_finite(path, base.model.state_dict())
        quantize_body(base, quantize)
        return base
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


def _open_folder(folder: Path) -> _Opened:
    require((folder / CONFIG).is_file(), f"{folder} is no model: {CONFIG} is missing")
    config = read_json(folder / CONFIG)
    family = _family(str(config.get("model_type")), folder)
    _require_plain(folder, config)
    shape = family.shape(config)
    if family.stops and (folder / GENERATION).is_file():
        config["stops"] = _ids(read_json(folder / GENERATION), "eos_token_id")
    tied = config.get(*family.tied)
    require(isinstance(tied, bool), f"{folder / CONFIG} says {tied!r} on tied embeddings; true or false is wanted")
    names = {name: family.published(name) for name in body_names(shape)} | {HEAD: family.head}
    return _Opened(
        family, config, shape, open_safetensors(folder), names, tied,
        next_frame=family.next_frame, rotary_pairs=False,
    )  # fmt: skip


def _require_plain(folder: Path, config: Mapping[str, Any]) -> None:
    require(
        not config.get("quantization_config"),
        f"{folder} is quantized ({CONFIG} has quantization_config); load the unquantized checkpoint with quantize=",
    )


def _family(kind: str, where: Path) -> Family:
    family = FAMILIES.get(kind.lower())
    if family is None:
        raise InputError(
            f"{where} is of family {kind!r}; known are {', '.join(FAMILIES)}, and folders of autoregressive "
            f"{', '.join(AUTOREGRESSIVE)} (architectures has a ...ForCausalLM). Another one is registered in one file: "
            "docs/adding-a-base.md"
        )
    return family


def _open_gguf(path: Path) -> _Opened:
    meta, files = open_gguf(path)
    family = _family(kind := str(meta.get("general.architecture")), path)
    require(
        family.block is None, f"{path} is of family {kind!r}, which has no GGUF form; load the folder of safetensors"
    )
    facts = gguf_config(meta, kind)
    shape, config = family.plain_shape(facts), facts | _gguf_ids(meta)
    shift = meta.get("diffusion.shift_logits", family.next_frame)
    require(
        bool(shift) == family.next_frame or kind == "dream",
        f"{path} says diffusion.shift_logits = {shift}; {kind} models do not shift",
    )
    names = gguf_names(shape)
    return _Opened(
        family, config, shape, files, names, names[HEAD] not in files.shapes,
        next_frame=bool(shift), rotary_pairs=family.rotary_pairs,
    )  # fmt: skip


def _gguf_ids(meta: Meta) -> dict[str, Any]:
    """Special tokens of a GGUF's metadata, under the names of a `config.json`."""
    ids = {key: meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("mask", "bos", "eos", "eot", "padding")}
    types, words = meta.get("tokenizer.ggml.token_type") or [], len(meta["tokenizer.ggml.tokens"])
    require(ids["mask"] is not None, "the GGUF has no metadata tokenizer.ggml.mask_token_id")
    return {
        "mask_token_id": ids["mask"],
        "eos_token_id": [token for token in (ids["eos"], ids["eot"]) if token is not None],
        "bos_token_id": ids["bos"],
        "pad_token_id": ids["padding"],
        "token_limit": max((n + 1 for n, kind in enumerate(types) if kind != _UNUSED), default=words),
    }


_UNUSED = 5  # GGUF's type of rows that are no token


def _read(
    opened: _Opened, mask_id: int, device: torch.device, dtype: torch.dtype, spread: DeviceMap | None
) -> tuple[Body, Tensor, str]:
    """(body, head, fingerprint): every tensor is read once, straight to its place; a spread model first to the CPU."""
    shape, files, published = opened.shape, opened.files, opened.published
    with torch.device("meta"):
        body = Body(shape)
    wanted = {name: tuple(tensor.shape) for name, tensor in body.state_dict().items()}
    if not opened.tied:
        wanted[HEAD] = (shape.vocab_size, shape.hidden_size)
    # Beside them buffers that old releases saved, and the head of a tied model (the embedding again).
    harmless = [name for name in files.shapes if name.endswith("rotary_emb.inv_freq")]
    harmless += [published[HEAD]] if opened.tied else []
    found = {name: size for name, size in files.shapes.items() if name not in harmless}
    check_shapes(files.where, found, {published[name]: size for name, size in wanted.items()})
    first = torch.device("cpu") if spread is not None else device
    weights, rows = {}, {}
    for name in wanted:
        tensor = opened.read(name, device if name == HEAD else first)
        rows[name] = sampled_rows(tensor, mask_id if name == EMBEDDING else None)
        if name == EMBEDDING and opened.tied:
            rows[HEAD] = sampled_rows(tensor)
            if published[HEAD] in files.shapes:
                head = opened.read(HEAD, first)
                same = head.shape == tensor.shape and bool((head == tensor).all())  # also across dtypes
                require(same, f"{files.where} has a head that is not the embedding, though its config ties the two")
        weights[name] = tensor.to(dtype)
        check_finite(files.where, {published[name]: weights[name]})
    head_VD = weights.pop(HEAD, None)
    body.load_state_dict(weights, assign=True)
    body.rotary.to(first)
    return body, body.embed_tokens.weight if head_VD is None else head_VD, fingerprint_of(shape, rows)


def _spec(opened: _Opened, tokenizer: Any, name: str) -> BaseSpec:
    """Ids from the tokenizer where there is one, else from the config; all are rows of the model."""
    family, vocab = opened.family, opened.shape.vocab_size
    said = {what: _ids(opened.config, f"{what}_token_id") for what in ("mask", "eos", "pad", "bos")}
    known = tokenizer.get_vocab() if tokenizer is not None else {}
    masks = [*said["mask"], *(known[token] for token in [family.mask_token] if token in known)]
    if family.block is not None and not masks and family.mask_id not in known.values():
        masks = [family.mask_id]
    require(bool(masks), f"{name} has no mask_token_id in config.json and no {family.mask_token} in its tokenizer")
    require(
        all(mask == masks[0] for mask in masks),
        f"{name}: config.json says mask_token_id {masks[0]}, the tokenizer's {family.mask_token} is {masks[-1]}",
    )
    ends = [known[token] for token in family.end_tokens if token in known] or said["eos"]
    ends += [token for token in opened.config.get("stops", []) if token not in ends]
    require(bool(ends), f"{name}: neither the tokenizer nor config.json (eos_token_id) names a token that ends a text")
    pad = (said["pad"] or ends)[0]
    words = min(vocab, opened.config.get("vocab_size") or vocab)  # LLaDA's matrices may have more rows
    limit = max(known.values()) + 1 if known else opened.config.get("token_limit", words)
    # Configs of Dream-v0 name the end token as the start, which is not believed; Qwen's tokenizers name none.
    starts = [*said["bos"], *([family.bos_id] if tokenizer is None and family.bos_id < vocab else [])]
    bos = None if tokenizer is None else tokenizer.bos_token_id
    bos = next((i for i in starts if i not in ends), None) if bos is None else bos
    return BaseSpec(
        name=name, mask_id=masks[0], end_ids=tuple(ends), pad_id=pad, bos_id=bos, vocab_size=vocab, token_limit=limit,
        context=opened.shape.max_position_embeddings, order=family.order, order_on=family.order_on,
        block=opened.shape.block,
    )  # fmt: skip


def _ids(config: Mapping[str, Any], key: str) -> list[int]:
    """The ids under a key: one, several or none."""
    value = config.get(key)
    return [i for i in (value if isinstance(value, list) else [value]) if i is not None]
