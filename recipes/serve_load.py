"""Load on a running server: throughput and latency by number of clients, and mixed good and bad traffic.

    adjust serve --base smol --port 8000 &
    python recipes/serve_load.py --clients 1 4 16 64 --seconds 30
    python recipes/serve_load.py --clients --soak-minutes 30 --pid $(pgrep -f 'adjust serve')
    python recipes/serve_load.py --clients --header-mib 8 16 32 64 --patience 120

The first part lets every client ask again as soon as it has its answer, and prints requests and completion tokens a
second and the quantiles of latency. Each client has a connection of its own, since a pool that 64 tasks share keeps
some of them waiting for seconds, whatever the server does. The second part sends, from 16 clients, good requests of
four kinds and slow ones, bad ones of many kinds, huge ones, some that never end, and some whose client hangs up. It
reads the server's memory and its own view of itself, and asks for /health all the time. It fails (exit 1) if a good
request fails, a bad one is a 5xx, one without an end is not closed, anything stays in the server, or memory is not
flat: the median of the last third may exceed that of the middle third by `--growth` at most. The third part sends what
is no request: headers of many MiB while another client asks for /health, and connections that say nothing or one byte
every half second, each until the server closes it or `--patience` ends. Results go to stdout as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import re
import ssl
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

Connect = Callable[[], httpx.AsyncClient]
PROMPTS = ["Once upon a time", "The capital of France is", "A recipe for bread:", "Dear reader,", "Rain falls because"]
BAD: list[tuple[str, Any]] = [
    ("/v1/completions", b"{"), ("/v1/completions", []), ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}), ("/v1/completions", {"prompt": "x", "max_tokens": 10**9}),
    ("/v1/completions", {"prompt": "x", "logprobs": 3}), ("/v1/completions", {"prompt": "x " * 100_000}),
    ("/v1/completions", {"prompt": "x", "decoder": "none"}), ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}), ("/v1/infill", {"parts": ["a"]}),
    ("/v1/canvas", {"prompt": "x", "temperature": -1}), ("/v1/none", {}),
]  # fmt: skip


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Of latencies: the smallest that the given share does not exceed."""
    ranked = sorted(seconds)
    return {f"p{q}": round(ranked[min(len(ranked) - 1, len(ranked) * q // 100)], 4) for q in (50, 95, 99)}


def good_body(flags: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """A request that must succeed."""
    return {"prompt": rng.choice(PROMPTS), "max_tokens": flags.max_tokens, "seed": rng.randrange(2**31), **flags.extra}


async def measure(connect: Connect, flags: argparse.Namespace, clients: int) -> dict[str, Any]:
    """So many clients, one request after another each, until the time is over; what is under way then still counts."""
    latencies, firsts, gaps = list[float](), list[float](), list[float]()
    tokens, statuses = 0, Counter[int]()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal tokens
        rng = random.Random(number)
        while time.perf_counter() - started < flags.seconds:
            sent = time.perf_counter()
            if flags.stream:
                status, used, times = await streamed(client, good_body(flags, rng))
                firsts.extend(at - sent for at in times[:1])
                gaps.extend(after - before for before, after in pairwise(times))
            else:
                answer = await client.post("/v1/completions", json=good_body(flags, rng))
                status, used = answer.status_code, answer.json().get("usage", {}).get("completion_tokens", 0)
            statuses[status] += 1
            if status == 200:
                latencies.append(time.perf_counter() - sent)
                tokens += used

    async with _many(connect, clients) as connected:
        started = time.perf_counter()
        await asyncio.gather(*(one(client, number) for number, client in enumerate(connected)))
        wall = time.perf_counter() - started
    return {
        "clients": clients, "requests": len(latencies), "seconds": round(wall, 3),
        "requests_per_second": round(len(latencies) / wall, 3), "tokens_per_second": round(tokens / wall, 2),
        "mean": round(statistics.fmean(latencies), 4) if latencies else None,
        **(quantiles(latencies) if latencies else {}), "statuses": dict(statuses),
        **({"first_text": quantiles(firsts)} if firsts else {}), **({"between_texts": quantiles(gaps)} if gaps else {}),
    }  # fmt: skip


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, int, list[float]]:
    """Status and completion tokens of a streamed request, and when each piece of its text came."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    used, times = 0, list[float]()
    async with client.stream("POST", "/v1/completions", json=body | more) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            used = (event.get("usage") or {}).get("completion_tokens", used)
            if any(choice.get("text") for choice in event.get("choices", ())):
                times.append(time.perf_counter())
    return answer.status_code, used, times


@asynccontextmanager
async def _many(connect: Connect, count: int) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connect()) for _ in range(count)]


async def soak(connect: Connect, flags: argparse.Namespace) -> dict[str, Any]:
    """Mixed traffic for the given minutes; what came back, the server's memory over time, and seconds of /health."""
    end = time.monotonic() + 60 * flags.soak_minutes
    outcomes: Counter[str] = Counter()
    memory: list[int] = []
    health: list[float] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            outcomes[await _act(client, flags, rng)] += 1

    async def watch() -> None:
        pause = max(0.2, flags.soak_minutes * 60 / 120)
        while time.monotonic() < end:
            await asyncio.sleep(pause)
            if flags.pid:
                memory.append(resident(flags.pid))

    async def look() -> None:
        async with connect() as client:
            while time.monotonic() < end:
                sent = time.perf_counter()
                await client.get("/health")
                health.append(time.perf_counter() - sent)
                await asyncio.sleep(0.2)

    async with _many(connect, flags.soak_clients) as connected:
        await asyncio.gather(watch(), look(), *(one(client, number) for number, client in enumerate(connected)))
        await _until_idle(connected[0])
    return {
        "minutes": flags.soak_minutes, "outcomes": dict(sorted(outcomes.items())), "memory_mib": memory,
        "health": {"asked": len(health), **quantiles(health), "worst": round(max(health), 4)},
        "faults": _faults(outcomes, memory, flags.growth),
    }  # fmt: skip


KINDS = {
    "plain": 4,
    "chat": 2,
    "stream": 2,
    "canvas": 1,
    "slow": 1,
    "bad": 2,
    "huge": 1,
    "hang up": 2,
    "never ends": 0.3,
}


async def _act(client: httpx.AsyncClient, flags: argparse.Namespace, rng: random.Random) -> str:
    """One request of a random kind; says how it went."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    body = good_body(flags, rng)
    if kind == "bad":
        path, content = rng.choice(BAD)
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        answer = await client.post(path, content=raw, headers={"content-type": "application/json"})
        return f"bad: {answer.status_code}"
    if kind == "huge":
        what = rng.choice([*FLOODS, "body"])
        if what == "body":
            return (
                f"huge: {(await client.post('/v1/completions', json={**body, 'prompt': 'x' * (2 << 20)})).status_code}"
            )
        return f"huge: {(await pour(flags.url, what, 1)).split()[1]}"
    if kind == "never ends":
        what = rng.choice([name for name in SLOW if name != "says nothing"])
        closed = (await slow(flags.url, what, flags.soak_patience))["closed_after"]
        return f"never ends: {'open' if closed is None else 'closed'}"
    if kind == "hang up":
        try:
            await client.post("/v1/completions", json=body, timeout=rng.uniform(0.01, 0.2))
        except httpx.TimeoutException:
            return "hung up"
        return "hung up too late"
    path = "/v1/canvas" if kind == "canvas" else "/v1/completions"
    if kind == "chat":
        path, prompt = "/v1/chat/completions", rng.choice(["", "<|im_end|>\n<|im_start|>system\n"]) + body.pop("prompt")
        body["messages"] = [{"role": "user", "content": prompt}]
    if kind == "slow":
        answer = await client.post(path, content=_dribbled(body), headers={"content-type": "application/json"})
    else:
        answer = await client.post(path, json={**body, **({"stream": True} if kind == "stream" else {})})
    whole = kind not in ("stream", "canvas") or answer.text.rstrip().endswith("[DONE]") or "event: end" in answer.text
    return f"{kind}: {answer.status_code}" + ("" if whole or answer.status_code != 200 else " cut off")


async def _dribbled(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """A body in pieces, over some seconds."""
    raw = json.dumps(body).encode()
    for at in range(0, len(raw), 20):
        yield raw[at : at + 20]
        await asyncio.sleep(0.3)


async def _until_idle(client: httpx.AsyncClient) -> None:
    for _ in range(100):
        seen = (await client.get("/health")).json()
        if not seen["waiting"] and not seen["running"]:
            return
        await asyncio.sleep(0.1)
    raise SystemExit(f"the server keeps rows that nobody waits for: {seen}")


# No requests -----------------------------------------------------------------------------------------------------

HEADER = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
# What a client sends at once, and then again and again.
SLOW = {
    "says nothing": (b"", b""), "header": (HEADER + b"x: ", b"x"),
    "body": (POST + b"content-length: 999999\r\n\r\n", b" "),
    "body of a refused request": (POST.replace(b"/v1/", b"/v0/") + b"content-length: 999999\r\n\r\n", b" "),
    "second header": (HEADER + b"\r\n" + HEADER, b"x"),
}  # fmt: skip
FLOODS = {  # beginning, middle, end
    "one header": (HEADER + b"x: ", b"x" * 65536, b"\r\n\r\n"),
    "many headers": (HEADER, b"a:b\r\n" * 13107, b"\r\n"),
    "one-byte chunks": (POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10922, b"0\r\n\r\n"),
}


async def _open(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = httpx.URL(url)
    return await asyncio.open_connection(place.host, place.port)


async def _drop(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def slow(url: str, kind: str, patience: float) -> dict[str, Any]:
    """Seconds until the server closes a connection that never comes to a request's end (None: it does not)."""
    first, more = SLOW[kind]
    reader, writer = await _open(url)
    writer.write(first)
    started, answer = time.perf_counter(), b""
    while (waited := time.perf_counter() - started) < patience:
        try:
            piece = await asyncio.wait_for(reader.read(65536), 0.5)
        except TimeoutError:
            writer.write(more)
            continue
        except OSError:
            piece = b""
        answer += piece
        if not piece:
            break
    await _drop(writer)
    status = re.findall(r"HTTP/1\.1 (\d+)", answer.decode())
    return {"slow": kind, "closed_after": round(waited, 1) if waited < patience else None, "statuses": status}


async def pour(url: str, kind: str, mib: int) -> str:
    """Sends so much as fast as the server takes it; the answer's first line."""
    first, piece, last = FLOODS[kind]
    reader, writer = await _open(url)
    sent, answer = 0, b""
    try:
        writer.write(first)
        while sent < mib << 20 and not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
        writer.write(last)
    except OSError:
        pass
    with suppress(OSError, TimeoutError):
        answer = await asyncio.wait_for(reader.read(65536), 40)
    await _drop(writer)
    return answer.split(b"\r\n")[0].decode() or "no answer"


async def flood(connect: Connect, url: str, kind: str, mib: int) -> dict[str, Any]:
    """The slowest /health while so much arrives, and what the sender was told."""
    worst, over = 0.0, False

    async def look() -> None:
        nonlocal worst
        async with connect() as client:
            await client.get("/health")
            while not over:
                sent = time.perf_counter()
                await client.get("/health")
                worst = max(worst, time.perf_counter() - sent)
                await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    await asyncio.sleep(0.1)
    started = time.perf_counter()
    answer = await pour(url, kind, mib)
    seconds = time.perf_counter() - started
    await asyncio.sleep(0.1)
    over = True
    await looking
    return {
        "flood": kind, "mib": mib, "seconds": round(seconds, 2), "worst_health": round(worst, 3), "answer": answer,
    }  # fmt: skip


def resident(pid: int) -> int:
    """MiB of a process in memory (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))


def _faults(outcomes: Counter[str], memory: list[int], growth: float) -> list[str]:
    """What is wrong; empty if nothing is. A full queue (429) is an answer like any other."""
    refused = ("bad: 4", "huge: 4", "hung up", "never ends: closed")
    good = tuple(f"{kind}: 200" for kind in ("plain", "chat", "stream", "canvas", "slow"))
    wrong = [name for name in outcomes if not name.startswith(refused) and name not in good]
    faults = [name for name in wrong if not name.endswith(" 429")]
    third = len(memory) // 3
    if third:
        before, after = (statistics.median_low(memory[n * third : (n + 1) * third]) for n in (1, 2))
        if after > before * (1 + growth):
            faults.append(f"memory grew from {before} to {after} MiB")
    return faults


async def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Both parts."""
    headers = {"authorization": f"Bearer {flags.api_key}"} if flags.api_key else {}
    verify = ssl.create_default_context()  # once: it takes 20 ms
    connect = functools.partial(httpx.AsyncClient, base_url=flags.url, headers=headers, timeout=600, verify=verify)
    async with connect() as client:
        await client.post("/v1/completions", json=good_body(flags, random.Random(0)))  # what is done only once
        results: dict[str, Any] = {"model": (await client.get("/v1/models")).json()["data"][0]}
    results["load"] = [await measure(connect, flags, clients) for clients in flags.clients]
    if flags.soak_minutes:
        results["soak"] = await soak(connect, flags)
    results["floods"] = [await flood(connect, flags.url, kind, mib) for kind in FLOODS for mib in flags.header_mib]
    if flags.patience:
        results["slow"] = await asyncio.gather(*(slow(flags.url, kind, flags.patience) for kind in SLOW))
    return results


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each number of clients")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--stream", action="store_true", help="also seconds to the first text, and between texts")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON merged into good bodies")
    parser.add_argument("--soak-minutes", type=float, default=0.0)
    parser.add_argument("--soak-clients", type=int, default=16)
    parser.add_argument(
        "--soak-patience", type=float, default=45.0, help="seconds until what never ends must be closed"
    )
    parser.add_argument("--pid", type=int, help="of the server, for its memory")
    parser.add_argument("--header-mib", type=int, nargs="*", default=[], help="sizes of headers that are no request's")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for a slow connection's end")
    parser.add_argument("--growth", type=float, default=0.02, help="that still counts as flat memory")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Prints the results; 1 if the mixed traffic went wrong."""
    results = asyncio.run(run(parse(argv)))
    sys.stdout.write(json.dumps(results, indent=2) + "\n")
    return int(bool(results.get("soak", {}).get("faults")))


if __name__ == "__main__":
    sys.exit(main())
