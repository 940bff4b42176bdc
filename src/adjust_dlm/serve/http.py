"""Routes: OpenAI's completions, chat completions and models; infilling and the canvas stream of our own.

And the server as a process: a socket, uvicorn, and an orderly end.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Route

import adjust_dlm
from adjust_dlm.eval.nll import mean_nll
from adjust_dlm.serve import errors
from adjust_dlm.serve.answers import DONE, Body, CanvasEvents, Shape, sse, usage
from adjust_dlm.serve.asks import AppConfig, Prompt, work_of
from adjust_dlm.serve.engine import Engine
from adjust_dlm.serve.errors import ApiError
from adjust_dlm.serve.guard import Guard, Rate
from adjust_dlm.serve.metrics import Metrics
from adjust_dlm.serve.schemas import CanvasAsk, ChatAsk, CompletionAsk, ErrorBody, Generation, InfillAsk, Sampling
from adjust_dlm.serve.wire import HEADER_BYTES, Connection
from adjust_dlm.serve.work import Event, Finished, Progress, Work
from adjust_dlm.types import InputError
from adjust_dlm.variants import DECODERS, option_names

logger = logging.getLogger(__name__)
_LAST_BYTES_SECONDS = 5  # for answers that are written while the server stops
# Clients drop an idle connection after 5 to 60 s. One that the server drops first may have a request on its way.
_KEEP_ALIVE_SECONDS = 75
PING, PING_SECONDS = ": nothing yet\n\n", 15.0  # proxies close connections that are silent
Events = AsyncIterator[Progress | Finished | None]
_Answers = dict[int | str, dict[str, Any]]
_ERRORS: _Answers = {
    status: {"model": ErrorBody, "description": HTTPStatus(status).phrase}
    for status in (400, 401, 404, 408, 413, 429, 500, 503, 504)
}
_STREAM: dict[str, Any] = {"text/event-stream": {}}
PAGE, PAGE_PATHS = Path(__file__).parent / "page", ("/", "/page.js", "/page.css", "/icon.svg")
# Nothing but this server's own files may be loaded, nothing but this server asked, and no text become HTML.
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Service:
    """The handlers of one server."""

    def __init__(self, engine: Engine, config: AppConfig, metrics: Metrics) -> None:
        self.engine, self.config, self.metrics = engine, config, metrics
        self.created = int(time.time())
        # A tokenizer works for one at a time anyway, and what a long prompt takes is kept by the thread that took it.
        self._encoder = ThreadPoolExecutor(1, "adjust-encoder")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.model:
            message = f"unknown model {name!r}; this server has {self.config.model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def _submitted(self, ask: Sampling, request: Request) -> tuple[Work, list[Prompt], Events]:
        """Work, prompts and events of a request, once the first is there: what fails before has a status of its own."""
        self._check_model(ask.model)
        loop, given = asyncio.get_running_loop(), (self.engine, self.config, ask)
        work, prompts = await loop.run_in_executor(self._encoder, work_of, *given)
        events = self._events(work, request)
        first = await anext(events)
        while first is None:
            first = await anext(events)
        self.metrics.tokens.labels("prompt").inc(sum(prompt.given for prompt in prompts))

        async def again() -> Events:
            yield first
            async for event in events:
                yield event

        return work, prompts, again()

    async def _events(self, work: Work, request: Request) -> Events:
        """What the engine tells; None where it has told nothing for some time.

        The work is cancelled as soon as the client hangs up or nobody listens any more.
        """
        loop, queue, left = asyncio.get_running_loop(), asyncio.Queue[Event](), len(work.rows)
        ticket = self.engine.submit(work, lambda event: loop.call_soon_threadsafe(queue.put_nowait, event))

        async def watch() -> None:  # Starlette does not stop a handler whose client has gone
            while (await request.receive())["type"] != "http.disconnect":
                pass
            ticket.over = True
            queue.put_nowait(ApiError(499, "the connection is closed"))

        watching = asyncio.create_task(watch())
        try:
            while left:
                try:
                    event = await asyncio.wait_for(queue.get(), PING_SECONDS)
                except TimeoutError:
                    yield None
                    continue
                if isinstance(event, BaseException):
                    raise errors.as_http(event)
                if isinstance(event, Finished):
                    self.metrics.row(event)
                    left -= 1
                yield event
        finally:
            watching.cancel()
            ticket.over = True

    async def completions(self, ask: CompletionAsk, request: Request) -> Response:
        """Continues prompts."""
        return await self._answer("text_completion", ask, request)

    async def chat(self, ask: ChatAsk, request: Request) -> Response:
        """Answers a conversation."""
        return await self._answer("chat.completion", ask, request)

    async def infill(self, ask: InfillAsk, request: Request) -> Response:
        """Fills the gaps of a text."""
        return await self._answer("infill", ask, request)

    async def _answer(self, kind: str, ask: Sampling, request: Request) -> Response:
        work, prompts, events = await self._submitted(ask, request)
        shape = Shape(kind, self.config.model, work, prompts)
        if isinstance(ask, Generation) and ask.stream:
            options = ask.stream_options
            return _sse_response(_pieces(shape, events, with_usage=bool(options and options.include_usage)))
        rows = sorted([event async for event in events if isinstance(event, Finished)], key=lambda row: row.index)
        return JSONResponse(shape.whole(rows, self.engine.words))

    async def canvas(self, ask: CanvasAsk, request: Request) -> Response:
        """Streams every commit."""
        work, prompts, events = await self._submitted(ask, request)
        shape = CanvasEvents(self.config.model, self.engine.words, work, prompts[0])
        return _sse_response(self._frames(shape, events, wants_nll=bool(ask.nll)))

    async def _frames(self, shape: CanvasEvents, events: Events, *, wants_nll: bool) -> AsyncIterator[str]:
        rows: list[Finished] = []
        try:
            yield sse(shape.start(), named=True)
            async for event in events:
                if isinstance(event, Finished):
                    rows.append(event)
                    yield sse(shape.row(event), named=True)
                else:
                    yield PING if event is None else sse(shape.round(event), named=True)
            rows.sort(key=lambda row: row.index)
            nll = [await self._nll(shape.prompt, row) for row in rows] if wants_nll else None
            yield sse(shape.end(rows, nll), named=True)
        except Exception as error:
            yield sse({"type": "error", **_told(error)}, named=True)

    async def _nll(self, prompt: Prompt, row: Finished) -> float | None:
        """Of the completion given the prompt; of a text with gaps, of everything behind the first one's start."""
        partner, first, end = self.engine.partner, len(prompt.ids), len(prompt.ids) + row.tokens
        assert partner is not None
        if prompt.spans:
            first, end = prompt.spans[0][0], len(row.ids)
        before, behind = row.ids[:first], row.ids[first:end]
        return await asyncio.wrap_future(self.engine.call(lambda: mean_nll(self.engine.base, partner, before, behind)))

    async def models(self) -> Body:
        """Lists the one model."""
        return {"object": "list", "data": [await self.one_model(self.config.model)]}

    async def one_model(self, model: str) -> Body:
        """That model, or 404."""
        self._check_model(model)
        engine, config, defaults = self.engine, self.config, self.config.config
        return {
            "id": config.model, "object": "model", "created": self.created, "owned_by": "adjust-dlm",
            "context": engine.base.spec.context, "decoders": engine.decoders, "nll": engine.partner is not None,
            "takes_tokens_per_step": [
                name for name in engine.decoders if DECODERS[name].takes_k or name == "adaptive"
            ],
            "decoder_settings": {name: option_names(name) for name in engine.decoders},
            "chat": bool(getattr(engine.base.tokenizer, "chat_template", None)),
            "defaults": {
                "decoder": config.decoder, "decoder_options": dict(config.options),
                "tokens_per_step": defaults.tokens_per_step, "max_tokens": defaults.max_new_tokens,
                "temperature": defaults.temperature, "top_p": defaults.top_p, "block_length": defaults.block_length,
            },
        }  # fmt: skip

    async def health(self) -> Response:
        """200 while requests are taken, 503 when not."""
        engine = self.engine
        status = "failed" if engine.gone else "draining" if engine.draining else "ok"
        body = {"status": status, "waiting": engine.waiting, "running": engine.running}
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def show_metrics(self) -> Response:
        """Prometheus' text format."""
        return PlainTextResponse(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")


def create_app(engine: Engine, config: AppConfig) -> FastAPI:
    """The ASGI application; the engine starts and ends with it."""

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        logging_task = asyncio.create_task(metrics.log())
        yield
        logging_task.cancel()
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="adjust serve", version=adjust_dlm.__version__, lifespan=running, docs_url=None, redoc_url=None)
    metrics = Metrics(engine)
    service = Service(engine, config, metrics)
    stream: _Answers = {200: {"content": _STREAM, "description": "Server-sent events."}}
    either: _Answers = {200: {"content": _STREAM, "description": "The answer, or server-sent events with `stream`."}}
    routes: list[tuple[str, str, Callable[..., Awaitable[Any]], _Answers]] = [
        ("POST", "/v1/completions", service.completions, either),
        ("POST", "/v1/chat/completions", service.chat, either),
        ("POST", "/v1/infill", service.infill, {}),
        ("POST", "/v1/canvas", service.canvas, stream),
        ("GET", "/v1/models", service.models, {}),
        ("GET", "/v1/models/{model:path}", service.one_model, {}),
        ("GET", "/health", service.health, {}),
    ]
    for method, path, handler, answers in routes:
        app.add_api_route(path, handler, methods=[method], response_model=None, responses={**_ERRORS, **answers})
    app.add_api_route("/metrics", service.show_metrics, include_in_schema=False, response_model=None)
    metrics.paths = {path for _, path, *_ in routes} | {"/metrics", *PAGE_PATHS}
    # A route for each file: what no route knows stays 404, and a known path with another method 405.
    app.routes.extend(Route(path, functools.partial(_page_file, path)) for path in PAGE_PATHS)
    for kind in (RequestValidationError, HTTPException, InputError, Exception):
        app.add_exception_handler(kind, _failed)
    rate = Rate(config.rate_limit)
    app.add_middleware(Guard, api_key=config.api_key, rate=rate, max_body=config.max_body, done=metrics.request)
    return app


