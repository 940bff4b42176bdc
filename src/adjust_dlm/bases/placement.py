"""Where a large base lives: quantized linear layers, and layers spread over devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.types import InputError, require

Quantize = Literal["int8", "fp8"]
DeviceMap = str | Mapping[str, Any]


def quantized(body: nn.Module, kind: Quantize) -> None:
    """Stores the weights of all linear layers in 8 bits, in place; embedding, norms and head keep their dtype.

    Raises:
        InputError: an unknown kind, no torchao, or a device that cannot do it.
    """
    require(kind in ("int8", "fp8"), f"quantize is {kind!r}; it must be int8 or fp8")
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise InputError(f"quantize needs torchao: pip install 'adjust-dlm[quant]' ({error})") from error
    quantize_(body, Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig())


def place(base: TransformerBase, device_map: DeviceMap, device: torch.device) -> TransformerBase:
    """Spreads the body's layers over devices; canvases, embedding lookups' results, states and head stay on `device`.

    Args:
        base: read to the CPU.
        device_map: "auto", "balanced", ... (see accelerate), or module name -> device.
        device: where the decoders work.
    """
    from accelerate import dispatch_model

    places = _spread(base.model, device_map) if isinstance(device_map, str) else dict(device_map)
    require(
        "disk" not in {str(where) for where in places.values()},
        "the model does not fit on the devices and the CPU; offloading to disk is not supported",
    )
    base.model = dispatch_model(base.model, places, main_device=device)
    base.head_matrix = base.head_matrix.to(device)
    return base


def _spread(model: nn.Module, how: str) -> dict[str, Any]:
    """accelerate's own plan; no layer is cut."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    known = ("auto", "balanced", "balanced_low_0", "sequential")
    require(how in known, f"device_map is {how!r}; it must be one of {', '.join(known)}, or a mapping")
    whole, limits = ["Layer"], None
    if how != "sequential":
        limits = get_balanced_memory(model, no_split_module_classes=whole, low_zero=how == "balanced_low_0")
    plan: dict[str, Any] = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole)
    return plan
