"""Several replicas of `adjust serve` on Ray Serve: `serve run adjust_dlm.commands.serve_ray:build base=smol ...`.

Each replica is a process with a model and an engine of its own. Ray starts, watches, replaces and scales them, and its
proxy spreads requests over them. A row's text does not depend on the replica that decodes it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from ray import serve

from adjust_dlm.commands.serve import KEY, ServeConfig, app_for, check
from adjust_dlm.commands.settings import filled
from adjust_dlm.types import require

_ELSEWHERE = {
    "host": "Ray's proxy listens: http_options.host of the configuration",
    "port": "Ray's proxy listens: http_options.port of the configuration",
    "api_key": f"arguments show in Ray's dashboard: give {KEY} in the replicas' environment",
}


@dataclass(frozen=True, kw_only=True)
class RayServeConfig(ServeConfig):
    """Arguments of `build`: those of `adjust serve`, and how many replicas with what.

    Attributes:
        min_replicas: that are always there.
        max_replicas: under load, at most.
        gpus: of a replica; 0 makes it run on the CPU. A part, such as 0.5, lets two share a card.
        cpus: of a replica, and threads of its matrix products on the CPU.
        target_requests: running requests of a replica above which there will be more; by default max_rows.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    gpus: float = 0.0
    cpus: float = 1.0
    target_requests: int | None = None


class Replica:
    """One process of a deployment."""

    def __init__(self, config: RayServeConfig) -> None:
        self._served, self._engine = app_for(config, check(config))

    def __serve_build_asgi_app__(self) -> Any:
        """The application that Ray starts, asks, and ends; the engine goes with it."""
        return self._served

    async def check_health(self) -> None:
        """Asks the engine's thread for a number from its device: one that hangs or is broken is replaced."""
        device = self._engine.base.device
        await asyncio.wrap_future(self._engine.call(lambda: float(torch.ones((), device=device))))


def build(args: dict[str, Any]) -> Any:
    """The application for `serve run` and for `import_path` of a configuration file.

    Args:
        args: fields of `RayServeConfig`; text, as the command line gives it, is read as YAML.

    Raises:
        ValueError: an unknown name, a value that does not fit (Ray judges its own), or what belongs elsewhere.
    """
    for name, instead in _ELSEWHERE.items():
        require(name not in args, f"{name} is no argument here; {instead}")
    given = {key: yaml.safe_load(value) if isinstance(value, str) else value for key, value in args.items()}
    config = RayServeConfig(**vars(filled(RayServeConfig, given, where="args")))
    check(config)
    rows, gpus = config.max_rows, {"num_gpus": config.gpus} if config.gpus else {}
    deployment = serve.deployment(
        name="adjust",
        ray_actor_options={"num_cpus": config.cpus, **gpus},
        autoscaling_config={
            "min_replicas": config.min_replicas, "max_replicas": config.max_replicas,
            "initial_replicas": config.min_replicas, "target_ongoing_requests": config.target_requests or rows,
        },
        max_ongoing_requests=2 * rows,  # beyond, they wait at the proxy, where a new replica can have them
        max_queued_requests=config.max_queue,
        health_check_period_s=2.0, health_check_timeout_s=30.0, graceful_shutdown_timeout_s=config.drain_seconds,
    )  # fmt: skip
    return deployment(serve.ingress()(Replica)).bind(config)
