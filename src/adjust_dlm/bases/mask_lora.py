"""Adapters that columns with MASK alone have: where there is text, a causal base is the model it was made from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PLACES = {  # of a layer: the products of one adapter, side by side
    "self_attn.lora_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.lora_out": ("self_attn.o_proj",),
    "mlp.lora_in": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.lora_out": ("mlp.down_proj",),
}


class MaskLora(nn.Module):
    """y + B A h where a column holds MASK, y itself (to the bit) elsewhere, for products y of the same states h."""

    def __init__(self, width: int, outputs: int, rank: int) -> None:
        """Of several products side by side `outputs` and `rank` are the sums of theirs: B is block-diagonal."""
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width))
        self.up = nn.Parameter(torch.empty(outputs, rank))

    def forward(self, y_BLN: Tensor, h_BLD: Tensor, text_BL1: Tensor) -> Tensor:
        """[B, L, N]; `text_BL1` is False in columns that hold MASK."""
        inner_BLR = F.linear(h_BLD, self.down).masked_fill(text_BL1, 0)
        return torch.addmm(y_BLN.flatten(0, 1), inner_BLR.flatten(0, 1), self.up.t()).view_as(y_BLN)


def side_by_side(model: Any) -> dict[str, Tensor]:
    """The tensors of all `MaskLora` of a body, from the adapters that peft put into a transformers model; fp32.

    The scale alpha / r goes into B.
    """
    out: dict[str, Tensor] = {}
    for n, layer in enumerate(model.layers):
        for place, names in PLACES.items():
            parts = [layer.get_submodule(name) for name in names]
            ups = [part.lora_B["default"].weight * part.scaling["default"] for part in parts]
            out[f"layers.{n}.{place}.down"] = torch.cat([part.lora_A["default"].weight for part in parts])
            out[f"layers.{n}.{place}.up"] = torch.block_diag(*ups)
    return out
