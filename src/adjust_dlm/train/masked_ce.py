"""The loss of masked diffusion: which positions a pass sees, what each weighs, a cross-entropy without [R, V].

L = 1/B sum_b 1/(t_b n_b) sum_{i masked in b} -log p(x_i | x_b masked), where n_b counts the positions of canvas b that
can be masked (all but its prompt), each of which is masked with probability t_b. With t uniform on (0, 1) this is the
usual upper bound on the negative log-likelihood, per token; every canvas counts alike, whatever its prompt's length.

Shape suffixes: B canvases, L positions, R masked positions, C rows of a chunk, D width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adjust_dlm.bases.blocks import before_and_own
from adjust_dlm.losses import with_gradients

MIN_T = 1e-3
CHUNK = 2048  # rows of logits held at a time


@dataclass(frozen=True)
class MaskedBatch:
    """Canvases with their masks, as the forward pass and the loss need them.

    Attributes:
        tokens_BL: int64 clean tokens.
        masked_BL: bool.
        rows_R: int64 flat index of the state that scores each masked position (Dream's frame: the one before it).
        targets_R: int64 clean token of each masked position.
        weights_R: fp32 weight of its cross-entropy in the loss; 0 on rows that fill the last chunk.
        cut_BG: int64 first positions of groups of masks, see `group_batch`; rows count in [clean | groups] then.
        teachers_R: int64 flat index, in the clean canvases [B, L], of the state whose distribution is the target; None
            where tokens are.
    """

    tokens_BL: Tensor
    masked_BL: Tensor
    rows_R: Tensor
    targets_R: Tensor
    weights_R: Tensor
    cut_BG: Tensor | None = None
    teachers_R: Tensor | None = None

    def to(self, device: torch.device) -> MaskedBatch:
        """A copy on a device."""
        on_gpu = device.type == "cuda"
        known = {name: part for name, part in vars(self).items() if part is not None}
        pinned = {name: part.pin_memory() if on_gpu and len(part) else part for name, part in known.items()}
        return MaskedBatch(**{name: part.to(device, non_blocking=on_gpu) for name, part in pinned.items()})


def stratified_times(size: int, generator: torch.Generator) -> Tensor:
    """t [B], one in each of B equal parts of (MIN_T, 1), in random order: t = MIN_T + (1 - MIN_T) (b + u) / B."""
    part_B = torch.randperm(size, generator=generator)
    u = torch.rand((), generator=generator, dtype=torch.float64)
    return MIN_T + (1 - MIN_T) * (part_B + u) / size


def draw_masks(prompt_len_B: Tensor, t_B: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """bool [B, L]: each position behind the prompt independently with its row's probability."""
    u_BL = torch.rand(len(t_B), length, generator=generator, dtype=torch.float64)
    return (u_BL < t_B[:, None]) & (torch.arange(length) >= prompt_len_B[:, None])


def masked_batch(tokens_BL: Tensor, masked_BL: Tensor, weights_B: Tensor, *, chunk: int = CHUNK) -> MaskedBatch:
    """Gathers the masked positions on the CPU, so that their number is known without waiting for a device.

    Args:
        tokens_BL: clean tokens.
        masked_BL: what is masked.
        weights_B: the weight of each masked position of a row.
        chunk: the rows are filled up to a multiple of it, so that a compiled chunk has one shape.
    """
    flat_R = masked_BL.flatten().nonzero()[:, 0]
    length = tokens_BL.shape[1]
    scoring_R = torch.where(flat_R % length == 0, flat_R, flat_R - 1)
    tokens_BL = tokens_BL.long()
    weights_R = weights_B.float()[flat_R // length]
    return MaskedBatch(tokens_BL, masked_BL, *_filled(chunk, scoring_R, tokens_BL.flatten()[flat_R], weights_R))


def _filled(chunk: int, *parts_R: Tensor) -> list[Tensor]:
    """Filled up with zeros to a multiple of the chunk, at least one."""
    count = len(parts_R[0])
    pad = -count % chunk if count else chunk
    return [torch.cat([part_R, part_R.new_zeros(pad)]) for part_R in parts_R]


def open_positions(tokens_BL: Tensor, prompt_len_B: Tensor, end_ids: Sequence[int], size: int) -> Tensor:
    """bool [B, L]: what a block base is trained to write: all behind the prompt, to the edge of a text's last block."""
    place_L = torch.arange(tokens_BL.shape[1])
    new_BL = place_L >= prompt_len_B[:, None]
    end_BL = torch.isin(tokens_BL.long(), torch.tensor(list(end_ids))) & new_BL
    last_B = torch.where(end_BL.any(-1), end_BL.long().argmax(-1), tokens_BL.shape[1])
    return new_BL & (place_L // size <= last_B[:, None] // size)


def block_batch(
    tokens_BL: Tensor, open_BL: Tensor, hidden_B2L: Tensor, weights_B3L: Tensor, size: int, *, chunk: int = CHUNK
) -> MaskedBatch:
    """Rows of [clean | A | B], views with hidden positions of their own.

    A view scores what it hides, from the column before (the shifted frame). A block's first position is scored by the
    clean half, since it is drawn before its block is looked at.

    Args:
        tokens_BL: clean tokens, L a multiple of S.
        open_BL: see `open_positions`.
        hidden_B2L: what A and B hide, open positions among others.
        weights_B3L: of the cross-entropies in the clean half, in A and in B.
        size: S.
        chunk: see `masked_batch`.
    """
    first_BL = (torch.arange(tokens_BL.shape[1]) % size == 0) & open_BL
    hidden_B2L = hidden_B2L & open_BL[:, None]
    shown = torch.cat([first_BL[:, None], hidden_B2L & ~first_BL[:, None]], 1)  # [B, 3, L]
    masked = torch.cat([torch.zeros_like(open_BL), *hidden_B2L.unbind(1)], 1)
    tokens = tokens_BL.long().repeat(1, 3)
    flat_R = shown.flatten().nonzero()[:, 0]
    weights_R = weights_B3L.float().flatten()[flat_R]
    return MaskedBatch(tokens, masked, *_filled(chunk, flat_R - 1, tokens.flatten()[flat_R], weights_R))


def group_batch(
    tokens_BL: Tensor, cut_BG: Tensor, weights_BGN: Tensor, *, taught: bool, chunk: int = CHUNK
) -> MaskedBatch:
    """Rows of [clean | groups]: each group hides S positions from its cut on and sees the clean text before it.

    Mask n of a group (from 1) scores the position n behind its cut; the cut itself is scored by the clean column
    before it, which is the autoregressive model's own.

    Args:
        tokens_BL: clean tokens.
        cut_BG: first hidden positions, at least 1.
        weights_BGN: of the position n behind each cut, n = 0 to S; 0 where it lies behind the canvas.
        taught: targets are the autoregressive model's own distributions, not the tokens.
        chunk: see `masked_batch`.
    """
    (count, length), (groups, size) = tokens_BL.shape, (weights_BGN.shape[1], weights_BGN.shape[2] - 1)
    flat_R = weights_BGN.flatten().nonzero()[:, 0]
    n_R, b_R = flat_R % (size + 1), flat_R // (groups * (size + 1))
    g_R, weights_R = flat_R // (size + 1) % groups, weights_BGN.float().flatten()[flat_R]
    at_R = cut_BG[b_R, g_R] + n_R  # the position that is scored
    own_R = torch.where(n_R == 0, at_R - 1, length + g_R * size + n_R - 1)
    rows_R, clean_R = b_R * (length + groups * size) + own_R, b_R * length + at_R
    tokens_BL, none = tokens_BL.long(), torch.zeros(count, 0, dtype=torch.bool)
    parts_R = rows_R, tokens_BL.flatten()[clean_R], weights_R, clean_R - 1
    rows_R, targets_R, weights_R, teachers_R = _filled(chunk, *parts_R)
    return MaskedBatch(tokens_BL, none, rows_R, targets_R, weights_R, cut_BG, teachers_R if taught else None)


def cuts(text_BL: Tensor, groups_B: Tensor, u_BG: Tensor) -> Tensor:
    """First hidden positions [B, G]: a random one in each of a row's equal parts of its text but for the last token.

    Args:
        text_BL: what may be hidden: bool, one run in each row; see `open_positions`.
        groups_B: how many parts, at most G; the groups behind these repeat the last part.
        u_BG: uniform numbers in [0, 1).
    """
    first_B1, last_B1 = text_BL.long().argmax(-1, keepdim=True), text_BL.sum(-1, keepdim=True) - 1
    part_BG = torch.arange(u_BG.shape[1]).minimum(groups_B[:, None] - 1)
    within_BG = ((part_BG + u_BG) / groups_B[:, None] * last_B1.clamp_min(0)).long()
    return (first_B1 + within_BG).clamp_min(1)


def behind_cuts(text_BL: Tensor, cut_BG: Tensor, size: int) -> Tensor:
    """Whether the position n behind a cut is text, n = 0 to S: bool [B, G, S + 1]."""
    at_BGN = cut_BG[..., None] + torch.arange(size + 1)
    inside_BGN = text_BL.gather(1, at_BGN.flatten(1).clamp_max(text_BL.shape[1] - 1)).view_as(at_BGN)
    return inside_BGN & (at_BGN < text_BL.shape[1])


def hidden_in_views(count: int, length: int, size: int, suffix: float, generator: torch.Generator) -> Tensor:
    """What views A and B hide: bool [B, 2, L].

    In a share `suffix` of the blocks they hide all from a position on, as an order from left to right does: A from one
    drawn evenly, B from half a block further on (modulo S). In the others A hides each position with the block's own
    rate, stratified in (0, 1), and B hides the rest.
    """
    blocks = length // size
    t_BJ = stratified_times(count * blocks, generator).view(count, -1)
    u_BL = torch.rand(count, length, generator=generator, dtype=torch.float64)
    a_BL = u_BL < t_BJ.repeat_interleave(size, 1)
    hidden_B2L = torch.stack([a_BL, ~a_BL], 1)
    if not suffix:
        return hidden_B2L
    cut_B2J = torch.randint(size, (count, 1, blocks), generator=generator) + torch.tensor([[0], [size // 2]])
    ends_BJ = torch.rand(count, blocks, generator=generator) < suffix
    suffix_B2L = torch.arange(length) % size >= (cut_B2J % size).repeat_interleave(size, -1)
    return torch.where(ends_BJ.repeat_interleave(size, 1)[:, None], suffix_B2L, hidden_B2L)


def next_positions(count: int, length: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A position of every block, drawn evenly, and with it what stands behind it in the block: bool [B, L] each."""
    cut_BL = torch.randint(size, (count, length // size), generator=generator).repeat_interleave(size, 1)
    place_L = torch.arange(length) % size
    return place_L == cut_BL, place_L >= cut_BL


def block_views_mask(length: int, size: int, device: torch.device | None = None) -> Tensor:
    """What columns of [clean | A | B] see: bool [1, 1, 3 L, 3 L].

    The clean half sees its own block and those before, a view its own block in the view and the clean ones before it.
    """
    before_LL, own_LL = before_and_own(length, size, device)
    never_LL = torch.zeros_like(own_LL)
    rows = [[before_LL | own_LL, never_LL, never_LL], [before_LL, own_LL, never_LL], [before_LL, never_LL, own_LL]]
    return torch.cat([torch.cat(row, 1) for row in rows])[None, None]


Chunk = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def ce_chunk(
    h_CD: Tensor, head_VD: Tensor, bias_V: Tensor, targets_C: Tensor, weights_C: Tensor
) -> tuple[Tensor, Tensor]:
    """(cross-entropy [C] in fp32, its weighted gradient [C, D] with respect to the states).

    d/dh w CE = w (p - onehot) W; `bias_V` holds -inf at forbidden tokens, whose p is 0.
    """
    log_p_CV = ((h_CD @ head_VD.T).float() + bias_V).log_softmax(-1)
    ce_C = -log_p_CV.gather(-1, targets_C[:, None])[:, 0]
    hit_CV = torch.arange(head_VD.shape[0], device=h_CD.device) == targets_C[:, None]
    error_CV = (log_p_CV.exp() - hit_CV.float()) * weights_C[:, None]
    return ce_C, error_CV.to(h_CD.dtype) @ head_VD


def taught_chunk(
    h_CD: Tensor, head_VD: Tensor, bias_V: Tensor, teacher_CD: Tensor, weights_C: Tensor
) -> tuple[Tensor, Tensor]:
    """As `ce_chunk`, against the distribution q of a teacher's states under the same head: d/dh w CE = w (p - q) W."""
    log_p_CV = ((h_CD @ head_VD.T).float() + bias_V).log_softmax(-1)
    q_CV = ((teacher_CD @ head_VD.T).float() + bias_V).softmax(-1)
    ce_C = -torch.where(q_CV > 0, q_CV * log_p_CV, 0).sum(-1)
    error_CV = (log_p_CV.exp() - q_CV) * weights_C[:, None]
    return ce_C, error_CV.to(h_CD.dtype) @ head_VD


def chunked_ce(
    h_RD: Tensor, head_VD: Tensor, bias_V: Tensor, targets_R: Tensor, weights_R: Tensor, *, size: int = CHUNK,
    chunk: Chunk = ce_chunk,
) -> Tensor:  # fmt: skip
    """Weighted sum of cross-entropies under a frozen head, holding the logits of `size` rows at a time.

    Args:
        h_RD: states that score the rows.
        head_VD: frozen head weight in the states' dtype.
        bias_V: fp32, -inf at forbidden tokens, 0 elsewhere.
        targets_R: true tokens; or the states [R, D] of a teacher, with `taught_chunk`.
        weights_R: fp32 weights.
        size: rows of a chunk.
        chunk: `ce_chunk`, `taught_chunk` or a compiled twin of either.

    Returns:
        fp32 scalar with a gradient to `h_RD`.
    """
    with torch.no_grad():  # value and gradient in one walk over the chunks; the head is frozen, so it gets none
        parts = (h_RD.split(size), targets_R.split(size), weights_R.split(size))
        done = [chunk(h_CD, head_VD, bias_V, t_C, w_C) for h_CD, t_C, w_C in zip(*parts, strict=True)]
    ce_R, grad_RD = (torch.cat(part) for part in zip(*done, strict=True))
    # where: a filler row may score -inf, and 0 * inf would be nan.
    return with_gradients(torch.where(weights_R > 0, ce_R * weights_R, 0).sum(), [grad_RD], [h_RD])
