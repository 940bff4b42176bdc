"""Algorithm 2, its loss and its trainer: the proofs of training; cases H5, H8, H19."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import typing
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm import cli
from adjust_dlm.bases.exact import ExactBase, load_exact
from adjust_dlm.bases.family import DreamBase, dream_base, dream_config
from adjust_dlm.bases.layers import new_model
from adjust_dlm.bases.transformer import TransformerBase
from adjust_dlm.data.canvases import CorpusConfig
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.decoders import decode
from adjust_dlm.decoders.divergence import observe
from adjust_dlm.losses import Student, kl_rows, row_shares, row_weights, weighted_kl
from adjust_dlm.sampler import Sampler, load_sampler
from adjust_dlm.sampling import EVALUATION_ROWS
from adjust_dlm.train import trainer
from adjust_dlm.train.adapt import AdaptConfig
from adjust_dlm.train.batches import pack, random_slices, released_depth
from adjust_dlm.train.metrics import held_out, looked_at
from adjust_dlm.train.one_pass import PoolConfig
from adjust_dlm.train.optim import learning_rate
from adjust_dlm.train.trainer import Run, TrainConfig, train
from adjust_dlm.train.unroll import unrolled_kl
from adjust_dlm.types import DecodeConfig, InputError, State, Trajectory
from helpers import BOS, stopping, tiny_base, tiny_sampler, unroll_slices

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def exact() -> ExactBase:
    return load_exact(device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def trajectories(exact: ExactBase) -> list[Trajectory]:
    result = decode(exact, [[]] * 300, DecodeConfig(max_new_tokens=4), decoder="joint")
    return [result.trajectory(b) for b in range(300)]


# losses


def test_kl_rows_by_hand() -> None:
    """p = (1/2, 1/2, 0), q = (1/4, 3/4, 0): KL = ln 2 - ln 3 / 2."""
    p = torch.tensor([[0.5, 0.5, 0.0]]).log()
    q = torch.tensor([[0.25, 0.75, 0.0]]).log()
    assert kl_rows(p, q).item() == pytest.approx(0.693147 - 0.549306, abs=1e-5)


def test_chunked_kl_equals_dense_in_value_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(23, 8, generator=generator)
    teacher = torch.randn(37, 8, generator=generator)
    weight = torch.rand(37, generator=generator)

    def logits(h: Tensor) -> Tensor:
        out = h @ head.T
        out[:, 5] = -torch.inf
        return out

    dense, chunked = (torch.randn(37, 8, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in "ab")
    a = (kl_rows(logits(teacher), logits(dense)) * weight).sum()
    b = weighted_kl(teacher, [Student(chunked, weight)], logits, head, chunk=10)
    (3 * a).backward()
    (3 * b).backward()
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(dense.grad, chunked.grad, rtol=1e-5, atol=1e-6)


def test_next_weights_by_hand() -> None:
    rank = torch.tensor([[0, 3, -1, 6]])
    weights = row_weights(rank, rank >= 0, "next")[0]
    near = torch.tensor([1.0, torch.e**-1, 0.0, torch.e**-2])
    expected = 0.9 * near / near.sum() + 0.1 * torch.tensor([1, 1, 0, 1]) / 3
    torch.testing.assert_close(weights, expected)
    assert row_weights(rank, rank >= 9, "next").sum() == 0


# Algorithm 2


def test_oracle_has_zero_kl_at_every_depth(exact: ExactBase, trajectories: list[Trajectory]) -> None:
    """With g = f every unrolled KL is exactly 0 (H5); an index slip of either kind makes it positive."""

    def oracle(h: Tensor, state: State) -> Tensor:
        return exact.hidden(state)

    def late(h: Tensor, state: State) -> Tensor:
        """Sees the canvas before the latest commit."""
        order = state.masked_BL.clone()
        return torch.where(order.all(-1)[:, None, None], exact.hidden(state), h)

    slices = random_slices(trajectories, range(300), count=32, length=4, rollout=3, key=(0,), pad_id=0)
    right, wrong = unroll_slices(exact, oracle, slices), unroll_slices(exact, late, slices)
    for k in (1, 2, 3):
        for weights in ("next", "uniform"):
            assert unrolled_kl(exact, right, k, weights=weights).item() == 0.0
        if k < 3:
            assert unrolled_kl(exact, wrong, k).item() > 1e-2
            assert unrolled_kl(exact, right, k, stale=True).item() > 1e-2


def test_unroll_feeds_g_the_canvas_after_its_commit(exact: ExactBase, trajectories: list[Trajectory]) -> None:
    """Window s of trajectory n calls g at depth k on state(start + s + k), recomputed from the order alone."""
    chosen, starts = trajectories[:3], [0, 1, 0]
    seen: list[Tensor] = []

    def spy(h: Tensor, state: State) -> Tensor:
        seen.append(state.tokens_BL)
        return exact.hidden(state)

    unroll_slices(exact, spy, pack(chosen, starts, 4, 0), rollout=2)
    for k in (1, 2):
        for s in (0, 1):
            for n, (x, start) in enumerate(zip(chosen, starts, strict=True)):
                t = min(start + s + k, x.commits)
                assert seen[k - 1][s * 3 + n].tolist() == x.state(t, exact.spec.mask_id)[0].tolist()


def test_shared_base_passes_equal_the_plain_form() -> None:
    """S - rollout windows of one slice give the loss and gradient of as many single windows (fp32, tiny Dream)."""
    torch.manual_seed(0)
    base = tiny_dream()
    result = decode(base, [[47, 1], [47, 2, 3]], DecodeConfig(max_new_tokens=8), decoder="joint")
    chosen = [result.trajectory(b) for b in range(2)]
    sampler = Sampler(base)

    def gradient(losses: list[Tensor]) -> tuple[Tensor, Tensor]:
        sampler.zero_grad()
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in sampler.parameters() if p.grad is not None])

    shared = unroll_slices(base, sampler, pack(chosen, [0, 1], 5, 0), rollout=2)
    sliced = gradient([unrolled_kl(base, shared, k) for k in (1, 2)])
    singles = []
    for s in range(3):
        run = unroll_slices(base, sampler, pack(chosen, [s, 1 + s], 3, 0), rollout=2)
        singles += [unrolled_kl(base, run, k) for k in (1, 2)]
    plain = gradient(singles)
    torch.testing.assert_close(sliced, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("suppress_eos", [False, True])
def test_depths_that_share_their_teacher_equal_the_dense_form(suppress_eos: bool) -> None:
    """Every window and depth by itself, its logits whole, and the tokens that may not come cut off them by hand."""
    torch.manual_seed(0)
    base, most = tiny_dream(), 48 if suppress_eos else 49  # 48 ends a text, 49 is the mask
    result = decode(base, [[47, 1], [47, 2, 3]], DecodeConfig(max_new_tokens=8), decoder="joint")
    chosen, sampler = [result.trajectory(b) for b in range(2)], Sampler(base)
    run = unroll_slices(base, sampler, pack(chosen, [-1, 5], 6, 0), rollout=2)
    for kind in ("next", "uniform"):
        dense = torch.zeros(())
        for k in (1, 2):
            masked = run.rank[k - 1] >= 0
            weight = row_weights(run.rank[k - 1], masked, kind)
            own = kl_rows(*((h @ base.head_matrix.T)[..., :most] for h in (run.teacher[k - 1], run.student[k - 1])))
            states = masked.any(-1).nonzero()[:, 0].tolist()
            assert 0 < len(states) < 8  # some hang over
            dense = dense + sum((weight[b] * own[b])[masked[b]].sum() for b in states) / len(states) / 2
        shared = unrolled_kl(base, run, (1, 2), weights=kind, suppress_eos=suppress_eos)
        torch.testing.assert_close(shared, dense, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            torch.autograd.grad(shared, sampler.mix.weight, retain_graph=True)[0],
            torch.autograd.grad(dense, sampler.mix.weight, retain_graph=True)[0], rtol=1e-4, atol=1e-6,
        )  # fmt: skip


def test_left_out_rows_do_not_move_the_expected_weights() -> None:
    """M = 3 of 6 rows: rank 0 stays, each of the five others is drawn with 2/5 and counts 5/2: all orders of lots."""
    rank = torch.tensor([[4, -1, 0, 9, 2, 7, 1 << 20]])
    total, orders = torch.zeros(1, 7), list(itertools.permutations(range(5)))
    for order in orders:
        u = torch.zeros(1, 7)
        u[0, [0, 3, 4, 5, 6]] = torch.tensor(order) / 5
        u[0, [1, 2]] = 0.1  # no lots in this draw
        share = row_shares(rank, 3, u)
        assert share[0, 1] == 0 and share[0, 2] == 1
        assert sorted(share[0, [0, 3, 4, 5, 6]].tolist()) == [0, 0, 0, 2.5, 2.5]
        total += share
    torch.testing.assert_close(total / len(orders), (rank >= 0).float())
    assert torch.equal(row_shares(rank, 6, torch.rand(1, 7)), (rank >= 0).float())
    assert torch.equal(row_shares(rank, 99, torch.rand(1, 7)), (rank >= 0).float())
    one = [row_shares(rank, 1, torch.rand(1, 7))[0].tolist() for _ in range(5)]
    assert all(sorted(x) == [0] * 6 + [6] for x in one)  # M = 1: one row stands for all six


def test_a_limit_on_rows_is_unbiased_in_loss_and_gradient() -> None:
    """Each far row in turn, M = 2 of 4 masked rows (1 near, 1 of 3 drawn): the mean is the loss on all rows."""
    torch.manual_seed(0)
    base = tiny_dream()
    x = decode(base, [[47, 1]], DecodeConfig(max_new_tokens=5), decoder="joint").trajectory(0)
    sampler = Sampler(base)
    run = unroll_slices(base, sampler, pack([x], [0], 2, 0), rollout=1)
    rank = run.rank_BL

    def both(**changes: object) -> list[Tensor]:
        loss = unrolled_kl(base, run, 1, **changes)  # type: ignore[arg-type]
        return [loss.detach(), torch.autograd.grad(loss, sampler.mix.weight, retain_graph=True)[0]]

    whole, parts = both(), []
    for first in (1, 2, 3):
        u = torch.where(rank == first, 0.0, 0.5)
        parts.append(both(share_BL=row_shares(rank, 2, u)))
        assert not torch.allclose(parts[-1][0], whole[0], rtol=1e-3)
    for n in (0, 1):
        torch.testing.assert_close(sum(part[n] for part in parts) / 3, whole[n], rtol=1e-4, atol=1e-7)
    covered = both(share_BL=row_shares(rank, 5, torch.rand(rank.shape)))
    assert all(torch.equal(a, b) for a, b in zip(covered, whole, strict=True))


@pytest.mark.parametrize("pad_to", [0, 24])
def test_h8_padding_changes_neither_loss_nor_gradient(pad_to: int) -> None:
    """Prompts of 2, 7 and 4 tokens left-padded, against each text alone and unpadded, weighted by states that count."""
    base = tiny_base("dream", end_ids=(23,))
    prompts = [[BOS, 1], [BOS, 2, 3, 4, 5, 6, 7], [BOS, 8, 9, 10]]
    result = decode(base, prompts, DecodeConfig(max_new_tokens=8), decoder="joint")
    texts, starts = [result.trajectory(b) for b in range(3)], [1, 6, -1]
    sampler = tiny_sampler(base).requires_grad_(True)

    def loss(chosen: list[int], k: int, pad_to: int) -> tuple[int, Tensor, list[Tensor]]:
        slices = pack([texts[n] for n in chosen], [starts[n] for n in chosen], 5, 3, pad_to=pad_to)
        assert slices.padded == (not bool(slices.real_NL.all())) == (len(chosen) > 1)
        run = unroll_slices(base, sampler, slices)
        value = unrolled_kl(base, run, k)
        gradients = torch.autograd.grad(value, list(sampler.parameters()))
        return int((run.rank[k - 1] >= 0).any(-1).sum()), value.detach(), list(gradients)

    for k, states in ((1, [2, 1, 1]), (2, [2, 0, 1]), (3, [2, 0, 1])):
        count, together, gradient = loss([0, 1, 2], k, pad_to)
        alone = [loss([n], k, 0) for n in range(3)]
        assert [n for n, *_ in alone] == states and count == sum(states)
        assert together > 0.1
        torch.testing.assert_close(together, sum(n * value for n, value, _ in alone) / count, rtol=1e-5, atol=1e-6)
        for i, mine in enumerate(gradient):
            torch.testing.assert_close(mine, sum(n * g[i] for n, _, g in alone) / count, rtol=1e-3, atol=1e-4)


def test_every_window_start_is_equally_likely() -> None:
    """T=6, S=4, rollout 2 (2 windows a slice): starts -1..4, so window starts 0..4 are covered twice each."""
    x = Trajectory(torch.arange(6), torch.arange(6), 0, 0)
    counts: Counter[int] = Counter()
    starts: set[int] = set()
    for step in range(400):
        slices = random_slices([x], range(1), count=8, length=4, rollout=2, key=(step,), pad_id=0)
        starts |= set(slices.start_N.tolist())
        for start in slices.start_N.tolist():
            counts.update(t for t in (start, start + 1) if 0 <= t <= 4)
    assert starts == set(range(-1, 5))  # a later one would have no window that counts
    total = sum(counts.values())
    assert sorted(counts) == [0, 1, 2, 3, 4]
    assert all(abs(c / total - 0.2) < 0.03 for t, c in counts.items() if t < 4)


def test_windows_before_the_first_state_do_not_count(exact: ExactBase, trajectories: list[Trajectory]) -> None:
    run = unroll_slices(exact, lambda h, s: h, pack(trajectories[:1], [-1], 4, 0), rollout=2)
    assert all((rank[0] < 0).all() for rank in run.rank)
    assert (run.rank[0][1] >= 0).sum() == 3 and (run.rank[1][1] >= 0).sum() == 2


def test_states_after_the_end_do_not_count() -> None:
    """A text that ended after 2 commits: its third state has no weight and its never-filled rows no rank."""
    done = Trajectory(torch.tensor([1, 2, 0, 0]), torch.tensor([0, 1, -2, -2]), 0, 0)
    slices = pack([done], [0], 4, 0)
    rank = slices.rank_BL.view(4, 1, 4)
    assert (rank[:2, 0] >= 0).sum(-1).tolist() == [4, 3]
    assert (rank[2:] >= 0).sum() == 0
    x = slices.states(9)  # the filler behind the end was never there
    assert x.tokens_BL.tolist() == [[9, 9, 9, 9], [1, 9, 9, 9], [1, 2, 9, 9], [1, 2, 9, 9]]
    assert torch.equal(x.masked_BL, x.tokens_BL == 9)


def test_released_depths_follow_their_softmax() -> None:
    counts = Counter(released_depth((0, step), 3) for step in range(4000))
    for depth, share in zip((1, 2, 3), (0.481, 0.292, 0.227), strict=True):
        assert counts[depth] / 4000 == pytest.approx(share, abs=0.03)


def test_learning_rate_by_hand() -> None:
    at = [learning_rate(s, s / 100, warmup=10, decay=0.7) for s in (0, 9, 30, 65, 100)]
    assert at == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])
    assert learning_rate(99, 0.99, warmup=0, decay=0.0) == 1.0


# the trainer, on the enumerable base


@pytest.fixture(scope="module")
def folder(exact: ExactBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trajectories")
    make_trajectories(
        TrajectoriesConfig(base="exact", num=1024, output=str(out), max_new_tokens=4, batch_size=512), base=exact
    )
    return out


def tiny_dream() -> DreamBase:
    config = dream_config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dream_base(config, mask_id=49, end_ids=(48,), bos_id=47, head_weight=torch.randn(50, 32) / 2)


def settings(folder: Path, output: Path, **changes: object) -> TrainConfig:
    common = {
        "base": "exact", "slice_states": 4, "slices": 8, "heldout": 64, "warmup": 5, "steps": 12, "eval_every": 6,
        "checkpoint_every": 5, "accumulate": 2,
    }  # fmt: skip
    return TrainConfig(trajectories=(str(folder),), output=str(output), **{**common, **changes})  # type: ignore[arg-type]


def weights(output: Path) -> dict[str, Tensor]:
    return torch.load(output / "checkpoint.pt", weights_only=True)["sampler"]


def test_trained_g_brings_total_variation_below_parallel(tmp_path: Path) -> None:
    """Proof 3: K=4 on four tokens is one base pass; parallel is far from p*, a trained g much nearer."""
    exact = load_exact(words=2, device=CPU, dtype=torch.float32)
    made = {"num": 1024, "max_new_tokens": 4, "batch_size": 512, "shard_rows": 1024}
    make_trajectories(TrajectoriesConfig(base="exact", output=str(tmp_path / "t"), **made), base=exact)  # type: ignore[arg-type]
    few = {"steps": 250, "slices": 32, "lr": 2e-2, "accumulate": 1, "eval_every": 250}
    result = train(settings(tmp_path / "t", tmp_path, **few), exact)
    held = result["heldout"]
    for k in (1, 2):
        assert held[f"kl_{k}"] < 0.2 * held[f"stale_{k}"]
    g = load_sampler(tmp_path / "sampler", exact)
    n = 4000
    config = DecodeConfig(tokens_per_step=4, max_new_tokens=4, seed=9)

    def total_variation(decoder: str) -> float:
        rows = decode(exact, [[]] * n, config, decoder=decoder, sampler=g).tokens_BL
        counts = Counter(map(tuple, rows.tolist()))
        return (
            sum(
                abs(counts[tuple(s)] / n - p)
                for s, p in zip(exact.strings_NL.tolist(), exact.p_N.tolist(), strict=True)
            )
            / 2
        )

    def divergence(decoder: str) -> float:
        helper = g if decoder == "adjust" else None
        return 4 * observe(exact, [[]] * 1000, config, decoder=decoder, sampler=helper).summary()["kl_qp"]

    # In g's own order, on canvases of its own. Held-out KL says nothing about these: it stays in the base's order.
    assert divergence("parallel") > 1
    assert divergence("adjust") < 0.1
    assert result["divergence"]["adjust"]["kl_qp"] < 0.1 * result["divergence"]["parallel"]["kl_qp"]
    distance = {d: total_variation(d) for d in ("joint", "parallel", "adjust")}
    assert distance["joint"] < 0.04  # sampling noise of 4000 draws from 16 strings
    assert distance["parallel"] > 0.4
    assert distance["adjust"] < 0.1


def test_h19_resume_is_bit_for_bit(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    """12 steps in one go, and 7 + SIGTERM + 5: the same weights, metrics and sampler file."""
    train(settings(folder, tmp_path / "whole"), exact)

    # the 14th micro-batch ends step 7
    first = train(settings(folder, tmp_path / "parts", eval_every=100), stopping(exact, 14))
    assert not first["finished"] and first["steps"] == 7 and first["sampler"] is None
    assert not (tmp_path / "parts" / "sampler").exists()
    # eval_every is a setting too: a changed one is refused by name
    with pytest.raises(InputError, match="eval_every was 100 and is now 6"):
        train(settings(folder, tmp_path / "parts"), exact)
    second = train(settings(folder, tmp_path / "parts", eval_every=100), exact)
    assert second["finished"] and second["sampler"] == str(tmp_path / "parts" / "sampler")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    files = [(tmp_path / p / "sampler" / "sampler.safetensors").read_bytes() for p in ("whole", "parts")]
    assert files[0] == files[1]


def metrics_of(output: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_a_stop_between_evaluations_leaves_the_same_metrics(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    """Stopped at step 7 of 12, evaluated at 6 and 12: the log of the two parts is the log of one run."""
    train(settings(folder, tmp_path / "whole"), exact)

    # 12 of six steps, 8 of the evaluation, 2 of step 7
    assert train(settings(folder, tmp_path / "parts"), stopping(exact, 22))["steps"] == 7
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "ce": {"text": 1.0}')  # what a kill leaves
    assert train(settings(folder, tmp_path / "parts"), exact)["steps"] == 12
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")
    assert [line["step"] for line in metrics_of(tmp_path / "whole")] == [6, 12]


@pytest.mark.parametrize(("at", "step"), [(14, 6), (34, 12)])
def test_a_signal_in_an_evaluation_is_heard_before_its_end(
    exact: ExactBase,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
    at: int,
    step: int,
) -> None:
    """In the second of its eight passes, behind 12 of six steps; the run goes on with that evaluation."""
    train(settings(folder, tmp_path / "whole"), exact)
    base = stopping(exact, at)
    monkeypatch.setattr(trainer, "load_base", lambda *_, **__: base)
    flags = {
        "base": "exact", "trajectories": folder, "output": tmp_path / "parts", "slice-states": 4, "slices": 8,
        "heldout": 64, "warmup": 5, "steps": 12, "eval-every": 6, "checkpoint-every": 5, "accumulate": 2,
    }  # fmt: skip
    code = cli.main(["train", *(f"--{name}={value}" for name, value in flags.items())])
    assert (code, next(base.passes)) == (130, at + 1)
    out = capsys.readouterr()
    assert "stopped before the end; the same command goes on from here" in out.err and "Traceback" not in out.err
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["step"] == step
    assert [line["step"] for line in metrics_of(tmp_path / "parts")] == [6][: step // 12]
    result = json.loads((tmp_path / "parts" / "result.json").read_text())["results"]
    assert (result["finished"], result["steps"], result["sampler"]) == (False, step, None)
    assert train(settings(folder, tmp_path / "parts"), exact)["finished"]
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[k], parts[k]) for k in whole)


def test_a_finished_run_started_again_changes_nothing(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    files = ("sampler/sampler.json", "sampler/sampler.safetensors", "metrics.jsonl")
    first = train(settings(folder, tmp_path), exact)
    before = [(tmp_path / name).read_bytes() for name in files]
    assert first["heldout"]
    assert train(settings(folder, tmp_path), exact)["heldout"] == first["heldout"]
    assert [(tmp_path / name).read_bytes() for name in files] == before


def test_other_trajectories_of_the_same_number_are_refused_on_resume(
    exact: ExactBase, folder: Path, tmp_path: Path
) -> None:
    train(settings(folder, tmp_path / "run"), exact)
    other = TrajectoriesConfig(base="exact", num=1024, output=str(tmp_path / "t"), max_new_tokens=4, seed=1)
    make_trajectories(other, base=exact)
    with pytest.raises(InputError, match=r"cannot resume .*: data_digest was"):
        train(settings(tmp_path / "t", tmp_path / "run"), exact)


def test_training_leaves_the_global_generator_alone(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(settings(folder, tmp_path, steps=1), exact)
    assert torch.equal(torch.rand(3), expected)


def test_held_out_means_are_over_the_states_that_count(exact: ExactBase, tmp_path: Path) -> None:
    """Texts of two tokens: windows start at 0 only, depth 1 has one masked row, depths 2 and 3 have none."""
    result = decode(exact, [[0, 1]] * 40, DecodeConfig(max_new_tokens=2), decoder="joint")
    data, g = [result.trajectory(b) for b in range(40)], Sampler(exact)
    metrics = held_out(exact, g, data, range(40), TrainConfig(), nullcontext())
    assert metrics.keys() == {"kl_1", "stale_1", "top1_1", "position_1", "own_kl_1", "own_back_1"}
    assert metrics["position_1"] == 1.0  # there is but one position left
    kl = [unrolled_kl(exact, unroll_slices(exact, g, pack([x], [0], 4, 0)), 1).item() for x in data]
    assert metrics["kl_1"] == pytest.approx(sum(kl) / 40, rel=1e-5)


@pytest.mark.parametrize("count", [1, 3, 64, 100, 128, 500, 1024, 2500])
def test_held_out_windows_look_at_every_row_equally_often(count: int) -> None:
    """At least 128 windows, at most 1024 rows; row by row in different parts of a text, over all rows evenly spread."""
    rows = [7 * n for n in range(count)]
    windows = looked_at(rows, seed=0)
    used = rows if count <= 1024 else [7 * (n * 2500 // 1024) for n in range(1024)]
    times = math.ceil(128 / len(used))
    assert Counter(row for row, _ in windows) == dict.fromkeys(used, times)
    for row in used:
        assert sorted(int(at * times) for r, at in windows if r == row) == list(range(times))
    assert sorted(int(at * len(windows)) for _, at in windows) == list(range(len(windows)))
    assert windows == looked_at(rows, seed=0) and (count == 1 or windows != looked_at(rows, seed=1))


def test_held_out_metrics_are_means_over_these_windows() -> None:
    """130 rows of 5 and 9 tokens, one window each at a start in 0..T-2, recomputed one by one."""
    base, how = tiny_dream(), {"suppress_eos": True, "next_decay": 1.0, "next_share": 0.5}
    lengths = [DecodeConfig(max_new_tokens=n, suppress_eos=True) for n in (5, 9)]
    result = [decode(base, [[47]] * 65, one, decoder="joint") for one in lengths]
    data, g = [r.trajectory(b) for r in result for b in range(65)], tiny_sampler(base)
    with torch.no_grad():
        base.head_matrix[48] *= 3  # now and then the end would be the likeliest: it must not count
    config = TrainConfig(rollout=2, slice_states=3, **how)
    metrics = held_out(base, g, data, range(130), config, nullcontext())
    names = ("kl", "stale", "top1", "position", "own_kl", "own_back")
    sums: dict[str, list[float]] = {f"{name}_{k}": [] for name in names for k in (1, 2)}
    starts: dict[int, list[int]] = {5: [], 9: []}
    ends = 0
    for row, at in looked_at(range(130), 0):
        x = data[row]
        starts[x.commits].append(math.floor(at * (x.commits - 1)))
        run = unroll_slices(base, g, pack([x], starts[x.commits][-1:], 3, 0), rollout=2)
        for k in (1, 2):
            if (run.rank[k - 1] >= 0).any():
                sums[f"kl_{k}"].append(unrolled_kl(base, run, k, **how).item())
                sums[f"stale_{k}"].append(unrolled_kl(base, run, k, stale=True, **how).item())
                rows = [h[run.rank[k - 1] == 0] @ base.head_matrix.T for h in (run.teacher[k - 1], run.student[k - 1])]
                sums[f"top1_{k}"].append(float(rows[0][0, :48].argmax() == rows[1][0, :48].argmax()))
                ends += sum(int(one[0, :49].argmax() == 48) for one in rows)
                masked_L = run.rank[k - 1][0] >= 0
                log_p, log_q = (
                    (h[0] @ base.head_matrix.T)[:, :48].double().log_softmax(-1)
                    for h in (run.teacher[k - 1], run.student[k - 1])
                )
                certain_L = (log_q.exp() * log_q).sum(-1)  # Dream's rule
                own = max((n for n in range(len(masked_L)) if masked_L[n]), key=lambda n: float(certain_L[n]))
                p, q = log_p[own], log_q[own]
                sums[f"position_{k}"].append(float(run.rank[k - 1][0, own] == 0))
                sums[f"own_kl_{k}"].append(float((p.exp() * (p - q)).sum()))
                sums[f"own_back_{k}"].append(float((q.exp() * (q - p)).sum()))
    assert len(sums["kl_1"]) == 130 > len(sums["kl_2"]) and ends > 20
    assert all(0.2 < metrics[f"{name}_{k}"] < 0.9 for name in ("top1", "position") for k in (1, 2))
    for name, values in sums.items():
        assert metrics[name] == pytest.approx(sum(values) / len(values), rel=1e-4)
    assert {n: set(s) for n, s in starts.items()} == {5: set(range(4)), 9: set(range(8))}


def test_training_ends_with_the_divergence_on_held_out_prompts(exact: ExactBase, tmp_path: Path) -> None:
    """Prompts of held-out trajectories, in rows for evaluation; K = rollout + 1, the temperature that most have."""
    for name, temperature in (("t", (1.0, 1.0, 0.5)), ("cold", (0.0,))):
        made = TrajectoriesConfig(
            base="exact", num=48, output=str(tmp_path / name), max_new_tokens=3, temperature=temperature,
            prompts=str(tmp_path / "x.jsonl"),
        )  # fmt: skip
        source = PromptSource("two", [[0], [1]])
        make_trajectories(made, base=exact, source=source)
    run = settings(tmp_path / "t", tmp_path / "run", heldout=24, heldout_texts=5, rollout=2, steps=1)
    result = train(run, exact)
    found = result["divergence"]
    assert (found["tokens_per_step"], found["temperature"], found["adjust"]["texts"]) == (3, 1.0, 5)
    store = TrajectoryStore(tmp_path / "t")
    apart = [store[(2 * i + 1)] for i in range(24)]
    warm = [x for x in apart if x.temperature == 1.0][:5]
    config = DecodeConfig(tokens_per_step=3, max_new_tokens=3)
    g, prompts = load_sampler(tmp_path / "run" / "sampler", exact), [x.tokens_L[:1].tolist() for x in warm]
    for decoder, helper in (("parallel", None), ("adjust", g)):
        rows = [EVALUATION_ROWS + n for n in range(5)]  # of the texts' own, joint text may be training text
        direct = observe(exact, prompts, config, decoder=decoder, sampler=helper, rows=rows).summary()
        assert found[decoder]["kl_qp"] == pytest.approx(direct["kl_qp"], rel=0.02)  # g is saved in bf16
    saved = json.loads((tmp_path / "run" / "sampler" / "sampler.json").read_text())
    assert saved["divergence"] == found
    off = train(settings(tmp_path / "t", tmp_path / "off", heldout=24, heldout_texts=0, rollout=2, steps=1), exact)
    assert off["divergence"] == {}
    greedy = train(settings(tmp_path / "cold", tmp_path / "greedy", heldout=24, rollout=2, steps=1), exact)
    assert greedy["divergence"] == {}  # a law at T = 0 has one text
    single = train(settings(tmp_path / "t", tmp_path / "one", heldout=24, heldout_texts=1, rollout=2, steps=1), exact)
    assert single["divergence"] == {}  # no interval


def test_training_on_a_base_whose_order_cannot_be_measured_ends_all_the_same(tmp_path: Path) -> None:
    """LLaDA's confidence at T > 0; it was an error once the last step was done, and no sampler was written."""
    base = tiny_base("llada")
    made = TrajectoriesConfig(base="llada", num=8, output=str(tmp_path / "t"), max_new_tokens=4, suppress_eos=True)
    make_trajectories(made, base=base)
    run = settings(tmp_path / "t", tmp_path / "run", heldout=2, rollout=1, steps=1, suppress_eos=True)
    result = train(run, base)
    assert "order confidence looks at the drawn tokens" in result["divergence"]["no_divergence"]
    saved = json.loads((tmp_path / "run" / "sampler" / "sampler.json").read_text())
    assert saved["divergence"] == result["divergence"]


