"""KL between teacher and student rows of a shared frozen head, and the weights of its rows.

`kl_rows` is the plain form. `weighted_kl` gives the same values and gradients while no [rows, V] tensor outlives its
chunk: the gradient w.r.t. the student's states is formed in the forward pass (q - p for the forward KL, times W), which
is possible because the head is frozen. Students of several depths share the teacher's logits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjust_dlm.kernels import HAS_TRITON
from adjust_dlm.types import NEXT_DECAY, NEXT_SHARE, KernelName, RowWeights, require

log = logging.getLogger(__name__)

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

    "uniform" is the paper's; "next" has its `share` on rows revealed soon, as exp(-rank / decay), and the rest uniform.
    A rank is how many commits from now the trajectory reveals the position (0 = next).
    """
    uniform_BL = masked_BL / masked_BL.sum(-1, keepdim=True).clamp_min(1)
    if kind == "uniform":
        return uniform_BL
    near_BL = torch.where(masked_BL, torch.exp(-rank_BL.clamp_min(0) / decay), 0)
    total_B1 = near_BL.sum(-1, keepdim=True)
    mixed_BL = share * near_BL / total_B1.clamp_min(1e-30) + (1 - share) * uniform_BL
    return torch.where(total_B1 > 0, mixed_BL, uniform_BL)


def row_shares(rank_BL: Tensor, limit: int, u_BL: Tensor) -> Tensor:
    """Factors on row weights that leave at most `limit` masked rows of a state, without moving the expected loss.

    The nearest `limit // 2` rows by rank stay as they are. Of the others, as many as there is room for are drawn, all
    equally likely, and count for those left out: fp32 [B, L], 1 or (others / drawn) on rows that stay, 0 elsewhere.
    Ranks are negative for rows that do not count; the uniforms decide the draw.
    """
    masked_BL = rank_BL >= 0
    near = limit // 2
    far = torch.iinfo(rank_BL.dtype).max
    order_BL = torch.where(masked_BL, rank_BL, far).argsort(dim=-1, stable=True).argsort(-1)
    near_BL = masked_BL & (order_BL < near)
    lot_BL = torch.where(masked_BL & ~near_BL, u_BL, 2.0).argsort(dim=-1, stable=True).argsort(-1)
    drawn_BL = masked_BL & ~near_BL & (lot_BL < limit - near)
    others_B1 = (masked_BL & ~near_BL).sum(-1, keepdim=True)
    return near_BL.float() + drawn_BL * (others_B1 / (limit - near)).clamp_min(1.0)


def kl_and_delta(
    teacher_RV: Tensor, student_RV: Tensor, weight_R: Tensor, reverse: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Per-row divergence and weight * its gradient w.r.t. the student's logits, in fp32. `torch.compile` fuses it well.

    (1 - r) KL(p || q) + r KL(q || p) with r = `reverse` has the gradient (1 - r) (q - p) + r q (log q/p - KL(q || p)).
    """
    log_p, log_q = teacher_RV.float().log_softmax(-1), student_RV.float().log_softmax(-1)
    p_RV, q_RV = log_p.exp(), log_q.exp()
    kl_R = (p_RV * torch.where(log_p.isfinite(), log_p - log_q, 0)).sum(-1)
    delta_RV = q_RV - p_RV
    if reverse:
        gap_RV = torch.where(log_q.isfinite(), log_q - log_p, 0)
        back_R = (q_RV * gap_RV).sum(-1)
        kl_R = (1 - reverse) * kl_R + reverse * back_R
        delta_RV = (1 - reverse) * delta_RV + reverse * q_RV * (gap_RV - back_R[:, None])
    return kl_R, delta_RV * weight_R[:, None]


def pick_delta(kernel: KernelName, device: torch.device, *, compiled: bool = False, reverse: float = 0.0) -> Delta:
    """The KL kernel of a run: Triton's on a card, the torch form (or its compiled twin) elsewhere.

    Raises:
        InputError: Triton's was asked for and cannot be had.
    """
    able = device.type == "cuda" and HAS_TRITON
    require(kernel != "triton" or able, f"kernel is triton on {device}; it needs a CUDA device and the triton package")
    if kernel != "torch" and able:
        from adjust_dlm.kernels import kl

        log.info("KL by the fused Triton kernel")
        form: Callable[..., tuple[Tensor, Tensor]] = kl.kl_and_delta
    else:
        log.info("KL by torch%s", ", compiled" if compiled else "")
        form = _compiled() if compiled else kl_and_delta
    return functools.partial(form, reverse=reverse) if reverse else form


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """One for all runs of a process."""
    return torch.compile(kl_and_delta, dynamic=True)


@dataclass
class Student:
    """States that are compared with the teacher's rows `first`, `first + 1`, ...

    Attributes:
        h_RD: states of g.
        weight_R: row weights.
        first: the teacher row of the first one.
    """

    h_RD: Tensor
    weight_R: Tensor
    first: int = 0


def weighted_kl(
    teacher_RD: Tensor, students: Sequence[Student], logits: Head, head_VD: Tensor, *, chunk: int = 4096,
    delta: Delta = kl_and_delta,
) -> Tensor:  # fmt: skip
    """sum over students and rows of weight_r KL(W teacher_r || W student_r), differentiable in the students' states.

    With another `delta` it is that divergence's sum.

    Args:
        teacher_RD: states of the base on the true canvas.
        students: what is compared with runs of its rows; the logits of a chunk of it are computed once for all.
        logits: fresh logits with forbidden tokens at -inf, in any dtype (`Base.logits`, `Base.plain_logits`).
        head_VD: the frozen head W, for the gradient.
        chunk: rows per piece.
        delta: `kl_and_delta` or a fused twin, which may write over the student's logits.
    """
    total = torch.zeros((), device=teacher_RD.device)
    grads = [torch.zeros_like(student.h_RD) for student in students]
    with torch.no_grad():
        for start in range(0, len(teacher_RD), chunk):
            teacher_RV = logits(teacher_RD[start : start + chunk])
            for student, grad_RD in zip(students, grads, strict=True):
                low = max(start, student.first)
                high = min(start + len(teacher_RV), student.first + len(student.h_RD))
                if low >= high:
                    continue
                part = slice(low - student.first, high - student.first)
                weight_R = student.weight_R[part]
                kl_R, delta_RV = delta(teacher_RV[low - start : high - start], logits(student.h_RD[part]), weight_R)
                total += (kl_R * weight_R).sum()
                grad_RD[part] = delta_RV.to(head_VD.dtype) @ head_VD
    return with_gradients(total, grads, [student.h_RD for student in students])


def with_gradients(value: Tensor, grads: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
    """A scalar whose gradients with respect to some states have been formed beside it."""
    return _Known.apply(value, grads, *states)  # type: ignore[no-untyped-call]


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.save_for_backward(*grads)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, None, *(grads[0].to(grad_RD.dtype) * grad_RD for grad_RD in ctx.saved_tensors)
