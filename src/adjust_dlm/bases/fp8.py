"""Linear layers that multiply in fp8 (e4m3), which cards from Ada and Hopper on do at twice the rate of bf16.

Each row of the states and each row of W is scaled by its own largest magnitude, so that neither an outlier of another
token nor one of another output costs it anything. On a card sums are kept in the accumulators of its matrix units,
which hold fewer bits than fp32 (`use_fast_accum`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adjust_dlm.bases.attention import fuses
from adjust_dlm.bases.layers import Linear
from adjust_dlm.kernels import HAS_TRITON
from adjust_dlm.types import require

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
SMALLEST = 1e-12  # magnitude that a row is scaled by
_STEP = 16  # what both widths of W must be multiples of


def in_fp8(x_RD: Tensor) -> tuple[Tensor, Tensor]:
    """q and scale with x = q scale: [R, D] in e4m3, to the nearest, and [R, 1] in fp32."""
    if fuses(x_RD):
        from adjust_dlm.kernels import fp8

        return fp8.in_fp8(x_RD, SMALLEST, LARGEST)
    most_R1 = x_RD.float().abs().amax(-1, keepdim=True).clamp_min(SMALLEST)
    return (x_RD.float() * (LARGEST / most_R1)).to(torch.float8_e4m3fn), most_R1 * (1 / LARGEST)


class Fp8Linear(Linear):
    """y = W h + b with W kept in fp8, [N, D], and its scales, [N, 1]; no gradient."""

    def __init__(self, plain: nn.Linear) -> None:
        """Takes over a layer's weights.

        Raises:
            InputError: widths that fp8 products do not take.
        """
        width, outputs = plain.in_features, plain.out_features
        sizes = f"a linear layer of {width} to {outputs}"
        require(width % _STEP == outputs % _STEP == 0, f"{sizes} cannot be in fp8: both must be multiples of {_STEP}")
        nn.Module.__init__(self)
        self.in_features, self.out_features = width, outputs
        weight_ND, scale_N1 = in_fp8(plain.weight.data.contiguous())
        self.weight = nn.Parameter(weight_ND, requires_grad=False)
        self.scale = nn.Parameter(scale_N1, requires_grad=False)
        self.register_parameter("bias", plain.bias)

    def forward(self, h: Tensor) -> Tensor:
        """[..., D] to [..., N]."""
        return self.product(h, self.weight, self.bias, self.scale)

    @staticmethod
    def product(h: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """W h + b, [..., N], rounded to bf16, as b is."""
        assert scale is not None
        made = in_fp8(h.reshape(-1, h.shape[-1]).contiguous())
        return scaled_product(made, weight, bias, scale).to(h.dtype).unflatten(0, h.shape[:-1])

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """As `Linear.gated`; where kernels stand in, silu(gate) * up is never written but in fp8."""
        if not fuses(gate) or self.weight.device != gate.device:  # offloaded weights come with a call of the layer
            return super().gated(gate, up)
        from adjust_dlm.kernels import fp8

        made = fp8.silu_mul_in_fp8(gate, up, SMALLEST, LARGEST)
        return scaled_product(made, self.weight, self.bias, self.scale).to(gate.dtype).unflatten(0, gate.shape[:-1])


def scaled_product(made: tuple[Tensor, Tensor], weight_ND: Tensor, bias: Tensor | None, scale_N1: Tensor) -> Tensor:
    """[R, N] in bf16, by our own kernel where that is faster."""
    q_RD, scale_R1 = made
    bias = None if bias is None else bias.to(torch.bfloat16)
    if q_RD.is_cuda and HAS_TRITON and not torch.compiler.is_compiling():
        from adjust_dlm.kernels.product import is_narrow, narrow_product

        if is_narrow(len(q_RD), len(weight_ND), q_RD.get_device()):
            return narrow_product(q_RD, scale_R1, weight_ND, scale_N1, bias)
    return _product(q_RD, scale_R1, weight_ND, scale_N1, bias)


def _product(q_RD: Tensor, scale_R1: Tensor, weight_ND: Tensor, scale_N1: Tensor, bias: Tensor | None) -> Tensor:
    """torch's; off CUDA, where not every torch has it, in fp32 from the same numbers."""
    if q_RD.is_cuda:
        return torch._scaled_mm(
            q_RD, weight_ND.t(), bias=bias, scale_a=scale_R1, scale_b=scale_N1.t(), out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip
    out_RN = q_RD.float() @ weight_ND.float().t() * scale_R1 * scale_N1.t()
    return (out_RN if bias is None else out_RN + bias.float()).bfloat16()


def in_fp8_layers(body: nn.Module) -> None:
    """Replaces all linear layers, in place.

    Raises:
        InputError: widths that fp8 products do not take.
        RuntimeError: torch has no fp8 products on this device.
    """
    for part in body.modules():
        for name, child in list(part.named_children()):
            if type(child) is Linear:
                setattr(part, name, Fp8Linear(child))
    probe = next(part for part in body.modules() if isinstance(part, Fp8Linear))
    one = in_fp8(probe.weight.new_zeros(1, probe.in_features, dtype=torch.bfloat16))
    _product(*one, probe.weight, probe.scale, None)
