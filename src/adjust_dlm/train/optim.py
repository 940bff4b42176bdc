"""Optimisers of the sampler and their one learning-rate curve."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn


def build_optimizers(module: nn.Module, kind: Literal["muon", "adamw"], lr: float) -> list[torch.optim.Optimizer]:
    """Torch's optimisers for g.

    "muon" is torch's Muon (update RMS matched to AdamW's) on matrices, AdamW at half its rate on the rest.

    Each group keeps its own `peak_lr`. The paper's AdamW has betas .9/.999 and no weight decay.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if kind == "adamw":
        group = {"params": parameters, "peak_lr": lr}
        return [torch.optim.AdamW([group], lr=lr, betas=(0.9, 0.999), weight_decay=0.0)]
    matrices = {"params": [p for p in parameters if p.ndim == 2], "peak_lr": lr}
    rest = {"params": [p for p in parameters if p.ndim != 2], "peak_lr": lr / 2}
    muon = torch.optim.Muon([matrices], lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW([rest], lr=lr / 2, weight_decay=0.0)]


def learning_rate(step: int, share: float, *, warmup: int, decay: float) -> float:
    """Factor on the peak rate after so many steps and such a share of the run.

    Linear warm-up over `warmup` steps, constant, then linear to 0 over the last `decay` of the run; 0 is no decay.
    """
    rising = min(1.0, (step + 1) / warmup) if warmup else 1.0
    falling = min(1.0, max(0.0, 1 - share) / decay) if decay else 1.0
    return rising * falling
