"""A running mean of g's weights."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def follow(mean: nn.Module, module: nn.Module, *, decay: float, step: int) -> None:
    """mean <- d mean + (1 - d) module, with d = min(decay, (1 + step) / (10 + step)): short memory at the start.

    Args:
        mean: same shapes as `module`; changed in place.
        module: the weights after this step.
        decay: weight of the past, 0..1.
        step: steps done before this one.
    """
    d = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(mean.parameters()), list(module.parameters()), 1 - d)