def test_g_is_saved_before_its_divergence_is_measured(
    exact: ExactBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for the logits")

    monkeypatch.setattr(trainer, "divergence", full)
    folder = tmp_path / "t"
    source = PromptSource("two", [[0], [1]])
    made = TrajectoriesConfig(base="exact", num=8, output=str(folder), max_new_tokens=3, prompts="x.jsonl")
    make_trajectories(made, base=exact, source=source)
    with pytest.raises(torch.OutOfMemoryError):
        train(settings(folder, tmp_path / "run", heldout=2, rollout=2, steps=1), exact)
    assert load_sampler(tmp_path / "run" / "sampler", exact).config.layers == 1


def test_a_bf16_base_trains_on_the_cpu(tmp_path: Path) -> None:
    """g's weights stay fp32, its passes run in the base's precision."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = dream_config(**shape, num_key_value_heads=2, vocab_size=50, max_position_embeddings=64)
    base = dream_base(
        config, mask_id=49, end_ids=(48,), bos_id=47, model=new_model(config).bfloat16(),
        head_weight=torch.randn(50, 32, dtype=torch.bfloat16),
    )  # fmt: skip
    make_trajectories(
        TrajectoriesConfig(base="dream", num=16, output=str(tmp_path / "t"), max_new_tokens=6, suppress_eos=True),
        base=base,
    )
    train(settings(tmp_path / "t", tmp_path / "run", heldout=4, steps=2), base)
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["run"]["dtype"] == "bfloat16"
    assert {w.dtype for w in saved["sampler"].values()} == {torch.float32}


@pytest.mark.parametrize("fused", [False, True])
def test_a_base_with_fused_kernels_is_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(trainer, "fuses", lambda _: fused)
    monkeypatch.setattr(TransformerBase, "compile", lambda self: calls.append(True))
    source = TrajectoriesConfig(base="dream", num=16, output=str(tmp_path / "t"), max_new_tokens=8)
    make_trajectories(source, base=tiny_dream())
    common = {"base": "dream", "trajectories": (str(tmp_path / "t"),), "steps": 1, "slices": 4, "heldout": 4}
    train(TrainConfig(output=str(tmp_path / "run"), compile=True, **common), tiny_dream())  # type: ignore[arg-type]
    assert calls == [] if fused else calls == [True]


def test_a_compiled_run_trains_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One canvas length, traced base, g and KL (traced by dynamo, run eagerly: a card's kernels are another matter)."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    folders = []
    for length in (8, 5):
        folders.append(tmp_path / str(length))
        make_trajectories(
            TrajectoriesConfig(base="dream", num=16, output=str(folders[-1]), max_new_tokens=length, batch_size=16,
                               shard_rows=16, seed=length),
            base=tiny_dream(),
        )  # fmt: skip
    for compiled in (False, True):
        train(
            TrainConfig(
                base="dream", trajectories=tuple(map(str, folders)), output=str(tmp_path / str(compiled)), steps=3,
                slices=4, slice_states=5, heldout=4, eval_every=3, compile=compiled,
            ),
            tiny_dream(),
        )  # fmt: skip
    eager, traced = weights(tmp_path / "False"), weights(tmp_path / "True")
    for name, value in eager.items():
        torch.testing.assert_close(traced[name], value, rtol=1e-4, atol=1e-5)


def test_resume_never_starts_anew(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    """The checkpoint of another run is in the way with "auto" and ignored with "never"."""
    train(settings(folder, tmp_path, steps=2), exact)
    with pytest.raises(InputError, match="steps was 2 and is now 3"):
        train(settings(folder, tmp_path, steps=3), exact)
    assert train(settings(folder, tmp_path, steps=3, resume="never"), exact)["steps"] == 3
    whole = weights(tmp_path)
    train(settings(folder, tmp_path / "other", steps=3), exact)
    assert all(torch.equal(whole[k], value) for k, value in weights(tmp_path / "other").items())


def test_a_run_begun_anew_is_not_gone_on_with_from_the_one_before(
    exact: ExactBase, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before a checkpoint of its own; the one before is kept under another name, and a dry run leaves it."""
    train(settings(folder, tmp_path, steps=2), exact)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    train(settings(folder, tmp_path, steps=2, resume="never", dry_run=True), exact)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("adjust_dlm.train.trainer._loop", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(settings(folder, tmp_path, steps=2, seed=7, resume="never"), exact)
    assert not (tmp_path / "checkpoint.pt").exists()
    assert (tmp_path / "checkpoint.old.pt").read_bytes() == before
    train(settings(folder, tmp_path, steps=2, seed=7), exact)
    train(settings(folder, tmp_path / "other", steps=2, seed=7), exact)
    assert all(torch.equal(weights(tmp_path)[k], value) for k, value in weights(tmp_path / "other").items())


def test_metrics_hold_every_depth(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    train(settings(folder, tmp_path), exact)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [6, 12]
    for k in (1, 2, 3):
        assert {f"kl_{k}", f"stale_{k}", f"top1_{k}"} <= lines[-1].keys()


def test_nan_stops_with_the_step_named(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    class Broken(ExactBase):
        calls = 0

        def hidden(self, state: State) -> Tensor:
            Broken.calls += 1
            h = super().hidden(state)
            return h * float("nan") if Broken.calls > 6 else h

    with pytest.raises(FloatingPointError, match="at step 3"):
        train(settings(folder, tmp_path), Broken(exact.joint))


def test_bad_input_is_named(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no trajectories"):
        train(TrainConfig(base="exact", output=str(tmp_path)), exact)
    with pytest.raises(InputError, match="1024 trajectories, of which 1024 are held out"):
        train(settings(folder, tmp_path, heldout=1024), exact)
    with pytest.raises(InputError, match="fingerprint"):
        train(settings(folder, tmp_path), load_exact(device=CPU, dtype=torch.float32, seed=1))
    with pytest.raises(InputError, match="slice_states is 3"):
        settings(folder, tmp_path, slice_states=3)
    with pytest.raises(InputError, match="lr is nan"):
        settings(folder, tmp_path, lr=float("nan"))
    for name in ("steps", "slices", "accumulate", "eval_every", "checkpoint_every", "rollout", "max_seconds", "clip"):
        with pytest.raises(InputError, match=f"{name} is 0; it must be"):
            settings(folder, tmp_path, **{name: 0})
    for name in ("warmup", "heldout", "seed"):
        with pytest.raises(InputError, match=f"{name} is -1; it must "):
            settings(folder, tmp_path, **{name: -1})
    with pytest.raises(InputError, match="seed is 9223372036854775808; it must lie in 0"):
        settings(folder, tmp_path, seed=2**63)


CONFIGS: list[tuple[Any, dict[str, Any]]] = [
    (TrainConfig, {}), (PoolConfig, {}), (TrajectoriesConfig, {"output": "o"}), (CorpusConfig, {"ar": "a"}),
    (AdaptConfig, {"output": Path("o")}),
]  # fmt: skip


@pytest.mark.parametrize(("settings_of", "given"), CONFIGS, ids=lambda x: getattr(x, "__name__", ""))
def test_values_of_another_type_are_refused_by_name(settings_of: Any, given: dict[str, Any]) -> None:
    """Python callers have no parser before them: a misspelled choice would train something else."""
    wrong = {
        "str": (1, None), "bool": (1, "x", None), "int": (True, 2.5, math.inf, "x", None), "Path": (1, None),
        "float": (True, "x", None), "Literal": ("x", None, 1), "tuple": (1, None),
    }  # fmt: skip
    for field in dataclasses.fields(settings_of):
        kind = str(typing.get_type_hints(settings_of)[field.name]).replace("typing.", "")
        first = next(name for name in (*wrong, "Pool") if name in kind.removeprefix("Optional[").split("[")[0])
        for value in wrong.get(first, (1, None)):
            if value is None and ("None" in kind or "Optional" in kind):
                continue
            with pytest.raises(InputError, match=f"{field.name} is "):
                settings_of(**{**given, field.name: value})


def test_what_a_type_allows_is_taken() -> None:
    config = TrainConfig(lr=1, features=[1, 2], output=Path("o"), rows=4)  # type: ignore[arg-type]
    assert (config.lr, config.features, config.output, config.rows) == (1, (1, 2), Path("o"), 4)


def test_a_file_that_is_no_checkpoint_is_refused(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "checkpoint.pt")
    with pytest.raises(InputError, match=r"cannot read .*checkpoint\.pt: 'run'"):
        train(settings(folder, tmp_path), exact)


def test_full_disk_keeps_the_old_checkpoint(
    exact: ExactBase, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(settings(folder, tmp_path, steps=5), exact)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    from adjust_dlm.train.checkpoint import save_checkpoint

    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, {"run": {}})
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not list(tmp_path.glob(".*part"))


def test_held_out_rows_are_spread_and_never_trained_on(exact: ExactBase, tmp_path: Path) -> None:
    """Ten trajectories, two held out: the middles of the halves, whatever folder they come from."""
    run = Run(TrainConfig(heldout=2), exact, Sampler(exact), list(range(10)), 0, 1, CPU)  # type: ignore[arg-type]
    assert run.rows(True) == [2, 7]
    assert run.rows(False) == [0, 1, 3, 4, 5, 6, 8, 9]
