"""What sets one published family of masked diffusion transformers apart from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases.base import BaseSpec
from adjust_dlm.bases.layers import new_model
from adjust_dlm.bases.shape import Shape
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.types import OrderOn, OrderRule


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

    def config(self, **changes: Any) -> Any:
        """The published model's config, as one of transformers, with changes."""
        import transformers

        return getattr(transformers, self.plain_class)(**{"tie_word_embeddings": False, **self.numbers, **changes})

    def make(
        self, config: Any, *, model: Any = None, head_weight: Tensor | None = None, tokenizer: Any = None, **ids: Any
    ) -> Any:
        """A base from a config of transformers.

        Args:
            config: the body's shape, and the context.
            model: the body; random weights unless it is given.
            head_weight: [V, D]; random unless it is given.
            tokenizer: optional.
            ids: `mask_id`, `end_ids`, `bos_id` and `token_limit` where they are not the published model's.
        """
        model = model if model is not None else new_model(self.plain_shape(config.to_dict()))
        if head_weight is None:
            head_weight = torch.empty(config.vocab_size, config.hidden_size).normal_(std=0.02)
        vocab = config.vocab_size
        ids = {"mask_id": self.mask_id, "end_ids": self.end_ids, "bos_id": self.bos_id, "token_limit": vocab} | ids
        spec = BaseSpec(
            name=self.name, pad_id=ids["end_ids"][0], vocab_size=vocab, context=config.max_position_embeddings,
            order=self.order, order_on=self.order_on, **ids,
        )  # fmt: skip
        return self.base(model, head_weight, spec, next_frame=self.next_frame, tokenizer=tokenizer)
