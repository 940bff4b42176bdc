"""LLaDA: Llama run bidirectionally, no shift, confidence of the drawn token on un-tempered logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adjust_dlm.bases.family import Family
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.types import require


class LladaBase(TransformerBase):
    """LLaDA-8B, LLaDA-1.5. The published step counts are `Base.reference_schedule` itself."""


# What the body is built for; a checkpoint that says otherwise is refused. None stands for false, too.
_PLAIN = {
    "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True, "alibi": None,
    "attention_layer_norm": None, "input_emb_norm": None, "scale_logits": None, "include_bias": None,
    "clip_qkv": None, "multi_query_attention": None,
}  # fmt: skip
_FIELDS = {
    "hidden_size": "d_model", "intermediate_size": "mlp_hidden_size", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",  # the config must have all of these
    "num_key_value_heads": "n_kv_heads", "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_sequence_length", "rope_theta": "rope_theta",
}  # fmt: skip
_NAMES = {
    "embed_tokens": "wte", "norm": "ln_f", "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
}  # fmt: skip


def _shape(config: Mapping[str, Any]) -> Shape:
    """LLaDA's config keeps the names of the code it grew from."""
    odd = {key: config[key] for key, plain in _PLAIN.items() if (config.get(key, plain) or None) != plain}
    require(not odd, f"this LLaDA has {odd}; the body is built for { ({key: _PLAIN[key] for key in odd}) }")
    missing = [theirs for theirs in tuple(_FIELDS.values())[:4] if config.get(theirs) is None]
    require(not missing, f"the config lacks {', '.join(missing)}")
    facts = {"rms_norm_eps": 1e-5} | {ours: config[theirs] for ours, theirs in _FIELDS.items() if theirs in config}
    vocab = config.get("embedding_size") or config.get("vocab_size")
    return replace(
        _plain_shape({**facts, "vocab_size": vocab}), qkv_bias=bool(config.get("include_qkv_bias", False)),
        rotate_fp32=bool(config.get("rope_full_precision", True)),
    )  # fmt: skip


def _plain_shape(facts: Mapping[str, Any]) -> Shape:
    return replace(Shape.of({**facts, "model_type": "llama"}), rotate_fp32=True)


def _published(name: str) -> str:
    """`layers.3.mlp.up_proj.weight` -> `model.transformer.blocks.3.up_proj.weight`."""
    stem, kind = name.rsplit(".", 1)
    layer, module = "", stem
    if stem.startswith("layers."):
        _, number, module = stem.split(".", 2)
        layer = f"blocks.{number}."
    return f"model.transformer.{layer}{_NAMES[module]}.{kind}"


LLADA = Family(
    name="llada", base=LladaBase, next_frame=False, order="confidence", order_on="raw", shape=_shape,
    plain_shape=_plain_shape, tied=("weight_tying", True), published=_published,
    head="model.transformer.ff_out.weight", mask_token="<|mdm_mask|>", end_tokens=("<|endoftext|>", "<|eot_id|>"),
    mask_id=126336, end_ids=(126081, 126348), bos_id=126080, rotary_pairs=True, plain_class="LlamaConfig",
    numbers={
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 126464, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
)  # fmt: skip
llada_base, llada_config = LLADA.make, LLADA.config
