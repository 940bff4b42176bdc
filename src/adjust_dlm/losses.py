"""Forward KL between teacher and student rows of a shared frozen head, and the weights of its rows.

`kl_rows` is the plain form. `ChunkedKL` gives the same values and gradients while no [rows, V] fp32 tensor
outlives its chunk: the gradient w.r.t. the student's states is formed in the forward pass (q - p, times W),
which is possible because the head is frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

RowWeights = Literal["next", "uniform"]
NEXT_DECAY = 3.0  # exp(-rank/3): measured best of the forms tried
NEXT_SHARE = 0.9  # weight on the rows revealed next; the rest is spread over all masked rows

Head = Callable[[Tensor], Tensor]
Delta = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def kl_rows(teacher_RV: Tensor, student_RV: Tensor) -> Tensor:
    """KL(teacher || student) per row from fp32 logits; tokens forbidden in both (-inf) count zero. [R]."""
    log_p, log_q = teacher_RV.log_softmax(-1), student_RV.log_softmax(-1)
    gap_RV = torch.where(log_p.isfinite(), log_p - log_q, 0)
    return (log_p.exp() * gap_RV).sum(-1)


def row_weights(
    rank_BL: Tensor, masked_BL: Tensor, kind: RowWeights, *, decay: float = NEXT_DECAY, share: float = NEXT_SHARE
) -> Tensor:
    """Weights over the masked rows of each state, summing to 1 per state (0 where nothing is masked).

    Args:
        rank_BL: how many commits from now the trajectory reveals the position (0 = next).
        masked_BL: rows that count.
        kind: "uniform" (the paper) or "next": most of the weight on the rows revealed next.
        decay: of "next": exp(-rank / decay).
        share: of "next": weight on that part; the rest is uniform.
    """
    uniform_BL = masked_BL / masked_BL.sum(-1, keepdim=True).clamp_min(1)
    if kind == "uniform":
        return uniform_BL
    near_BL = torch.where(masked_BL, torch.exp(-rank_BL.clamp_min(0) / decay), 0)
    total_B1 = near_BL.sum(-1, keepdim=True)
    mixed_BL = share * near_BL / total_B1.clamp_min(1e-30) + (1 - share) * uniform_BL
    return torch.where(total_B1 > 0, mixed_BL, uniform_BL)


def kl_and_delta(teacher_RV: Tensor, student_RV: Tensor, weight_R: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row KL and weight * d KL / d student logits = weight * (q - p). `torch.compile` fuses it well."""
    log_p, log_q = teacher_RV.log_softmax(-1), student_RV.log_softmax(-1)
    p_RV = log_p.exp()
    kl_R = (p_RV * torch.where(log_p.isfinite(), log_p - log_q, 0)).sum(-1)
    return kl_R, (log_q.exp() - p_RV) * weight_R[:, None]


def weighted_kl(
    teacher_RD: Tensor,
    student_RD: Tensor,
    weight_R: Tensor,
    logits: Head,
    head_VD: Tensor,
    *,
    chunk: int = 4096,
    delta: Delta = kl_and_delta,
) -> Tensor:
    """sum_r weight_r KL(W teacher_r || W student_r), differentiable in the student's states.

    Args:
        teacher_RD: states of the base on the true canvas.
        student_RD: states of g, same rows.
        weight_R: row weights.
        logits: fp32 logits with forbidden tokens at -inf (`Base.logits`).
        head_VD: the frozen head W, for the gradient.
        chunk: rows per piece.
        delta: `kl_and_delta` or a compiled twin.

    Returns:
        fp32 scalar.
    """
    total: Tensor = ChunkedKL.apply(student_RD, teacher_RD, weight_R, logits, head_VD, chunk, delta)  # type: ignore[no-untyped-call]
    return total


class ChunkedKL(torch.autograd.Function):
    """See `weighted_kl`."""

    @staticmethod
    def forward(ctx: Any, student_RD: Tensor, teacher_RD: Tensor, weight_R: Tensor, *rest: Any) -> Tensor:
        """Loss and gradient, chunk by chunk."""
        logits, head_VD, chunk, delta = rest
        total = torch.zeros((), device=student_RD.device)
        grad_RD = torch.empty_like(student_RD)
        for start in range(0, len(student_RD), chunk):
            part = slice(start, start + chunk)
            kl_R, delta_RV = delta(logits(teacher_RD[part]), logits(student_RD[part]), weight_R[part])
            total += (kl_R * weight_R[part]).sum()
            grad_RD[part] = delta_RV.to(head_VD.dtype) @ head_VD
        ctx.save_for_backward(grad_RD)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Scales the stored gradient."""
        (grad_RD,) = ctx.saved_tensors
        return grads[0] * grad_RD, None, None, None, None, None, None
