"""The inner half of the sandbox: a program of its own, of the standard library alone, that `sandbox.py` starts.

Three processes, each the parent of the next: the outer one, which waits for the order to end everything; the keeper,
process 1 of a new PID namespace, with whose end the kernel ends all that the candidate started; the candidate. Where
namespaces are not to be had, outer and keeper are one process, which adopts what the candidate leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

NOBODY = 65534
MESSAGE = 2000  # characters of an error that go back
LEFT_BEHIND = b"\0left processes running"
_PDEATHSIG, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 36, 38  # of linux/prctl.h
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_CAP_VERSION = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Reads the job from stdin and runs it; the numbers of two pipes are the arguments: results out, token in."""
    result_fd, token_fd = map(int, sys.argv[1:3])
    job = json.load(sys.stdin)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    protections = ["user"] if _became_nobody(job["folder"]) else []
    _libc.prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != job["parent"]:  # gone before it could be told
        os._exit(1)
    _libc.prctl(_SUBREAPER, 1)
    others = _tasks_of(os.geteuid())  # they count, too, where no namespace counts anew
    if job["namespaces"] and _unshared():
        protections += ["processes", "network"]
        keeper = os.fork()
        if keeper:  # ends with the keeper, or ends it when told to
            signal.signal(signal.SIGTERM, lambda *_: os.kill(keeper, signal.SIGKILL))
            os.waitpid(keeper, 0)
            os._exit(0)
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)
        protections += _closed_files(job["folder"], job["file_mb"])
        others = 0
    job["processes"] += others
    os.chdir(job["folder"])
    os.write(result_fd, (json.dumps({"protections": protections}) + "\n").encode())
    candidate = os.fork()
    if not candidate:
        _candidate(job, result_fd, token_fd)
    os.close(token_fd)
    _keep(candidate, result_fd)


def _became_nobody(folder: str) -> bool:
    """Gives up root, if this is root and nobody can still read the standard library and enter the folder."""
    if os.geteuid():
        return False
    os.chown(folder, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    readable = os.access(os.__file__, os.R_OK, effective_ids=True) and os.access(folder, os.W_OK, effective_ids=True)
    os.seteuid(0)
    if not readable:
        os.chown(folder, 0, 0)
        return False
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    _libc.prctl(_DUMPABLE, 1)  # else the files of /proc/self stay root's, and with them the maps of ids
    return True


def _tasks_of(uid: int) -> int:
    count = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if status.stat().st_uid == uid:
                count += int(status.read_text(errors="replace").partition("Threads:")[2].split()[0])
    return count


def _unshared() -> bool:
    """Whether this process has namespaces of its own now; children only then get the one of processes."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_NEWUSER | _NEWPID | _NEWNET | _NEWNS | _NEWIPC):
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")
    return True


def _closed_files(folder: str, size_mb: int) -> list[str]:
    """Makes every file system read-only and puts a small one in memory over the folder; hides other processes."""
    done = []
    if not _libc.mount(b"proc", b"/proc", b"proc", 0, None):
        done.append("proc")
        with contextlib.suppress(OSError):  # else the program could make itself a namespace in which it may mount
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)  # set, clear, propagation, user namespace
    call = [ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), b"/", ctypes.c_uint(_AT_RECURSIVE)]
    read_only = not _libc.syscall(*call, ctypes.byref(attributes), ctypes.c_size_t(32))
    own = not _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size_mb}m,mode=700".encode())
    return [*done, "files"] if read_only and own else done


def _keep(candidate: int, result_fd: int) -> NoReturn:
    """Waits for the candidate, buries every orphan, and leaves no child behind.

    A candidate whose children live on has not passed, whatever it wrote: the line added here spoils its token.
    """
    signal.signal(signal.SIGTERM, lambda *_: _end_children())
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0] != candidate:
            pass
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        os.write(result_fd, LEFT_BEHIND)
    _end_children()


def _end_children() -> NoReturn:
    """Kills children until there is none; those of killed ones become ours."""
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(0)


def _children() -> list[int]:
    me, found = str(os.getpid()), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text(errors="replace").rpartition(")")[2].split()[1] == me:
                found.append(int(stat.parent.name))
    return found


def _candidate(job: dict[str, Any], result_fd: int, token_fd: int) -> NoReturn:
    """Runs the parts; only behind the last one is the token read and handed back.

    What is needed then is bound now, so that a candidate that replaces functions of `os` or built-ins changes nothing.
    """
    read, write, leave, run, describe = os.read, os.write, os._exit, exec, traceback.format_exception_only
    for fd in (result_fd, token_fd):
        os.set_inheritable(fd, False)
    _limit(job)
    try:
        parts = [compile(text, f"<part {n}>", "exec", dont_inherit=True) for n, text in enumerate(job["parts"])]
        module = types.ModuleType("candidate")  # not __main__: what stands under that test is not asked for
        sys.modules["candidate"], names = module, vars(module)
        sys.argv = ["candidate"]
        for part in parts:
            run(part, names)
    except BaseException as error:  # SystemExit, too
        text = "".join(describe(error))[-MESSAGE:].encode(errors="replace")
        write(result_fd, b"error " + text)
        leave(1)
    write(result_fd, b"token " + read(token_fd, 64))
    leave(0)


def _limit(job: dict[str, Any]) -> None:
    """A session of its own, limits that it cannot raise, and no privilege that a namespace gave."""
    os.setsid()
    seconds, memory, size = job["cpu_seconds"], job["memory_mb"] << 20, job["file_mb"] << 20
    for limit, value in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NPROC, job["processes"]), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, job["files"]),
    ):  # fmt: skip
        hard = resource.getrlimit(limit)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (bound, bound))
    _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.capset((ctypes.c_uint32 * 2)(_CAP_VERSION, 0), (ctypes.c_uint32 * 6)())


if __name__ == "__main__":
    main()
