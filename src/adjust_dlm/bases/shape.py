"""The shape of a body, from any config of its families, every value checked by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adjust_dlm.types import require, require_count

_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
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


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a body is built from: names and values of a family's `config.json`.

    Attributes:
        model_type: llama or qwen2.
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
        rotate_fp32: turn q and k in fp32 whatever their dtype (LLaDA does).
        block: S of a block-diffusion body (see `bases.blocks`); None: every column sees all.
        initializer_range: standard deviation of fresh weights.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    rope: dict[str, Any]
    initializer_range: float
    rotate_fp32: bool = False
    block: int | None = None

    def __post_init__(self) -> None:
        """Checks every value by name: configs come from strangers."""
        for name in _WHOLE:
            value = getattr(self, name)
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(good, f"{name} is {value!r}; it must be a whole number >= 1")
        numbers = {"rms_norm_eps": self.rms_norm_eps, "initializer_range": self.initializer_range, **self.rope}
        for name in sorted(numbers.keys() - {"rope_type", "truncate"}):
            require(_positive(numbers[name]), f"{name} is {numbers[name]!r}; it must be a finite number above 0")
        require_count("block", self.block, 1, optional=True)
        heads, kv = self.num_attention_heads, self.num_key_value_heads
        require(heads % kv == 0, f"num_key_value_heads is {kv}; it must divide the {heads} heads")
        require(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}; rotary pairs need an even one")

    @classmethod
    def of(cls, config: Any, block: int | None = None) -> Shape:
        """The shape in a transformers config, in the content of a `config.json`, or itself; `block` is not in these.

        Raises:
            InputError: another family, a value that makes no sense, or a form of attention, activation or rotary
                scaling that is not built here.
        """
        if isinstance(config, Shape):
            return config
        facts: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        kind = str(facts.get("model_type"))
        require(kind in ("llama", "qwen2"), f"model_type is {kind!r}; known are llama and qwen2")
        _check_plain(facts)
        heads, bias = facts["num_attention_heads"], bool(facts.get("attention_bias", False))
        kv = facts.get("num_key_value_heads")
        return cls(
            model_type=kind, **{name: facts[name] for name in _NEEDED},
            num_key_value_heads=heads if kv is None else kv, head_dim=_head_dim(facts),
            max_position_embeddings=facts.get("max_position_embeddings", {"llama": 2048, "qwen2": 32768}[kind]),
            rms_norm_eps=facts.get("rms_norm_eps", 1e-6), qkv_bias=bias or kind == "qwen2",
            output_bias=bias and kind == "llama", mlp_bias=bool(facts.get("mlp_bias", False)) and kind == "llama",
            rope=_rope(facts), initializer_range=facts.get("initializer_range", 0.02), block=block,
        )  # fmt: skip


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _check_plain(facts: Mapping[str, Any]) -> None:
    """Refuses what the body is not built for, and configs without the fields that have no default."""
    act = facts.get("hidden_act", "silu")
    require(act == "silu", f"hidden_act is {act!r}; the body is built with silu")
    require(not facts.get("use_sliding_window"), "use_sliding_window is true; the body attends to everything")
    lost = [name for name in _NEEDED if name not in facts]
    require(not lost, f"the config lacks {', '.join(lost)}")


def _head_dim(facts: Mapping[str, Any]) -> Any:
    width, heads, given = facts["hidden_size"], facts["num_attention_heads"], facts.get("head_dim")
    countable = isinstance(width, int) and isinstance(heads, int) and heads > 0
    return given if given is not None else width // heads if countable else 0  # 0: an earlier check says more


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