async def _page_file(path: str, _request: Request) -> Response:
    return FileResponse(PAGE / (path[1:] or "index.html"), headers=PAGE_HEADERS)


def _sse_response(pieces: AsyncIterator[str]) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(pieces, media_type="text/event-stream", headers=headers)


async def _pieces(shape: Shape, events: Events, *, with_usage: bool) -> AsyncIterator[str]:
    """OpenAI's chunks: text from left to right as it is finished."""
    rows: list[Finished] = []
    shape.head |= {"usage": None} if with_usage else {}
    try:
        if shape.chat:
            for index in range(len(shape.work.rows)):
                yield sse(shape.piece(index, role="assistant"))
        async for event in events:
            if event is None:
                yield PING
            elif isinstance(event, Finished):
                rows.append(event)
                yield sse(shape.piece(event.index, reason=event.reason))
            elif event.text:
                yield sse(shape.piece(event.index, event.text))
        if with_usage:
            yield sse({**shape.piece(0), "choices": [], "usage": usage(shape.prompts, rows)})
        yield DONE
    except Exception as error:
        yield sse(_told(error))


# Errors ----------------------------------------------------------------------------------------------------------


def _told(error: Exception) -> Body:
    known = errors.as_http(error)
    if known.status_code == 500 and known is not error:
        logger.error("a request failed", exc_info=error)
    return errors.body(known)


