"""`adjust serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adjust_dlm.commands.common import LoadFlags, load_for, load_sampler_for
from adjust_dlm.commands.output import Outcome

if TYPE_CHECKING:
    from fastapi import FastAPI

    from adjust_dlm.bases import Base
    from adjust_dlm.serve.asks import Defaults
    from adjust_dlm.serve.engine import Engine

logger = logging.getLogger(__name__)
KEY = "ADJUST_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeConfig(LoadFlags):
    """Settings of `adjust serve`.

    Attributes:
        host: address to listen on; other machines reach any but loopback.
        port: 0 takes a free one.
        model_name: what clients call the model; by default the base's name.
        decoder: what decodes where a request names none.
        set: settings of that decoder, as NAME=VALUE.
        tokens_per_step: K where a request says nothing.
        max_new_tokens: max_tokens where a request says nothing.
        temperature: where a request says nothing.
        top_p: where a request says nothing.
        top_k: where a request says nothing.
        block_length: where a request says nothing.
        order: entropy, confidence, margin, random or left_to_right; by default the base's own.
        suppress_eos: never commit an end token.
        load_partner: load the autoregressive partner, for NLL in /v1/canvas and decoders that ask one.
        max_rows: rows decoded at a time.
        max_batch_tokens: rows times longest canvas of a batch, at most.
        max_queue: rows that may wait; more are refused with 429.
        timeout: seconds after which a request is given up, waiting included.
        api_key: what clients must send as bearer token; better given in the environment, as ADJUST_API_KEY.
        max_body: bytes of a request's body, at most.
        rate_limit: requests a minute of one address; 0 is no limit.
        drain_seconds: how long a first SIGTERM waits for running requests.
        eager: run the reference decoders where their fast form on CUDA would be taken.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    decoder: str = "adjust"
    set: tuple[str, ...] = ()
    tokens_per_step: int = 4
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    block_length: int | None = None
    order: str | None = None
    suppress_eos: bool = False
    load_partner: bool = False
    max_rows: int = 16
    max_batch_tokens: int = 16384
    max_queue: int = 256
    timeout: float = 600.0
    api_key: str | None = None
    max_body: int = 1 << 20
    rate_limit: int = 0
    drain_seconds: float = 30.0
    eager: bool = False


def run(flags: ServeConfig) -> Outcome:
    """Serves until SIGTERM or Ctrl-C."""
    require_extra()
    from adjust_dlm.serve.run import Server, bound, is_loopback

    defaults = check(flags)
    sock = bound(flags.host, flags.port)  # before the model is loaded: a port in use is known at once
    if _key(flags) is None and not is_loopback(flags.host):
        logger.warning("anyone who reaches %s can use this server: give --api-key or set %s", flags.host, KEY)
    app, engine = app_for(flags, defaults)
    server = Server(app, engine, drain_seconds=flags.drain_seconds)
    host, port = sock.getsockname()[:2]
    where, decoders = f"[{host}]" if ":" in host else host, ", ".join(engine.decoders)
    logger.info("serving %s on http://%s:%d (decoders: %s)", _name(flags), where, port, decoders)
    server.run(sockets=[sock])
    return Outcome(results={})


def app_for(flags: ServeConfig, defaults: Defaults) -> tuple[FastAPI, Engine]:
    """Loads the model; the application starts and ends the engine."""
    from adjust_dlm.serve.http import AppConfig, create_app
    from adjust_dlm.serve.run import return_freed_memory

    return_freed_memory()
    engine = _engine(flags, load_for(flags), defaults)
    config = AppConfig(
        model=_name(flags), defaults=defaults, api_key=_key(flags), max_body=flags.max_body,
        rate_limit=flags.rate_limit,
    )  # fmt: skip
    return create_app(engine, config), engine


def _name(flags: ServeConfig) -> str:
    return flags.model_name or flags.base


def _key(flags: ServeConfig) -> str | None:
    return flags.api_key or os.environ.get(KEY) or None


def require_extra() -> None:
    """Raises InputError where the extra `serve` is not installed."""
    from importlib.util import find_spec

    from adjust_dlm.types import require

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    require(not missing, f"{', '.join(missing)} is not installed; pip install 'adjust-dlm[serve]'")


def check(flags: ServeConfig) -> Defaults:
    """All that can be refused before a model is loaded."""
    from adjust_dlm.decoders import build_options, read_options
    from adjust_dlm.serve.asks import Defaults
    from adjust_dlm.types import DecodeConfig, require

    options = read_options(flags.set)
    build_options(flags.decoder, options)
    for name, least in (("port", 0), ("max_body", 1), ("rate_limit", 0), ("drain_seconds", 0)):
        value = getattr(flags, name)
        require(value >= least, f"{name} is {value}; it must be at least {least}")
    require(flags.port < 65536, f"port is {flags.port}; it must be below 65536")
    names = (
        "tokens_per_step", "max_new_tokens", "temperature", "top_p", "top_k", "block_length", "order", "suppress_eos",
    )  # fmt: skip
    return Defaults(
        decoder=flags.decoder, options=options, config=DecodeConfig(**{name: getattr(flags, name) for name in names})
    )


def _engine(flags: ServeConfig, base: Base, defaults: Defaults) -> Engine:
    """The engine with what it can have; raises InputError if the default decoder lacks something."""
    from adjust_dlm.bases.partner import load_partner
    from adjust_dlm.serve.engine import Engine, Limits
    from adjust_dlm.serve.work import RowSpec, Work

    limits = Limits(rows=flags.max_rows, tokens=flags.max_batch_tokens, queue=flags.max_queue, seconds=flags.timeout)
    sampler: Any = load_sampler_for(flags, base)
    partner = load_partner(base, flags.partner) if flags.load_partner or flags.partner else None
    engine = Engine(base, sampler=sampler, partner=partner, limits=limits, eager=flags.eager or None)
    row = RowSpec(ids=[], new=1, seed=0, row=0)
    engine.plan(Work(rows=(row,), decoder=defaults.decoder, config=defaults.config, options=defaults.options))
    return engine
