"""What sets one published family of masked diffusion transformers apart from another.

Dream is Qwen2 run bidirectionally; state i-1 scores token i. LLaDA is Llama run bidirectionally, without a shift.
Fast-dLLM v2 is Qwen2 in blocks, shifted. SDAR is Qwen3 in blocks, without a shift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.base import BaseSpec
from adjust_dlm.bases.layers import new_model
from adjust_dlm.bases.shape import IDS, ROPE_DICTS, ROPE_TOP, Shape, check_keys, flag
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.types import OrderOn, OrderRule, require


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of a family; its checkpoints differ in numbers only.

    Attributes:
        name: as in a `config.json` (`model_type`), in small letters, and in a GGUF.
        base: the class of its bases.
        next_frame: state i-1 scores token i.
        order: rule for the next position.
        order_on: what that rule looks at.
        shape: the content of `config.json` -> the body's shape; raises InputError for what the body cannot do.
        plain_shape: the same for facts under the names of a Qwen2 or Llama config: a GGUF's, or one of transformers.
        tied: key of `config.json` that says whether head and embedding are one matrix, and what holds without it.
        published: our name of a body's tensor -> its name in the family's checkpoints.
        head: name of the head in the family's checkpoints.
        mask_token: the mask in the family's tokenizers.
        end_tokens: tokens that end a text, as far as a tokenizer has them; the first is the filler.
        mask_id, end_ids, bos_id: of the published models. What a checkpoint says comes before them.
        rotary_pairs: whether its GGUF files keep q and k in rotary pairs (2i, 2i + 1).
        plain_class: the class of transformers for configs under those names.
        numbers: what such a config holds for the published model.
        block: of a family that writes in blocks, the key of S in `config.json`, and S without it. MASK may be missing
            there, too, and there is no GGUF form.
        stops: `generation_config.json` names ends of texts, too.
    """

    name: str
    base: type[TransformerBase]
    next_frame: bool
    order: OrderRule
    order_on: OrderOn
    shape: Callable[[Mapping[str, Any]], Shape]
    plain_shape: Callable[[Mapping[str, Any]], Shape]
    tied: tuple[str, bool]
    published: Callable[[str], str]
    head: str
    mask_token: str
    end_tokens: tuple[str, ...]
    mask_id: int
    end_ids: tuple[int, ...]
    bos_id: int
    rotary_pairs: bool
    plain_class: str
    numbers: Mapping[str, Any]
    block: tuple[str, int] | None = None
    stops: bool = False

    def config(self, **changes: Any) -> Any:
        """The published model's config, as one of transformers, with changes."""
        import transformers

        return getattr(transformers, self.plain_class)(**{"tie_word_embeddings": False, **self.numbers, **changes})

    def make(
        self, config: Any, *, model: Any = None, head_weight: Tensor | None = None, tokenizer: Any = None,
        block: int | None = None, **ids: Any,
    ) -> Any:  # fmt: skip
        """A base from a config of transformers; body and head [V, D] have random weights unless they are given.

        `block` is S of a base that writes in blocks (see `bases.blocks`), where it is not the family's own; a given
        body must have it too. `mask_id`, `end_ids`, `bos_id` and `token_limit` may differ from the published model's.
        """
        block = self.block[1] if block is None and self.block is not None else block
        shape = replace(self.plain_shape(config.to_dict()), block=block)
        model = model if model is not None else new_model(shape)
        if head_weight is None:
            head_weight = torch.empty(config.vocab_size, config.hidden_size).normal_(std=0.02)
        vocab = config.vocab_size
        bos = self.bos_id if self.bos_id < vocab else None
        ids = {"mask_id": self.mask_id, "end_ids": self.end_ids, "bos_id": bos, "token_limit": vocab} | ids
        spec = BaseSpec(
            name=self.name, pad_id=ids["end_ids"][0], vocab_size=vocab, context=config.max_position_embeddings,
            order=self.order, order_on=self.order_on, block=block, **ids,
        )  # fmt: skip
        return self.base(model, head_weight, spec, next_frame=self.next_frame, tokenizer=tokenizer)


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


def _dream_shape(config: Mapping[str, Any]) -> Shape:
    return Shape.of({**config, "model_type": "qwen2"})


