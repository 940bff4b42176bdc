"""A cluster of Ray: trajectories leave it alone; of two replicas on Ray Serve one dies, and nobody waits in vain."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from adjust_dlm.bases import load_base
from adjust_dlm.data.trajectories import TrajectoriesConfig, make_trajectories
from adjust_dlm.decoders import decode
from adjust_dlm.types import DecodeConfig, InputError
from serving import wait_for

pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
psutil = pytest.importorskip("psutil")
CHOICES, NEW = 8, 3
ARGS = {"base": "exact", "decoder": "joint", "min_replicas": "2", "max_replicas": "2", "temperature": "1"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of our own, whose start and end leave signals as they were."""
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def url(cluster: None) -> Iterator[str]:
    """Replicas and a proxy on a free port of loopback."""
    from ray import serve

    from adjust_dlm.commands.serve_ray import build
    from adjust_dlm.serve.http import bound

    with bound("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(ARGS), name="adjust", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.mark.slow
def test_trajectories_leave_a_cluster_that_is_there_and_actors_say_what_is_wrong(cluster: None, tmp_path: Path) -> None:
    """Before replicas take its CPUs."""
    import ray

    config = TrajectoriesConfig(base="exact", num=64, max_new_tokens=4, shard_rows=64, output=str(tmp_path))
    make_trajectories(config)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match=f"cannot continue {tmp_path}: seed was 0 and is now 7"):
        make_trajectories(replace(config, engine="ray", seed=7))
    assert ray.is_initialized() and {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def replicas() -> set[int]:
    """Processes of replicas that this test has started."""
    below = psutil.Process().children(recursive=True)
    return {process.pid for process in below if alive_name(process).startswith("ray::ServeReplica")}


def alive_name(process: Any) -> str:
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(process.name())
    except psutil.NoSuchProcess:
        return ""


def running() -> int:
    from ray import serve

    return int(serve.status().applications["adjust"].deployments["adjust"].replica_states.get("RUNNING", 0))


def asked(client: openai.OpenAI, seed: int) -> list[str]:
    answer = client.completions.create(model="exact", prompt=[1], max_tokens=NEW, n=CHOICES, seed=seed)
    return [choice.text for choice in answer.choices]


exact = functools.cache(load_base)


def expected(seed: int) -> list[str]:
    config = DecodeConfig(max_new_tokens=NEW, seed=seed)
    result = decode(exact("exact"), [[1]] * CHOICES, config, decoder="joint", rows=list(range(CHOICES)))
    return [" ".join(map(str, row)) for row in result.tokens_BL[:, 1:].tolist()]


@pytest.mark.slow
def test_a_killed_replica_costs_nobody_an_answer_and_is_replaced(url: str) -> None:
    """Clients try again after a 5xx or a broken connection, as OpenAI's does; the seed makes it the same text."""
    assert running() == 2
    before, seeds, answered = replicas(), range(64), threading.Semaphore(0)
    assert len(before) == 2
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=4, timeout=30)

    def one(seed: int) -> list[str]:
        texts = asked(client, seed)
        answered.release()
        return texts

    with ThreadPoolExecutor(8) as pool:
        coming = [pool.submit(one, seed) for seed in seeds]
        for _ in range(12):
            assert answered.acquire(timeout=30)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        killed_at = sum(future.done() for future in coming)
        texts = [future.result(timeout=60) for future in coming]
    assert killed_at < len(seeds) - 8  # it was under load
    assert texts == [expected(seed) for seed in seeds]
    wait_for(lambda: running() == 2 and len(replicas()) == 2, seconds=40)
    assert victim not in replicas() and len(replicas() - before) == 1
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as strict:
        assert [asked(strict, seed) for seed in range(8)] == texts[:8]


@pytest.mark.slow
def test_replicas_that_leave_finish_what_they_have(url: str) -> None:
    """New settings: one new replica for two old ones, under load and without any second try."""
    from ray import serve

    from adjust_dlm.commands.serve_ray import build

    before, stop = replicas(), threading.Event()

    def keep_asking(client: openai.OpenAI, first: int) -> dict[int, list[str]]:
        texts = {}
        for seed in range(first, first + 100_000):
            if stop.is_set():
                break
            texts[seed] = asked(client, seed)
        return texts

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as strict, ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, strict, 100_000 * n) for n in range(4)]
        try:
            serve.run(build({**ARGS, "min_replicas": 1, "max_replicas": 1}), name="adjust", route_prefix="/")
            wait_for(lambda: len(replicas()) == 1 and not before & replicas(), seconds=40)
        finally:
            stop.set()
        texts = {seed: text for future in asking for seed, text in future.result(timeout=60).items()}
    assert len(before) == 2 and len(texts) > 12  # how many more says only how fast the machine is
    for seed in (seed for seed in sorted(texts) if seed % 100_000 < 10):
        assert texts[seed] == expected(seed)


@pytest.mark.slow
def test_streams_errors_and_the_page_come_through_the_proxy(url: str) -> None:
    with httpx.Client(base_url=url, timeout=30) as client:
        stream = client.post("/v1/canvas", json={"prompt": [1], "max_tokens": NEW, "seed": 0})
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.text.count("event: round\n") == NEW and stream.text.count("event: end\n") == 1
        refused = client.post("/v1/completions", json={"prompt": [1], "max_tokens": 99})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert client.get("/health").json()["status"] == "ok"
        page = client.get("/")
        assert page.status_code == 200 and "content-security-policy" in page.headers


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"host": "0.0.0.0"}, "host is no argument here"),
        ({"api_key": "x"}, "give ADJUST_API_KEY in the replicas' environment"),
        ({"replicas": 2}, "unknown setting replicas"),
        ({"min_replicas": 3, "max_replicas": "2"}, "max_replicas"),
        ({"gpus": "-1"}, "num_gpus"),
        ({"max_rows": "many"}, "max_rows"),
        ({"decoder": "best"}, "best"),
        ({"target_requests": -1}, "target_ongoing_requests"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_starts(args: dict[str, Any], said: str) -> None:
    from adjust_dlm.commands.serve_ray import build

    with pytest.raises(ValueError, match=said):
        build(args)


def test_arguments_become_a_deployment() -> None:
    """Text is read as YAML, a configuration's values are taken as they are."""
    from adjust_dlm.commands.serve_ray import build

    given = {**ARGS, "gpus": "0.5", "cpus": 2, "max_rows": "8", "load_partner": "true", "drain_seconds": "7"}
    deployment = build(given)._bound_deployment
    (config,) = deployment.init_args
    assert (config.min_replicas, config.gpus, config.cpus, config.load_partner) == (2, 0.5, 2.0, True)
    assert deployment.ray_actor_options == {"num_cpus": 2.0, "num_gpus": 0.5}
    assert deployment.max_ongoing_requests == 16
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 2, 8)
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 7
