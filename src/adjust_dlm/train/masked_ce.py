"""The loss of masked diffusion: which canvases and positions a step sees, what each weighs, a CE without [R, V].

L = 1/B sum_b 1/(t_b n_b) sum_{i masked in b} -log p(x_i | x_b masked), where n_b counts the positions of canvas b that
can be masked (all but its prompt), each of which is masked with probability t_b. With t uniform on (0, 1) this is the
usual upper bound on the negative log-likelihood, per token; every canvas counts alike, whatever its prompt's length.

Shape suffixes: B canvases, L positions, R masked positions, Q those with a taught target, C rows of a chunk, D width,
V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adjust_dlm.bases.blocks import before_and_own
from adjust_dlm.data.corpus import Corpus
from adjust_dlm.data.settings import KINDS
from adjust_dlm.losses import with_gradients
from adjust_dlm.types import require

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
        taught_rows_Q: as `rows_R`, of masked positions whose target is a distribution; none unless asked for.
        teachers_Q: int64 flat index, in the clean canvases [B, L], of the autoregressive state that gives it.
        taught_weights_Q: fp32, as `weights_R`.
    """

    tokens_BL: Tensor
    masked_BL: Tensor
    rows_R: Tensor
    targets_R: Tensor
    weights_R: Tensor
    taught_rows_Q: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    teachers_Q: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    taught_weights_Q: Tensor = field(default_factory=lambda: torch.zeros(0))

    def to(self, device: torch.device) -> MaskedBatch:
        """A copy on a device."""
        on_gpu = device.type == "cuda"
        fields = (part.pin_memory() if on_gpu and len(part) else part for part in vars(self).values())
        return MaskedBatch(*(part.to(device, non_blocking=on_gpu) for part in fields))


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
    tokens_BL: Tensor, open_BL: Tensor, hidden_B2L: Tensor, weights_B3L: Tensor, size: int, *,
    taught_B2L: Tensor | None = None, chunk: int = CHUNK,
) -> MaskedBatch:  # fmt: skip
    """Rows of [clean | A | B], views with hidden positions of their own.

    A view scores what it hides, from the column before (the shifted frame). A block's first position is scored by the
    clean half, since it is drawn before its block is looked at.

    Args:
        tokens_BL: clean tokens, L a multiple of S.
        open_BL: see `open_positions`.
        hidden_B2L: what A and B hide, open positions among others.
        weights_B3L: of the cross-entropies in the clean half, in A and in B.
        size: S.
        taught_B2L: where the target is the distribution of an autoregressive teacher, at a block's first position and
            in the views. None: all targets are tokens.
        chunk: see `masked_batch`.
    """
    first_BL = (torch.arange(tokens_BL.shape[1]) % size == 0) & open_BL
    hidden_B2L = hidden_B2L & open_BL[:, None]
    shown = torch.cat([first_BL[:, None], hidden_B2L & ~first_BL[:, None]], 1)  # [B, 3, L]
    masked = torch.cat([torch.zeros_like(open_BL), *hidden_B2L.unbind(1)], 1)
    tokens = tokens_BL.long().repeat(1, 3)
    flat_R = shown.flatten().nonzero()[:, 0]
    weights_R = weights_B3L.float().flatten()[flat_R]
    if taught_B2L is None:
        return MaskedBatch(tokens, masked, *_filled(chunk, flat_R - 1, tokens.flatten()[flat_R], weights_R))
    is_taught_R = taught_B2L[:, [0, 1, 1]].flatten()[flat_R]
    length, own_R = tokens_BL.shape[1], flat_R[~is_taught_R]
    own = _filled(chunk, own_R - 1, tokens.flatten()[own_R], weights_R[~is_taught_R])
    flat_Q = flat_R[is_taught_R]
    teacher_Q = flat_Q // (3 * length) * length + flat_Q % length - 1
    return MaskedBatch(tokens, masked, *own, *_filled(chunk, flat_Q - 1, teacher_Q, weights_R[is_taught_R]))