DREAM = Family(
    name="dream", base=DreamBase, next_frame=True, order="entropy", order_on="processed", shape=_dream_shape,
    plain_shape=_dream_shape, tied=("tie_word_embeddings", False), published=lambda name: f"model.{name}",
    head="lm_head.weight", mask_token="<|mask|>", end_tokens=("<|endoftext|>", "<|im_end|>"), mask_id=151666,
    end_ids=(151643,), bos_id=151665, rotary_pairs=False, plain_class="Qwen2Config",
    numbers={
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
)  # fmt: skip


class LladaBase(TransformerBase):
    """LLaDA-8B, LLaDA-1.5. The published step counts are `Base.reference_schedule` itself."""


# What the body is built for, and what changes no state.
LLADA_MUST = {
    "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True,  # must be there
    "alibi": False, "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1,
    "clip_qkv": False, "include_bias": False, "input_emb_norm": False, "layer_norm_with_affine": True,
    "multi_query_attention": False, "scale_logits": False,
}  # fmt: skip
LLADA_IGNORED = (
    "alibi_bias_max", "attention_layer_norm_with_affine", "embedding_dropout", "flash_attention", "init_cutoff_factor",
    "init_device", "init_fn", "init_std", "mlp_ratio", "precision", "residual_dropout", "tie_word_embeddings",
)  # fmt: skip
_FIELDS = {
    "hidden_size": "d_model", "intermediate_size": "mlp_hidden_size", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",  # the config must have all of these
    "num_key_value_heads": "n_kv_heads", "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_sequence_length", **{key: key for key in (*ROPE_TOP, *ROPE_DICTS)},
}  # fmt: skip
LLADA_KNOWN = (
    *_FIELDS.values(), "model_type", "vocab_size", "embedding_size", "include_qkv_bias", "rope_full_precision",
    "weight_tying", "quantization_config", *IDS,
)  # fmt: skip
_NAMES = {
    "embed_tokens": "wte", "norm": "ln_f", "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
}  # fmt: skip


def _llada_shape(config: Mapping[str, Any]) -> Shape:
    """LLaDA's config keeps the names of the code it grew from."""
    check_keys(config, LLADA_MUST, (*LLADA_KNOWN, *LLADA_IGNORED))
    needed = (*list(_FIELDS.values())[:4], *list(LLADA_MUST)[:4])
    missing = [theirs for theirs in needed if config.get(theirs) is None]
    require(not missing, f"the config lacks {', '.join(missing)}")
    facts = {"rms_norm_eps": 1e-5, "max_position_embeddings": 1024}
    facts |= {ours: config[theirs] for ours, theirs in _FIELDS.items() if theirs in config}
    words = config.get("vocab_size")
    require(words is None or type(words) is int, f"vocab_size is {words!r}; a whole number is wanted")
    shape = _plain_shape({**facts, "vocab_size": config.get("embedding_size") or words})
    bias, precise = flag(config, "include_qkv_bias"), flag(config, "rope_full_precision", True)
    return replace(shape, qkv_bias=bias, rotate_fp32=precise)


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
    name="llada", base=LladaBase, next_frame=False, order="confidence", order_on="raw", shape=_llada_shape,
    plain_shape=_plain_shape, tied=("weight_tying", True), published=_published,
    head="model.transformer.ff_out.weight", mask_token="<|mdm_mask|>", end_tokens=("<|endoftext|>", "<|eot_id|>"),
    mask_id=126336, end_ids=(126081, 126348), bos_id=126080, rotary_pairs=True, plain_class="LlamaConfig",
    numbers={
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 126464, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
)  # fmt: skip


def _block_shape(config: Mapping[str, Any], key: str, size: int, ignored: tuple[str, ...] = (), **body: Any) -> Shape:
    """Qwen's shape, and S, which Qwen's configs do not have."""
    given = config.get(key)
    plain = {name: value for name, value in config.items() if name not in (key, *ignored)}
    return replace(Shape.of({**plain, **body}), block=size if given is None else given)


# Both releases order positions by the probability of the token drawn there. At T > 0 such a text does not follow the
# joint law, so `verified` and the divergence would have none; entropy is a function of the canvas.
FAST_DLLM = Family(
    name="fast_dllm_qwen", base=TransformerBase, next_frame=True, order="entropy", order_on="processed",
    shape=lambda config: _block_shape(config, "bd_size", 32, model_type="qwen2"), plain_shape=_dream_shape,
    tied=("tie_word_embeddings", False), published=lambda name: f"model.{name}", head="lm_head.weight",
    mask_token="|<MASK>|", end_tokens=("<|im_end|>",), mask_id=151665, end_ids=(151645,), bos_id=151643,
    rotary_pairs=False, plain_class="Qwen2Config", block=("bd_size", 32),
    numbers={**DREAM.numbers, "max_position_embeddings": 32768},
)  # fmt: skip
SDAR_IGNORED = (
    "attn_implementation", "debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep",
)  # fmt: skip
SDAR = Family(
    name="sdar", base=TransformerBase, next_frame=False, order="entropy", order_on="processed",
    shape=lambda config: _block_shape(config, "block_size", 4, SDAR_IGNORED, model_type="qwen3"),
    plain_shape=Shape.of, tied=("tie_word_embeddings", False), published=lambda name: f"model.{name}",
    head="lm_head.weight", mask_token="<|MASK|>", end_tokens=("<|endoftext|>", "<|im_end|>"), mask_id=151669,
    end_ids=(151643, 151645), bos_id=151643, rotary_pairs=False, plain_class="Qwen3Config", block=("block_size", 4),
    stops=True,
    numbers={
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
)  # fmt: skip
FAMILIES = {family.name: family for family in (DREAM, LLADA, FAST_DLLM, SDAR)}
dream_base, dream_config, llada_base, llada_config = DREAM.make, DREAM.config, LLADA.make, LLADA.config
