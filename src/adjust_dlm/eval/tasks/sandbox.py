"""Runs Python programs that nobody has read, each in a process tree of its own that ends with it (`jail.py`).

What it protects from and what not: docs/code-execution.md. Callers ask the user first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from adjust_dlm.checks import Checked, Count, PositiveOrInf, require

PROTECTIONS = ("user", "processes", "network", "proc", "files")
GRACE = 5.0  # seconds for the tree to end after the order; then it is killed from outside
_START = 30.0  # seconds for the interpreter to start on a busy machine; not counted as the program's
log = logging.getLogger(__name__)
_JAIL = Path(__file__).with_name("jail.py")
_MARK = "ADJUST_SANDBOX"


@dataclass(frozen=True, kw_only=True)
class Limits(Checked):
    """What a program may use.

    Attributes:
        seconds: wall time from the moment its code starts; CPU time of a process is held to one second more.
        memory_mb: address space of a process.
        file_mb: size of a file, and of all files where the folder is in memory.
        output_kb: stdout and stderr together; one that writes more is ended and has failed.
        processes: processes and threads at once.
        files: open files of a process.
        namespaces: use those of the kernel where it lends them.
    """

    seconds: PositiveOrInf = 5.0
    memory_mb: Count = 2048
    file_mb: Count = 64
    output_kb: Count = 1024
    processes: Count = 32
    files: Count = 64
    namespaces: bool = True


@dataclass(frozen=True)
class Result:
    """How a program ended.

    Attributes:
        status: passed (all parts ran to their end), failed, timeout, or output (wrote more than it may).
        message: the exception it ended with, or how the process ended.
        protections: those of `PROTECTIONS` that were active beside limits and the process tree.
    """

    status: Literal["passed", "failed", "timeout", "output"]
    message: str
    protections: tuple[str, ...]


def available_workers() -> int:
    """CPUs this process may use, as one of this machine's ranks."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def run_programs(
    programs: Sequence[Sequence[str]], limits: Limits = Limits(), *, workers: int | None = None
) -> list[Result]:
    """Runs programs side by side, `available_workers` at once unless `workers` are given; results in order.

    The parts of a program are compiled apart and run one after another with the same globals, so that no part can
    swallow the next one by its syntax.

    Raises:
        InputError: not on Linux.
    """
    require(sys.platform == "linux", f"running programs needs Linux, and this is {sys.platform}; use a container")
    with ThreadPoolExecutor(workers or available_workers()) as pool:
        return list(pool.map(lambda parts: run_program(parts, limits), programs))


def run_program(parts: Sequence[str], limits: Limits) -> Result:
    """Runs one program; when this returns, none of its processes and files is left.

    Raises:
        RuntimeError: the sandbox did not start, twice.
    """
    try:
        return _run_once(parts, limits)
    except RuntimeError as error:  # on a machine that is busy enough, an interpreter can take very long
        log.warning("%s; trying once more", error)
        return _run_once(parts, limits)


def _run_once(parts: Sequence[str], limits: Limits) -> Result:
    folder = tempfile.mkdtemp(prefix="adjust-program-")
    mark, token = secrets.token_hex(16), secrets.token_hex(16)
    try:
        with contextlib.ExitStack() as open_files:
            result_in, result_out = _pipe(open_files)
            token_in, token_out = _pipe(open_files)
            os.write(token_out.fileno(), token.encode())
            process = _start(parts, limits, folder, mark, (result_out, token_in), open_files)
            result_out.close()
            token_in.close()
            try:
                return _watch(process, result_in, token, limits)
            finally:
                _end(process, mark)
    finally:
        _remove(Path(folder))


def _pipe(open_files: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return open_files.enter_context(open(read, "rb", 0)), open_files.enter_context(open(write, "wb", 0))


def _start(
    parts: Sequence[str], limits: Limits, folder: str, mark: str, pipes: tuple[IO[bytes], IO[bytes]],
    open_files: contextlib.ExitStack,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """The jail as a process: nothing of the user's environment, no site packages (-sS), no folder to import from (-P).

    Hashes have a fixed seed, so that the order of a set, and with it a score, is the same in every run.
    """
    job = {"parts": list(parts), "folder": folder, "parent": os.getpid(), "cpu_seconds": int(limits.seconds) + 1}
    fds = [pipe.fileno() for pipe in pipes]
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(asdict(limits) | job).encode())
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", str(_JAIL), *map(str, fds)],
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=fds, start_new_session=True,
            env={_MARK: mark, "PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8",
                 "PYTHONHASHSEED": "0"}, cwd=folder,
        )  # fmt: skip
    assert process.stdout is not None
    open_files.enter_context(process.stdout)
    return process


def _watch(process: subprocess.Popen[bytes], results: IO[bytes], token: str, limits: Limits) -> Result:
    """Reads what the tree says until it ends, is too late or says too much."""
    assert process.stdout is not None
    watcher, said, written = selectors.DefaultSelector(), b"", 0
    began, limit, tail = time.monotonic(), _START, b""
    process_fd = os.pidfd_open(process.pid)
    with watcher, open(process_fd, "rb", 0):
        for fd in (results.fileno(), process.stdout.fileno(), process_fd):
            watcher.register(fd, selectors.EVENT_READ)
        while (left := began + limit - time.monotonic()) > 0 and written <= limits.output_kb << 10:
            ready = {key.fd for key, _ in watcher.select(left)}
            for fd in ready - {process_fd}:
                data = os.read(fd, 1 << 16)
                if not data:
                    watcher.unregister(fd)
                elif fd == process.stdout.fileno():
                    written += len(data)
                    tail = (tail + data)[-2000:]
                elif len(said) < 1 << 16:
                    started = b"\n" in said
                    said += data
                    if not started and b"\n" in said:  # the clock of the program starts with its code
                        began, limit = time.monotonic(), limits.seconds
            if ready == {process_fd}:
                break
    head, _, verdict = said.partition(b"\n")
    if not head:
        raise RuntimeError(f"the sandbox did not start: {tail.decode(errors='replace') or 'no reason given'}")
    protections = tuple(json.loads(head)["protections"])
    if written > limits.output_kb << 10:
        return Result("output", f"wrote more than {limits.output_kb} kB", protections)
    if left <= 0:
        return Result("timeout", f"did not end within {limits.seconds:g} s", protections)
    if verdict == f"token {token}".encode():
        return Result("passed", "", protections)
    verdict, _, left_behind = verdict.partition(b"\0")
    kind, _, message = verdict.partition(b" ")
    told = message if kind == b"error" else left_behind
    return Result("failed", told.decode(errors="replace").strip() or "ended early", protections)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Orders the tree to end, buries it, and kills what could still be about."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    while left := marked(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """Living processes that were started with this mark, or are children of such by fork."""
    found, sign = [], f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours to read
            if sign in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _remove(folder: Path) -> None:
    """Deletes a folder whatever rights its owner took away."""
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
