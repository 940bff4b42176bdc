"""What a training run says before it starts, keeps while it runs, and leaves when it fails."""

import functools
import json
import math
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from adjust_dlm import cli
from adjust_dlm.bases import Base
from adjust_dlm.bases.exact import ExactBase, load_exact
from adjust_dlm.data import store
from adjust_dlm.data.prompts import PromptSource
from adjust_dlm.data.store import TrajectoryStore
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.sampler import load_sampler
from adjust_dlm.train import distributed, preflight, record, trainer
from adjust_dlm.train.batches import pack
from adjust_dlm.train.checkpoint import claim, load_checkpoint, save_checkpoint
from adjust_dlm.train.one_pass import PoolConfig
from adjust_dlm.train.trainer import TrainConfig, train
from adjust_dlm.train.unroll import states_compared, unrolled_kl
from adjust_dlm.types import InputError, State, Trajectory
from helpers import tiny_base, unroll_slices
from ranks import first_of_two
from test_one_pass import run_settings as one_pass_settings
from test_train import settings, weights

CPU = torch.device("cpu")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def exact() -> ExactBase:
    return load_exact(device=CPU, dtype=torch.float32)


def make(output: Path, base: Any, **changes: Any) -> Path:
    given = {"num": 256, "max_new_tokens": 4, "batch_size": 256, "shard_rows": 256, **changes}
    make_trajectories(TrajectoriesConfig(base="exact", output=str(output), **given), base=base)
    return output


@pytest.fixture(scope="module")
def folder(exact: ExactBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("trajectories"), exact)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: Any) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return call


def flags(folder: Path, output: Path, **changes: Any) -> list[Any]:
    given = {"steps": 4, "slices": 2, "slice_states": 4, "heldout": 8, "warmup": 1, "eval_every": 2, **changes}
    words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value)]
    return ["train", "--base", "exact", "--trajectories", folder, "--output", output, *words]


def prepared(folder: Path, output: Path, base: Any, **changes: Any) -> trainer.Run:
    return trainer._prepare(settings(folder, output, **changes), base, 0, 1)


# --- the scale of the loss (H8) ----------------------------------------------------------------------------------


class OneNat(Base):
    """States are logits; the base says token 0 for certain, so a student that gives it 1/e has a KL of exactly 1."""

    def __init__(self) -> None:
        ids = {"mask_id": 3, "end_ids": (), "pad_id": 0, "bos_id": None}
        self.spec = replace(tiny_base("dream").spec, vocab_size=4, token_limit=4, **ids)
        self.head_matrix = torch.eye(4)
        self.width, self.fingerprint = 4, "one nat"

    def hidden(self, state: State) -> Tensor:
        return torch.tensor([0.0, -1e4, -1e4, 0.0]).expand(*state.tokens_BL.shape, 4).clone()

    def embed(self, tokens_BL: Tensor) -> Tensor:
        return self.head_matrix[tokens_BL]

    @staticmethod
    def student(h_BLD: Tensor, state: State) -> Tensor:
        return torch.tensor([-1.0, math.log(1 - 1 / math.e), -1e4, 0.0]).expand_as(h_BLD).clone()


@pytest.mark.parametrize("rows", ["uniform", "next"])
@pytest.mark.parametrize("pad_to", [0, 16])
def test_h8_a_kl_of_one_nat_on_every_counted_position_is_a_loss_of_one(rows: Any, pad_to: int) -> None:
    """Two texts of 8 with 3 and 5 given: what is given, padded or over does not dilute the loss, nor does V or B."""
    orders = [torch.tensor([-1] * given + [*range(8 - given)]) for given in (3, 5)]
    texts = [Trajectory(torch.zeros(8, dtype=torch.long), order, 0, 0) for order in orders]
    base = OneNat()
    states = unroll_slices(base, base.student, pack(texts, [0, 0], 5, 0, pad_to=pad_to), rollout=3)
    for k in (1, 2, 3):
        # at depth 3 the shorter text has nothing masked any more in either window: it does not count
        assert unrolled_kl(base, states, k, weights=rows).item() == pytest.approx(1.0, abs=1e-5)


# --- resuming (H19) ---------------------------------------------------------------------------------------------


