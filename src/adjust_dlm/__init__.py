"""adjust-dlm: joint sampling for masked diffusion language models.

`import adjust_dlm` is light: everything that needs transformers is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adjust_dlm.artifacts import from_pretrained, push_to_hub, save_pretrained
    from adjust_dlm.bases import Base, load_base
    from adjust_dlm.decoders import decode, generate
    from adjust_dlm.released import import_released
    from adjust_dlm.sampler import Sampler, load_sampler
    from adjust_dlm.types import DecodeConfig, DecodeResult

__version__ = "0.1.0"

_NAMES = {
    "bases": ("Base", "load_base"),
    "decoders": ("decode", "generate"),
    "sampler": ("Sampler", "load_sampler"),
    "artifacts": ("save_pretrained", "from_pretrained", "push_to_hub"),
    "released": ("import_released",),
    "types": ("DecodeConfig", "DecodeResult"),
}
_WHERE = {name: f"adjust_dlm.{module}" for module, names in _NAMES.items() for name in names}
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    """Imports the public names on first use."""
    if name not in _WHERE:
        raise AttributeError(f"module 'adjust_dlm' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
