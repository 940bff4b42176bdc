"""LLaDA: Llama run bidirectionally, no shift, confidence of the drawn token on un-tempered logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.base import BaseSpec
from adjust_dlm.bases.family import Family
from adjust_dlm.bases.layers import new_model
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.types import require


class LladaBase(TransformerBase):
    """LLaDA-8B, LLaDA-1.5. The published step counts are `Base.reference_schedule` itself."""


def llada_config(**changes: Any) -> Any:
    """The Llama config of LLaDA-8B (32 layers, D=4096, V=126464), with changes."""
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
    model = model if model is not None else new_model(replace(Shape.of(config), rotate_fp32=True))
    if head_weight is None:
        head_weight = torch.empty(config.vocab_size, config.hidden_size).normal_(std=0.02)
    spec = BaseSpec(
        name="llada", mask_id=mask_id, end_ids=end_ids, pad_id=end_ids[0], bos_id=bos_id,
        vocab_size=config.vocab_size, token_limit=token_limit or config.vocab_size,
        context=config.max_position_embeddings, order="confidence", order_on="raw",
    )  # fmt: skip
    return LladaBase(model, head_weight, spec, next_frame=False, tokenizer=tokenizer)


# What the body is built for; a checkpoint that says otherwise is refused.
_PLAIN = {
    "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True, "alibi": False,
    "attention_layer_norm": False, "input_emb_norm": False, "scale_logits": False, "include_bias": False,
    "clip_qkv": None, "multi_query_attention": None,
}  # fmt: skip
_FIELDS = {
    "hidden_size": "d_model", "intermediate_size": "mlp_hidden_size", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_sequence_length", "rope_theta": "rope_theta",
}  # fmt: skip
_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm", "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj", "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
}  # fmt: skip


def _shape(config: Mapping[str, Any]) -> Shape:
    """LLaDA's config keeps the names of the code it grew from."""
    odd = {key: config[key] for key, plain in _PLAIN.items() if config.get(key, plain) not in (plain, None, False)}
    odd |= {"rope": config["rope"]} if config.get("rope", True) is False else {}
    require(not odd, f"this LLaDA has {odd}; the body is built for { ({key: _PLAIN[key] for key in odd}) }")
    needed = ("d_model", "n_layers", "n_heads", "mlp_hidden_size")
    missing = [theirs for theirs in needed if config.get(theirs) is None]
    require(not missing, f"the config lacks {', '.join(missing)}")
    facts = {"rms_norm_eps": 1e-5} | {ours: config[theirs] for ours, theirs in _FIELDS.items() if theirs in config}
    vocab = config.get("embedding_size") or config.get("vocab_size")
    bias = bool(config.get("include_qkv_bias", False))
    fp32 = bool(config.get("rope_full_precision", True))
    return replace(Shape.of({"model_type": "llama", "vocab_size": vocab, **facts}), qkv_bias=bias, rotate_fp32=fp32)


def _published(name: str) -> str:
    """`layers.3.mlp.up_proj.weight` -> `model.transformer.blocks.3.up_proj.weight`."""
    if not name.startswith("layers."):
        return "model.transformer." + {"embed_tokens.weight": "wte.weight", "norm.weight": "ln_f.weight"}[name]
    _, number, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"model.transformer.blocks.{number}.{_NAMES[module]}.{kind}"


LLADA = Family(
    base=LladaBase, next_frame=False, order="confidence", order_on="raw", shape=_shape,
    gguf_shape=lambda facts: replace(Shape.of({**facts, "model_type": "llama"}), rotate_fp32=True),
    tied=lambda config: config.get("weight_tying", True), published=_published,
    head="model.transformer.ff_out.weight", mask_token="<|mdm_mask|>", end_tokens=("<|endoftext|>", "<|eot_id|>"),
    bos_id=126080, rotary_pairs=True,
)  # fmt: skip
