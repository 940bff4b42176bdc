"""What passes need not compute again: the exact cache of block bases, and the prefix cache of others."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adjust_dlm.bases import Base
from adjust_dlm.bases.blocks import to_edge
from adjust_dlm.bases.memory import Memory, renew
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders.machinery.canvas import Canvas
from adjust_dlm.sampler import Sampler
from adjust_dlm.types import DecodeConfig, State, require


def with_cache(base: Base, config: DecodeConfig) -> Base:
    """The base as the settings of a canvas have it look at this; itself where there is nothing to keep."""
    keeps = isinstance(base, TransformerBase) and base.spec.block is not None
    if config.cache_period is None and not keeps:
        return base
    cached = copy.copy(base)
    more = (config.cache_period, config.cache_window)
    hidden = functools.partial(_open_blocks, base) if keeps else functools.partial(_hidden, base, *more)
    cached.hidden = hidden  # type: ignore[method-assign]
    return cached


def no_further(base: Base, config: DecodeConfig, masks: int | None) -> tuple[Base, DecodeConfig]:
    """A causal base whose passes look at so many masks of a row, which change nothing before them; None: at S.

    `config.block_length` goes before. Text scores the next token, so at one mask no pass computes it, or its adapters.

    Raises:
        InputError: a block_length above S.
    """
    most = base.spec.block
    if not base.spec.causal or most is None or not isinstance(base, TransformerBase):
        return base, config
    masks = 1 if masks == 1 else config.block_length or min(masks or most, most)
    require(masks <= most, f"block_length is {masks}; base {base.spec.name!r} looks at most {most} tokens ahead")
    twin = copy.copy(base)
    twin.spec, twin.model = replace(base.spec, block=masks), copy.copy(base.model)
    if masks == 1:
        twin.layer_config = twin.model.config = replace(base.model.config, lora_rank=None)
    return twin, config.but(block_length=None)


def with_sampler_cache(sampler: Any) -> Any:
    """The sampler as it looks at canvases of a block base; itself on others, and a function that is no `Sampler`."""
    if not isinstance(sampler, Sampler) or sampler.block is None:
        return sampler
    cached = copy.copy(sampler)
    cached.forward = functools.partial(_step_of_blocks, sampler)  # type: ignore[method-assign]
    cached.keys = functools.partial(_keys_of_blocks, sampler)  # type: ignore[method-assign]
    return cached


def passes_open(base: Base) -> bool:
    """Whether passes compute the open block: not where it is one token, which the state before it scores."""
    return base.spec.block != 1 or not base.lag


def surplus(base: Base) -> int:
    """Columns that a cached pass has right of its canvas: as many as a row's last block may lack."""
    return (base.spec.block or 1) - 1


def grid(base: Base) -> tuple[int, int]:
    """Blocks begin at multiples of what, and how many columns of its open block a pass computes."""
    size = base.spec.block or 1
    return 1 if base.spec.causal else size, size if passes_open(base) else 0


def _open_blocks(base: Base, state: State, count: int | None = None) -> Tensor:
    """States h_BLD of a canvas of a block base; any other state is looked at whole.

    A pass computes each row's open block (see `passes_open`), and before it what has become final since the row's last
    pass: the prompt in its first, in the first of a block the block before. Keys and values of final blocks are never
    written again. On a causal base all text is final, and a block begins with the first mask: each pass enters one.
    Columns of other blocks hold what an earlier pass left there.
    """
    length, lack, (size, ahead) = state.tokens_BL.shape[1], surplus(base), grid(base)
    if not isinstance(state, Canvas) or base.spec.block is None:
        return base.hidden(state)
    whole = to_edge(state, size, base.spec.mask_id, lack)
    columns = columns_to_edge(state, state.memory, size, length + lack, state.open_B, count=count, ahead=ahead)
    return base.hidden_again(whole, state.memory, *columns[:2])[:, :length]


def hidden_drafts(base: Base, canvas: Canvas, drafts: list[State], *, count: int | None = None) -> list[Tensor]:
    """States h_BLD of a canvas and of drafts of what may follow, by one pass.

    On a block base drafts differ from the canvas in its open block alone: a pass computes that block once for each.
    `count` as in `columns_to_edge`.
    """
    size, known = base.spec.block, isinstance(base, TransformerBase)
    if not drafts:
        return [_open_blocks(base, canvas, count) if count and known else base.hidden(canvas)]
    if size is None or not isinstance(base, TransformerBase):
        tokens, real, masked = (
            torch.cat([getattr(s, name) for s in (canvas, *drafts)]) for name in ("tokens_BL", "real_BL", "masked_BL")
        )
        return list(base.hidden(State(tokens, real, masked, canvas.padded)).split(len(canvas.rows_B)))
    length, lack, (step, ahead) = canvas.tokens_BL.shape[1], surplus(base), grid(base)
    whole = to_edge(canvas, step, base.spec.mask_id, lack)
    first_B = canvas.real_BL.long().argmax(-1) + canvas.block_of(step) * step
    place_BS = first_B[:, None] + torch.arange(size, device=first_B.device)
    token_BJS = torch.stack(
        [F.pad(s.tokens_BL, (0, lack), value=base.spec.mask_id).gather(1, place_BS) for s in drafts], 1
    )
    column_BN, valid_BN, _ = columns_to_edge(
        canvas, canvas.memory, step, length + lack, canvas.open_B, count=count, ahead=ahead
    )
    h_BLD, view_BJSD = base.hidden_drafts(whole, canvas.memory, column_BN, valid_BN, token_BJS, place_BS)
    views = [renew(h_BLD.clone(), view_BSD, place_BS) for view_BSD in view_BJSD.unbind(1)]
    return [part[:, :length] for part in (h_BLD, *views)]


