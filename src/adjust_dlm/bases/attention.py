"""Attention without its weights: rotary angles, what a position may see, and the product that mixes values."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from adjust_dlm.bases.shape import Shape
from adjust_dlm.kernels import HAS_TRITON

_MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fuses(h: Tensor) -> bool:
    """Whether `kernels.layer` stands in for the plain form: half precision on a card with Triton, outside of training.

    Not below a compiler, which fuses by itself.
    """
    half = HAS_TRITON and h.is_cuda and h.dtype in (torch.bfloat16, torch.float16)
    return half and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


class Rotary:
    """cos and sin of the rotary embedding. Not a module: its fp32 frequencies must survive a cast to bf16."""

    def __init__(self, shape: Shape) -> None:
        """Frequencies theta^(-2i/d), scaled where the family says so."""
        rope, d = shape.rope, shape.head_dim
        self.scale, self.fp32 = 1.0, shape.rotate_fp32
        if rope["rope_type"] == "default":
            self.inverse_F = 1.0 / (rope["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float, device="cpu") / d))
        else:
            self.inverse_F, self.scale = _scaled_frequencies(shape)

    def to(self, device: torch.device) -> None:
        """Goes along with the weights; a move during a compiled call would have it compiled again."""
        if device.type != "meta":
            self.inverse_F = self.inverse_F.to(device)

    def __call__(self, positions_BL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, 1, L, d]; angles in fp32, the results in fp32 or in the states' dtype."""
        if self.inverse_F.device != positions_BL.device:
            self.to(positions_BL.device)
        angle_BLF = positions_BL[..., None].float() * self.inverse_F
        angle_B1LE = torch.cat([angle_BLF, angle_BLF], -1)[:, None]
        out = torch.float32 if self.fp32 else dtype
        cos, sin = angle_B1LE.cos(), angle_B1LE.sin()
        if self.scale != 1:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(out), sin.to(out)


def _scaled_frequencies(shape: Shape) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_attention_heads, head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings, rope_parameters=shape.rope,
    )  # fmt: skip
    with torch.device("cpu"):  # a body may be under construction on another one
        inverse_F, scale = ROPE_INIT_FUNCTIONS[shape.rope["rope_type"]](config, torch.device("cpu"))
    return inverse_F, float(scale)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x_i, x_{i + d/2}), in the dtype of cos and sin."""
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, heads, L, d], turned; fresh ones, since they may be turned where they stand."""
    if fuses(q):
        from adjust_dlm.kernels import layer

        layer.turn(q, k, cos, sin)
        return q, k
    q, k = turn(torch.cat([q, k], 1), cos, sin).split([q.shape[1], k.shape[1]], 1)
    return q, k


def visible(real_BL: Tensor | None, h_BLD: Tensor, shape: Shape, *, masks: bool) -> Tensor | None:
    """What hides left pads: None without any; a mask [B, 1, 1, L]; or int32 [2 B + 1], the edges of runs of columns.

    With a mask, scores go through a slow kernel and keys are copied for every head that shares them. Where flash
    attention can do it, a row is therefore two runs of the B L columns that do not see each other: pads, and the rest.
    With `masks` it stays a mask.
    """
    if real_BL is None:
        return None
    if masks or not fuses(h_BLD) or not _flash(shape.head_dim, h_BLD.device):
        return real_BL[:, None, None, :]
    rows, length = real_BL.shape
    start_B = torch.arange(0, rows * length, length, device=real_BL.device)
    edge_E = torch.stack([start_B, start_B + length - real_BL.sum(-1)], 1).flatten()
    return F.pad(edge_E, (0, 1), value=rows * length).int()


def _flash(head_dim: int, device: torch.device) -> bool:
    """Whether torch's flash attention takes heads of that width there."""
    return head_dim % 8 == 0 and head_dim <= 256 and torch.cuda.get_device_capability(device) >= (8, 0)


def _attend_runs(q: Tensor, k: Tensor, v: Tensor, edge_E: Tensor) -> Tensor:
    """Attention within the runs of `visible`: [B, L, heads * d]."""
    rows, _, length, _ = q.shape
    parts = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B L, heads, d]
    out = torch.ops.aten._flash_attention_forward(*parts, edge_E, edge_E, length, length, 0.0, False, False)[0]
    return out.reshape(rows, length, -1)


def causal_mask(tokens_BL: Tensor, mask_B11L: Tensor | None) -> Tensor:
    """Every position sees itself, pads too: a row that sees nothing would be NaN."""
    own_LL = torch.eye(tokens_BL.shape[1], dtype=torch.bool, device=tokens_BL.device)
    earlier_LL = torch.ones_like(own_LL).tril()
    return earlier_LL if mask_B11L is None else earlier_LL & mask_B11L | own_LL


def attend(q: Tensor, k: Tensor, v: Tensor, mask_BHLL: Tensor | None) -> Tensor:
    """Softmax attention of [B, heads, L, d]: [B, L, heads * d]; the mask is one, or what `visible` gives."""
    if mask_BHLL is not None and mask_BHLL.dtype == torch.int32:
        return _attend_runs(q, k, v, mask_BHLL)
    share = q.shape[1] // k.shape[1]
    # With a mask, grouped heads would send CUDA to the slow kernel.
    grouped = share > 1 and (mask_BHLL is None or not q.is_cuda)
    if share > 1 and not grouped:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    # cuDNN's form has no plan for some masks with gradients.
    with sdpa_kernel(_MASKED) if mask_BHLL is not None and q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BHLL, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)
