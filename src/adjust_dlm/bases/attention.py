"""Attention without its weights: rotary angles, what a position may see, and the product that mixes values."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from adjust_dlm.bases.blocks import block_mask
from adjust_dlm.bases.shape import Shape
from adjust_dlm.kernels import HAS_TRITON
from adjust_dlm.types import State

_GROUPS = 65_535  # that the kernel can be launched for
_TILE = 128  # queries that flash attention looks at together
_MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def kernels_for(mask: Tensor | None) -> AbstractContextManager[None]:
    """Torch's kernels for attention under a mask on a card: cuDNN has no plan for some masks with gradients."""
    return sdpa_kernel(_MASKED) if mask is not None and mask.is_cuda else nullcontext()


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


class Runs(NamedTuple):
    """What queries see where flash attention can do it: neighbours among them are a group, which sees one run of keys.

    With a mask, scores go through a slow kernel, keys are copied for every head that shares them, and time follows the
    length of the canvas instead of that of its rows.

    Attributes:
        causal: the last query of a group sees its whole run, the one before it a key less, and so on.
        packed: P heads that share keys count as queries of one head, so that few columns fill a tile; 1: none do.
        query_E: int32 [G + 1], where groups begin among the B N P queries, and the end of these. Groups may be empty.
        key_E: int32 [G + 1], where their runs begin among the B L keys; the last entry means nothing.
        seen_G: int32 [G], how many keys a run has, at least one. Runs may overlap.
    """

    causal: bool
    packed: int
    query_E: Tensor
    key_E: Tensor
    seen_G: Tensor


Seen = Tensor | Runs | None  # by queries: a mask, runs, or everything


def visible(
    state: State, h: Tensor, shape: Shape, column_BN: Tensor | None = None, valid_BN: Tensor | None = None,
    seen: int | None = None, *, masks: bool = False,
) -> Seen:  # fmt: skip
    """What all columns of a canvas see, or some: its real columns; on a block base as in `block_mask`.

    Args:
        state: the canvas [B, L]; on a block base with pads on both sides.
        h: any tensor of the pass's dtype and device.
        shape: of the layers.
        column_BN: the columns.
        valid_BN: which are wanted; the others see something that means nothing. On a block base there are no runs
            without it: those of a row ascend, and stand in at most ceil(N / S) blocks that follow each other. Where
            `sees` is 1, all columns of a row follow each other.
        seen: on a block base no wanted column sees this one or later ones.
        masks: no runs.
    """
    size, real_BL = shape.sees, state.real_BL
    if size is None and not state.padded:
        return None
    (rows, length), device = real_BL.shape, real_BL.device
    count = length if column_BN is None else column_BN.shape[1]
    ordered = size is None or column_BN is None or valid_BN is not None
    causal = size == 1 and count > 1
    few = size is None or causal or rows * -(-count // size) <= _GROUPS
    if masks or not (ordered and few and _flash(h, shape)):
        return real_BL[:, None, None] if size is None else block_mask(state, size, column_BN)[..., :seen]
    row_B1 = torch.arange(rows, device=device)[:, None]
    edge_BG, seen_BG = torch.zeros_like(row_B1), real_BL.sum(-1, keepdim=True)
    first_B1 = real_BL.long().argmax(-1, keepdim=True)
    if causal:  # one group a row
        seen_BG = (length if column_BN is None else column_BN[:, -1:] + 1) - first_B1
    elif size is not None:
        block_BN = state.positions_BL // size
        if column_BN is not None and valid_BN is not None:
            block_BN = torch.where(valid_BN, block_BN.gather(1, column_BN), -1).cummax(-1).values
        own_BG = block_BN[:, -1:] - torch.arange(-(-count // size) - 1, -1, -1, device=device)
        edge_BG = (block_BN[:, None] < own_BG[..., None]).sum(-1)
        edge_BG[:, 0] = 0
        seen_BG = seen_BG.minimum((own_BG + 1) * size)
    key_BG = (row_B1 * length + first_B1).expand_as(seen_BG)
    query_E = F.pad((row_B1 * count + edge_BG).flatten(), (0, 1), value=rows * count)
    packed = shape.num_attention_heads // shape.num_key_value_heads if count < _TILE and not causal else 1
    parts = packed * query_E, F.pad(key_BG.flatten(), (0, 1)), seen_BG.clamp_min(1).flatten()
    return Runs(causal, packed, *(part.int() for part in parts))


def _flash(h: Tensor, shape: Shape) -> bool:
    """Whether torch's flash attention takes such heads there."""
    able = fuses(h) and shape.head_dim % 8 == 0 and shape.head_dim <= 256
    return able and torch.cuda.get_device_capability(h.device) >= (8, 0)


def _attend_runs(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Tensor:
    """Attention by runs: [B, N, heads * d]."""
    rows, heads, count, width = q.shape
    if torch.is_autocast_enabled(q.device.type):  # which does not know the kernel; norms give fp32 there
        q, k, v = (part.to(torch.get_autocast_dtype(q.device.type)) for part in (q, k, v))
    few = heads // runs.packed
    q = q.unflatten(1, (few, -1)).permute(0, 3, 2, 1, 4).reshape(-1, few, width)  # [B N P, heads / P, d]
    k_all, v_all = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))  # [B L, heads of keys, d]
    most = max(count * runs.packed, 2)  # told that groups have one query, it would lay them out anew
    out = torch.ops.aten._flash_attention_forward(
        q, k_all, v_all, runs.query_E, runs.key_E, most, k.shape[2], 0.0, runs.causal, False, seqused_k=runs.seen_G
    )[0]
    return out.view(rows, count, runs.packed, few, width).transpose(2, 3).reshape(rows, count, -1)


def causal_mask(tokens_BL: Tensor, mask_B11L: Tensor | None) -> Tensor:
    """Every position sees itself, pads too: a row that sees nothing would be NaN."""
    own_LL = torch.eye(tokens_BL.shape[1], dtype=torch.bool, device=tokens_BL.device)
    earlier_LL = torch.ones_like(own_LL).tril()
    return earlier_LL if mask_B11L is None else earlier_LL & mask_B11L | own_LL


def attend(q: Tensor, k: Tensor, v: Tensor, mask_BHLL: Seen) -> Tensor:
    """Softmax attention of queries [B, heads, N, d] to keys [B, heads, L, d]: [B, N, heads * d]."""
    if isinstance(mask_BHLL, Runs):
        return _attend_runs(q, k, v, mask_BHLL)
    share = q.shape[1] // k.shape[1]
    # With a mask, grouped heads would send CUDA to the slow kernel.
    grouped = share > 1 and (mask_BHLL is None or not q.is_cuda)
    if share > 1 and not grouped:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    with kernels_for(mask_BHLL):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BHLL, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)
