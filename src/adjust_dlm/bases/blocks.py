"""Block diffusion: a column sees its own block of S columns in both directions and all blocks before it.

Of causal blocks it sees what stands left of it, as in the autoregressive model that the base was made from. Blocks are
counted from a row's first real token, so left pads change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adjust_dlm.types import State


def block_mask(state: State, size: int, column_BN: Tensor | None = None) -> Tensor:
    """What columns see: [B, 1, N, L], for `column_BN` or for all; `size` is that of `Shape.sees`."""
    block_BL = state.positions_BL // size
    own_BN = block_BL if column_BN is None else block_BL.gather(1, column_BN)
    return ((block_BL[:, None] <= own_BN[..., None]) & state.real_BL[:, None])[:, None]


def before_and_own(length: int, size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Of texts without left pads: whether column i sees column j in a block before its own, and in its own: [L, L]."""
    block_L = torch.arange(length, device=device) // size
    own_LL = block_L[None] == block_L[:, None]
    return block_L[None] < block_L[:, None], own_LL


def open_block(state: State, size: int) -> Tensor:
    """The columns of the block that holds a row's first mask: [B, L]; of a row without masks, its first block."""
    block_BL = state.positions_BL // size
    return (block_BL == block_BL.gather(1, state.masked_BL.long().argmax(-1, keepdim=True))) & state.real_BL


def to_edge(state: State, size: int, mask_id: int, columns: int | None = None) -> State:
    """The canvas with the masks that its last blocks lack, each row to the edge of its own.

    Args:
        state: the canvas.
        size: S; 1 where blocks begin anywhere, so that every row gets all columns.
        mask_id: of the base.
        columns: how many are appended; as many as the rows need by default. Those behind a row's edge are pads.
    """
    lacks_B = -state.real_BL.sum(-1) % size + (columns or 0) * (size == 1)
    columns = int(lacks_B.max()) if columns is None else columns
    if not columns:
        return state
    more_BX = torch.arange(columns, device=lacks_B.device) < lacks_B[:, None]
    tokens_BX = torch.full_like(more_BX, mask_id, dtype=state.tokens_BL.dtype)
    pairs = (state.tokens_BL, tokens_BX), (state.real_BL, more_BX), (state.masked_BL, more_BX)
    tokens, real, masked = (torch.cat(pair, 1) for pair in pairs)
    return State(tokens, real, masked)
