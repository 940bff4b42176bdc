"""The loss of masked diffusion: which positions are masked, what each one weighs, and a cross-entropy without [R, V].

L = 1/B sum_b 1/(t_b n_b) sum_{i masked in b} -log p(x_i | x_b masked), where n_b counts the positions of canvas b that
can be masked (all but its prompt), each of which is masked with probability t_b. With t uniform on (0, 1) this is the
usual upper bound on the negative log-likelihood, per token; every canvas counts alike, whatever its prompt's length.

Shape suffixes: B canvases, L positions, R masked positions, C rows of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        weights_R: fp32 weight of its cross-entropy in the loss; 0 on filler rows.
        masked: how many of the R rows are masked positions; the others fill the last chunk.
    """

    tokens_BL: Tensor
    masked_BL: Tensor
    rows_R: Tensor
    targets_R: Tensor
    weights_R: Tensor
    masked: int

    def to(self, device: torch.device) -> MaskedBatch:
        """A copy on a device."""

        def moved(field: Tensor) -> Tensor:
            return field.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else field.to(device)

        return MaskedBatch(
            tokens_BL=moved(self.tokens_BL),
            masked_BL=moved(self.masked_BL),
            rows_R=moved(self.rows_R),
            targets_R=moved(self.targets_R),
            weights_R=moved(self.weights_R),
            masked=self.masked,
        )


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
    length, masked = tokens_BL.shape[1], len(flat_R)
    scoring_R = torch.where(flat_R % length == 0, flat_R, flat_R - 1)
    pad = -masked % chunk if masked else chunk

    def filled(values_R: Tensor) -> Tensor:
        return torch.cat([values_R, values_R.new_zeros(pad)])

    return MaskedBatch(
        tokens_BL=tokens_BL.long(),
        masked_BL=masked_BL,
        rows_R=filled(scoring_R),
        targets_R=filled(tokens_BL.flatten()[flat_R].long()),
        weights_R=filled(weights_B.float()[flat_R // length]),
        masked=masked,
    )


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


class _ChunkedCE(torch.autograd.Function):
    """Value and gradient in one walk over the chunks; the head is frozen, so it gets none."""

    @staticmethod
    def forward(
        ctx: Any, h_RD: Tensor, head_VD: Tensor, bias_V: Tensor, targets_R: Tensor, weights_R: Tensor, size: int,
        chunk: Chunk,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        parts = (h_RD.split(size), targets_R.split(size), weights_R.split(size))
        done = [chunk(h_CD, head_VD, bias_V, t_C, w_C) for h_CD, t_C, w_C in zip(*parts, strict=True)]
        ce_R, grad_RD = (torch.cat(part) for part in zip(*done, strict=True))
        ctx.save_for_backward(grad_RD)
        ctx.mark_non_differentiable(ce_R)
        # where: a filler row may score -inf, and 0 * inf would be nan.
        return torch.where(weights_R > 0, ce_R * weights_R, 0).sum(), ce_R

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad_RD,) = ctx.saved_tensors
        return (grad_RD * grad.to(grad_RD.dtype), None, None, None, None, None, None)


def chunked_ce(
    h_RD: Tensor, head_VD: Tensor, bias_V: Tensor, targets_R: Tensor, weights_R: Tensor, *, size: int = CHUNK,
    chunk: Chunk = ce_chunk,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weighted sum of cross-entropies under a frozen head, holding the logits of `size` rows at a time.

    Args:
        h_RD: states that score the rows.
        head_VD: frozen head weight in the states' dtype.
        bias_V: fp32, -inf at forbidden tokens, 0 elsewhere.
        targets_R: true tokens.
        weights_R: fp32 weights.
        size: rows of a chunk.
        chunk: `ce_chunk`, or a compiled twin of it.

    Returns:
        fp32 scalar with a gradient to `h_RD`, and the plain cross-entropies [R] without one.
    """
    out: tuple[Tensor, Tensor] = _ChunkedCE.apply(  # type: ignore[no-untyped-call]
        h_RD, head_VD, bias_V, targets_R, weights_R, size, chunk
    )
    return out
