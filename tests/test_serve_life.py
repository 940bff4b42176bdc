"""How requests and servers end: clients that hang up (H18), SIGTERM, a fuzzed schema, a real process."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from adjust_dlm import cli
from adjust_dlm.commands import serve as serve_command
from adjust_dlm.commands.serve import ServeConfig, run
from adjust_dlm.decoders.fast import engine as fast
from adjust_dlm.serve import guard, http, wire
from adjust_dlm.serve.asks import AppConfig
from adjust_dlm.serve.http import Server, bound
from adjust_dlm.types import InputError
from helpers import tiny_base
from serving import Served, Typist, serving, typing_engine, wait_for

PASS = 0.02  # seconds of a base pass where it matters
LONG = {"prompt": "write:", "max_tokens": 200, "decoder": "joint"}
SHORT = {"prompt": "write:", "max_tokens": 2, "decoder": "joint"}


@pytest.fixture(scope="module")
def slow() -> Iterator[tuple[Typist, Served]]:
    base = Typist("x" * 200)
    base.sleep = PASS
    with serving(typing_engine(base)) as served:
        yield base, served


def left_alone(base: Typist, served: Served) -> None:
    """The work of a client that hung up stops within a round: one that runs, and one that may have begun since."""
    begun = base.passes
    wait_for(lambda: served.engine.idle)
    assert base.passes - begun <= 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/canvas"])
def test_a_stream_that_is_closed_stops_its_work(slow: tuple[Typist, Served], path: str) -> None:
    """Also where the text of the left part shows nothing yet, so that nothing is written that could fail."""
    base, served = slow
    for n in range(10):
        body = {**LONG, "stream": True, **({"block_length": 1} if n % 2 and path != "/v1/canvas" else {})}
        body = body if path != "/v1/canvas" else {key: body[key] for key in LONG}
        with served.client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            if path == "/v1/canvas" or n % 2:
                next(answer.iter_lines())
        time.sleep(PASS)
        left_alone(base, served)


def test_a_client_that_stops_waiting_stops_its_work(
    slow: tuple[Typist, Served], caplog: pytest.LogCaptureFixture
) -> None:
    """20 times: a request without a stream times out at the client; the next one is as quick as ever."""
    base, served = slow
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{served.url}/v1/completions", json=LONG, timeout=0.06)
            begun = base.passes
            answer = served.client.post("/v1/completions", json=SHORT)
            assert answer.json()["choices"][0]["text"] == "xx"
            assert base.passes - begun <= 2 + 2  # its own, one that runs, and one that may have begun since
            wait_for(lambda: served.engine.idle)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert served.client.get("/health").json() == {"status": "ok", "waiting": 0, "running": 0}


def test_half_a_request_hurts_nobody(slow: tuple[Typist, Served]) -> None:
    _, served = slow
    host, port = served.url.removeprefix("http://").split(":")
    for raw in (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
        b"\x00\x01\r\n\r\n",
        b"GET",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as half:
            half.sendall(raw)
    assert served.client.post("/v1/completions", json=SHORT).status_code == 200


def test_a_connection_outlives_the_patience_of_clients(slow: tuple[Typist, Served]) -> None:
    """Many keep an idle connection for five seconds: one that the server closes as soon may lose a request."""
    _, served = slow
    connection = HTTPConnection(httpx.URL(served.url).netloc.decode(), timeout=5)
    connection.connect()
    connection.auto_open = False  # no second connection behind our back
    for pause in (0.0, 5.5):
        time.sleep(pause)
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read())["status"] == "ok"
    connection.close()


# Requests that never end ------------------------------------------------------------------------------------------

WHOLE = 0.6  # seconds that a request may take to arrive where it matters
LATE = 5.0  # seconds that a busy machine may be late
HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99999\r\n\r\n"


def dialled(served: Served) -> socket.socket:
    """A connection of one's own."""
    url = httpx.URL(served.url)
    return socket.create_connection((url.host, url.port or 80), timeout=20)


def heard(line: socket.socket, more: bytes = b"", every: float = 0.05) -> bytes:
    """What comes back until the server closes the connection, while a client goes on sending a little."""
    line.settimeout(every)
    answer = b""
    while True:
        try:
            piece = line.recv(65536)
        except TimeoutError:
            if more:  # a line that is shut for sending takes nothing, not even this
                line.sendall(more)
            continue
        except ConnectionResetError:
            return answer
        answer += piece
        if not piece:
            return answer


