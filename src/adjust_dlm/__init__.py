"""adjust-dlm: joint sampling for masked diffusion language models.

`import adjust_dlm` is light: everything that needs transformers is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adjust_dlm.artifacts import from_pretrained, push_to_hub, save_pretrained
    from adjust_dlm.bases import Base, load_base
    from adjust_dlm.decoders import decode, generate
    from adjust_dlm.released import import_released
    from adjust_dlm.sampler import Sampler, load_sampler
    from adjust_dlm.types import DecodeConfig, DecodeResult

__version__ = "0.1.0"

_WHERE = {
    "Base": "adjust_dlm.bases",
    "load_base": "adjust_dlm.bases",
    "decode": "adjust_dlm.decoders",
    "generate": "adjust_dlm.decoders",
    "Sampler": "adjust_dlm.sampler",
    "load_sampler": "adjust_dlm.sampler",
    "save_pretrained": "adjust_dlm.artifacts",
    "from_pretrained": "adjust_dlm.artifacts",
    "push_to_hub": "adjust_dlm.artifacts",
    "import_released": "adjust_dlm.released",
    "DecodeConfig": "adjust_dlm.types",
    "DecodeResult": "adjust_dlm.types",
}
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    """Imports the public names on first use."""
    if name not in _WHERE:
        raise AttributeError(f"module 'adjust_dlm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