def test_h19_every_step_after_a_resume_is_that_of_the_whole_run(
    exact: ExactBase, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 steps of 2 micro-batches, and 7 + 5: loss, gradient norm, rate, texts and starts, all bit for bit."""
    step, draw = trainer._step, trainer.random_slices
    stop_at = [99]
    log: list[Any] = []

    def watched(run: trainer.Run) -> dict[str, float]:
        if run.step + 1 == stop_at[0]:
            os.kill(os.getpid(), signal.SIGTERM)
        losses = step(run)
        log.append((run.step, losses))
        return losses

    def drawn(*given: Any, **more: Any) -> Any:
        slices = draw(*given, **more)
        log.append((slices.start_N.tolist(), slices.tokens_NL.tolist(), slices.order_NL.tolist()))
        return slices

    monkeypatch.setattr(trainer, "_step", watched)
    monkeypatch.setattr(trainer, "random_slices", drawn)
    train(settings(folder, tmp_path / "whole"), exact)
    whole = log[:]
    log.clear()
    stop_at[0] = 7
    assert train(settings(folder, tmp_path / "parts"), exact)["steps"] == 7
    stop_at[0] = 99
    assert train(settings(folder, tmp_path / "parts"), exact)["steps"] == 12
    assert len(whole) == 12 * 3 and log == whole
    assert len({str(entry) for entry in whole}) == 12 * 3  # no two steps, and no two micro-batches, are alike


# --- two runs in one folder -------------------------------------------------------------------------------------

HOLDS = (
    "import sys, time; from pathlib import Path; from adjust_dlm.train.checkpoint import claim\n"
    "with claim(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
)


def test_a_folder_in_use_is_refused_before_the_first_step(run: Run, folder: Path, tmp_path: Path) -> None:
    """By a process without a checkpoint yet; once that is killed, the next run goes on."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        code, out, err = run(*flags(folder, tmp_path / "run"))
        other.kill()
    assert (code, out) == (2, "") and f"another run is writing to {tmp_path / 'run'}; wait for its end" in err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]  # the other one's
    assert run(*flags(folder, tmp_path / "run"))[0] == 0
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_refused_run_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    """Neither the folders that it made, nor a lock in one that was there."""
    for there, left in ((tmp_path / "there", True), (tmp_path / "new" / "run", False)):
        if left:
            there.mkdir()
        with pytest.raises(RuntimeError, match="refused"), claim(there):
            assert [path.name for path in there.iterdir()] == ["run.lock"]
            raise RuntimeError("refused")
        assert there.exists() == left and sum(1 for _ in tmp_path.rglob("*")) == 1


# --- the best and the last sampler -------------------------------------------------------------------------------