def told(answer: bytes) -> tuple[list[int], dict[str, Any]]:
    """The statuses, and the error of the last answer."""
    statuses = [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+)", answer)]
    return statuses, json.loads(answer.rpartition(b"\r\n\r\n")[2]).get("error", {})


@pytest.mark.parametrize(
    ("first", "more", "statuses"),
    [
        (HEAD + b"x: ", b"x", [408]), (HEAD, b"a: b\r\n", [408]), (b"G", b"E", [408]), (POST, b" ", [408]),
        (POST.replace(b"content-length: 99999", b"transfer-encoding: chunked"), b"1\r\nx\r\n", [408]),
        (HEAD + b"\r\n" + HEAD, b"x", [200, 408]), (POST.replace(b"/v1/", b"/v0/"), b" ", [404]),
    ],
)  # fmt: skip
def test_a_request_that_never_ends_is_given_up(
    slow: tuple[Typist, Served], monkeypatch: pytest.MonkeyPatch, first: bytes, more: bytes, statuses: list[int]
) -> None:
    """One deadline from the first byte, however steadily more bytes come, and also behind an answer."""
    _, served = slow
    monkeypatch.setattr(guard, "REQUEST_SECONDS", WHOLE)
    with dialled(served) as line:
        begun = time.monotonic()
        line.sendall(first)
        got, error = told(heard(line, more))
        assert WHOLE <= time.monotonic() - begun < WHOLE + LATE
    assert got == statuses
    assert error["code"] == ("request_timeout" if got[-1] == 408 else None)