def _step_of_blocks(sampler: Sampler, h_BLD: Tensor, state: State, column_BN: Tensor | None = None) -> Tensor:
    """One step of g at the open block's columns; once over what has become final, whose keys it then keeps."""
    if not isinstance(state, Canvas) or sampler.block is None or column_BN is not None:
        return Sampler.forward(sampler, h_BLD, state, column_BN)
    return renew(h_BLD.clone(), *step_at_columns(sampler, h_BLD, state))


def step_at_columns(
    sampler: Sampler, h_BLD: Tensor, canvas: Canvas, count: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """States of that step, their columns, and which of these it changes: the open block's; `count` as below.

    A causal g changes one state of a row, that of the column which scores the first mask. Text that the base has looked
    at since g's last step leaves its keys anew; tokens behind it keep those of the first step that they were part of.
    """
    memory, causal, known_B = canvas.sampler_memory, sampler.causal, canvas.memory.counts_B3[:, 1]
    stepped_B = memory.counts_B3[:, 1].maximum(known_B)
    size, ahead = (1, 0) if causal else (sampler.block or 1,) * 2
    column_BN, valid_BN, own_BN = columns_to_edge(
        canvas, memory, size, canvas.tokens_BL.shape[1], canvas.busy_B, count=count, ahead=ahead
    )
    if causal:
        memory.counts_B3[:, 0] = memory.counts_B3[:, 0].minimum(known_B)
        own_BN = valid_BN & (torch.arange(1 - column_BN.shape[1], 1, device=column_BN.device) == 0)
        place_BN = column_BN - canvas.real_BL.long().argmax(-1, keepdim=True)
        valid_BN = valid_BN & ((place_BN < known_B[:, None]) | (place_BN >= stepped_B[:, None]))
    return sampler.rows(h_BLD, canvas, column_BN, memory, valid_BN), column_BN, own_BN


def _keys_of_blocks(sampler: Sampler, h_BLD: Tensor, state: State) -> Memory:
    """For sparse steps: what `_step_of_blocks` keeps."""
    if not isinstance(state, Canvas):
        return Sampler.keys(sampler, h_BLD, state)
    _step_of_blocks(sampler, h_BLD, state)
    return state.sampler_memory


def columns_to_edge(
    canvas: State, memory: Memory, size: int, width: int, goes_B: Tensor, *, count: int | None = None, ahead: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's columns from the first that is not final in the memory to the edge of its open block; books these.

    In a step of g, `goes_B` are the rows with commits left, since others may have filled their block by now. `count` is
    N, where the host knows that no row has more; else the device is asked. A block begins at a multiple of `size`, and
    `ahead` columns of it are computed: see `grid`.

    Returns:
        The columns [B, N], all different in a row; which of them are wanted; which lie in the open block.
    """
    memory.width = width
    start_B = canvas.real_BL.long().argmax(-1)
    final_B = memory.counts_B3[:, 0]
    first_B = canvas.masked_BL.long().argmax(-1) - start_B
    before_B = first_B // size * size  # the open block's first position
    edge_B = (start_B + before_B + ahead).clamp_max(width)
    count_B = (edge_B - start_B - final_B).masked_fill(~goes_B, 0)
    if count is None:
        most, memory.seen = torch.stack([count_B.max(), edge_B.max()]).tolist()
        count = max(1, most)
    count = min(count, width)
    place_BN = edge_B[:, None] - count + torch.arange(count, device=edge_B.device)
    valid_BN = place_BN >= (edge_B - count_B)[:, None]
    for n, now_B in enumerate((before_B, first_B, before_B + ahead)[: 3 if ahead else 2]):
        memory.counts_B3[:, n] = torch.where(goes_B, now_B, memory.counts_B3[:, n])
    return place_BN % width, valid_BN, valid_BN & (place_BN >= (start_B + before_B)[:, None])


def _hidden(base: Base, period: int | None, window: int | None, state: State) -> Tensor:
    """States h_BLD of the canvas; any other state is looked at exactly.

    A row is computed whole in its first pass, when it enters a block, and once `period` passes are over. In between,
    all columns before the first mask it then had keep their states, keys and values; the last of them is computed
    anyway, since in a shifted frame it scores that mask. A window lets what is kept follow the first mask. What a row
    reuses depends on that row alone. Columns count from the right, where pads that come and go change nothing.
    """
    if not isinstance(state, Canvas):
        return base.hidden(state)
    memory, length, open_B, block_B = state.memory, state.tokens_BL.shape[1], state.open_B, state.block_B
    age_B, before_B, last_B = memory.counts_B3.unbind(-1)
    again_B = open_B & ((age_B % (period or 1) == 0) | (block_B != before_B))
    now_B = torch.where(again_B, length, last_B).masked_fill(~open_B, 0)  # nothing to score: none
    count = min(length, int(now_B.max())) if memory.kept else length
    column_BN = torch.arange(length - count, length, device=now_B.device).expand(len(now_B), -1)
    h_BLD = base.hidden_again(state, memory, column_BN, column_BN >= length - now_B[:, None])
    open_behind_B = length - state.masked_BL.long().argmax(-1) + (window or 1)
    follows_B = last_B if window is None else last_B.minimum(open_behind_B)
    last_B = torch.where(again_B, open_behind_B, follows_B)
    memory.counts_B3 = torch.stack([torch.where(again_B, 0, age_B) + 1, block_B, last_B], -1)
    return h_BLD
