"""Dream: Qwen2 run bidirectionally, state i-1 scores token i, entropy order on processed logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.base import BaseSpec
from adjust_dlm.bases.family import Family
from adjust_dlm.bases.layers import new_model
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase


class DreamBase(TransformerBase):
    """Dream-7B, Dream-Coder, DiffuCoder: same tensors as Qwen2."""

    def reference_schedule(self, masked: int, steps: int) -> list[int]:
        """Dream's own counts: int(left * (1 - s/t)) on linspace(1, 1e-3), the last step takes the rest."""
        times = torch.linspace(1, 1e-3, steps + 1)
        left, out = masked, []
        for i in range(steps):
            share = 1 - float(times[i + 1] / times[i])
            out.append(left if i == steps - 1 else int(left * share))
            left -= out[-1]
        return out


def dream_config(**changes: Any) -> Any:
    """The Qwen2 config of Dream-v0-7B (28 layers, D=3584, V=152064), with changes."""
    from transformers import Qwen2Config

    fields: dict[str, Any] = {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    return Qwen2Config(**{**fields, **changes})


def dream_base(
    config: Any | None = None, *, mask_id: int = 151666, end_ids: tuple[int, ...] = (151643,), bos_id: int = 151665,
    token_limit: int | None = None, model: Any = None, head_weight: Tensor | None = None, tokenizer: Any = None,
) -> DreamBase:  # fmt: skip
    """Builds the family from a config (random weights unless a model and a head are given)."""
    config = config or dream_config()
    model = model if model is not None else new_model(config)
    if head_weight is None:
        head_weight = torch.empty(config.vocab_size, config.hidden_size).normal_(std=0.02)
    spec = BaseSpec(
        name="dream", mask_id=mask_id, end_ids=end_ids, pad_id=end_ids[0], bos_id=bos_id,
        vocab_size=config.vocab_size, token_limit=token_limit or config.vocab_size,
        context=config.max_position_embeddings, order="entropy", order_on="processed",
    )  # fmt: skip
    return DreamBase(model, head_weight, spec, next_frame=True, tokenizer=tokenizer)


def _shape(config: Mapping[str, Any]) -> Shape:
    return Shape.of({**config, "model_type": "qwen2"})


DREAM = Family(
    base=DreamBase, next_frame=True, order="entropy", order_on="processed", shape=_shape,
    gguf_shape=_shape,
    tied=lambda config: config.get("tie_word_embeddings", False), published=lambda name: f"model.{name}",
    head="lm_head.weight", mask_token="<|mask|>", end_tokens=("<|endoftext|>", "<|im_end|>"), bos_id=151665,
    rotary_pairs=False,
)  # fmt: skip
