"""Where a large base lives: quantized linear layers, and layers spread over devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adjust_dlm.bases.fp8 import in_fp8_layers
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.types import DeviceMap, Quantize, refusing, require


def quantize_body(base: TransformerBase, kind: Quantize | None) -> None:
    """Stores the weights of the body's linear layers in 8 bits, in place; embedding, norms and head keep their dtype.

    "int8" and "fp8" save memory and multiply in the base's dtype (torchao). "fp8-dynamic" multiplies in fp8
    (`bases.fp8`), which cards from Ada and Hopper on do at twice the rate of bf16.

    Raises:
        InputError: the device or this torch cannot do it.
    """
    base.quantized = kind
    if kind is None:
        return
    with refusing(f"quantize {kind} does not work here", RuntimeError, AssertionError, NotImplementedError):
        if kind == "fp8-dynamic":
            in_fp8_layers(base.model)
        else:
            from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

            plain = {"set_inductor_config": False}  # which would search for kernels for minutes
            quantize_(base.model, Int8WeightOnlyConfig(**plain) if kind == "int8" else Float8WeightOnlyConfig(**plain))


def place(base: TransformerBase, device_map: DeviceMap, device: torch.device) -> TransformerBase:
    """Spreads the body's layers over devices; canvases, embedding lookups' results, states and head stay on `device`.

    Args:
        base: read to the CPU.
        device_map: "auto", "balanced", ... (see accelerate), or module name -> device.
        device: where the decoders work; a map of a single device decides that, too.
    """
    from accelerate import dispatch_model

    places = _spread(base.model, device_map) if isinstance(device_map, str) else dict(device_map)
    on_disk = "disk" in map(str, places.values())
    require(not on_disk, "some layers would lie on disk, beside the devices and the CPU; that is not supported")
    with refusing(f"device_map {places} does not work here", ValueError, RuntimeError, AssertionError):
        where = {torch.device(place) for place in places.values()}
        if len(where) == 1:
            (device,) = where
            base.model = base.model.to(device)
        else:
            base.model = dispatch_model(base.model, places, main_device=device, force_hooks=True)
        base.head_matrix = base.head_matrix.to(device)
    return base


def _spread(model: nn.Module, how: str) -> dict[str, Any]:
    """accelerate's own plan; no layer is cut."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole, low = {"no_split_module_classes": ["Layer"]}, how == "balanced_low_0"
    limits = None if how == "sequential" else get_balanced_memory(model, low_zero=low, **whole)
    return infer_auto_device_map(model, max_memory=limits, **whole)
