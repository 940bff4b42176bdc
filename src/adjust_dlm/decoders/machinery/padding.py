"""Prompts of any lengths as one batch."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.bases import BaseSpec
from adjust_dlm.types import is_id, require


def left_padded(spec: BaseSpec, prompts: list[list[int]], new: list[int]) -> tuple[Tensor, Tensor]:
    """Ids with masks behind them, and which of them are real: [B, L] on the CPU."""
    require(len(new) == len(prompts), f"{len(new)} lengths for {len(prompts)} prompts; give one each")
    given: list[Any] = prompts
    flat = [prompt for prompt in given if not isinstance(prompt, Sized)]
    require(not flat, f"{flat[:1]} among the prompts; each is a list of token ids")
    long, masks = max(zip(map(len, prompts), new, strict=True), key=sum)
    width = long + masks
    require(
        width <= spec.context,
        f"prompt of {long} tokens plus {masks} new ones make {width}; base {spec.name!r} takes at most {spec.context}",
    )
    tokens_BL = torch.full((len(prompts), width), spec.pad_id, dtype=torch.long)
    real_BL = torch.zeros(tokens_BL.shape, dtype=torch.bool)
    for b, (prompt, masks) in enumerate(zip(prompts, new, strict=True)):
        wrong = [t for t in prompt if not is_id(t, 0, spec.vocab_size)]
        require(not wrong, f"prompt {b} holds token id {wrong[:1]}; ids run from 0 to {spec.vocab_size - 1}")
        first = width - len(prompt) - masks
        tokens_BL[b, first:] = torch.tensor([*prompt, *[spec.mask_id] * masks])
        real_BL[b, first:] = True
    return tokens_BL, real_BL
