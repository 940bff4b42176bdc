"""Training on causal blocks: all steps of all windows at once are those of one window at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.decoders import decode
from adjust_dlm.losses import kl_rows
from adjust_dlm.sampler import Sampler
from adjust_dlm.train.causal import pack_windows, random_windows
from adjust_dlm.train.metrics import held_out
from adjust_dlm.train.trainer import TrainConfig
from adjust_dlm.train.unroll import states_compared, unroll, unrolled_kl
from adjust_dlm.types import DecodeConfig, InputError, Trajectory
from helpers import BOS, FAMILIES, MASK, left_pad, tiny_base, tiny_sampler

SIZE = 4
FORMS: list[dict[str, Any]] = [{}, {"layers": 2, "features": (1,)}]


def texts(base: TransformerBase) -> list[Trajectory]:
    """Prompts of one to six tokens; some texts end early, and have masks behind their end."""
    prompts = [[BOS, 5, 6, 7, 8, 9][:n] for n in range(1, 7)]
    result = decode(base, prompts, DecodeConfig(max_new_tokens=9, seed=2), decoder="joint")
    whole = [result.trajectory(b) for b in range(len(prompts))]
    x, at = whole[3], len(whole[3].tokens_L) - 5
    order_L, tokens_L = x.order_L.clone(), x.tokens_L.clone()
    order_L[at:], tokens_L[at:] = -2, MASK
    return [*whole[:3], replace(x, tokens_L=tokens_L, order_L=order_L), *whole[4:]]


def window_by_hand(base: TransformerBase, g: Sampler, x: Trajectory, t: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of commit t + k: the state that scores it in the finished text, the base's at commit t, and g's at step k.

    By whole passes over the canvas as it was, and one causal pass of g's layers.
    """
    base, cut = g.on(base), int((x.order_L == 0).nonzero()) + t
    text = x.tokens_L[: cut + k].tolist()
    teacher_D = base.hidden(left_pad([text]))[0, -1]
    h_LD = base.hidden(left_pad([[*text[:cut], *[MASK] * k]]))[0]
    place_L, norms = torch.arange(cut + k), [g.norm_hidden, *g.norm_features]
    parts = zip(norms, h_LD.split(g.width, -1), strict=True)
    mixed = [g.norm_embed(base.embed(torch.tensor(text))), *(norm(part) for norm, part in parts)]
    z_BLD, sees = g.mix(torch.cat(mixed, -1))[None], (place_L <= place_L[:, None])[None, None]
    for layer in g.layers:
        z_BLD = layer.beside(z_BLD, place_L[None], sees, lambda *keys: keys)
    return teacher_D, h_LD[-1], h_LD[-1, : g.width] + g.norm_out(z_BLD[0, -1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", [*FAMILIES, "sdar"])
def test_states_and_steps_are_those_of_one_window_at_a_time(family: str, form: dict[str, Any]) -> None:
    base, rollout, length = tiny_base(family, block=SIZE, causal=True, end_ids=(1,)), 3, 8
    g, data = tiny_sampler(base, **form), texts(base)
    starts = [0, -2, 3, 1, 0, 5]
    slices = pack_windows(data, starts, length, rollout, base.spec.pad_id)
    run, seen = unroll(g, slices.frames(g.on(base)), rollout=rollout), 0
    for n, (x, start) in enumerate(zip(data, starts, strict=True)):
        for w in range(length - rollout):
            for k in range(1, rollout + 1):
                row, t = w * run.n + n, start + w
                assert (int(run.rank[k - 1][row]) == 0) == (t >= 0 and t + k < x.commits)
                if t < 0 or t + k >= x.commits:
                    continue
                wanted = window_by_hand(base, g, x, t, k)
                got = run.teacher[k - 1][row, 0], run.stale[k - 1][row, 0], run.student[k - 1][row, 0, : g.width]
                for own, other in zip(got, wanted, strict=True):
                    torch.testing.assert_close(own, other, rtol=0, atol=5e-5)
                seen += 1
    assert seen > 30
    assert states_compared(slices, rollout).tolist() == [int((rank >= 0).sum()) for rank in run.rank]


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_and_its_gradient_are_those_of_one_window_at_a_time(form: dict[str, Any]) -> None:
    base, rollout = tiny_base("dream", block=SIZE, causal=True, end_ids=(1,)), 2
    g, data = tiny_sampler(base, **form).requires_grad_(True), texts(base)[1:4]
    slices = pack_windows(data, [0, 0, 0], 9 + rollout, rollout, base.spec.pad_id)
    seen = g.on(base)
    loss = unrolled_kl(seen, unroll(g, slices.frames(seen), rollout=rollout), (1, 2))
    loss.backward()
    own = {name: p.grad.clone() for name, p in g.named_parameters()}
    g.zero_grad()
    total = torch.zeros(())
    for k in (1, 2):
        parts = [window_by_hand(base, g, x, t, k) for x in data for t in range(x.commits - k)]
        rows = [
            kl_rows(*(base.logits(part[None, : g.width]) for part in (teacher, step))) for teacher, _, step in parts
        ]
        total = total + torch.cat(rows).mean() / 2
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    total.backward()
    for name, p in g.named_parameters():
        torch.testing.assert_close(own[name], p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("length", "wide"), [(4, 3), (9, 8), (40, 16)])
def test_every_window_start_of_a_text_weighs_the_same(length: int, wide: int) -> None:
    """Of 9 commits, so 8 windows: a slice that holds them all has them all; none is longer than the texts need."""
    base, count = tiny_base("dream", block=SIZE, causal=True, end_ids=(23,)), Counter[int]()
    data, steps = texts(base), 300
    for step in range(steps):
        slices = random_windows(data, [0], count=4, length=length, rollout=1, key=(1, step), pad_id=0)
        assert slices.length - 1 == wide
        alive = (slices.rank_BL >= 0).view_as(slices.text_SN)
        count.update(slices.t_SN[:-1][alive[:-1] & alive[1:]].tolist())
    share = 4 * steps * min(1, wide / (8 + wide - 1) if wide < 8 else 1)
    assert sorted(count) == list(range(8))
    assert all(abs(n - share) < 5 * share**0.5 * (wide < 8) + 1e-9 for n in count.values())
    moved = (
        slices.tokens_NL.clone(),
        random_windows(data, [0], count=2, length=length, rollout=1, key=(1, step), pad_id=0, first=2),
    )
    assert torch.equal(moved[0][2:], moved[1].tokens_NL) and torch.equal(slices.start_N[2:], moved[1].start_N)


def test_heldout_metrics_of_a_g_that_changes_nothing_are_those_of_the_base() -> None:
    """What parallel decoding uses is the base's state at that depth, not the state that the round began with."""
    base = tiny_base("dream", block=SIZE, causal=True, end_ids=(23,))
    g = tiny_sampler(base, output_norm_init=0.0)
    found = held_out(base, g, texts(base), [0, 1, 2], TrainConfig(rollout=2), torch.no_grad())
    for k in (1, 2):
        assert found[f"kl_{k}"] == pytest.approx(found[f"stale_{k}"], rel=1e-6) and found[f"kl_{k}"] > 0.01


def test_a_step_on_a_whole_canvas_is_refused() -> None:
    base = tiny_base("dream", block=SIZE, causal=True)
    x = left_pad([[BOS, 5, MASK]])
    with pytest.raises(InputError, match="g of causal blocks has no step of a whole canvas"):
        tiny_sampler(base)(base.hidden(x), x)
    with pytest.raises(
        InputError,
        match="a Sampler of this base knows no sparse steps; they take a Sampler, not",
    ):
        decode(base, [[BOS]], DecodeConfig(max_new_tokens=9), decoder="adjust", sampler=tiny_sampler(base), sparse=True)
