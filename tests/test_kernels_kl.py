"""The fused KL against its torch form: on a card where there is one, else in Triton's interpreter (see conftest)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adjust_dlm.losses import Student, kl_and_delta, kl_rows, pick_delta, weighted_kl
from adjust_dlm.types import InputError

fused = pytest.importorskip("adjust_dlm.kernels.kl", reason="needs triton", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows(vocabulary: int, count: int = 6, scale: float = 4.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (scale * torch.randn(count, vocabulary, generator=generator) for _ in "ab")
    for logits in (teacher, student):
        logits[:, vocabulary // 3] = -torch.inf
        logits[:, vocabulary - 2 :] = -torch.inf
    return teacher.to(DEVICE), student.to(DEVICE), torch.rand(count, generator=generator).to(DEVICE)


@pytest.mark.parametrize("reverse", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("vocabulary", [5, 64, 1000, 4097, 9496])
def test_fused_equals_the_torch_form(vocabulary: int, reverse: float) -> None:
    """Below one block, a whole one, ragged ones; the last two tokens and one in the middle are forbidden."""
    teacher, student, weight = rows(vocabulary)
    wanted = kl_and_delta(teacher, student, weight, reverse)
    got = fused.kl_and_delta(teacher, student.clone(), weight, reverse)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=5e-6 if reverse else 1e-7)
    mixed = (1 - reverse) * kl_rows(teacher, student) + reverse * kl_rows(student, teacher)
    torch.testing.assert_close(got[0], mixed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reverse", [0.0, 0.3, 1.0])
def test_the_gradient_is_that_of_autograd(reverse: float) -> None:
    """In fp64 from the definition, tokens forbidden in both left out."""
    teacher, student, weight = rows(64)
    allowed = teacher.isfinite()[0]
    p, s = (x[:, allowed].double() for x in (teacher, student))
    s.requires_grad_()
    log_p, log_q = p.log_softmax(-1), s.log_softmax(-1)
    value = (1 - reverse) * log_p.exp() * (log_p - log_q) + reverse * log_q.exp() * (log_q - log_p)
    (value.sum(-1) * weight.double()).sum().backward()
    kl, delta = kl_and_delta(teacher, student, weight, reverse)
    assert s.grad is not None and (delta[:, ~allowed] == 0).all()
    torch.testing.assert_close(delta[:, allowed].double(), s.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kl.double(), value.sum(-1).detach(), rtol=1e-5, atol=1e-5)


def test_equal_rows_cost_nothing_and_far_ones_stay_finite() -> None:
    teacher, _, weight = rows(777)
    kl, delta = fused.kl_and_delta(teacher, teacher.clone(), weight)
    assert kl.abs().max() < 1e-6 and delta.abs().max() < 1e-7
    peaked = torch.full((1, 777), -300.0, device=DEVICE)
    peaked[0, 3], other = 300.0, peaked.flip(-1).clone()
    other[0, -4] = 300.0
    kl, delta = fused.kl_and_delta(peaked, other, torch.ones(1, device=DEVICE))
    assert kl.item() == pytest.approx(600.0)  # log p - log q = 0 - (-600) at the teacher's only token
    assert delta[0, 3].item() == -1.0 and delta[0, -4].item() == 1.0 and delta.abs().sum().item() == pytest.approx(2.0)
    other = peaked.flip(-1).clone()
    kl, delta = fused.kl_and_delta(peaked, other, torch.ones(1, device=DEVICE), 1.0)
    assert kl.item() == pytest.approx(600.0) and delta.isfinite().all()


@pytest.mark.parametrize("reverse", [0.0, 0.5])
def test_a_shift_of_all_logits_of_a_side_changes_nothing(reverse: float) -> None:
    """By so much that e^logit is 0 in fp32, of one block and of two: the running maximum starts below any logit."""
    for vocabulary in (100, 5000):
        teacher, student, weight = rows(vocabulary)
        wanted = kl_and_delta(teacher, student, weight, reverse)
        for a, b in zip(fused.kl_and_delta(teacher - 300, student - 400, weight, reverse), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reverse", [0.0, 0.5])
def test_a_whole_block_may_be_forbidden(reverse: float) -> None:
    """The first 4096 tokens are out: the running maximum starts on nothing."""
    teacher, student, weight = rows(6000)
    for logits in (teacher, student):
        logits[:, :4096] = -torch.inf
    wanted = kl_and_delta(teacher, student, weight, reverse)
    for a, b in zip(fused.kl_and_delta(teacher, student.clone(), weight, reverse), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_token_that_only_the_student_forbids_costs_infinity() -> None:
    teacher, student, weight = rows(50)
    student[0, 7] = -torch.inf
    for form in (kl_and_delta, fused.kl_and_delta):  # and the other way round for the reverse KL
        assert form(student, teacher.clone(), weight, 1.0)[0].isinf().tolist() == [True] + [False] * 5
    assert kl_and_delta(teacher, student, weight)[0].isinf().tolist() == [True] + [False] * 5
    assert fused.kl_and_delta(teacher, student, weight)[0].isinf().tolist() == [True] + [False] * 5


def test_half_precision_is_read_as_it_stands_and_written_in_place() -> None:
    teacher, student, weight = rows(1999)
    teacher, student = teacher.bfloat16(), student.bfloat16()
    wanted = kl_and_delta(teacher, student, weight)
    kl, delta = fused.kl_and_delta(teacher, student, weight)
    torch.testing.assert_close(kl, wanted[0], rtol=1e-5, atol=1e-5)
    assert delta.data_ptr() == student.data_ptr() and delta.dtype == torch.bfloat16
    torch.testing.assert_close(delta.float(), wanted[1], rtol=2**-7, atol=1e-12)  # one bf16 step


def test_rows_of_a_wider_table_and_turned_ones() -> None:
    """Strides of a head padded to a multiple of 128, and tokens that are not neighbours (a copy, told apart)."""
    teacher, student, weight = rows(300)
    wide = torch.zeros(6, 384, device=DEVICE)
    wide[:, :300] = student
    kl, delta = fused.kl_and_delta(teacher, wide[:, :300], weight)
    wanted = kl_and_delta(teacher, student, weight)
    torch.testing.assert_close(kl, wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(wide[:, :300], wanted[1], rtol=1e-5, atol=1e-7)
    assert (wide[:, 300:] == 0).all() and delta.data_ptr() == wide.data_ptr()
    turned = student.T.contiguous().T
    kl, delta = fused.kl_and_delta(teacher.T.contiguous().T, turned, weight)
    torch.testing.assert_close(kl, wanted[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(turned, student) and delta.data_ptr() != turned.data_ptr()
    assert [part.shape for part in fused.kl_and_delta(teacher[:0], student[:0], weight[:0])] == [(0,), (0, 300)]


def test_weighted_kl_has_the_gradient_of_the_dense_form() -> None:
    """Two depths over overlapping runs of the teacher's rows, chunks that cut both."""
    generator = torch.Generator().manual_seed(2)
    head, teacher = (torch.randn(n, 8, generator=generator).to(DEVICE) for n in (41, 23))

    def logits(h: Tensor) -> Tensor:
        out = h @ head.T
        out[:, 5] = -torch.inf
        return out

    spans = [(0, 17), (4, 23)]
    weights = [torch.rand(b - a, generator=generator).to(DEVICE) for a, b in spans]
    states = [torch.randn(b - a, 8, generator=generator).to(DEVICE) for a, b in spans]
    results = []
    for delta in (None, kl_and_delta, fused.kl_and_delta):
        own = [h.clone().requires_grad_() for h in states]
        if delta is None:
            parts = zip(spans, own, weights, strict=True)
            loss = sum((kl_rows(logits(teacher[a:b]), logits(h)) * w).sum() for (a, b), h, w in parts)
        else:
            students = [Student(h, w, a) for (a, _), h, w in zip(spans, own, weights, strict=True)]
            loss = weighted_kl(teacher, students, logits, head, chunk=6, delta=delta)
        (2 * loss).backward()
        results.append([loss.detach(), *(h.grad for h in own)])
    for others in results[1:]:
        for a, b in zip(results[0], others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_cannot_be_had_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(InputError, match="kernel is triton on cpu; it needs a CUDA device"):
        pick_delta("triton", cpu)
    with caplog.at_level("INFO", logger="adjust_dlm"):
        assert pick_delta("auto", cpu) is kl_and_delta and pick_delta("torch", cpu) is kl_and_delta
    assert caplog.messages == ["KL by torch", "KL by torch"]
