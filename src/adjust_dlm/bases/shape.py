"""The shape of a body, from any config of its families, every value checked by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adjust_dlm.checks import Checked, Count, Positive, require, require_value

_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_CONTEXT = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}  # of a config that does not say
_WHOLE = (*_NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")
# Forms of rotary scaling whose frequencies do not depend on the canvas, and what they need.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_ORIGINAL = "original_max_position_embeddings"
ROPE_TOP = ("rope_theta", "partial_rotary_factor", _ORIGINAL)  # rotary settings beside the dictionaries
ROPE_DICTS = ("rope_scaling", "rope_parameters")
# Of a `config.json`: what the body is built for, and what changes no state. docs/models.md has the table (tested).
MUST = {
    "hidden_act": "silu", "is_causal": False, "layer_types": "full_attention",
    "rope_interleaved": False, "use_mrope": False, "use_sliding_window": False,
}  # fmt: skip
IDS = ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id")
KNOWN = (
    *_WHOLE, "model_type", "rms_norm_eps", "initializer_range", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "quantization_config", *ROPE_TOP, *ROPE_DICTS, *IDS,
    "sliding_window", "max_window_layers", "pretraining_tp",  # without effect where `MUST` holds
)  # fmt: skip
IGNORED = (
    "architectures", "attention_dropout", "auto_map", "chunk_size_feed_forward", "decoder_start_token_id",
    "do_sample", "dtype", "id2label", "is_encoder_decoder", "is_llama_config", "label2id", "max_length",
    "max_new_tokens", "min_length", "num_beams", "num_labels", "output_attentions", "output_hidden_states",
    "problem_type", "repetition_penalty", "return_dict", "sep_token_id", "task_specific_params", "temperature",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "transformers.js_config", "transformers_version", "use_cache",
)  # fmt: skip


def check_keys(config: Mapping[str, Any], must: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises InputError for another value than `must` has, and for a key that is not known: it may change states."""
    said = {key: value if isinstance(value, list) else [value] for key, value in config.items() if key in must}
    odd = {key: config[key] for key in said if any(value not in (None, must[key]) for value in said[key])}
    require(not odd, f"the config has {odd}; the body is built for { ({key: must[key] for key in odd}) }")
    names = {key for key in config.keys() - {*must, *known, *IGNORED} if config[key] is not None}
    new = {key: config[key] for key in sorted(names) if not key.startswith("_")}
    why = "not known here, so they may change what the model computes; delete from a copy of the file what does not"
    require(not new, f"the config has {new}: {why}")


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A switch of a config; InputError for what is neither true, false nor null."""
    value = config.get(key)
    require(value in (None, True, False), f"{key} is {value!r}; true or false is wanted")
    return default if value is None else bool(value)


@dataclass(frozen=True, kw_only=True)
class Shape(Checked):
    """What a body is built from: names and values of a family's `config.json`.

    Attributes:
        model_type: llama, qwen2 or qwen3.
        hidden_size: D.
        intermediate_size: width of the MLP.
        num_hidden_layers: layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of a head.
        vocab_size: V.
        max_position_embeddings: the context the family was trained for.
        rms_norm_eps: of every norm.
        qkv_bias, output_bias, mlp_bias: which projections have a bias.
        rope: rotary settings, `rope_theta` and `rope_type` among them.
        qk_norm: every head of q and k has an RMSNorm before it is turned.
        rotate_fp32: turn q and k in fp32 whatever their dtype (LLaDA does).
        block: S of a block-diffusion body (see `bases.blocks`); None: every column sees all.
        causal: a column sees nothing right of it, not even of its block.
        lora_rank: of adapters that columns with MASK alone have (`bases.mask_lora`); None: there are none.
        initializer_range: standard deviation of fresh weights.
    """

    model_type: str
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    vocab_size: Count
    max_position_embeddings: Count
    rms_norm_eps: Positive
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    rope: dict[str, Any]
    initializer_range: Positive
    qk_norm: bool = False
    rotate_fp32: bool = False
    block: Count | None = None
    causal: bool = False
    lora_rank: Count | None = None

    def __post_init__(self) -> None:
        """Checks every value by name: configs come from strangers."""
        super().__post_init__()
        require(not self.causal or self.block is not None, "causal is true; it is about columns of a block: give block")
        alone = self.causal or self.lora_rank is None
        require(alone, f"lora_rank is {self.lora_rank}; adapters of masks alone are for causal blocks")
        for name in sorted(self.rope.keys() - {"rope_type", "truncate"}):
            require_value(name, self.rope[name], Positive)
        heads, kv = self.num_attention_heads, self.num_key_value_heads
        require(heads % kv == 0, f"num_key_value_heads is {kv}; it must divide the {heads} heads")
        require(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}; rotary pairs need an even one")

    @property
    def sees(self) -> int | None:
        """How many columns see each other both ways: a block, one, or all (None)."""
        return 1 if self.causal else self.block

    @classmethod
    def of(cls, config: Any, block: int | None = None, *, causal: bool = False) -> Shape:
        """The shape in a transformers config, in the content of a `config.json` (without block and causal), or itself.

        Raises:
            InputError: another family, a value that makes no sense, a form of attention, activation or rotary scaling
                that is not built here, or a key that is not known here.
        """
        if isinstance(config, Shape):
            return config
        facts: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        kind = str(facts.get("model_type"))
        require(kind in _CONTEXT, f"model_type is {kind!r}; known are {', '.join(_CONTEXT)}")
        check_keys(facts, MUST, KNOWN)
        lost = [name for name in _NEEDED if name not in facts]
        lost += ["head_dim"] * (kind == "qwen3" and facts.get("head_dim") is None)  # 128 by default there, whatever D
        require(not lost, f"the config lacks {', '.join(lost)}")
        heads, bias = facts["num_attention_heads"], flag(facts, "attention_bias")
        kv, width = facts.get("num_key_value_heads"), facts["hidden_size"]
        countable = isinstance(width, int) and isinstance(heads, int) and heads > 0  # else an earlier check says more
        head = facts["head_dim"] if facts.get("head_dim") is not None else width // heads if countable else 0
        return cls(
            model_type=kind, **{name: facts[name] for name in _NEEDED},
            num_key_value_heads=heads if kv is None else kv, head_dim=head,
            max_position_embeddings=facts.get("max_position_embeddings", _CONTEXT[kind]),
            rms_norm_eps=facts.get("rms_norm_eps", 1e-6), qkv_bias=bias or kind == "qwen2",
            output_bias=bias and kind != "qwen2", mlp_bias=flag(facts, "mlp_bias") and kind == "llama",
            qk_norm=kind == "qwen3", rope=_rope(facts),
            initializer_range=facts.get("initializer_range", 0.02), block=block, causal=causal,
        )  # fmt: skip


def _rope(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 5 writes them, or as older files do; a setting in two places must be the same."""
    places = [{key: facts.get(key) for key in ROPE_TOP}, *(facts.get(name) or {} for name in ROPE_DICTS)]
    odd = [place for place in places if not isinstance(place, Mapping)]
    require(not odd, f"the rotary settings are {odd[:1]}; an object is wanted")
    rope: dict[str, Any] = {}
    for key, value in ((key, value) for place in places for key, value in place.items() if value is not None):
        key = "rope_type" if key == "type" else key
        same = rope.setdefault(key, value) == value
        require(same, f"{key} is {rope[key]!r} in one place of the config and {value!r} in another; say it once")
    part = rope.pop("partial_rotary_factor", 1)
    require(part == 1, f"partial_rotary_factor is {part!r}; the body turns whole heads")
    rope.setdefault("rope_theta", facts.get("rope_theta", 10000.0))
    kind = rope.setdefault("rope_type", "default")
    require(kind in tuple(_ROPE_NEEDS), f"rope_type is {kind!r}; known are {', '.join(_ROPE_NEEDS)}")
    lost = [key for key in _ROPE_NEEDS[kind] if key not in rope]
    require(not lost, f"rotary scaling of type {kind} lacks {', '.join(lost)}")
    known = {"rope_type", "rope_theta", _ORIGINAL, *_ROPE_NEEDS[kind], *(_YARN if kind == "yarn" else ())}
    more = {key: value for key, value in rope.items() if key not in known}
    require(not more, f"the rotary settings have {more}; one rotary of type {kind} has none")
    return rope
