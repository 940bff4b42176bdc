"""Dream: Qwen2 run bidirectionally, state i-1 scores token i, entropy order on processed logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adjust_dlm.bases.family import Family
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


def _shape(config: Mapping[str, Any]) -> Shape:
    return Shape.of({**config, "model_type": "qwen2"})


DREAM = Family(
    name="dream", base=DreamBase, next_frame=True, order="entropy", order_on="processed", shape=_shape,
    plain_shape=_shape, tied=("tie_word_embeddings", False), published=lambda name: f"model.{name}",
    head="lm_head.weight", mask_token="<|mask|>", end_tokens=("<|endoftext|>", "<|im_end|>"), mask_id=151666,
    end_ids=(151643,), bos_id=151665, rotary_pairs=False, plain_class="Qwen2Config",
    numbers={
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
)  # fmt: skip
dream_base, dream_config = DREAM.make, DREAM.config
