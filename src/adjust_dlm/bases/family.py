"""What sets one published family of masked diffusion transformers apart from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.types import OrderOn, OrderRule


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of a family; its checkpoints differ in numbers only.

    Attributes:
        base: the class of its bases.
        next_frame: state i-1 scores token i.
        order: rule for the next position.
        order_on: what that rule looks at.
        shape: the content of `config.json` -> the body's shape; raises InputError for what the body cannot do.
        gguf_shape: the same for a GGUF's metadata under the names of a Llama config.
        tied: the content of `config.json` -> whether head and embedding are one matrix.
        published: our name of a body's tensor -> its name in the family's checkpoints.
        head: name of the head in the family's checkpoints.
        mask_token: the mask in the family's tokenizers.
        end_tokens: tokens that end a text, as far as a tokenizer has them; the first is the filler.
        bos_id: start token where no tokenizer says it (configs of the family may name another).
        rotary_pairs: whether its GGUF files keep q and k in rotary pairs (2i, 2i + 1).
    """

    base: type[TransformerBase]
    next_frame: bool
    order: OrderRule
    order_on: OrderOn
    shape: Callable[[Mapping[str, Any]], Shape]
    gguf_shape: Callable[[Mapping[str, Any]], Shape]
    tied: Callable[[Mapping[str, Any]], Any]
    published: Callable[[str], str]
    head: str
    mask_token: str
    end_tokens: tuple[str, ...]
    bos_id: int
    rotary_pairs: bool
