"""`--engine ray`: the shards of `--engine local`, whatever happens to a worker."""

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm.data import ray_engine, store
from adjust_dlm.data.ray_engine import ShardMaker, make_with_ray
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories, prepared_run
from adjust_dlm.types import InputError

ROWS, SHARD = 640, 64


def settings(folder: Path, **changes: Any) -> TrajectoriesConfig:
    fields = {"base": "exact", "num": ROWS, "max_new_tokens": 4, "batch_size": 64, "shard_rows": SHARD, **changes}
    return TrajectoriesConfig(output=str(folder), **fields)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    make_trajectories(settings(folder))
    return folder


class Killer(logging.Handler):
    """Kills the worker that made the first shard, and keeps (first row, worker) of all that came back.

    Also the names of the threads that there were.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if "made by worker" in record.msg:
            first, _, worker = record.args  # type: ignore[misc]
            if not self.seen:
                os.kill(worker, signal.SIGKILL)  # type: ignore[arg-type]
            self.seen.append((first, worker))  # type: ignore[arg-type]
            self.threads |= {thread.name.split("-")[0] for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_killed_worker_loses_and_doubles_nothing(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two CPU actors in a cluster of our own; shard 3 is there before. One row at a time keeps shards slow."""
    import ray

    ready = tmp_path / "s" / store.shard_name((3 * SHARD, 4 * SHARD))
    ready.parent.mkdir()
    ready.write_bytes((local / ready.name).read_bytes())
    (tmp_path / "s" / store.MANIFEST).write_bytes((local / store.MANIFEST).read_bytes())
    output = Path(os.path.relpath(tmp_path / "s"))  # as a user types it
    stamp, killer, log = ready.stat().st_mtime_ns, Killer(), logging.getLogger(ray_engine.__name__)
    log.addHandler(killer)
    monkeypatch.setattr(log, "level", logging.DEBUG)
    try:
        made = make_trajectories(settings(output, engine="ray", actors=2, batch_size=1))
    finally:
        log.removeHandler(killer)
    assert contents(tmp_path / "s") == contents(local)
    assert ready.stat().st_mtime_ns == stamp
    assert (made["complete"], made["shards_made"], made["rows_made"]) == (True, 9, ROWS - SHARD)
    assert sorted(first for first, _ in killer.seen) == [n for n in range(0, ROWS, SHARD) if n != 3 * SHARD]
    assert len({worker for _, worker in killer.seen}) == 3  # the two, and the one that took the dead one's place
    assert not ray.is_initialized()
    assert {"StreamingExecutor", "iter_threaded"} <= killer.threads  # as the engine knows them


@pytest.mark.slow
def test_sigterm_stops_a_cluster_of_our_own_and_keeps_whole_shards(local: Path, tmp_path: Path) -> None:
    """Ray's own handler would abort with a page of addresses."""
    words = {"base": "exact", "num": 64_000, "max-new-tokens": 4, "batch-size": 1, "shard-rows": 64, "engine": "ray"}
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "adjust_dlm.cli", "trajectories", *flags, "--output", str(tmp_path / "s")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not store.find_shards(tmp_path / "s") and process.poll() is None:
            time.sleep(0.05)
    finally:
        process.terminate()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and said.endswith("adjust: interrupted\n")
    for path in store.find_shards(tmp_path / "s").values():
        if (local / path.name).exists():  # rows 0..639
            assert path.read_bytes() == (local / path.name).read_bytes()


# --- without a cluster -------------------------------------------------------------------------------------------


def ask(maker: ShardMaker, *ranges: store.Range) -> list[int]:
    """Tokens of each shard."""
    answers = [maker({"start": a, "stop": b}) for a, b in ranges]
    assert all(answer["tokens"] == answer["base_calls"] for answer in answers)  # K = 1
    return [answer["tokens"] for answer in answers]


def test_an_actor_counts_what_it_made_and_makes_no_shard_twice(local: Path, tmp_path: Path) -> None:
    maker = ShardMaker(settings(tmp_path / "s"), os.getcwd(), prepared_run)
    assert ask(maker, (0, 64), (128, 192)) == [256, 256]  # four masked positions: four tokens a row
    assert ask(maker, (0, 64), (0, 0)) == [0, 0]
    for rows in ((0, 64), (128, 192)):
        name = store.shard_name(rows)
        assert (tmp_path / "s" / name).read_bytes() == (local / name).read_bytes()