def hidden_in_views(
    count: int, length: int, size: int, suffix: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """What views A and B hide: bool [B, 2, L]; and the positions of blocks where that is a suffix: bool [B, L].

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
        return hidden_B2L, torch.zeros_like(a_BL)
    cut_B2J = torch.randint(size, (count, 1, blocks), generator=generator) + torch.tensor([[0], [size // 2]])
    ends_BJ = torch.rand(count, blocks, generator=generator) < suffix
    suffix_B2L = torch.arange(length) % size >= (cut_B2J % size).repeat_interleave(size, -1)
    ends_BL = ends_BJ.repeat_interleave(size, 1)
    return torch.where(ends_BL[:, None], suffix_B2L, hidden_B2L), ends_BL


def suffix_weights(hidden_BVL: Tensor, size: int) -> Tensor:
    """Weights of hidden positions: the n-th of a block's m counts m / (n H_m), H_m = 1 + 1/2 + .. + 1/m: mean 1.

    A round of K tokens from left to right takes the first K, so with the K of use spread evenly by their logarithm the
    first counts most. fp32 [B, V, L], 0 at all others.
    """
    hidden_BVJS = hidden_BVL.unflatten(-1, (-1, size))
    share_BVJS = hidden_BVJS / hidden_BVJS.cumsum(-1).clamp_min(1)
    scale_BVJ = hidden_BVJS.sum(-1) / share_BVJS.sum(-1).clamp_min(1)
    return (share_BVJS * scale_BVJ[..., None]).flatten(-2)


def next_positions(count: int, length: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A position of every block, drawn evenly, and with it what stands behind it in the block: bool [B, L] each."""
    cut_BL = torch.randint(size, (count, length // size), generator=generator).repeat_interleave(size, 1)
    place_L = torch.arange(length) % size
    return place_L == cut_BL, place_L >= cut_BL


def block_views_mask(length: int, size: int, device: torch.device | None = None, *, causal: bool = False) -> Tensor:
    """What columns of [clean | A | B] see: bool [1, 1, 3 L, 3 L].

    The clean half sees its own block and those before, a view its own block in the view and the clean ones before it;
    of causal blocks what is left of the column.
    """
    before_LL, own_LL = before_and_own(length, size, device, causal=causal)
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


class CanvasBatches:
    """Global batches in fixed proportions of the kinds; each kind walks through its own permutations.

    A batch is a pure function of (corpus, seed, step), so resuming needs no state.

    All ranks draw the whole batch, masks and times with it, and keep each world-th row: together they train on exactly
    what a single process would.
    """

    def __init__(
        self, corpus: Corpus, shares: Mapping[str, float], *, batch_size: int, seed: int, rank: int = 0, world: int = 1,
        block: int | None = None, end_ids: Sequence[int] = (), suffix: float = 0.0, distill: bool = False,
    ) -> None:  # fmt: skip
        """Splits the batch over the kinds.

        Args:
            corpus: all canvases of the training split.
            shares: weight of each kind; those without canvases are left out and the rest scaled up.
            batch_size: B, canvases of a global batch, a multiple of `world`.
            seed: names the order, the times and the masks.
            rank: this process.
            world: number of processes.
            block: S of a block base, whose canvases are looked at as [clean | A | B].
            end_ids: that end its texts.
            suffix: see `hidden_in_views`.
            distill: blocks that hide a suffix have taught targets.
        """
        self.block, self.end_ids, self.suffix, self.distill = block, end_ids, suffix, distill
        self.corpus, self.seed, self.rank, self.world = corpus, seed, rank, world
        self.members = {k: (corpus.kind_N == n).nonzero()[:, 0] for n, k in enumerate(KINDS)}
        present = {k: shares[k] for k in KINDS if len(self.members[k]) and shares[k] > 0}
        require(bool(present), f"every kind of canvas in the corpus has share 0: {dict(shares)}")
        self.counts = largest_remainder(present, batch_size)
        self._orders: dict[str, tuple[int, Tensor]] = {}

    def step(self, step: int, micro: int) -> list[MaskedBatch]:
        """This rank's part of batch `step`, in passes of `micro` canvases; losses add up over passes and ranks."""
        generator = torch.Generator().manual_seed(_mixed(self.seed, 0, step))
        members = [self._take(kind, step * count, count) for kind, count in self.counts.items() if count]
        index_B = torch.cat(members)
        index_B = index_B[torch.randperm(len(index_B), generator=generator)]
        prompt_B, tokens_BL = self.corpus.prompt_len_N[index_B], self.corpus.tokens_NL[index_B]
        length = tokens_BL.shape[1]
        if self.block is not None:
            return self._views(tokens_BL, prompt_B, micro, generator, self.block)
        t_B = stratified_times(len(index_B), generator)
        masked_BL = draw_masks(prompt_B, t_B, length, generator)
        mine = slice(self.rank, None, self.world)
        weights_B = 1 / (t_B * (length - prompt_B.double()).clamp_min(1) * len(index_B))
        parts = (x[mine].split(micro) for x in (tokens_BL, masked_BL, weights_B))
        return [masked_batch(*part) for part in zip(*parts, strict=True)]

    def _views(
        self, tokens_BL: Tensor, prompt_B: Tensor, micro: int, generator: torch.Generator, size: int
    ) -> list[MaskedBatch]:
        """Every score weighs the same, but in hidden suffixes with a teacher; those are some more than open positions.

        Short canvases share passes, which end where the longest does, in quarters of the length (few shapes).
        """
        count, length = tokens_BL.shape
        hidden_B2L, ends_BL = hidden_in_views(count, length, size, self.suffix, generator)
        open_BL = open_positions(tokens_BL, prompt_B, self.end_ids, size)
        weights_B3L = torch.full((count, 3, length), 1 / max(1, int(open_BL.sum())))
        taught_B2L = None
        if self.distill:  # a teacher knows nothing of tokens to the right, or of what fills a block behind an end
            text_BL = open_positions(tokens_BL, prompt_B, self.end_ids, 1)
            taught_B2L = torch.stack([text_BL, text_BL & ends_BL], 1)
            share_B2L = suffix_weights(hidden_B2L & open_BL[:, None], size)
            weights_B3L[:, 1:] *= torch.where(ends_BL[:, None], share_B2L, 1.0)
        quarter = -(-length // size // 4) * size
        used_B = (open_BL * torch.arange(1, length + 1)).amax(-1)
        passes = []
        for index in torch.arange(self.rank, count, self.world)[used_B[self.rank :: self.world].argsort()].split(micro):
            end = min(length, max(1, -(-int(used_B[index].max()) // quarter)) * quarter)
            a, b, c, d = (part[index, ..., :end] for part in (tokens_BL, open_BL, hidden_B2L, weights_B3L))
            taught = None if taught_B2L is None else taught_B2L[index, ..., :end]
            passes.append(block_batch(a, b, c, d, size, taught_B2L=taught))
        return passes

    def _take(self, kind: str, start: int, count: int) -> Tensor:
        """Canvases start..start+count of a kind's endless stream of permutations."""
        size = len(self.members[kind])
        first, last = start // size, (start + count - 1) // size
        orders = [self._order(kind, epoch) for epoch in range(first, last + 1)]
        return torch.cat(orders)[start - first * size :][:count]

    def _order(self, kind: str, epoch: int) -> Tensor:
        known = self._orders.get(kind)
        if known is None or known[0] != epoch:
            generator = torch.Generator().manual_seed(_mixed(self.seed, 1 + KINDS.index(kind), epoch))
            members = self.members[kind]
            self._orders[kind] = (epoch, members[torch.randperm(len(members), generator=generator)])
        return self._orders[kind][1]


def largest_remainder(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers in proportion to the shares that add up to `total`."""
    exact = {key: total * share / sum(shares.values()) for key, share in shares.items()}
    counts = {key: int(value) for key, value in exact.items()}
    by_remainder = sorted(exact, key=lambda key: counts[key] - exact[key])
    for key in by_remainder[: total - sum(counts.values())]:
        counts[key] += 1
    return counts


def _mixed(seed: int, stream: int, number: int) -> int:
    """A generator seed for each (seed, stream, number)."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {stream} {number}".encode(), digest_size=7).digest(), "big")
