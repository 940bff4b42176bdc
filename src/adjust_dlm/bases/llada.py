"""LLaDA: Llama run bidirectionally, no shift, confidence of the drawn token on un-tempered logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.base import BaseSpec
from adjust_dlm.bases.layers import new_model
from adjust_dlm.bases.transformer import TransformerBase


class LladaBase(TransformerBase):
    """LLaDA-8B, LLaDA-1.5. The published step counts are `Base.reference_schedule` itself."""


def llada_config(**changes: Any) -> Any:
    """The Llama config of LLaDA-8B (REFERENCE: 32 layers, D=4096, V=126464), with changes."""
    from transformers import LlamaConfig

    fields: dict[str, Any] = {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 126464, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }  # fmt: skip
    return LlamaConfig(**{**fields, **changes})


def llada_base(
    config: Any | None = None, *, mask_id: int = 126336, end_ids: tuple[int, ...] = (126081, 126348),
    bos_id: int = 126080, token_limit: int | None = None, model: Any = None, head_weight: Tensor | None = None,
    tokenizer: Any = None,
) -> LladaBase:  # fmt: skip
    """Builds the family from a config (random weights unless a model and a head are given)."""
    config = config or llada_config()
    model = model if model is not None else new_model(config)
    if head_weight is None:
        head_weight = torch.empty(config.vocab_size, config.hidden_size).normal_(std=0.02)
    spec = BaseSpec(
        name="llada", mask_id=mask_id, end_ids=end_ids, pad_id=end_ids[0], bos_id=bos_id,
        vocab_size=config.vocab_size, token_limit=token_limit or config.vocab_size,
        context=config.max_position_embeddings, order="confidence", order_on="raw",
    )  # fmt: skip
    return LladaBase(model, head_weight, spec, next_frame=False, tokenizer=tokenizer)
