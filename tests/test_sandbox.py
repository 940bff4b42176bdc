"""Hostile programs: each fails in time, leaves nothing behind, and the next one does not notice."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from adjust_dlm.eval.tasks import sandbox
from adjust_dlm.eval.tasks.sandbox import Limits, available_workers, marked, run_program, run_programs
from adjust_dlm.types import InputError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

SECONDS = 1.0
SLACK = 4.0  # a busy machine: start of the interpreter, end of the tree
TEST = "assert answer == 42"
FORKS = """
import os, time
for _ in range(50):
    if os.fork() == 0:
        time.sleep(100)
        os._exit(0)
answer = 42
"""
CATCHES = """
while True:
    try:
        while True: pass
    except BaseException:
        pass
"""
IGNORES = """
import signal
for n in range(1, 64):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
"""
TOKENS = """
import os
for fd in range(3, 64):
    try: os.write(fd, b'token ' + b'0' * 32)
    except OSError: pass
os._exit(0)
"""
EXITS = """
class Answer:
    def __eq__(self, other):
        import os
        os._exit(0)
answer = Answer()
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        time.sleep(100)
    os._exit(0)
os.wait()
answer = 42
"""
TOO_MANY = "import os, time\nfor _ in range(50):\n    if os.fork() == 0: time.sleep(9)"
# Every one would have the right answer if it were judged by its answer alone.
HOSTILE = {
    "endless loop": "answer = 42\nwhile True: pass",
    "reads stdin": "answer = 42\ninput()",
    "sleeps in the background": "import subprocess\nanswer = 42\nsubprocess.Popen(['sleep', '100'])",
    "another session": "import subprocess\nanswer = 42\nsubprocess.Popen(['sleep', '100'], start_new_session=True)",
    "a daemon": DAEMON,
    "prints 200 MB": "answer = 42\nfor _ in range(200): print('x' * (1 << 20))",
    "writes 200 MB to stderr": "import os\nanswer = 42\nfor _ in range(200): os.write(2, b'x' * (1 << 20))",
    "50 children": FORKS,
    "50 GB": "answer = 42\nbytearray(50 << 30)",
    "a file of 1 GB": "answer = 42\nwith open('big', 'wb') as f:\n    for _ in range(1024): f.write(bytes(1 << 20))",
    "1000 open files": "answer = 42\nkept = [open('/dev/null') for _ in range(1000)]",
    "catches everything": CATCHES,
    "ignores signals": IGNORES + CATCHES,
    "sleeps": "import time\nanswer = 42\ntime.sleep(100)",
    "exits at once": "import os\nos._exit(0)",
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "exit in the answer": EXITS,
    "prints what looks like a token": "import os\nfor fd in (1, 2): os.write(fd, b'token ' + b'0' * 32)\nos._exit(0)",
    "writes a token everywhere": TOKENS,
    "replaces built-ins": (
        "import builtins, os\nbuiltins.print = builtins.exec = builtins.compile = lambda *a, **k: None\n"
        "os._exit = os.write = lambda *a: None\nanswer = 41"
    ),
    "catches the failing test": "try:\n    answer = 41",
    "opens a string over the test": "answer = 41\n'''",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nwhile True: pass",
    "kills its group": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "closes everything": "import os\nos.closerange(0, 64)\nanswer = 42",
    "raises its limits": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\nanswer = 42",
    "an error that cannot be shown": "class E(BaseException):\n    def __str__(self): raise self\nraise E",
    "deep recursion": "import sys\nsys.setrecursionlimit(1 << 30)\ndef f(x): return [f(x) for _ in x]\nf([0])",
    "no syntax": "def answer(:",
    "a null byte": "answer = 42\0",
    "nothing": "",
}  # fmt: skip


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The marks and tokens that the sandbox gave out."""
    given: list[str] = []
    real = sandbox.secrets.token_hex

    def token_hex(size: int) -> str:
        given.append(real(size))
        return given[-1]

    monkeypatch.setattr(sandbox.secrets, "token_hex", token_hex)
    return given


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the working folders are made: nobody but this test."""
    folder = Path(tempfile.mkdtemp())  # tmp_path is not open to other users
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def passes(parts: list[str], limits: Limits) -> bool:
    return run_program(parts, limits).status == "passed"


def zombies() -> int:
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found += f") Z {os.getpid()} " in stat.read_text(errors="replace")
    return found


@pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "plain"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_fails_in_time_and_leaves_nothing(
    name: str, namespaces: bool, marks: list[str], folders: Path
) -> None:
    began = time.monotonic()
    result = run_program([HOSTILE[name], TEST], Limits(seconds=SECONDS, namespaces=namespaces))
    assert time.monotonic() - began < SECONDS + SLACK
    assert result.status in ("failed", "timeout", "output") and result.message
    assert marked(marks[0]) == [] and zombies() == 0
    assert list(folders.iterdir()) == []
    assert passes(["answer = 42", TEST], Limits(seconds=5, namespaces=namespaces))


def test_how_programs_end() -> None:
    limits = Limits(seconds=SECONDS)
    assert run_program([HOSTILE["endless loop"]], limits).status == "timeout"
    assert run_program([HOSTILE["prints 200 MB"]], limits).status == "output"
    assert run_program([HOSTILE["reads stdin"]], limits).message == "EOFError: EOF when reading a line"
    assert run_program([HOSTILE["50 GB"]], limits).message == "MemoryError"
    assert run_program([HOSTILE["another session"]], limits).message == "left processes running"
    assert run_program(["answer = 41", TEST], limits).message == "AssertionError"
    assert passes(["x = 1", "y = x + 1", "assert (x, y, __name__) == (1, 2, 'candidate')"], limits)


def test_what_an_honest_program_may_do() -> None:
    parts = [
        "from dataclasses import dataclass\nimport subprocess, tempfile, threading, sys\nprint('x' * 100_000)",
        "from __future__ import annotations\n@dataclass\nclass P:\n    x: int",
        "open('note', 'w').write('kept'); assert open('note').read() == 'kept'; tempfile.TemporaryFile().write(b'x')",
        "t = threading.Thread(target=print); t.start(); t.join(); assert subprocess.run(['true']).returncode == 0",
        "import io, os; sys.stdout = io.StringIO(); assert P(3).x == 3 and 'ADJUST_CACHE' not in os.environ",
    ]
    for namespaces in (True, False):
        assert passes(parts, Limits(namespaces=namespaces))


def test_nothing_of_the_user_s_python_gets_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "extra.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("extra", "numpy", "jail", "adjust_dlm"):
        assert "ModuleNotFoundError" in run_program([f"import {name}"], Limits()).message
    first, second = (run_program(["raise ValueError(hash('adjust'))"], Limits()).message for _ in range(2))
    assert first == second and first.startswith("ValueError: ")


def test_a_program_that_deletes_its_folder_disturbs_nobody(folders: Path) -> None:
    gone = "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nos.chdir('/')\nanswer = 42"
    locked = "import os\nos.makedirs('a/b')\nos.chmod('a', 0)\nos.chmod('.', 0)\nanswer = 42"
    for namespaces in (True, False):
        limits = Limits(seconds=SECONDS, namespaces=namespaces)
        results = run_programs([[gone, TEST], [locked, TEST], ["open('x', 'w')\nanswer = 42", TEST]], limits, workers=1)
        assert [r.status == "passed" for r in results] == [True, True, True]
        assert list(folders.iterdir()) == []


def test_results_come_in_order_and_workers_stay_as_many(marks: list[str]) -> None:
    before = threading.active_count()
    programs = [HOSTILE["sleeps"], "answer = 42", HOSTILE["50 children"], "answer = 42", "answer = 41", "answer = 42"]
    results = run_programs([[text, TEST] for text in programs], Limits(seconds=SECONDS), workers=2)
    assert [r.status == "passed" for r in results] == [False, True, False, True, False, True]
    assert threading.active_count() == before and zombies() == 0
    assert [pid for mark in marks for pid in marked(mark)] == []
    assert available_workers() == len(os.sched_getaffinity(0)) and run_programs([], Limits()) == []


def protections() -> tuple[str, ...]:
    return run_program([""], Limits()).protections


def test_protections_say_what_holds(tmp_path: Path) -> None:
    active = protections()
    assert set(active) <= set(sandbox.PROTECTIONS)
    assert not set(run_program([""], Limits(namespaces=False)).protections) - {"user"}
    if "network" in active:
        interfaces = "import socket\nassert [name for _, name in socket.if_nameindex() if name != 'lo'] == []"
        reach = "try: socket.create_connection(('127.0.0.1', PORT), 1)\nexcept OSError: pass\nelse: assert False"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert passes([interfaces, reach.replace("PORT", str(port))], Limits())
    if "processes" in active:
        assert passes(["import os\nassert os.getppid() == 1 and os.getpid() == 2"], Limits())
    if "files" in active:
        target = tmp_path / "mine"
        target.write_text("kept")
        target.chmod(0o666)
        outcome = run_program([f"open({str(target)!r}, 'w')"], Limits())
        assert outcome.status == "failed" and target.read_text() == "kept"
        assert not passes(["for n in range(9): open(str(n), 'wb').write(bytes(8 << 20))"], Limits(file_mb=64))
        assert passes(["for n in range(7): open(str(n), 'wb').write(bytes(8 << 20))"], Limits(file_mb=64))
        again = "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000 | 0x00020000) == -1"  # user and mounts
        assert passes([again], Limits())


def test_root_becomes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    readable = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if os.geteuid() or readable is None:
        pytest.skip("needs root and a Python that everybody can read")
    monkeypatch.setattr(sys, "executable", readable)
    if "user" not in protections():
        pytest.skip("nobody cannot read this Python")
    for namespaces in (True, False):
        limits = Limits(seconds=5, namespaces=namespaces)
        assert passes(["import os\nassert os.getresuid() == (65534,) * 3\nopen('mine', 'w')"], limits)
        outcome = run_program([f"import os\nos.listdir({str(Path.home())!r})"], limits)
        assert "Permission" in outcome.message or Path.home().stat().st_mode & 0o004
        assert "BlockingIOError" in run_program([TOO_MANY], limits).message


def test_the_limit_of_processes_holds() -> None:
    if os.geteuid() == 0 and "user" not in protections():
        pytest.skip("root is not held to a number of processes, and nobody cannot read this Python")
    assert "BlockingIOError" in run_program([TOO_MANY], Limits(seconds=5, processes=32)).message


def test_a_program_ends_when_its_evaluation_is_killed(folders: Path) -> None:
    code = (
        "from adjust_dlm.eval.tasks import sandbox\nsandbox.secrets.token_hex = lambda size: 'f00d' * 8\n"
        "sandbox.run_programs([['print(1)\\nwhile True: pass']], sandbox.Limits(seconds=100))"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(folders)})
    try:
        wait_for(lambda: len(marked("f00d" * 8)) >= 2)
    finally:
        runner.kill()
        runner.wait()
    wait_for(lambda: marked("f00d" * 8) == [])


def wait_for(condition: object, seconds: float = 30.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_bad_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="seconds is 0; it must be above 0"):
        Limits(seconds=0)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="needs Linux"):
        run_programs([[""]])


def test_a_sandbox_that_does_not_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "jail.py"
    broken.write_text("raise SystemExit('no way')")
    monkeypatch.setattr(sandbox, "_JAIL", broken)
    with pytest.raises(RuntimeError, match="did not start: no way"):
        run_program(["x = 1"], Limits())


def test_a_start_that_fails_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, failures = sandbox._watch, [1]

    def flaky(*args: Any) -> Any:
        if failures:
            failures.pop()
            raise RuntimeError("the sandbox did not start: busy")
        return watch(*args)

    monkeypatch.setattr(sandbox, "_watch", flaky)
    assert passes(["assert True"], Limits())
    failures[:] = [1, 1]
    with pytest.raises(RuntimeError, match="did not start"):
        run_program(["assert True"], Limits())
