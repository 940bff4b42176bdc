"""One-pass training: the rows that `adjust trajectories` would make, and the plain form's loss on their windows."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adjust_dlm import cli
from adjust_dlm.bases import Base
from adjust_dlm.bases.exact import load_exact
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.data.trajectories import RowMaker, TrajectoriesConfig, make_trajectories
from adjust_dlm.decoders import decode
from adjust_dlm.losses import RowWeights, row_shares
from adjust_dlm.sampler import Sampler
from adjust_dlm.train import one_pass, preflight, trainer
from adjust_dlm.train.batches import lots, pack
from adjust_dlm.train.one_pass import Lane, Pool, PoolConfig, lookahead, start_pool
from adjust_dlm.train.trainer import TrainConfig, train
from adjust_dlm.train.unroll import Frames, unroll, unrolled_kl
from adjust_dlm.types import DecodeConfig, InputError, Trajectory
from helpers import BOS, tiny_base, unroll_slices
from ranks import first_of_two

ROLLOUT, LENGTH = 2, 5
ONE, MIXED = PromptSource("one", [[BOS]]), PromptSource("mixed", [[BOS, *range(3, 3 + n)] for n in (3, 0, 6, 1)])


def settings(**changes: Any) -> PoolConfig:
    return PoolConfig(**{"rows": 4, "max_new_tokens": 8, **changes})


def pool_of(base: Base, config: PoolConfig, source: PromptSource = ONE, **changes: Any) -> Pool:
    common = {"length": LENGTH, "rollout": ROLLOUT, "slices": 2, "seed": 3, **changes}
    return Pool(base, config, source, **common)


def starts(frames: Frames, data: list[Trajectory]) -> list[tuple[int, int]]:
    """(row, t) of every window, t from the number of masks that are left."""
    windows, n = LENGTH - ROLLOUT, frames.text_SN.shape[1]
    out = []
    for w in range(windows):
        for m in range(n):
            row = int(frames.text_SN[w, m])
            if row >= 0:
                new = int((data[row].order_L != -1).sum())
                out.append((row, new - int(frames.x.masked_BL[w * n + m].sum())))
    return out


def endless_base(family: str = "dream", **changes: Any) -> Base:
    """Its end token is a padding row of the head: every row has all of its commits."""
    return tiny_base(family, end_ids=(23,), **changes)


def ending_base() -> Base:
    """Half of the ids end a text: many rows end early."""
    return tiny_base("dream", seed=1, end_ids=tuple(range(1, 12)))


def finished_rows(pool: Pool) -> list[Trajectory]:
    """Fills with the rows of a pool, each as it stood before its place was given to another row."""
    found: list[Trajectory] = []

    def watched(lane: Lane) -> Callable[..., None]:
        restart, canvas = lane.canvas.restart, lane.canvas

        def keep(b: int, ids: list[int], row: int) -> None:
            if (old := int(canvas.rows_B[b])) >= 0:
                tokens_L, order_L = (part[b][canvas.real_BL[b]].clone() for part in (canvas.tokens_BL, canvas.order_BL))
                found.append(Trajectory(tokens_L, order_L, old, canvas.config.seed, canvas.config.temperature))
            restart(b, ids, row)

        return keep

    for lane in pool.lanes:
        lane.canvas.restart = watched(lane)  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("temperature", [(1.0,), (0.5, 1.0)])
@pytest.mark.parametrize("ends", [False, True])
def test_rows_are_those_of_adjust_trajectories(temperature: tuple[float, ...], ends: bool, tmp_path: Path) -> None:
    """Prompts of four lengths in four places: tokens and order of row r do not depend on who decodes beside it."""
    base = ending_base() if ends else endless_base()
    config = settings(temperature=temperature)
    common: dict[str, Any] = {
        "max_new_tokens": 8, "temperature": temperature, "seed": 3, "batch_size": 4, "shard_rows": 8, "first_row": 5,
    }  # fmt: skip
    pool = pool_of(base, config, MIXED, first=5)
    kept = finished_rows(pool)
    for _ in range(30):
        pool.frames()
    assert len(kept) >= 16
    assert any((x.order_L == -2).any() for x in kept) == ends
    make_trajectories(TrajectoriesConfig(output=str(tmp_path), num=pool.end - 5, **common), base, source=MIXED)
    made = {x.row: x for x in TrajectoryStore(tmp_path)}
    for x in kept:
        assert torch.equal(x.tokens_L, made[x.row].tokens_L) and torch.equal(x.order_L, made[x.row].order_L)
        assert (x.seed, x.temperature) == (made[x.row].seed, made[x.row].temperature)


def test_rows_are_decoded_at_the_temperature_that_they_say() -> None:
    """Training rows and held-out ones against joint decoding at T = 1 and 0.6; at the other one they are other rows."""
    base, config = endless_base(), settings(temperature=(1.0, 0.6))
    pool = pool_of(base, config, MIXED)
    kept = finished_rows(pool)
    while len(kept) < 12:
        pool.advance()
    held = RowMaker(config.trajectories(seed=3, suppress_eos=False), base, MIXED).decoded((0, 12))
    assert [x.row for x in held] == [*range(12)] and {x.temperature for x in kept} == {1.0, 0.6}
    for x in (*kept, *held):
        own, other = (1.0, 0.6) if (x.row % 4 + x.row // 4) % 2 == 0 else (0.6, 1.0)  # four prompts
        alone, moved = (
            decode(
                base, [MIXED.ids(x.row)], DecodeConfig(max_new_tokens=8, temperature=t, seed=3), decoder="joint",
                rows=[x.row],
            ).trajectory(0)
            for t in (own, other)
        )  # fmt: skip
        assert torch.equal(alone.tokens_L, x.tokens_L) and torch.equal(alone.order_L, x.order_L)
        assert x.temperature == own and not torch.equal(moved.tokens_L, x.tokens_L)


@pytest.mark.parametrize("weights", ["next", "uniform"])
@pytest.mark.parametrize("source", [ONE, MIXED], ids=["one", "mixed"])
@pytest.mark.parametrize("ends", [False, True])
def test_loss_and_gradient_are_those_of_the_plain_form(ends: bool, source: PromptSource, weights: RowWeights) -> None:
    """The windows of each micro-batch, packed one by one from the finished trajectories, base passes made anew."""
    base = ending_base() if ends else endless_base()
    pool = pool_of(base, settings(), source, weights=weights)
    made = settings().trajectories(seed=3, suppress_eos=False)
    data = RowMaker(made, base, source).decoded((0, 60))
    torch.manual_seed(0)
    g = Sampler(base)

    def both(run: Any) -> list[Tensor]:
        loss = unrolled_kl(base, run, range(1, ROLLOUT + 1), weights=weights)
        return [loss.detach(), *torch.autograd.grad(loss, list(g.parameters()))]

    crossing = 0
    for _ in range(12):
        frames = pool.frames()
        used = starts(frames, data)
        crossing += int((frames.text_SN[0] != frames.text_SN[-1]).sum())
        single = pack([data[row] for row, _ in used], [t for _, t in used], ROLLOUT + 1, base.spec.pad_id)
        ours, plain = both(unroll(g, frames, rollout=ROLLOUT)), both(unroll_slices(base, g, single, rollout=ROLLOUT))
        assert plain[0] > 0
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert crossing > 5  # rows ended inside of slices


def test_next_weights_know_enough_of_the_future() -> None:
    """80 commits, of which a state sees 51: the plain form, which sees all of them, has the same loss and gradient."""
    base = endless_base(max_position_embeddings=128)
    config = settings(max_new_tokens=80)
    pool = pool_of(base, config)
    data = RowMaker(config.trajectories(seed=3, suppress_eos=False), base, ONE).decoded((0, 6))
    g = Sampler(base)
    assert lookahead("uniform") == 0 and lookahead("next") == 51
    gradients = []
    for _ in range(40):
        frames = pool.frames()
    used = starts(frames, data)
    single = pack([data[row] for row, _ in used], [t for _, t in used], ROLLOUT + 1, 0)
    for run in (unroll(g, frames, rollout=ROLLOUT), unroll_slices(base, g, single, rollout=ROLLOUT)):
        loss = unrolled_kl(base, run, (1, 2))
        gradients.append([loss.detach(), torch.autograd.grad(loss, g.mix.weight)[0]])
    assert max(80 - t for _, t in used) > 51
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_every_window_comes_once_and_costs_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    base = endless_base("llada")
    data = RowMaker(settings().trajectories(seed=3, suppress_eos=False), base, ONE).decoded((0, 60))
    calls = []
    hidden = base.hidden
    monkeypatch.setattr(base, "hidden", lambda state: calls.append(len(state.tokens_BL)) or hidden(state))
    pool = pool_of(base, settings())
    seen: Counter[tuple[int, int]] = Counter()
    phases = []
    for _ in range(60):
        frames = pool.frames()
        at = starts(frames, data)
        seen.update(at)
        phases.append(len({t for _, t in at}))
    assert set(seen.values()) == {1}
    rows = {row for row, _ in seen}
    whole = [row for row in rows if row <= max(rows) - 8]  # the last ones are still under way
    assert len(whole) > 8 and all({t for r, t in seen if r == row} == set(range(8)) for row in whole)
    assert set(calls) == {4}
    blocks = 30  # of 3 windows in 4 places, two micro-batches each; a state waits for 9 commits, the canvas's length
    assert len(calls) == LENGTH + 9 + (blocks - 1) * (LENGTH - ROLLOUT)
    assert min(phases[4:]) >= 5  # two rows of three windows each: different mask ratios


def test_ranks_share_the_rows_of_every_temperature() -> None:
    """Two temperatures alternate row by row: rank 0 must not get one of them alone."""
    base, config = endless_base(), settings(temperature=(0.5, 1.0))
    got = []
    for rank in (0, 1):
        lanes = pool_of(base, config, first=10, rank=rank, world=2).lanes
        got.append([[lane.next_row() for _ in range(3)] for lane in lanes])
    assert got == [[[10, 14, 18], [11, 15, 19]], [[12, 16, 20], [13, 17, 21]]]


def test_a_restored_pool_goes_on_as_if_nothing_had_happened() -> None:
    """Frames to the last bit."""
    base = ending_base()
    whole, again = (pool_of(base, settings(), MIXED) for _ in "ab")
    for _ in range(13):
        whole.frames()
    again.load(whole.state())
    for _ in range(13):
        a, b = whole.frames(), again.frames()
        assert torch.equal(a.text_SN, b.text_SN) and torch.equal(a.rank_BL, b.rank_BL)
        assert torch.equal(torch.cat([*a.h]), torch.cat([*b.h])) and torch.equal(a.x.tokens_BL, b.x.tokens_BL)
    assert again.end == whole.end >= 12


# the trainer


def run_settings(output: Path, **changes: Any) -> TrainConfig:
    common: dict[str, Any] = {
        "base": "exact", "one_pass": True, "pool": PoolConfig(rows=16, max_new_tokens=4), "slice_states": 4,
        "slices": 8, "heldout": 32, "warmup": 5, "steps": 12, "eval_every": 6, "checkpoint_every": 5, "accumulate": 2,
    }  # fmt: skip
    return TrainConfig(output=str(output), **{**common, **changes})


@pytest.mark.slow
def test_training_in_one_pass_learns(tmp_path: Path) -> None:
    exact = load_exact(words=2, device=torch.device("cpu"), dtype=torch.float32)
    pool = PoolConfig(rows=64, max_new_tokens=4)
    few = {"steps": 200, "slices": 32, "lr": 2e-2, "accumulate": 1, "eval_every": 200}
    held = train(run_settings(tmp_path, pool=pool, **few), exact)["heldout"]
    for k in (1, 2):
        assert held[f"kl_{k}"] < 0.5 * held[f"stale_{k}"]
    assert (tmp_path / "sampler" / "sampler.safetensors").is_file()


def test_resume_is_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 steps in one go, and 7 + SIGTERM + 5: the same weights."""
    exact = load_exact(device=torch.device("cpu"), dtype=torch.float32)
    train(run_settings(tmp_path / "whole"), exact)
    calls, frames = [], Pool.frames

    def stopping(pool: Pool) -> Frames:
        calls.append(1)
        if len(calls) == 14:  # the 14th micro-batch ends step 7
            os.kill(os.getpid(), signal.SIGTERM)
        return frames(pool)

    monkeypatch.setattr(Pool, "frames", stopping)
    first = train(run_settings(tmp_path / "parts"), exact)
    assert not first["finished"] and first["steps"] == 7
    with pytest.raises(InputError, match="pool was"):
        train(run_settings(tmp_path / "parts", pool=PoolConfig(rows=32, max_new_tokens=4)), exact)
    assert train(run_settings(tmp_path / "parts"), exact)["finished"]
    a, b = (torch.load(tmp_path / p / "checkpoint.pt", weights_only=True)["sampler"] for p in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_compiled_run_trains_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of three lengths make one canvas length: one shape of the base for decoding, one of g for training."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in (1, 4, 2)))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    pool, shapes = PoolConfig(rows=8, prompts=str(prompts), max_new_tokens=6), set()
    for compiled in (False, True):
        base = endless_base()
        base.tokenizer = SimpleNamespace(encode=lambda text, **_: [5] * len(text))
        forward = base.model.forward
        monkeypatch.setattr(
            base.model, "forward", lambda *x, f=forward, c=compiled, **k: shapes.add((c, x[0].shape)) or f(*x, **k)
        )
        train(run_settings(tmp_path / str(compiled), steps=3, pool=pool, compile=compiled, heldout=0), base)
    a, b = (torch.load(tmp_path / str(c) / "checkpoint.pt", weights_only=True)["sampler"] for c in (False, True))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
    assert shapes == {(compiled, (8, 11)) for compiled in (False, True)}


def test_held_out_rows_are_never_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0..31 are held out where nothing is stored; stored rows of the same seed are left out too."""
    exact = load_exact(device=torch.device("cpu"), dtype=torch.float32)
    first: list[int] = []
    frames, measure = Pool.frames, trainer.held_out
    measured: list[list[int]] = []

    def watching(pool: Pool) -> Frames:
        out = frames(pool)
        first.append(min(int(row) for row in out.text_SN.flatten() if row >= 0))
        return out

    def measuring(base: Base, g: Any, data: Any, rows: Any, *rest: Any) -> dict[str, float]:
        measured.append([data[n].row for n in rows])
        return measure(base, g, data, rows, *rest)

    monkeypatch.setattr(Pool, "frames", watching)
    monkeypatch.setattr(trainer, "held_out", measuring)

    def first_trained(name: str, **changes: Any) -> int:
        first.clear()
        assert train(run_settings(tmp_path / name, steps=6, **changes), exact)["heldout"]
        return min(first)

    stored = TrajectoriesConfig(base="exact", num=64, output=str(tmp_path / "t"), max_new_tokens=4, first_row=8)
    make_trajectories(stored, base=exact)
    folder = (str(tmp_path / "t"),)
    assert first_trained("a") == 32 and measured.pop() == [*range(32)]
    assert first_trained("b", heldout_trajectories=folder) == 72 and measured.pop() == [*range(8, 72)]
    assert first_trained("c", heldout_trajectories=folder, seed=1) == 0 and measured.pop() == [*range(8, 72)]
    make_trajectories(dataclasses.replace(stored, output=str(tmp_path / "u"), seed=5), base=exact)
    with pytest.raises(InputError, match="heldout_digest was"):
        first_trained("c", heldout_trajectories=(str(tmp_path / "u"),), seed=1)


def test_stored_rows_are_no_training_rows_of_one_pass(tmp_path: Path) -> None:
    said = r"trajectories is \('t',\); one_pass decodes what it trains on: give stored rows as heldout_trajectories"
    with pytest.raises(InputError, match=said):
        run_settings(tmp_path, trajectories=("t",))
    exact, other = (load_exact(device=torch.device("cpu"), dtype=torch.float32, seed=seed) for seed in (0, 1))
    make_trajectories(TrajectoriesConfig(base="exact", num=8, output=str(tmp_path / "t"), max_new_tokens=4), base=other)
    with pytest.raises(InputError, match="come from a base with fingerprint"):
        train(run_settings(tmp_path / "a", heldout_trajectories=(str(tmp_path / "t"),)), exact)


def test_rows_behind_stored_ones_have_prompts_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless source makes a prompt for every row up to the last: those of held-out rows do not come again."""
    exact = load_exact(device=torch.device("cpu"), dtype=torch.float32)
    make_trajectories(TrajectoriesConfig(base="exact", num=64, output=str(tmp_path / "t"), max_new_tokens=4), exact)
    asked: list[int] = []

    def opened(*_: Any, rows: int, **__: Any) -> PromptSource:
        asked.append(rows)
        return PromptSource("none", [[]])

    monkeypatch.setattr(one_pass, "open_prompts", opened)
    train(run_settings(tmp_path / "a", heldout_trajectories=(str(tmp_path / "t"),)), exact)
    assert asked == [64 + 16 + 12 * 2 * 8 // 4]  # held out, the pool's, and those that its steps use up


@pytest.mark.slow
def test_two_processes_decode_different_rows_and_save_both_pools(tmp_path: Path) -> None:
    flags = {
        "base": "exact", "pool.rows": 16, "pool.max-new-tokens": 4, "slice-states": 4, "slices": 8, "heldout": 16,
        "steps": 6, "eval-every": 6, "checkpoint-every": 3, "output": tmp_path,
    }  # fmt: skip
    command = ["train", "--one-pass", *(f"--{name}={value}" for name, value in flags.items())]
    with first_of_two("-m", "adjust_dlm.cli", *command):
        assert cli.main(command) == 0
    pools = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["pools"]
    rows = [set(torch.cat([m["row_N"] for m in pool["moments"]]).tolist()) - {-1} for pool in pools]
    assert len(rows) == 2 and all(len(mine) > 16 for mine in rows)
    assert [{row % 2 for row in mine} for mine in rows] == [{0}, {1}]


def test_a_pool_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pool\.rows is 6; it must be a multiple of 4 \(slices\) and 1 \(temperat"):
        pool_of(endless_base(), settings(rows=6), slices=4)
    for few in (0, 1):
        with pytest.raises(InputError, match=rf"pool\.max_new_tokens is {few}; it must be at least 2"):
            start_pool(run_settings(tmp_path, pool=PoolConfig(max_new_tokens=few)), endless_base(), 0, 1)


@pytest.mark.parametrize("rows", [None, 3])
def test_features_and_a_limit_on_rows_go_with_it(tmp_path: Path, rows: int | None) -> None:
    """A middle layer, a decay: the first loss is the objective on the same frames."""
    base = endless_base(num_hidden_layers=3)
    pool = PoolConfig(rows=8, max_new_tokens=8)
    config = run_settings(
        tmp_path, pool=pool, features=(1,), rows=rows, steps=2, eval_every=1, accumulate=1, heldout=4,
        next_decay=2.0,
    )  # fmt: skip
    train(config, base)
    loss = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        g = Sampler(base.with_features((1,)), config.sampler_config())
    own = Pool(base.with_features((1,)), pool, ONE, length=4, rollout=3, slices=8, first=4, decay=2.0)
    run = unroll(g, own.frames(), rollout=3)
    share = None if rows is None else row_shares(run.rank_BL, rows, lots(run.rank_BL, run.n, (0, 0)))
    parts = [unrolled_kl(base, run, k, next_decay=2.0, share_BL=share).item() for k in (1, 2, 3)]
    assert loss == pytest.approx(sum(parts) / 3, rel=1e-4)


# the dry run


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_dry_run_of_one_pass_writes_nothing(tmp_path: Path, resumed: bool) -> None:
    """Before a run and in the middle of one; 12 steps of 2 x 8 windows, texts of 4."""
    exact = load_exact(device=torch.device("cpu"), dtype=torch.float32)
    pool = PoolConfig(rows=16, max_new_tokens=4)
    config = run_settings(tmp_path / "run", pool=pool)
    done = 0
    if resumed:
        with pytest.raises(FloatingPointError), pytest.MonkeyPatch.context() as patch:
            micro_loss = trainer._micro_loss
            patch.setattr(
                trainer, "_micro_loss", lambda run, *parts: micro_loss(run, *parts) * (math.nan if run.step == 7 else 1)
            )
            train(config, exact)
        done = 5
    before = files_in(tmp_path)
    report = train(dataclasses.replace(config, dry_run=True), exact)
    assert files_in(tmp_path) == before and bool(before) == resumed
    assert report["problems"] == [] and report["heldout_rows"] == 32 and report["steps"] == 12 - done
    assert report["windows"] == (12 - done) * 16 and report["training_rows"] == (12 - done) * 4
    assert report["windows_per_row"] == 4


def test_a_dry_run_counts_the_rows_of_the_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 steps of 4 rows x 2 windows are the windows of 200 texts of 8; up to a pool of 8 is only half used."""
    base, seen = endless_base(), set()
    pool = PoolConfig(rows=8, max_new_tokens=8)
    config = run_settings(
        tmp_path, pool=pool, steps=200, slices=4, slice_states=4, rollout=2, accumulate=1, heldout=4,
        checkpoint_every=200, eval_every=200,
    )  # fmt: skip
    report = train(dataclasses.replace(config, dry_run=True), base)
    frames = Pool.frames

    def watching(pool: Pool) -> Frames:
        out = frames(pool)
        seen.update(out.text_SN[:2].flatten().tolist())
        return out

    monkeypatch.setattr(Pool, "frames", watching)
    train(config, base)
    assert report["training_rows"] == 200
    assert 200 <= len(seen - {-1}) <= 200 + 8


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_dry_run_times_decoding_as_often_as_it_comes(tmp_path: Path, accumulate: int) -> None:
    """3 passes for every 6 micro-batches of 2 rows: at 1 s a pass and 10 s a micro-batch, one takes 10.5 s."""
    base = endless_base()
    config = run_settings(
        tmp_path, pool=PoolConfig(rows=12, max_new_tokens=12), slices=2, slice_states=5, rollout=2, heldout=0,
        accumulate=accumulate, steps=1000, eval_every=1000,
    )  # fmt: skip
    run = trainer._prepare(config, base, 0, 1)
    assert run.pool is not None
    micro_batches = 0

    def step(run: trainer.Run) -> None:
        nonlocal micro_batches
        for _ in range(accumulate):
            assert run.pool is not None
            run.pool.frames()
            micro_batches += 1

    def clock() -> float:
        assert run.pool is not None
        return 10.0 * micro_batches + run.pool.passes

    report = preflight.preflight(run, tmp_path, step=step, evaluate=lambda run: None, clock=clock)
    assert report["seconds_per_step"] == pytest.approx(10.5 * accumulate)
    assert report["hours"] == pytest.approx(1000 * 10.5 * accumulate / 3600)


def tensor_bytes(value: Any) -> int:
    if isinstance(value, dict | list | tuple):
        return sum(map(tensor_bytes, value.values() if isinstance(value, dict) else value))
    return value.nbytes if isinstance(value, Tensor) else 0


def test_what_a_checkpoint_holds_of_a_pool_is_known_before(tmp_path: Path) -> None:
    """When all moments are there, states of a base with a feature left out."""
    base = endless_base(num_hidden_layers=3)
    config = run_settings(tmp_path, pool=PoolConfig(rows=8, max_new_tokens=8), features=(1,), heldout=0)
    run = trainer._prepare(config, base, 0, 1)
    assert run.pool is not None
    disk = preflight.disk_bytes(run, tmp_path)["checkpoint"]
    plain = dataclasses.replace(run, pool=None, pad_to=run.pool.width)
    run.pool.frames()
    assert disk - preflight.disk_bytes(plain, tmp_path)["checkpoint"] == tensor_bytes(run.pool.state())


def test_a_dry_run_of_one_pass_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"slice-states": 4, "slices": 4, "steps": 4, "heldout": 4, "pool.rows": 8, "pool.max-new-tokens": 4}
    words = [f"--{name}={value}" for name, value in {**flags, "base": "exact", "output": tmp_path / "run"}.items()]
    assert cli.main(["train", "--one-pass", "--dry-run", *words]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("hours", "memory (GiB)", "peak", "training rows", "windows per row"))
    assert files_in(tmp_path) == []
