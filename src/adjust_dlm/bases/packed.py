"""W h for a frozen matrix; on a CPU with W laid out once in the order in which the product reads it."""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

_X86 = platform.machine() in ("x86_64", "AMD64")
_ABLE = _X86 and torch.backends.mkldnn.is_available()
_packed = WeakIdKeyDictionary()  # W -> (its version, its copy), as long as W lives


def frozen_linear(h_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """W h + b: [..., V], fresh. Plain fp32 on an x86 CPU takes oneDNN and a copy of W in its layout, made on first use.

    MKL, which `linear` calls there, needs a fixed time for W however few the rows: with the default model as long as
    the arithmetic of some twenty. oneDNN's numbers differ in the last bits; unlike MKL's, those of a row are the same
    whatever the other rows are, and however many. Where a gradient is wanted, `linear` does it.

    A W that was changed in place is copied anew; not one changed through `.data`, which nothing can see: see `forget`.
    """
    if not _packs(h_RD, weight_VD):
        if weight_VD.requires_grad and not torch.compiler.is_compiling():
            forget(weight_VD)  # whose version torch's fused optimizers leave as it was
        return F.linear(h_RD, weight_VD, bias_V)
    version, packed = _packed.get(weight_VD, (None, None))
    if version != weight_VD._version:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_VD.contiguous())
        _packed[weight_VD] = weight_VD._version, packed
    return torch.ops.mkldnn._linear_pointwise(h_RD, packed, bias_V, "none", [], "")


def forget(weight_VD: Tensor) -> None:
    """Drops the copy of W, which got other memory."""
    _packed.pop(weight_VD, None)


def _packs(h_RD: Tensor, weight_VD: Tensor) -> bool:
    if not (_ABLE and weight_VD.is_cpu and h_RD.is_cpu) or torch.compiler.is_compiling():
        return False
    plain = type(weight_VD) in (Tensor, nn.Parameter) and not weight_VD.is_inference()
    with_gradient = weight_VD.requires_grad or (h_RD.requires_grad and torch.is_grad_enabled())
    return plain and weight_VD.dtype == torch.float32 and not with_gradient