def test_the_clock_ends_with_the_request(slow: tuple[Typist, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pauses between requests nor a long answer count, and what comes slowly but in time is answered."""
    _, served = slow
    monkeypatch.setattr(guard, "REQUEST_SECONDS", WHOLE)
    with dialled(served) as line:
        for _ in range(2):
            for piece in (HEAD[:5], HEAD[5:], b"\r\n"):
                line.sendall(piece)
                time.sleep(WHOLE / 4)
            assert told(line.recv(65536)) == ([200], {})
            time.sleep(1.5 * WHOLE)
    answer = served.client.post("/v1/completions", json={**LONG, "max_tokens": int(2 * WHOLE / PASS)})
    assert answer.status_code == 200 and answer.elapsed.total_seconds() > 1.5 * WHOLE


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_KEEP_ALIVE_SECONDS", WHOLE)
    with serving(typing_engine(Typist("x"))) as served, dialled(served) as line:
        begun = time.monotonic()
        assert heard(line) == b""
        assert WHOLE / 2 <= time.monotonic() - begun < WHOLE + LATE


def test_behind_a_proxy_of_another_kind_a_body_has_the_same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application's own, for servers that are not ours."""
    monkeypatch.setattr(guard, "REQUEST_SECONDS", WHOLE)
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(WHOLE / 5)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    app = http.create_app(typing_engine(Typist("x")), AppConfig(model="tiny"))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    begun = time.monotonic()
    asyncio.run(app(scope, receive, send))
    assert WHOLE <= time.monotonic() - begun < WHOLE + LATE
    assert sent[0]["status"] == 408


@pytest.mark.parametrize("middle", [b"x" * 997, b"a: b\r\n" * 166, b"a: b\r\n b" * 100])
def test_headers_are_refused_beyond_a_limit(slow: tuple[Typist, Served], middle: bytes) -> None:
    """Up to it they are read; beyond it the client is told, though it sends 16 MiB; others wait for none of it."""
    _, served = slow
    for count, status in ((wire.HEADER_BYTES // len(middle) - 1, 200), ((16 << 20) // len(middle), 431)):
        with dialled(served) as line:
            line.sendall(HEAD + b"x: " + middle * count)
            begun = time.monotonic()
            assert httpx.get(f"{served.url}/health").status_code == 200
            assert time.monotonic() - begun < LATE
            line.sendall(b"\r\n" if middle.endswith(b"\n") else b"\r\n\r\n")
            line.shutdown(socket.SHUT_WR)
            got, error = told(heard(line))
        assert got == [status] and error.get("code") == (None if status == 200 else "headers_too_large")


@pytest.mark.parametrize("after", [wire.HEADER_BYTES + wire._READ_BYTES, 200_000])
def test_whole_headers_in_one_piece_are_refused_too(slow: tuple[Typist, Served], after: int) -> None:
    with dialled(slow[1]) as line:
        line.sendall(HEAD + b"x: " + b"x" * after + b"\r\n\r\n")
        assert told(heard(line))[0] == [431]


@pytest.mark.parametrize(
    ("raw", "statuses"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400]), (b"nonsense\r\n\r\n", [400]),
        (HEAD + b"x\r\n\r\n", [400]), (HEAD + b"\r\n" + b"nonsense\r\n\r\n", [200, 400]),
        (POST.replace(b"content-length: 99999", b"transfer-encoding: chunked") + b"zz\r\n", [400]),
        (HEAD + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n" + HEAD + b"connection: close\r\n\r\n", [200, 200]),
    ],
)  # fmt: skip
def test_what_is_no_http_is_refused_in_the_usual_shape(
    slow: tuple[Typist, Served], caplog: pytest.LogCaptureFixture, raw: bytes, statuses: list[int]
) -> None:
    with caplog.at_level(logging.ERROR), dialled(slow[1]) as line:
        line.sendall(raw)
        got, error = told(heard(line))
        assert got == statuses
        assert error.get("message") == ("this is not HTTP/1.1" if 400 in statuses else None)
    assert not caplog.records


def test_nonsense_behind_an_answer_closes_the_connection(
    slow: tuple[Typist, Served], caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that comes before the body's end is the only one."""
    post = POST.replace(b"/v1/", b"/v0/").replace(b"content-length: 99999", b"transfer-encoding: chunked")
    with caplog.at_level(logging.ERROR), dialled(slow[1]) as line:
        line.sendall(post)
        got = line.recv(65536)
        line.sendall(b"zz\r\n")
        assert re.findall(rb"HTTP/1\.1 (\d+)", got + heard(line)) == [b"404"]
    assert not caplog.records


def test_a_client_that_resets_a_late_request_leaves_no_trace(
    slow: tuple[Typist, Served], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reset comes when all of the refusal but its end is written."""
    _, served = slow
    monkeypatch.setattr(guard, "REQUEST_SECONDS", WHOLE)
    send = h11.Connection.send

    def reset(connection: h11.Connection, event: h11.Event) -> bytes | None:
        if isinstance(event, h11.EndOfMessage):
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            line.close()
        return send(connection, event)

    with caplog.at_level(logging.WARNING):
        line = dialled(served)
        line.sendall(POST + b" ")
        monkeypatch.setattr(h11.Connection, "send", reset)
        wait_for(lambda: line.fileno() < 0)
        monkeypatch.undo()
        live = served.server.server_state.connections
        wait_for(lambda: not any(c.cycle is not None and c.cycle.disconnected for c in live))
        assert httpx.get(f"{served.url}/health").status_code == 200
    assert not caplog.records


def test_empty_lines_before_a_request_are_no_request(slow: tuple[Typist, Served]) -> None:
    with dialled(slow[1]) as line:
        for n in range(4):
            line.sendall(b"\r\n" * n + HEAD + b"connection: close\r\n" * (n == 3) + b"\r\n")
            time.sleep(0.1)
        assert told(heard(line)) == ([200] * 4, {})


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch, *, reads: bool) -> None:
    """One that reads slowly gets all of it."""
    monkeypatch.setattr(guard, "REQUEST_SECONDS", WHOLE)
    body = json.dumps({"prompt": "write:", "max_tokens": 400, "n": 100, "decoder": "parallel", "tokens_per_step": 100})
    base = Typist("x" * 400, context=500)
    with serving(typing_engine(base, rows=100, tokens=10**6)) as served, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url, live = httpx.URL(served.url), served.server.server_state.connections
        line.connect((url.host, url.port or 80))
        wait_for(lambda: live)
        sock = next(iter(live)).transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        line.sendall(POST.replace(b"99999", b"%d" % len(body)).replace(b"completions", b"canvas") + body.encode())
        wait_for(lambda: any(c.flow.write_paused for c in live))
        begun, answer = time.monotonic(), b""
        while reads and b"event: end" not in answer:
            answer += line.recv(1 << 18)
            time.sleep(0.001)
        if reads:
            assert time.monotonic() - begun > 2 * WHOLE
        else:
            wait_for(lambda: not live)
            assert time.monotonic() - begun < WHOLE + LATE
            wait_for(lambda: served.client.get("/health").json() == {"status": "ok", "waiting": 0, "running": 0})


def test_answers_leave_at_once(slow: tuple[Typist, Served]) -> None:
    """An answer is two writes: where the system waits for more before it sends the second, each takes 40 ms."""
    _, served = slow
    served.client.get("/health")
    for connection in served.server.server_state.connections:
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# The schema ------------------------------------------------------------------------------------------------------


def test_nothing_the_schema_allows_or_forbids_is_a_server_error() -> None:
    """Schemathesis: valid and broken requests for every route; answers keep to the documented statuses and types."""
    base = Typist("hello world foo", context=64)
    base.poison = base.crash = -1
    engine = typing_engine(base, queue=8)
    checks = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
    with serving(engine) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        operations = [operation.ok() for operation in schema.get_all_operations()]
        assert {operation.path for operation in operations} >= {
            "/v1/completions",
            "/v1/infill",
            "/v1/canvas",
            "/health",
        }
        for operation in operations:
            _fuzz(operation, checks)
        assert served.client.get("/health").json() == {"status": "ok", "waiting": 0, "running": 0}


def _fuzz(operation: Any, checks: Any) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
        if mode is schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
            continue

        @settings(max_examples=15, deadline=None, suppress_health_check=quiet, phases=[Phase.generate], database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            case.call_and_validate(checks=checks, timeout=60)

        check()


# Errors that are no Exception -------------------------------------------------------------------------------------


class Panic(BaseException):
    """As pyo3's PanicException."""


def panic(*_: Any, **__: Any) -> Any:
    raise Panic("made up")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/canvas"])
@pytest.mark.parametrize(
    ("place", "name"),
    [("base", "hidden"), ("base tokenizer", "encode"), ("base tokenizer", "decode"), ("", "_lane"), ("", "_drop")],
)
def test_an_error_that_is_no_exception_fails_one_request(
    path: str, place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the model, in the tokenizer at both ends, and in the engine; the next request is answered."""
    base = Typist("xxx")
    with serving(typing_engine(base)) as served:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "write:"}], "max_tokens": 2}
        body = asked if path == "/v1/chat/completions" else SHORT
        with monkeypatch.context() as patch:
            patch.setattr(functools.reduce(getattr, place.split(), served.engine), name, panic)
            answer = served.client.post(path, json=body)
        assert "internal" in answer.text and answer.status_code in ((500, 200) if path == "/v1/canvas" else (500,))
        assert httpx.post(f"{served.url}{path}", json=body).status_code == 200  # uvicorn closes the failed connection
        assert httpx.get(f"{served.url}/health").json()["status"] == "ok"


def test_a_call_between_rounds_may_panic_too() -> None:
    with serving(typing_engine(Typist("xxx"))) as served:
        with pytest.raises(RuntimeError, match="made up"):
            served.engine.call(panic).result(5)
        assert served.client.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_engine_is_gone_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits gets 503, and so does who looks; the server needs no signal."""
    with serving(typing_engine(Typist("xxx"))) as served:
        monkeypatch.setattr(Server, "on_tick", uvicorn.Server.on_tick)
        monkeypatch.setattr(served.engine, "turn", panic)
        monkeypatch.setattr(served.engine, "_give_up", panic)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(served.client.post, "/v1/completions", json=SHORT)
            wait_for(lambda: served.engine.gone)
            health = httpx.get(f"{served.url}/health")
            assert (health.status_code, health.json()["status"]) == (503, "failed")
            monkeypatch.undo()
            assert asked.result().status_code == 503
        wait_for(lambda: served.server.should_exit)


# Draining --------------------------------------------------------------------------------------------------------


def test_sigterm_lets_requests_finish_and_refuses_new_ones() -> None:
    base = Typist("x" * 100)
    base.sleep = PASS
    with serving(typing_engine(base, rows=1)) as served, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "write:", "max_tokens": 20, "decoder": "joint"}
        served.client.get("/health")  # the connection that stays
        running = pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=20)
        waiting = pool.submit(httpx.post, f"{served.url}/v1/completions", json={**body, "stream": True}, timeout=20)
        wait_for(lambda: served.engine.running and served.engine.waiting)
        served.server.handle_exit(signal.SIGTERM, None)
        refused = served.client.post("/v1/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert served.client.get("/health").json()["status"] == "draining"
        assert running.result().json()["choices"][0]["text"] == "x" * 20
        assert waiting.result().text.endswith("data: [DONE]\n\n")
        wait_for(lambda: served.server.should_exit)


def test_a_second_signal_ends_what_is_left() -> None:
    base = Typist("x" * 200)
    base.sleep = PASS
    with serving(typing_engine(base)) as served, ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(httpx.post, f"{served.url}{path}", json=LONG, timeout=20)
            for path in ("/v1/completions", "/v1/canvas")
        ]
        wait_for(lambda: base.passes > 8)  # of two lanes in turn: both streams have begun
        for _ in range(2):
            served.server.handle_exit(signal.SIGTERM, None)
        plain, stream = (future.result() for future in asked)
        assert plain.status_code == 503 and plain.json()["error"]["code"] == "shutting_down"
        assert stream.status_code == 200 and "event: error" in stream.text and "shutting_down" in stream.text
    assert base.passes < 100


@contextmanager
def process(*flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """`adjust serve` on the enumerable base; its log lines as they come."""
    command = [sys.executable, "-m", "adjust_dlm.cli", "serve", "--base", "exact", "--decoder", "joint", *flags]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    lines: list[str] = []
    assert running.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(iter(running.stderr.readline, "")))  # type: ignore[union-attr]
    reader.start()
    try:
        yield running, lines
    finally:
        running.kill()
        running.wait(10)
        reader.join(10)


def test_the_command_serves_and_leaves_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with process("--port", "0", "--max-new-tokens", "3", ADJUST_API_KEY="k") as (running, lines):
        wait_for(lambda: any("serving exact on" in line for line in lines), 60)
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+", "".join(lines))
        client = httpx.Client(base_url=url, headers={"authorization": "Bearer k"}, timeout=20)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        answer = client.post("/v1/completions", json={"prompt": "1", "seed": 2})
        assert re.fullmatch(r"[0-3] [0-3] [0-3]", answer.json()["choices"][0]["text"])
        for body in ({"prompt": "1 2", "max_tokens": 3}, {"prompt": "1", "max_tokens": 1}):  # it takes four tokens
            assert client.post("/v1/completions", json=body).status_code == 400
        port = url.split(":")[-1]
        assert cli.main(["serve", "--base", "exact", "--port", port, "--decoder", "joint"]) == 1
        said = capsys.readouterr().err
        assert "Address already in use" in said and "Traceback" not in said
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
    assert "Traceback" not in "".join(lines) and "SIGTERM: finishing what runs" in "".join(lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"decoder": "adjust"}, "needs a sampler"), ({"decoder": "klass"}, "not served here; served are joint"),
        ({"port": 70000}, "port is 70000"), ({"max_rows": 0}, "rows is 0"), ({"set": ("tau=1",)}, "has no option tau"),
        ({"temperature": -1.0}, "temperature is -1.0"), ({"rate_limit": -1}, "rate_limit is -1"),
    ],
)  # fmt: skip
def test_flags_that_make_no_sense_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(ServeConfig(**{"base": "exact", "decoder": "joint", "port": 0, **flags}))


@pytest.mark.parametrize("eager", [True, False])
def test_the_command_hands_eager_on(*, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card: the fast form unless it is refused."""
    monkeypatch.setattr(fast, "wanted", lambda base, eager: not eager)
    monkeypatch.setattr(serve_command, "load_for", lambda flags: tiny_base("dream"))
    monkeypatch.setattr(serve_command, "set_malloc", lambda **sizes: None)
    flags = ServeConfig(base="exact", decoder="joint", eager=eager)
    _, engine = serve_command.app_for(flags, serve_command.check(flags))
    assert (engine._rounds is None) is eager


def test_a_port_in_use_is_named() -> None:
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(OSError, match="in use") as error:
            bound(*taken.getsockname())
    assert error.value.filename == "127.0.0.1:" + str(error.value.filename).split(":")[1]


def test_serving_is_imported_by_nothing_else() -> None:
    """The command's own module, and so `adjust --help`, loads neither fastapi nor torch."""
    program = (
        "import sys, adjust_dlm.commands.serve; print([m for m in ('fastapi', 'torch', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert Path(sys.modules["adjust_dlm.serve.http"].__file__ or "").is_file()
