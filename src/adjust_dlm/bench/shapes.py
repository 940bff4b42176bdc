"""Bases with random weights of a real model's shape: they cost what the real ones cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adjust_dlm.types import SamplerConfig, require
from adjust_dlm.words import known

if TYPE_CHECKING:
    import torch

    from adjust_dlm.bases.transformer import TransformerBase
    from adjust_dlm.sampler import Sampler

# Its family, changes of the family's config, and special tokens where they are not the family's.
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dream-7b-shape": ("dream", {}, {}),
    "llada-8b-shape": ("llada", {}, {}),
    # The default model's size with wide weights: few near ties, so that two ways to compute it give the same tokens.
    "small-shape": (
        "dream",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 49152, "initializer_range": 0.1},
        {"mask_id": 16, "bos_id": 1, "end_ids": (2,)},
    ),
    "tiny-shape": (
        "dream",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 1152},
        {"mask_id": 95, "bos_id": 93, "end_ids": (94,)},
    ),
}  # fmt: skip


def random_base(
    name: str, *, device: torch.device, dtype: torch.dtype, head_std: float = 0.02, block: int | None = None,
    **changes: Any,
) -> TransformerBase:  # fmt: skip
    """Weights are drawn where they stay, with a fixed seed; `changes` are of the config (`num_hidden_layers=2`).

    Raises:
        InputError: no such shape.
    """
    require(name in SHAPES, f"unknown shape {name!r}; {known(name, SHAPES)}")
    import torch

    from adjust_dlm.bases.family import dream_base, dream_config, llada_base, llada_config

    family, own, ids = SHAPES[name]
    make_config, build = {"dream": (dream_config, dream_base), "llada": (llada_config, llada_base)}[family]
    config, before = make_config(**own | changes), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            # A family whose body differs from its config (LLaDA's turns q and k in fp32) makes it itself.
            head = torch.empty(config.vocab_size, config.hidden_size).normal_(std=head_std)
            base = build(config, head_weight=head, block=block, **ids)
    finally:
        torch.set_default_dtype(before)
    base.model.to(device)  # the rotary frequencies
    return base


def random_sampler(base: TransformerBase, config: SamplerConfig | None = None) -> Sampler:
    """A fresh g in the base's dtype, beside it."""
    import torch

    from adjust_dlm.sampler import Sampler

    with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []), base.device:
        torch.manual_seed(1)
        return Sampler(base, config).to(base.device, base.dtype).eval().requires_grad_(False)