async def _failed(_request: Request, error: Exception) -> Response:
    """Every failure in OpenAI's shape."""
    return errors.answer(_invalid(error) if isinstance(error, RequestValidationError) else error)


def _invalid(error: RequestValidationError) -> ApiError:
    """The first fault, with the name of the parameter; a value that fits none of several types says so once."""
    faults = error.errors()
    first = faults[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    place = [str(part) for part in first["loc"][1:]]
    if not place:
        return ApiError(400, "the body must be a JSON object, sent as content-type application/json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {'.'.join(place)!r}", param=".".join(place), code="unknown_parameter")
    same = [fault["msg"] for fault in faults if fault["loc"][1:2] == first["loc"][1:2]]
    return ApiError(400, f"{place[0]}: {'; or '.join(dict.fromkeys(same))}", param=place[0])


# The process -----------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """Uvicorn that drains: the first SIGTERM or Ctrl-C lets what is there finish and refuses the rest, then it exits.

    A second one, or `drain_seconds`, ends what is left with 503.
    """

    def __init__(self, app: FastAPI, engine: Engine, *, drain_seconds: float) -> None:
        super().__init__(
            uvicorn.Config(
                app, loop="asyncio", http=Connection, ws="none",  # whatever else is installed
                log_config=None, access_log=False, server_header=False, proxy_headers=False,
                h11_max_incomplete_event_size=HEADER_BYTES, timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
        )  # fmt: skip
        self.engine, self.drain_seconds = engine, drain_seconds
        self._last_moment = float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Uvicorn's signal handler."""
        again = self.engine.draining
        self.engine.draining = True
        self._last_moment = time.monotonic() + (0 if again else self.drain_seconds)
        logger.info("%s: %s", signal.Signals(sig).name, "giving up the rest" if again else "finishing what runs")

    async def on_tick(self, counter: int) -> bool:
        """Looks ten times a second whether it is time to go."""
        if self.engine.draining and self.engine.idle:
            self.should_exit = True
        elif time.monotonic() > self._last_moment or self.engine.gone:
            await asyncio.to_thread(self.engine.close)
            self.should_exit = True
        return await super().on_tick(counter)


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, not yet listening; port 0 is any free one. Raises OSError."""
    # With the protocol named asyncio sets TCP_NODELAY; without, an answer in two pieces takes 40 ms longer.
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from error
    return sock