def test_bad_input_and_a_full_disk_come_back_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(**changes: Any) -> Exception:
        maker = ShardMaker(settings(tmp_path / "s", **changes), os.getcwd(), prepared_run)
        return pickle.loads(maker({"start": 0, "stop": 64})["error"])

    error = told(max_new_tokens=9)
    assert isinstance(error, InputError) and "context of base 'exact'" in str(error)

    def full(*_: Any) -> None:
        raise OSError(28, "cannot write shard: No space left on device")

    monkeypatch.setattr(store, "write_shard", full)
    error = told()
    assert isinstance(error, OSError) and error.errno == 28 and "cannot write shard: No space left" in str(error)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(store, "write_shard", broken)
    error = told()
    assert isinstance(error, RuntimeError)
    assert str(error) == "an actor failed on rows 0..63: ZeroDivisionError: made up"


def test_a_cluster_ends_behind_the_threads_that_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    alive: list[bool] = []
    late = threading.Thread(target=time.sleep, args=(0.2,), name="iter_threaded", daemon=True)
    monkeypatch.setattr(ray_engine, "_start", lambda *_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray, "shutdown", lambda: alive.append(late.is_alive()))
    with pytest.raises(InputError, match="wrong"), ray_engine._cluster(settings(tmp_path, engine="ray"), 1):
        late.start()
        raise InputError("wrong")
    assert alive == [False]


def test_shards_on_another_machines_disk_are_missed(local: Path, tmp_path: Path) -> None:
    ray_engine._check_seen(local, [(0, 64)])
    with pytest.raises(FileNotFoundError, match=r"2 of 2 shards .* first is shard-00000-00064.*disk that all nodes"):
        ray_engine._check_seen(tmp_path, [(0, 64), (64, 128)], wait=0.0)


def test_a_shard_that_shows_late_is_waited_for(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk that shows the file at the third look."""
    looks = iter([[], [], ["shard-00000-00064.parquet"]])
    monkeypatch.setattr(os, "listdir", lambda path: next(looks))
    monkeypatch.setattr(ray_engine.time, "sleep", lambda seconds: None)
    ray_engine._check_seen(tmp_path, [(0, 64)])
    assert next(looks, None) is None


@pytest.mark.parametrize(
    ("resources", "change", "pool"),
    [
        ({"CPU": 64.0, "GPU": 8.0}, {}, (8, 1, 1)),
        ({"CPU": 64.0, "GPU": 8.0}, {"device": "cpu"}, (10, 4, 0)),  # ten shards
        ({"CPU": 64.0, "GPU": 8.0}, {"actors": 3}, (3, 1, 1)),
        ({"CPU": 16.0}, {}, (4, 4, 0)),
        ({"CPU": 2.0}, {}, (1, 2, 0)),
        ({"CPU": 2.0}, {"actors": 2}, (2, 1, 0)),
    ],
)
def test_actors_get_a_gpu_each_or_some_threads(
    tmp_path: Path, resources: dict[str, float], change: dict[str, Any], pool: tuple[int, int, int]
) -> None:
    found = ray_engine._pool(settings(tmp_path, engine="ray", **change), resources, 10, fixed=True)
    assert (found.actors, found.cpus, found.gpus) == pool


def test_actors_without_room_are_not_waited_for(tmp_path: Path) -> None:
    config = settings(tmp_path, engine="ray", actors=3)
    with pytest.raises(InputError, match="actors is 3; this machine has room for 2, one a GPU"):
        ray_engine._pool(config, {"CPU": 8.0, "GPU": 2.0}, 10, fixed=True)
    assert ray_engine._pool(config, {"CPU": 8.0, "GPU": 2.0}, 10, fixed=False).actors == 3  # it may grow


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"engine ray needs Ray: pip install 'adjust-dlm\[ray\]'"):
        make_with_ray(settings(tmp_path / "s", engine="ray"), prepared_run, lambda done: None)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "dask"}, "engine is 'dask'; it must be one of local, ray"),
        ({"engine": "ray", "actors": 0}, "actors is 0"),
        ({"actors": 2}, "actors is 2 but the engine is local"),
        ({"engine": "ray", "device": "cuda:1"}, "device is 'cuda:1'; Ray hands out the GPUs"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings(tmp_path, **change)


def test_an_address_where_nothing_listens_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # ours, and not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(InputError, match=f"no Ray cluster answers at {address}: .*refused"):
            make_trajectories(settings(tmp_path / "s", engine="ray"))
    assert not (tmp_path / "s").exists()


def test_what_an_actor_cannot_take_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adjust_dlm.bases import load_base

    with pytest.raises(InputError, match="loads base and prompts in its actors"):
        make_trajectories(settings(tmp_path, engine="ray"), load_base("exact"))
    with pytest.raises(InputError, match="run it without torchrun"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        make_trajectories(settings(tmp_path, engine="ray"))
