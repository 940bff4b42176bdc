"""`adjust serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from adjust_dlm.checks import Bound, Count, NotNegativeOrInf, PositiveOrInf, require
from adjust_dlm.commands.common import DrawFlags, load_for, set_malloc
from adjust_dlm.commands.output import Outcome
from adjust_dlm.types import DecodeConfig
from adjust_dlm.variants import build_options, read_options

if TYPE_CHECKING:
    from fastapi import FastAPI

    from adjust_dlm.serve.asks import AppConfig
    from adjust_dlm.serve.engine import Engine

logger = logging.getLogger(__name__)
KEY = "ADJUST_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeConfig(DrawFlags):
    """Settings of `adjust serve`.

    Attributes:
        host: address to listen on; other machines reach any but loopback.
        port: 0 takes a free one.
        model_name: what clients call the model; by default the base's name.
        decoder: what decodes where a request names none.
        set: settings of that decoder, as NAME=VALUE.
        load_partner: load the autoregressive partner, for NLL in /v1/canvas and decoders that ask one.
        max_rows: rows decoded at a time.
        max_batch_tokens: rows times longest canvas of a batch, times the canvases that a pass looks at, at most.
        max_queue: rows that may wait; more are refused with 429.
        timeout: seconds after which a request is given up, waiting included.
        api_key: what clients must send as bearer token; better given in the environment, as ADJUST_API_KEY.
        max_body: bytes of a request's body, at most.
        rate_limit: requests a minute of one address; 0 is no limit.
        drain_seconds: how long a first SIGTERM waits for running requests.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Bound(0, 65535, "in 0..65535")] = 8000
    model_name: str | None = None
    decoder: str = "adjust"
    set: tuple[str, ...] = ()
    load_partner: bool = False
    max_rows: Count = 16
    max_batch_tokens: Count = 16384
    max_queue: Count = 256
    timeout: PositiveOrInf = 600.0
    api_key: str | None = None
    max_body: Annotated[int, Bound(1, math.inf, "at least 1")] = 1 << 20
    rate_limit: Annotated[int, Bound(0, math.inf, "at least 0")] = 0
    drain_seconds: NotNegativeOrInf = 30.0


def run(flags: ServeConfig) -> Outcome:
    """Serves until SIGTERM or Ctrl-C. An engine that has died is a problem of the outcome."""
    config = check(flags)
    from adjust_dlm.serve.http import Server, bound

    sock = bound(flags.host, flags.port)  # before the model is loaded: a port in use is known at once
    if config.api_key is None and flags.host not in ("localhost", "::1") and not flags.host.startswith("127."):
        logger.warning("anyone who reaches %s can use this server: give --api-key or set %s", flags.host, KEY)
    app, engine = app_for(flags, config)
    server = Server(app, engine, drain_seconds=flags.drain_seconds)
    host, port = sock.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    sock.listen()  # before the log says so: who reads it is not refused
    logger.info("serving %s on http://%s:%d (decoders: %s)", config.model, where, port, ", ".join(engine.decoders))
    server.run(sockets=[sock])
    return Outcome(results={"problems": ["the engine has died; what stands above says why"]} if engine.gone else {})


def check(flags: ServeConfig) -> AppConfig:
    """All that can be refused before a model is loaded.

    Raises:
        InputError: a value that makes no sense, or the extra `serve` is not installed.
    """
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    require(not missing, f"{', '.join(missing)} is not installed; pip install 'adjust-dlm[serve]'")
    config = DecodeConfig.from_settings(flags)
    options = read_options(flags.set)
    build_options(flags.decoder, options)
    from adjust_dlm.serve.asks import AppConfig  # needs torch, what stands above does not

    return AppConfig(
        model=flags.model_name or flags.base, decoder=flags.decoder, options=options,
        config=config, max_body=flags.max_body,
        rate_limit=flags.rate_limit, api_key=flags.api_key or os.environ.get(KEY) or None,
    )  # fmt: skip


def app_for(flags: ServeConfig, config: AppConfig) -> tuple[FastAPI, Engine]:
    """Loads the model; the application starts and ends the engine.

    Raises:
        InputError: the default decoder lacks something.
    """
    from adjust_dlm.bases.partner import load_partner
    from adjust_dlm.eval.generation import sampler_for
    from adjust_dlm.serve.engine import Engine
    from adjust_dlm.serve.guard import Limits
    from adjust_dlm.serve.http import create_app
    from adjust_dlm.serve.work import RowSpec, Work

    # `adjust` keeps what is freed, which is quicker for a command that ends. Batches of a server change their size all
    # the time: kept blocks are cut up, the next large one does not fit, and memory grows for hours (200 MiB in five
    # minutes of mixed traffic with the default model on two CPU cores).
    set_malloc(map_from=1 << 20, keep=1 << 20)
    base = load_for(flags)
    partner = load_partner(base, flags.partner) if flags.load_partner or flags.partner else None
    sampler, eager = sampler_for(flags, base), flags.eager or None
    limits = Limits(rows=flags.max_rows, tokens=flags.max_batch_tokens, queue=flags.max_queue, seconds=flags.timeout)
    engine = Engine(base, sampler=sampler, partner=partner, limits=limits, eager=eager)
    row = RowSpec(ids=[], new=1, seed=0, row=0)
    engine.plan(Work(rows=(row,), decoder=config.decoder, config=config.config, options=config.options))
    return create_app(engine, config), engine