def test_the_best_sampler_is_the_one_of_the_least_held_out_kl(
    exact: ExactBase, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four evaluations with made-up KLs: means 2, 1.5, 1.75, 1.5; the second is the best, and ties stay with it."""
    made = iter([(3.0, 1.0), (1.0, 2.0), (2.0, 1.5), (2.0, 1.0)])
    monkeypatch.setattr(trainer, "_held_out", lambda run: dict(zip(("kl_1", "kl_2"), next(made), strict=True)))
    taken: dict[int, dict[str, Tensor]] = {}
    keep = trainer.keep_best

    def spy(run: trainer.Run, *given: Any) -> None:
        taken[run.step] = {k: v.detach().clone() for k, v in run.sampler.state_dict().items()}
        keep(run, *given)

    monkeypatch.setattr(trainer, "keep_best", spy)
    result = train(settings(folder, tmp_path, eval_every=3), exact)
    assert result["best"] == {"step": 6, "kl": 1.5}
    facts = json.loads((tmp_path / "sampler-best" / "sampler.json").read_text())
    assert (facts["step"], facts["heldout_kl"], facts["heldout"]) == (6, 1.5, {"kl_1": 1.0, "kl_2": 2.0})
    assert json.loads((tmp_path / "sampler" / "sampler.json").read_text())["step"] == 12
    for name, step in (("sampler-best", 6), ("sampler", 12)):
        found = load_sampler(tmp_path / name, exact).state_dict()
        assert all(torch.equal(found[k], w.bfloat16().float()) for k, w in taken[step].items())


def test_the_best_so_far_survives_a_stop(
    exact: ExactBase, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL 1 at step 3, then a failure at step 8; after resuming from step 5, KL 2 everywhere is no improvement."""
    monkeypatch.setattr(trainer, "_held_out", lambda run: {"kl_1": 1.0 if run.step == 3 else 2.0})
    step = trainer._step

    def fails(run: trainer.Run) -> dict[str, float]:
        if run.step == 8:
            raise FloatingPointError("made up")
        return step(run)

    monkeypatch.setattr(trainer, "_step", fails)
    with pytest.raises(FloatingPointError):
        train(settings(folder, tmp_path, eval_every=3), exact)
    monkeypatch.setattr(trainer, "_step", step)
    result = train(settings(folder, tmp_path, eval_every=3), exact)
    assert result["steps"] == 12 and result["best"] == {"step": 3, "kl": 1.0}
    assert json.loads((tmp_path / "sampler-best" / "sampler.json").read_text())["step"] == 3


def test_without_held_out_rows_there_is_no_best(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    result = train(settings(folder, tmp_path, steps=1, heldout=0), exact)
    assert (result["best"], result["best_sampler"], result["heldout"]) == ({}, None, {})
    assert (tmp_path / "sampler").is_dir() and not (tmp_path / "sampler-best").exists()


# --- rows ----------------------------------------------------------------------------------------------------


def test_held_out_folders_are_measured_and_never_trained_on(
    exact: ExactBase, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics equal those of a run that looks at the held-out folder alone; all training rows are used."""
    held = make(tmp_path / "held", exact, num=32, seed=1)
    own = prepared(folder, tmp_path / "own", exact, heldout_trajectories=(str(held),))
    assert own.rows(False) == list(range(256)) and own.rows(True) == list(range(32))
    alone = prepared(held, tmp_path / "alone", exact, heldout=0)
    monkeypatch.setattr(type(alone), "rows", lambda self, held: list(range(32)))
    expected = trainer._held_out(alone)
    monkeypatch.undo()
    assert trainer._held_out(own) == expected
    train(settings(folder, tmp_path / "run", steps=2, heldout_trajectories=(str(held),)), exact)
    other = make(tmp_path / "other", exact, num=32, seed=2)
    with pytest.raises(InputError, match="heldout_digest was"):
        train(settings(folder, tmp_path / "run", steps=2, heldout_trajectories=(str(other),)), exact)


def test_a_held_out_row_that_is_trained_on_is_refused(
    exact: ExactBase, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows 250..281 of the same seed: six of them stand in both."""
    held = make(tmp_path / "held", exact, num=32, first_row=250)
    with pytest.raises(InputError, match="6 of the 32 held-out trajectories are training trajectories, too"):
        prepared(folder, tmp_path, exact, heldout_trajectories=(str(held),))
    assert not (tmp_path / "run").exists()
    apart = make(tmp_path / "apart", exact, num=32, first_row=256)
    prepared(folder, tmp_path, exact, heldout_trajectories=(str(apart),))
    texts = [{(tuple(x.tokens_L.tolist()), tuple(x.order_L.tolist())) for x in TrajectoryStore(f)} for f in (folder,)]
    equal = sum(
        (tuple(x.tokens_L.tolist()), tuple(x.order_L.tolist())) in texts[0] for x in TrajectoryStore(apart)
    )  # few strings, many rows: some are bound to be equal, which is told and not refused
    assert equal > 0 and f"{equal} of 32 held-out trajectories equal a training one" in caplog.text


def test_texts_of_one_commit_are_nothing_to_learn_from(exact: ExactBase, tmp_path: Path) -> None:
    """ExactBase wants canvases of four: three given tokens and one new."""
    from adjust_dlm.data.prompts import PromptSource

    config = TrajectoriesConfig(base="exact", output=str(tmp_path / "t"), num=8, max_new_tokens=1)
    make_trajectories(config, base=exact, source=PromptSource("three", [[0, 1, 2]]))
    with pytest.raises(InputError, match=r"none of the 8 trajectories in .*t has two commits"):
        prepared(tmp_path / "t", tmp_path, exact, heldout=0)


def test_another_vocabulary_is_named(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    """Same fingerprint (as of a base whose config was edited), other ids."""
    shutil.copytree(folder, tmp_path / "t")
    manifest = store.read_manifest(tmp_path / "t")
    store.write_manifest(tmp_path / "t", {**manifest, "mask_id": 7})
    with pytest.raises(InputError, match="have another vocabulary: mask token 7, ids up to 3; base 'exact' has mask"):
        prepared(tmp_path / "t", tmp_path, exact)


def test_another_base_is_named_on_the_command_line(run: Run, tmp_path: Path) -> None:
    folder = make(tmp_path / "t", load_exact(device=CPU, dtype=torch.float32, seed=1))
    code, out, err = run(*flags(folder, tmp_path / "run"))
    assert (code, out) == (2, "") and "come from a base with fingerprint" in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


# --- failures on the way --------------------------------------------------------------------------------------


def test_nan_is_one_line_and_exit_1(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = trainer._micro_loss
    monkeypatch.setattr(
        trainer, "_micro_loss", lambda r, *parts: loss(r, *parts) * (float("nan") if r.step == 2 else 1)
    )
    code, out, err = run(*flags(folder, tmp_path))
    assert (code, out) == (1, "") and "loss nan, gradient norm nan at step 2: training stopped" in err


def test_a_loss_that_is_not_finite_leaves_nothing_of_its_step(
    exact: ExactBase, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 5 of 12, whose end would be evaluated and saved: the files are those of step 5, and the run goes on."""
    config = settings(folder, tmp_path / "whole", eval_every=3, checkpoint_every=1)
    train(config, exact)
    loss = trainer._micro_loss
    monkeypatch.setattr(trainer, "_micro_loss", lambda r, *parts: loss(r, *parts) * (math.inf if r.step == 5 else 1))
    config = replace(config, output=str(tmp_path / "parts"))
    with pytest.raises(FloatingPointError, match="loss inf, gradient norm nan at step 5: training stopped"):
        train(config, exact)
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["step"] == 5
    assert json.loads((tmp_path / "parts" / "sampler-best" / "sampler.json").read_text())["step"] == 3
    assert all(w.isfinite().all() for w in weights(tmp_path / "parts").values())
    monkeypatch.setattr(trainer, "_micro_loss", loss)
    train(config, exact)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[k], parts[k]) for k in whole)


class Waits(TorchDispatchMode):
    """Notes what would make the host wait for a card, but for `tolist`, of which torch tells nothing here."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        listed = name == "lift_fresh" and args[0].ndim  # `torch.tensor([...])`, which a device would have to copy
        if listed or name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.seen.append(name)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_waits_once_a_micro_batch_and_once_at_its_end(
    dream_run: trainer.Run, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the number of rows that go through the head, and for loss and gradient norm, when all is under way."""
    given = {"key": (0, 0), "pad_id": dream_run.base.spec.pad_id, "count": 4, "length": 6, "rollout": 3}
    slices = trainer.random_slices(dream_run.data, dream_run.training_rows, **given)
    monkeypatch.setattr(trainer, "random_slices", lambda *_, **__: slices)  # the CPU's work on any device
    run = replace(dream_run, config=replace(dream_run.config, accumulate=accumulate, rows=3))
    events, tolist = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: events.append("tolist") or tolist(x))

    def update(step: Callable[[], Any]) -> None:
        events.append("update")
        with _disable_current_modes():  # AdamW counts its steps on the CPU, whatever the device
            step()

    for optimizer in run.optimizers:
        monkeypatch.setattr(optimizer, "step", functools.partial(update, optimizer.step))
    with Waits() as waits:
        trainer._step(run)
    assert waits.seen == []
    assert events == ["tolist"] * accumulate + ["update"] * 2 + ["tolist"]


def test_ranks_tell_each_other_all_scalars_in_one_all_reduce(
    dream_run: trainer.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two made-up ranks of equal states, gradients and losses; the other one is at 8 s and was told to stop."""
    sizes: list[int] = []

    def both(x: Tensor) -> None:
        sizes.append(x.numel())
        x += torch.tensor([float(x[0]), 4.0, 1.0]) if x.numel() == 3 and x.is_floating_point() else x.clone()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", both)
    run = replace(dream_run, world=2, elapsed=4.0, step=50)
    parameters = sum(p.numel() for p in run.sampler.parameters())
    parts = [trainer._draw(run, first) for first in (0, 4)]
    states = sum(2 * states_compared(part, 3) for part in parts)
    expected = 2 * sum(trainer._micro_loss(run, 4 * j, part, states).item() for j, part in enumerate(parts))
    losses = trainer._step(run)
    assert sizes == [3, parameters, 3] and losses["loss"] == pytest.approx(expected, rel=1e-6)
    assert (run.elapsed, run.stopping) == (6.0, True)


@contextmanager
def no_larger_files(limit: int) -> Iterator[None]:
    """A real failure: the kernel refuses to write more than `limit` bytes to a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_names_the_file(run: Run, folder: Path, tmp_path: Path) -> None:
    with no_larger_files(20_000):
        code, _, err = run(*flags(folder, tmp_path / "run", checkpoint_every=1, steps=2))
    assert code == 1 and f"cannot write {tmp_path / 'run' / 'checkpoint.pt'}: File too large" in err
    assert "Traceback" not in err
    assert not list((tmp_path / "run").glob("*.pt")) and not list((tmp_path / "run").glob(".*part"))


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"run": {}, "w": torch.zeros(4)})
    before = (tmp_path / "checkpoint.pt").read_bytes()
    payload = {"run": {}, "parts": [torch.zeros(100_000), {"w": torch.zeros(10, dtype=torch.bfloat16)}]}
    with no_larger_files(100_000), pytest.raises(OSError, match=r"cannot write .*\.pt: File too large") as caught:
        save_checkpoint(tmp_path, payload)
    assert caught.value.errno == 27  # EFBIG; ENOSPC takes the same way
    assert (tmp_path / "checkpoint.pt").read_bytes() == before and not list(tmp_path.glob(".*part"))


def test_a_disk_that_is_too_small_is_told_before_the_first_step(
    run: Run, exact: ExactBase, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepared(folder, tmp_path / "run", exact, heldout=8)
    p = sum(w.numel() for w in ready.sampler.parameters())
    matrices = sum(w.numel() for w in ready.sampler.parameters() if w.ndim == 2)
    checkpoint = 4 * p + 4 * matrices + 8 * (p - matrices)
    needed = 2 * checkpoint + 3 * 2 * p
    for free, code in ((needed - 1, 1), (needed, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        got, _, err = run(*flags(folder, tmp_path / str(free)))
        assert got == code
        left = {path.name for path in (tmp_path / str(free)).glob("*")}
        assert ("checkpoint.pt" in left) == (code == 0) and (code == 0 or not left)
        wanted = f"checkpoints and samplers need {needed:,} bytes, {needed - 1:,} are free"
        assert (wanted in err) == (code == 1)


def test_what_is_on_disk_already_is_not_needed_again(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    config = settings(folder, tmp_path, steps=2)
    before = preflight.disk_bytes(trainer._prepare(config, exact, 0, 1), tmp_path)
    train(config, exact)
    after = preflight.disk_bytes(trainer._prepare(config, exact, 0, 1), tmp_path)
    kept = [tmp_path / "checkpoint.pt", *tmp_path.glob("sampler*/*.safetensors")]
    assert len(kept) == 3
    assert after["needed"] == before["needed"] - sum(path.stat().st_size for path in kept)


# --- the dry run ------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_its_figures_and_writes_nothing(run: Run, folder: Path, tmp_path: Path) -> None:
    code, out, err = run(*flags(folder, tmp_path / "run"), "--dry-run")
    assert code == 0, err
    for word in ("steps", "windows", "hours", "memory (GiB)", "peak", "disk (GiB)", "free"):
        assert word in out
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_what_is_wrong_and_exits_1(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    code, out, err = run(*flags(folder, tmp_path / "run"), "--dry-run")
    assert code == 1 and "hours" in out and "no room for this run" in err and "5 are free" in err
    monkeypatch.undo()

    def out_of_memory(_: Any) -> None:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(trainer, "_step", out_of_memory)
    code, out, err = run(*flags(folder, tmp_path / "run"), "--dry-run")
    assert code == 1 and "memory (GiB)" in out and "lower slices, and raise accumulate" in err
    assert not (tmp_path / "run").exists()


def test_steps_windows_and_hours_by_hand(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    """Made-up seconds: 2 a step, 30 an evaluation. At step 100 of 1000: 900 steps, evaluations at 150, 300, .., 900."""
    now = [0.0]

    def passing(seconds: float) -> Callable[[Any], None]:
        return lambda run: now.__setitem__(0, now[0] + seconds)

    ready = prepared(folder, tmp_path, exact, steps=1000, eval_every=150, accumulate=3, slices=5, slice_states=6)
    ready.step = 100
    call = {"step": passing(2.0), "evaluate": passing(30.0), "clock": lambda: now[0]}
    report = preflight.preflight(ready, tmp_path, **call)
    assert (report["steps"], report["windows"]) == (900, 900 * 3 * 5 * 3)
    assert report["windows_per_row"] == 900 * 45 / 192
    assert report["hours"] == pytest.approx((900 * 2 + 6 * 30) / 3600)
    ready.config = settings(folder, tmp_path, steps=1000, max_seconds=60.0)
    assert preflight.preflight(ready, tmp_path, **call)["hours"] == pytest.approx(1 / 60)


@pytest.fixture(scope="module")
def dream_run(tmp_path_factory: pytest.TempPathFactory) -> trainer.Run:
    """A tiny Dream whose inner width, heads and canvas are unlike each other."""
    base, out = tiny_base("dream"), tmp_path_factory.mktemp("dream")
    config = TrajectoriesConfig(
        base="dream", num=32, output=str(out / "t"), max_new_tokens=12, batch_size=32, shard_rows=32, suppress_eos=True
    )
    make_trajectories(config, base=base)
    return prepared(out / "t", out / "run", base, heldout=4, slice_states=6, slices=4)


def test_memory_is_what_training_holds_and_a_measured_peak(dream_run: trainer.Run) -> None:
    """Weights, gradients and optimiser state exactly (but for AdamW's step counts), once a step has been made."""
    run = dream_run
    sizes = preflight._memory_bytes(run)
    trainer._step(run)
    parameters = list(run.sampler.parameters())
    states = [s for o in run.optimizers for state in o.state.values() for s in state.values() if torch.is_tensor(s)]
    held = [*parameters, *(w.grad for w in parameters if w.grad is not None), *(s for s in states if s.ndim)]
    assert sizes["sampler"] == sum(x.nbytes for x in held)
    assert 100_000_000 < sizes["peak"] < 2 * sizes["machine"]
    per_state = run.world * run.config.accumulate * run.config.slices
    assert preflight.windows_of(run, 10) == 10 * per_state * (run.config.slice_states - run.config.rollout)


# --- how a step is cut ---------------------------------------------------------------------------------------------


class Lettered(OneNat):
    """`OneNat`, whose states say how many masks their window began with, and a student with a weight on each number.

    A row's loss moves by 1/e - 1 with its window's weight, so the gradient tells what the window weighs.
    """

    def hidden(self, state: State) -> Tensor:
        masks_BL1 = state.masked_BL.sum(-1)[:, None, None].expand(-1, state.masked_BL.shape[1], 1)
        return torch.cat([super().hidden(state), masks_BL1], -1)

    class Weighed(torch.nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.move_KT = torch.nn.Parameter(torch.zeros(3, length))

        def forward(self, h_BLD: Tensor, state: State) -> Tensor:
            began_BL, length = h_BLD[..., 4].long(), self.move_KT.shape[1]
            depth_BL = began_BL - state.masked_BL.sum(-1)[:, None]
            first_BL = OneNat.student(h_BLD[..., :4], state)
            move_BL = self.move_KT[depth_BL.clamp(1, 3) - 1, (length - began_BL).clamp(0, length - 1)]
            return torch.cat([first_BL + move_BL[..., None] * torch.eye(4)[0], h_BLD[..., 4:]], -1)


def counted(slices: Any) -> Tensor:
    """[depth, window start] of texts of 16 tokens, by hand."""
    out = torch.zeros(3, 16)
    for start in slices.start_N.tolist():
        for t in range(max(0, start), start + 4):
            for k in range(1, 4):
                out[k - 1, t : t + 1] += t + k < 16  # something is masked in state t + k
    return out


def test_every_window_of_a_step_weighs_the_same(folder: Path, tmp_path: Path) -> None:
    """--slices 1 --slice-states 7 --accumulate 16: at each depth one share for every window, 0 and T - 2 among them."""
    texts = [Trajectory(torch.zeros(16, dtype=torch.long), torch.arange(16), row, 0) for row in range(8)]
    config = settings(folder, tmp_path, slices=1, slice_states=7, accumulate=16, heldout=0, clip=1e9, weights="uniform")
    run = trainer.Run(config, Lettered(), Lettered.Weighed(16), texts, 0, 1, CPU)  # type: ignore[arg-type]
    run.began = 0.0
    given = {"count": 16, "length": 7, "rollout": 3, "pad_id": 0}
    for run.step in range(12):
        run.sampler.zero_grad()
        losses = trainer._step(run)
        assert losses["loss"] == pytest.approx(1.0, abs=1e-5)
        count_KT = counted(trainer.random_slices(texts, range(8), key=(0, run.step), **given))
        weight_KT = run.sampler.move_KT.grad / (1 / math.e - 1)
        torch.testing.assert_close(weight_KT, count_KT / count_KT.sum(-1, keepdim=True) / 3, rtol=1e-4, atol=1e-6)
    total_KT = torch.zeros(3, 16)
    for step in range(500):
        count_KT = counted(trainer.random_slices(texts, range(8), key=(0, step), **given))
        total_KT += count_KT / count_KT.sum(-1, keepdim=True)
    for k, total_T in enumerate(total_KT, start=1):
        assert total_T[16 - k :].eq(0).all()
        assert ((total_T[: 16 - k] / total_T.sum() * (16 - k) - 1).abs() < 0.15).all()


CUTS = [(8, 1), (4, 2), (2, 4), (1, 8)]  # slices, accumulate; with two ranks half as many slices
FORMS: list[dict[str, Any]] = [{}, {"loss": "released", "weights": "uniform"}, {"rows": 3}]


def mixed_base(block: int | None = None) -> Any:
    return tiny_base("dream", end_ids=(1, 3, 4, 5), **({} if block is None else {"block": block}))


Mixed = list[tuple[Path, int | None]]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    """Texts behind prompts of several lengths, some of which end early: of a whole base, and of one in blocks of 4."""
    found: Mixed = [(tmp_path_factory.mktemp(f"mixed-{block}") / "t", block) for block in (None, 4)]
    source = PromptSource("mixed", [[2, *range(6, 6 + n)] for n in (3, 0, 6, 1)])
    for out, block in found:
        made = {"num": 64, "max_new_tokens": 9, "batch_size": 64, "shard_rows": 64}
        make_trajectories(
            TrajectoriesConfig(base="dream", output=str(out), **made), base=mixed_base(block), source=source
        )
    return found


def cut_run(
    stored: tuple[Path, int | None], rank: int, world: int, slices: int, accumulate: int, changes: dict[str, Any]
) -> trainer.Run:
    data, block = stored
    given = {"heldout": 8, "slice_states": 5, "rollout": 2, "clip": 1e9, **changes}
    config = settings(data, data / "run", slices=slices, accumulate=accumulate, **given)
    return trainer._prepare(config, mixed_base(block), rank, world)


def stepped(run: trainer.Run, steps: int = 1) -> tuple[dict[str, float], Tensor]:
    """Losses and gradient of the last step."""
    for run.step in range(steps):
        losses = trainer._step(run)
    return losses, torch.cat([x.grad.flatten() for x in run.sampler.parameters() if x.grad is not None])


def cuts_of(form: dict[str, Any]) -> list[tuple[int, int]]:
    return CUTS if form == {} else CUTS[:2]


def one_of_two(rank: int, mixed: Mixed) -> list[Any]:
    """A rank of two: for each base the first step of the cuts in every form, and three steps of one."""
    distributed.start()
    return [
        [
            {(at, cut): stepped(cut_run(stored, rank, 2, cut[0] // 2, cut[1], form))
             for at, form in enumerate(FORMS) for cut in cuts_of(form)[:3]},
            stepped(cut_run(stored, rank, 2, 4, 1, {}), steps=3),
        ]
        for stored in mixed
    ]  # fmt: skip


SECOND = """
import pickle, sys, torch, test_train_safety
torch.set_num_threads(1)
test_train_safety.one_of_two(1, pickle.loads(bytes.fromhex(sys.argv[1])))
torch.distributed.destroy_process_group()
"""


def test_a_step_is_the_same_however_it_is_cut(mixed: Mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices x accumulate x ranks over the same eight slices: one loss, one gradient; two ranks bit for bit."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with first_of_two("-c", SECOND, pickle.dumps(mixed).hex()):
        of_two = one_of_two(0, mixed)
    for stored, (two, longer) in zip(mixed, of_two, strict=True):
        for at, form in enumerate(FORMS):
            one = {cut: stepped(cut_run(stored, 0, 1, *cut, form)) for cut in cuts_of(form)}
            loss, gradient = one[8, 1]
            assert loss["loss"] > 0.1 and gradient.norm() > 0.1
            for other_loss, found in [*one.values(), *(two[at, cut] for cut in cuts_of(form)[:3])]:
                assert other_loss["loss"] == pytest.approx(loss["loss"], rel=1e-6)
                assert (found - gradient).norm() < 3e-6 * gradient.norm()
            assert torch.equal(two[at, (8, 1)][1], one[4, 2][1])  # the sum of the same two
        assert torch.equal(longer[1], stepped(cut_run(stored, 0, 1, 4, 2, {}), steps=3)[1])


@pytest.mark.parametrize("cut", [(4, 2), (2, 4)])
def test_a_step_of_one_pass_is_the_same_however_it_is_cut(tmp_path: Path, cut: tuple[int, int]) -> None:
    """Once all rows of the pool have begun: two blocks of eight rows, in micro-batches of 8, 4 or 2."""
    config = one_pass_settings(
        tmp_path / "run", pool=PoolConfig(rows=8, max_new_tokens=9), heldout=4, steps=5,
        slice_states=5, rollout=2, clip=1e9,
    )  # fmt: skip
    found = []
    for slices, accumulate in ((8, 1), cut):
        form = replace(config, slices=slices, accumulate=accumulate)
        run = trainer._prepare(form, mixed_base(), 0, 1)
        assert run.pool is not None
        while run.pool.group or run.pool.passes < 24:
            run.pool.frames()
        found.append((run.pool.passes, *stepped(run)))
    (passes, loss, gradient), other = found
    assert other[0] == passes and other[1]["loss"] == pytest.approx(loss["loss"], rel=1e-6) and loss["loss"] > 0.1
    assert (other[2] - gradient).norm() < 1e-6 * gradient.norm()


# --- several processes ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_equal_one_that_accumulates_twice(exact: ExactBase, folder: Path, tmp_path: Path) -> None:
    """torchrun with gloo: the same weights, losses and held-out metrics, and one set of files."""
    given = {"steps": 6, "slices": 4, "eval_every": 3, "checkpoint_every": 3, "heldout": 16, "warmup": 2}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "adjust_dlm.cli", *map(str, flags(folder, tmp_path / "two", **given))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    train(settings(folder, tmp_path / "one", accumulate=2, **given), exact)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6)
    logs = [[json.loads(x) for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("one", "two")]
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]] == [3, 6]
    for a, b in zip(*logs, strict=True):
        keys = [key for key in a if key != "seconds"]
        np.testing.assert_allclose([a[k] for k in keys], [b[k] for k in keys], rtol=1e-4, atol=1e-6)
    assert json.loads((tmp_path / "two" / "result.json").read_text())["results"]["windows"] == 6 * 2 * 4


def test_a_group_on_cpus_ends_before_its_process() -> None:
    """Two ranks, one a fork of the other; what was registered first runs last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        "import atexit, os\n"
        "import torch.distributed as dist\n"
        "atexit.register(lambda: os.write(1, b'there\\n' if dist.is_initialized() else b'ended\\n'))\n"
        "from adjust_dlm.train import distributed\n"
        "os.environ['RANK'] = str(int(os.fork() == 0))\n"
        "distributed.start()\n"
        "assert distributed.from_all_ranks([os.environ['RANK']]) == ['0', '1']\n"
    )
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout.split()) == (0, ["ended"] * 2), done.stderr


def test_ranks_that_would_go_on_from_different_steps_stop(
    exact: ExactBase, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second machine that does not see the first one's checkpoint."""
    monkeypatch.setattr(distributed, "from_all_ranks", lambda items: [5, *items])
    with pytest.raises(InputError, match="the step to go on from differs between ranks: 5, 0; all machines must see"):
        train(settings(folder, tmp_path / "run"), exact)
    assert not (tmp_path / "run").exists()


# --- trackers -----------------------------------------------------------------------------------------------------


def test_tensorboard_gets_what_the_log_gets_and_goes_on_after_a_stop(
    exact: ExactBase, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs into one folder, the second resumed at step 5: every step once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    step = trainer._step

    def fails(run: trainer.Run) -> dict[str, float]:
        if run.step == 8:
            raise FloatingPointError("made up")
        return step(run)

    monkeypatch.setattr(trainer, "_step", fails)
    config = settings(folder, tmp_path, eval_every=3, track=("tensorboard", "tensorboard"))
    with pytest.raises(FloatingPointError):
        train(config, exact)
    monkeypatch.setattr(trainer, "_step", step)
    train(config, exact)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for key in ("loss", "kl_1", "lr"):
        seen = [(event.step, event.value) for event in events.Scalars(key)]
        assert [at for at, _ in seen] == [line["step"] for line in lines] == [3, 6, 9, 12]
        np.testing.assert_allclose([value for _, value in seen], [line[key] for line in lines], rtol=1e-6)


SERVICE = """
import sys
calls = []
def init(**given):
    calls.append(("init", given))
    return sys.modules[__name__]
def log(values, step): calls.append(("log", step, values))
def finish(): calls.append(("finish",))
"""


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Modules of the two names that note their calls."""
    import importlib

    (tmp_path / "fake").mkdir()
    for name in ("wandb", "trackio"):
        (tmp_path / "fake" / f"{name}.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(tmp_path / "fake")
    yield {name: importlib.import_module(name) for name in ("wandb", "trackio")}
    for name in ("wandb", "trackio"):
        del sys.modules[name]


def test_services_get_one_run_through_a_stop_and_are_closed(
    exact: ExactBase, folder: Path, tmp_path: Path, services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    loss = trainer._micro_loss
    bad = {8}
    monkeypatch.setattr(
        trainer, "_micro_loss", lambda r, *parts: loss(r, *parts) * (float("nan") if r.step in bad else 1)
    )
    config = settings(folder, tmp_path / "run", eval_every=3, track=("wandb", "trackio"))
    with pytest.raises(FloatingPointError):
        train(config, exact)
    bad.clear()
    train(config, exact)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name, module in services.items():
        kinds = [call[0] for call in module.calls]
        assert kinds == ["init", "log", "log", "finish", "init", "log", "log", "log", "finish"]
        first, second = (call[1] for call in module.calls if call[0] == "init")
        assert first["resume"] == "allow" and first["config"]["steps"] == 12
        assert first["project"] == ("mine" if name == "wandb" else "adjust-dlm")
        identity = "id" if name == "wandb" else "name"
        assert first[identity] == second[identity]
        last = module.calls[-2]
        assert last[1] == 12 and last[2] == {k: float(v) for k, v in lines[-1].items() if k != "step"}


def test_a_new_run_gets_a_new_id(exact: ExactBase, folder: Path, tmp_path: Path, services: dict[str, Any]) -> None:
    for _ in "ab":
        train(settings(folder, tmp_path / "run", steps=1, track=("wandb",), resume="never"), exact)
    ids = [call[1]["id"] for call in services["wandb"].calls if call[0] == "init"]
    assert len(set(ids)) == 2


def test_a_tracker_that_is_not_there_is_named_before_any_work(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()  # what W&B leaves behind is not the package
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = run(*flags(folder, tmp_path / "run"), "--track", "wandb")
    assert code == 2 and "track wandb needs a package that is not installed: pip install wandb" in err
    with pytest.raises(InputError, match="track is 'mlflow'; it must be one of tensorboard, wandb, trackio"):
        TrainConfig(track=("mlflow",))  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_best_kl_by_hand() -> None:
    assert record.heldout_kl({"kl_1": 1.0, "kl_2": 3.0, "stale_1": 9.0, "top1_1": 0.5}) == 2.0
    assert record.heldout_kl({}) == float("inf")


def test_a_checkpoint_with_a_setting_that_is_gone_is_refused(tmp_path: Path) -> None:
    """A run that used it would go on as another one; one that left it off goes on."""
    for ema, goes_on in ((0.0, True), (0.99, False)):
        torch.save({"run": {"lr": 0.1, "ema": ema}}, tmp_path / "checkpoint.pt")
        if goes_on:
            assert load_checkpoint(tmp_path, {"lr": 0.1}) == {"run": {"lr": 0.1, "ema": 0.0}}
        else:
            with pytest.raises(InputError, match="this version has no ema"):
                load_checkpoint(tmp_path, {"lr": 0.1})
