"""`adjust trajectories --engine ray`: shards made by actors of Ray Data, on one machine or a cluster.

The row ranges of the store's shards are the rows of a dataset. An actor loads the base once, makes whole shards and
writes them into the output folder, which all nodes must share (as under torchrun); only counts travel back. A shard
appears whole or not at all and depends on its rows alone, so Ray may repeat one whose worker died: nothing is lost,
nothing doubled, and the files are those of `--engine local` on the same kind of device.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from adjust_dlm.data import store
from adjust_dlm.types import InputError, refusing, require

Show = Callable[[float], None]
Prepare = Callable[[Any], Any]  # TrajectoriesConfig -> what makes shards (`trajectories.prepared_run`)
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
CPUS = 4  # threads of an actor without a GPU, where there are as many
LATE = 60.0  # seconds that a network disk may take to show another machine's files
logger = logging.getLogger(__name__)


class ShardMaker:
    """An actor: holds the base from its first shard on."""

    def __init__(self, config: Any, cwd: str, prepare: Prepare) -> None:
        """Loads nothing yet, so that bad input comes back as a row and not as an actor that cannot start.

        Relative paths in `config` start from `cwd`, the driver's folder.
        """
        if Path(cwd).is_dir():  # another machine may have no such folder; its absolute paths are good all the same
            os.chdir(cwd)
        self.config, self.prepare = config, prepare
        self.run: Any = None  # from the first shard on

    def __call__(self, item: dict[str, int]) -> dict[str, Any]:
        """Makes the shard of a row range unless it is on disk already; gives counts, and what went wrong, pickled."""
        rows = item["start"], item["stop"]
        row: dict[str, Any] = {**item, "base_calls": 0, "tokens": 0, "worker": os.getpid(), "error": b""}
        try:
            self.run = self.run or self.prepare(self.config)
            before = dict(self.run.made)
            if rows[0] < rows[1] and not store.is_whole(self.run.folder / store.shard_name(rows)):
                self.run.make_shards([rows])
            row |= {name: self.run.made[name] - before[name] for name in ("base_calls", "tokens")}
        except (InputError, OSError) as error:
            row["error"] = pickle.dumps(error)
        except Exception as error:  # ours to tell: Ray's own message is a page
            logger.exception("rows %d..%d", *rows)
            said = f"an actor failed on rows {rows[0]}..{rows[1] - 1}: {type(error).__name__}: {error}"
            row["error"] = pickle.dumps(RuntimeError(said))
        return row


def make_with_ray(config: Any, prepare: Prepare, show: Show) -> dict[str, int]:
    """Makes the shards that are missing: `rows_made, shards_made, base_calls, tokens` of this call.

    An actor calls `prepare` with the `TrajectoriesConfig`; `show` is called with the number of rows done.

    Raises:
        InputError: no Ray, more actors than a machine has room for, or what the actors found wrong.
        OSError: an actor could not write, or wrote into a folder that this machine does not see.
    """
    require(find_spec("ray") is not None, "engine ray needs Ray: pip install 'adjust-dlm[ray]'")
    folder = Path(config.output)
    left = store.missing(folder, store.shard_ranges(config.num, config.shard_rows, first_row=config.first_row))
    todo = left or [(config.first_row, config.first_row)]  # no rows: the settings are checked all the same
    done = {"rows_made": 0, "shards_made": 0, "base_calls": 0, "tokens": 0}
    with _cluster(config, len(todo)) as pool:
        logger.info("%d of %d shards to make, %d actors", len(left), -(-config.num // config.shard_rows), pool.actors)
        for row in _dataset(config, prepare, todo, pool).iter_rows():
            if row["error"]:
                raise pickle.loads(row["error"])
            rows = row["stop"] - row["start"]  # also where an actor died after it had written them
            made = {**row, "rows_made": rows, "shards_made": int(rows > 0)}
            done = {name: count + int(made[name]) for name, count in done.items()}
            logger.debug("rows %d..%d made by worker %d", row["start"], row["stop"] - 1, row["worker"])
            show(done["rows_made"])
    _check_seen(folder, left)
    return done


class _Pool(NamedTuple):
    """How many actors, and what each of them gets."""

    actors: int
    cpus: int
    gpus: int


def _pool(config: Any, resources: dict[str, float], shards: int, *, fixed: bool) -> _Pool:
    """One actor a GPU; without GPUs one for every four CPUs, whose threads it uses; not more than there are shards.

    `fixed` says that the cluster cannot grow: actors without room would be waited for in vain.
    """
    gpus, cpus = 0 if config.device == "cpu" else int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    actors = config.actors or min(gpus or max(1, cpus // CPUS), shards)
    room = gpus or cpus
    require(
        actors <= room or not fixed,
        f"actors is {actors}; this machine has room for {room}, {'one a GPU' if gpus else 'one a CPU'}",
    )
    return _Pool(actors, 1 if gpus else max(1, min(CPUS, cpus // actors)), int(gpus > 0))


def _dataset(config: Any, prepare: Prepare, todo: list[store.Range], pool: _Pool) -> Any:
    """Lazy dataset of counts, one row a shard. Ray Data starts dead actors anew and gives them their shards again."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    items = [{"start": a, "stop": b} for a, b in todo]
    dataset: Any = ray.data.from_items(items, override_num_blocks=len(items))
    return dataset.map(
        ShardMaker,
        compute=ray.data.ActorPoolStrategy(size=pool.actors),
        num_cpus=pool.cpus,
        num_gpus=pool.gpus,
        fn_constructor_kwargs={"config": config, "cwd": os.getcwd(), "prepare": prepare},
    )


