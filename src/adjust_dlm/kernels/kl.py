"""KL of logits and its gradient in two passes over the vocabulary: the fused twin of `losses.kl_and_delta`.

No softmax is ever written down. The first pass keeps a running maximum and sum for each side and, on the teacher's
scale, the sum of e^t (t - s), on the student's that of e^s (s - t); the second writes the gradient where the student's
logits were.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # tokens looked at together
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _kl_and_delta(  # type: ignore[no-untyped-def]
    teacher, student, weight, kl, teacher_stride, student_stride, vocabulary, reverse,
    REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    teacher += row * teacher_stride
    student += row * student_stride
    # Finite, so that a block without any allowed token gives 0 and not inf - inf.
    max_t = -1.0e30
    max_s = -1.0e30
    sum_t = 0.0
    sum_s = 0.0
    gap = 0.0
    back = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocabulary
        t = tl.load(teacher + at, mask=inside, other=-float("inf")).to(tl.float32)
        s = tl.load(student + at, mask=inside, other=-float("inf")).to(tl.float32)
        new_t = tl.maximum(max_t, tl.max(t, 0))
        new_s = tl.maximum(max_s, tl.max(s, 0))
        e_t = tl.exp(t - new_t)
        scale = tl.exp(max_t - new_t)
        away = tl.where(e_t > 0, t, 0.0) - tl.where(e_t > 0, s, 0.0)  # no inf - inf where both forbid
        gap = gap * scale + tl.sum(e_t * away, 0)
        sum_t = sum_t * scale + tl.sum(e_t, 0)
        e_s = tl.exp(s - new_s)
        scale = tl.exp(max_s - new_s)
        if REVERSE:
            back = back * scale + tl.sum(e_s * (tl.where(e_s > 0, s, 0.0) - tl.where(e_s > 0, t, 0.0)), 0)
        sum_s = sum_s * scale + tl.sum(e_s, 0)
        max_t = new_t
        max_s = new_s
    log_t = max_t + tl.log(sum_t)
    log_s = max_s + tl.log(sum_s)
    value = gap / sum_t - log_t + log_s
    back = back / sum_s - log_s + log_t
    if REVERSE:
        value = (1 - reverse) * value + reverse * back
    tl.store(kl + row, value)
    w = tl.load(weight + row).to(tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocabulary
        t = tl.load(teacher + at, mask=inside, other=-float("inf")).to(tl.float32)
        s = tl.load(student + at, mask=inside, other=-float("inf")).to(tl.float32)
        q = tl.exp(s - log_s)
        delta = q - tl.exp(t - log_t)
        if REVERSE:
            ratio = tl.where(q > 0, s, 0.0) - tl.where(q > 0, t, 0.0) - log_s + log_t
            delta = (1 - reverse) * delta + reverse * q * (ratio - back)
        tl.store(student + at, (w * delta).to(student.dtype.element_ty), mask=inside)


def kl_and_delta(
    teacher_RV: Tensor, student_RV: Tensor, weight_R: Tensor, reverse: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `losses.kl_and_delta`, but the second result stands where the student's logits stood, in their dtype.

    Logits come in fp32, bf16 or fp16, forbidden tokens at -inf; each row needs one that is not. The student's are
    copied first where its tokens are not neighbours in memory.
    """
    teacher_RV, student_RV = (x if x.stride(-1) == 1 else x.contiguous() for x in (teacher_RV, student_RV))
    rows, vocabulary = student_RV.shape
    kl_R = torch.empty(rows, dtype=torch.float32, device=student_RV.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        strides = teacher_RV.stride(0), student_RV.stride(0)
        with torch.cuda.device_of(student_RV):
            _kl_and_delta[(rows,)](
                teacher_RV, student_RV, weight_R.contiguous(), kl_R, *strides, vocabulary, float(reverse),
                REVERSE=bool(reverse), BLOCK=block, num_warps=_WARPS,
            )  # fmt: skip
    return kl_R, student_RV
