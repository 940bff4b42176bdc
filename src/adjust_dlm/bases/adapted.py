"""A base that `adjust adapt` made: an autoregressive model plus a LoRA adapter and a mask embedding.

Folder: `base.json` (facts), `adapter_config.json` and `adapter_model.safetensors` (peft's own format),
`mask_embedding.safetensors`. The merged weights are cached once as bf16, so a second start reads one file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.base import BaseSpec, register_base
from adjust_dlm.bases.layers import bidirectional, read_model, see_both_ways
from adjust_dlm.bases.smol_files import cache_dir, smol_ar_dir
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.types import InputError, require

ADAPTER, MASK_EMBEDDING, FACTS = "adapter_model.safetensors", "mask_embedding.safetensors", "base.json"


def ar_folder(source: str) -> Path:
    """Folder of the autoregressive model: `smol` (fetched on first use) or a path."""
    if source == "smol":
        return smol_ar_dir()
    require(Path(source, "config.json").is_file(), f"no autoregressive model at {source!r} (config.json is missing)")
    return Path(source)


def load_ar(source: str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """(causal LM, tokenizer) of an autoregressive source: the judge, the AR partner, what `adapt` starts from."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = ar_folder(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot load the autoregressive model {folder}: {str(error).splitlines()[0]}") from error
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    loaded: Any = model  # transformers types `.to` for quantized models only
    return loaded.to(device).eval().requires_grad_(False), tokenizer


def file_digest(*paths: Path) -> str:
    """sha256 over the bytes of files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


@register_base("adapted", "a folder written by `adjust adapt` (give its path instead of this name)")
def load_adapted(
    *, device: torch.device, dtype: torch.dtype, path: Path | None = None, name: str | None = None
) -> TransformerBase:
    """Loads an adapted base: merged weights from the cache, or merges and caches them first.

    Raises:
        InputError: a file of the folder is missing, unreadable, or belongs to another model.
    """
    require(path is not None, "the base 'adapted' is loaded by the path of its folder")
    assert path is not None
    facts = _facts(path)
    digest = file_digest(path / FACTS, path / ADAPTER, path / MASK_EMBEDDING)
    merged = cache_dir() / "merged" / digest
    if not (merged / "model.safetensors").is_file():
        _merge(path, facts, merged)
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    model = read_model(merged, dtype=dtype, device=device)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ar_folder(facts["ar"]), local_files_only=True)
    if facts.get("chat_template"):
        tokenizer.chat_template = facts["chat_template"]
    return wrap_adapted(model, facts, tokenizer=tokenizer, fingerprint=digest, name=name or str(path))


def wrap_adapted(
    model: Any, facts: dict[str, Any], *, tokenizer: Any, fingerprint: str | None, name: str
) -> TransformerBase:
    """The base around a tied-head body whose adapter is merged (or, while training, live)."""
    model.config = bidirectional(model.config)
    for layer in model.layers:
        layer.self_attn.config = model.config
    see_both_ways(model)
    spec = BaseSpec(
        name=name, mask_id=facts["mask_id"], end_ids=tuple(facts["end_ids"]), pad_id=facts["pad_id"],
        bos_id=facts["bos_id"], vocab_size=model.config.vocab_size,
        token_limit=facts.get("token_limit", model.config.vocab_size), context=facts["context"],
        order=facts["order"], order_on=facts["order_on"],
    )  # fmt: skip
    head: Tensor = model.embed_tokens.weight
    return TransformerBase(model, head, spec, next_frame=True, tokenizer=tokenizer, fingerprint=fingerprint)


def _facts(path: Path) -> dict[str, Any]:
    for file in (FACTS, ADAPTER, MASK_EMBEDDING):
        require((path / file).is_file(), f"{path} is not an adapted base: {file} is missing")
    try:
        facts: dict[str, Any] = json.loads((path / FACTS).read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{path / FACTS} is not JSON: {error}") from error
    wanted = {"ar", "mask_id", "end_ids", "pad_id", "bos_id", "context", "order", "order_on"}
    require(wanted <= facts.keys(), f"{path / FACTS} lacks {sorted(wanted - facts.keys())}")
    return facts


def _merge(path: Path, facts: dict[str, Any], merged: Path) -> None:
    """AR weights + adapter, in fp32 on the CPU, rounded to bf16; appears whole or not at all."""
    from peft import PeftModel
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    model, _ = load_ar(facts["ar"])
    try:
        body = PeftModel.from_pretrained(model, str(path)).merge_and_unload().model
        row = load_file(path / MASK_EMBEDDING)["mask_embedding"]
    except (OSError, RuntimeError, SafetensorError, KeyError) as error:
        raise InputError(f"cannot read the adapter in {path}: {str(error).splitlines()[0]}") from error
    with torch.no_grad():
        body.embed_tokens.weight[facts["mask_id"]] = row.float()
    merged.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=merged.parent))
    try:
        body.to(torch.bfloat16).save_pretrained(part)
        os.replace(part, merged)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        if not (merged / "model.safetensors").is_file():  # lost a race with another process: its folder is as good
            raise