def _check_seen(folder: Path, made: list[store.Range], wait: float = LATE) -> None:
    """Workers on other machines may have written to disks of their own, or a shared one may show files late."""
    names, end = {store.shard_name(rows) for rows in made}, time.monotonic() + wait
    while unseen := sorted(names - set(os.listdir(folder) if folder.is_dir() else ())):
        if time.monotonic() > end:
            raise FileNotFoundError(
                2,
                f"{len(unseen)} of {len(made)} shards that the actors wrote to {folder.absolute()} are not there on "
                f"this machine (the first is {unseen[0]}): the folder must be on a disk that all nodes share",
            )
        time.sleep(min(1.0, wait))


@contextlib.contextmanager
def _cluster(config: Any, shards: int) -> Iterator[_Pool]:
    """Room on a cluster of our own or the one that is there; ours goes away again."""
    import ray
    import ray.data

    address = os.environ.get("RAY_ADDRESS")
    ours = not ray.is_initialized()
    if ours:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        _start(ray, config, address)
        if threading.current_thread() is threading.main_thread():  # Ray's own would abort, and leave its processes
            for number, handler in handlers.items():
                signal.signal(number, handler)
    try:
        yield _pool(config, ray.cluster_resources(), shards, fixed=ours and address is None)
    finally:
        if ours:
            for thread in threading.enumerate():  # Ray Data's own: what they ask of Ray after its end can abort us
                if thread.name.startswith(("StreamingExecutor", "iter_threaded")):
                    thread.join(LATE)
            ray.shutdown()  # of a cluster that was there before, this only lets go


def _start(ray: Any, config: Any, address: str | None) -> None:
    """Starts a cluster on this machine or joins one, without Ray's own lines unless ours are verbose, too."""
    quiet: dict[str, Any] = {}
    if not logger.isEnabledFor(logging.DEBUG):
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
        logging.getLogger("ray.data").setLevel(logging.ERROR)
    if address is None:
        ray.init(num_cpus=max(config.actors or 1, os.cpu_count() or 1), include_dashboard=False, **quiet)
        return
    with refusing(f"no Ray cluster answers at {address}", OSError, ValueError, first=True):  # OSError: ConnectionError
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, **quiet)
