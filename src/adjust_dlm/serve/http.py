"""Routes: OpenAI's completions, chat completions and models; infilling and the canvas stream of our own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

import adjust_dlm
from adjust_dlm.decoders import DECODERS
from adjust_dlm.serve import asks
from adjust_dlm.serve.answers import DONE, Body, CanvasEvents, Shape, infilled, sse
from adjust_dlm.serve.asks import Defaults, Prompt
from adjust_dlm.serve.engine import Engine
from adjust_dlm.serve.errors import ApiError, as_api_error
from adjust_dlm.serve.guard import ClientGone, Guard, Rate
from adjust_dlm.serve.listen import Listener, finished, started
from adjust_dlm.serve.metrics import Metrics
from adjust_dlm.serve.nll import mean_nll
from adjust_dlm.serve.page_files import PATHS, page_routes
from adjust_dlm.serve.schemas import CanvasAsk, ChatAsk, CompletionAsk, ErrorBody, InfillAsk
from adjust_dlm.serve.work import Finished, Progress, Work
from adjust_dlm.types import InputError

logger = logging.getLogger(__name__)
PING_SECONDS = 15.0
_Answers = dict[int | str, dict[str, Any]]
_ERRORS: _Answers = {
    status: {"model": ErrorBody, "description": HTTPStatus(status).phrase}
    for status in (400, 401, 404, 408, 413, 429, 500, 503, 504)
}
_STREAM: dict[str, Any] = {"text/event-stream": {}}


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """How a server answers.

    Attributes:
        model: its name for clients.
        defaults: what holds where a request says nothing.
        api_key: what clients must send as a bearer token; None lets everyone in.
        max_body: bytes.
        rate_limit: requests a minute of one address; 0 is no limit.
    """

    model: str
    defaults: Defaults = field(default_factory=Defaults)
    api_key: str | None = None
    max_body: int = 1 << 20
    rate_limit: int = 0


class Service:
    """The handlers of one server."""

    def __init__(self, engine: Engine, config: AppConfig) -> None:
        """Starts nothing."""
        self.engine, self.config, self.metrics = engine, config, Metrics(engine)
        self.created = int(time.time())
        # A tokenizer works for one at a time anyway, and what a long prompt takes is kept by the thread that took it.
        self._encoder = ThreadPoolExecutor(1, "adjust-encoder")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.model:
            message = f"unknown model {name!r}; this server has {self.config.model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def _submitted(self, make: Callable[..., tuple[Work, list[Prompt]]], ask: Any, request: Request) -> Any:
        """Work, prompts and events of a request; whatever is wrong with it is raised here."""
        self._check_model(ask.model)
        loop, given = asyncio.get_running_loop(), (self.engine, self.config.defaults, ask)
        work, prompts = await loop.run_in_executor(self._encoder, make, *given)
        events = Listener(self.engine, work, request).events()
        self.metrics.prompt(sum(prompt.given for prompt in prompts))
        return work, prompts, self._counted(events)

    async def _counted(self, events: AsyncIterator[Progress | Finished]) -> AsyncIterator[Progress | Finished]:
        async for event in events:
            if isinstance(event, Finished):
                self.metrics.row(event)
            yield event

    async def completions(self, ask: CompletionAsk, request: Request) -> Response:
        """Continues prompts."""
        return await self._generate(ask, request)

    async def chat(self, ask: ChatAsk, request: Request) -> Response:
        """Answers a conversation."""
        return await self._generate(ask, request)

    async def _generate(self, ask: CompletionAsk | ChatAsk, request: Request) -> Response:
        shape = Shape(self.config.model, chat=isinstance(ask, ChatAsk))
        if ask.stream_options is not None and not ask.stream:
            raise ApiError(400, "stream_options without stream; leave it out", param="stream_options")
        work, prompts, events = await self._submitted(asks.generation, ask, request)
        if not ask.stream:
            return JSONResponse(shape.whole(work, prompts, await finished(events)))
        with_usage = ask.stream_options is not None and bool(ask.stream_options.include_usage)
        return _sse_response(_pieces(shape, work, prompts, await started(events), with_usage))

    async def infill(self, ask: InfillAsk, request: Request) -> Response:
        """Fills the gaps of a text."""
        work, prompts, events = await self._submitted(asks.infill, ask, request)
        rows = await finished(events)
        return JSONResponse(infilled(self.config.model, self.engine.words, work, prompts[0], rows))

    async def canvas(self, ask: CanvasAsk, request: Request) -> Response:
        """Streams every commit."""
        work, prompts, events = await self._submitted(asks.canvas, ask, request)
        shape = CanvasEvents(self.config.model, self.engine.words, work, prompts[0])
        return _sse_response(self._frames(shape, await started(events), wants_nll=bool(ask.nll)))

    async def _frames(
        self, shape: CanvasEvents, events: AsyncIterator[Progress | Finished], *, wants_nll: bool
    ) -> AsyncIterator[str]:
        rows: list[Finished] = []
        try:
            yield sse(shape.start(), named=True)
            async for event in events:
                if isinstance(event, Progress):
                    yield sse(shape.round(event), named=True)
                else:
                    rows.append(event)
                    yield sse(shape.row(event), named=True)
            rows.sort(key=lambda row: row.index)
            nll = [await self._nll(shape.prompt, row) for row in rows] if wants_nll else None
            yield sse(shape.end(rows, nll), named=True)
        except ClientGone:
            return
        except Exception as error:
            yield sse({"type": "error", **_as_error(error).body()}, named=True)

    async def _nll(self, prompt: Prompt, row: Finished) -> float | None:
        """Of the completion given the prompt; of a text with gaps, of everything behind the first one's start."""
        partner, first = self.engine.partner, len(prompt.ids)
        assert partner is not None
        if prompt.spans:
            first, end = prompt.spans[0][0], len(row.ids)
        else:
            end = first + row.tokens
        before, behind = row.ids[:first], row.ids[first:end]
        return await asyncio.wrap_future(self.engine.call(lambda: mean_nll(self.engine.base, partner, before, behind)))

    async def models(self) -> Body:
        """Lists the one model."""
        return {"object": "list", "data": [self._model()]}

    async def one_model(self, model: str) -> Body:
        """That model, or 404."""
        self._check_model(model)
        return self._model()

    def _model(self) -> Body:
        defaults, engine = self.config.defaults, self.engine
        return {
            "id": self.config.model, "object": "model", "created": self.created, "owned_by": "adjust-dlm",
            "context": engine.base.spec.context, "decoders": engine.decoders, "nll": engine.partner is not None,
            "takes_tokens_per_step": [
                name for name in engine.decoders if DECODERS[name].takes_k or name == "adaptive"
            ],
            "chat": bool(getattr(engine.base.tokenizer, "chat_template", None)),
            "defaults": {
                "decoder": defaults.decoder, "decoder_options": dict(defaults.options),
                "tokens_per_step": defaults.config.tokens_per_step, "max_tokens": defaults.config.max_new_tokens,
                "temperature": defaults.config.temperature, "top_p": defaults.config.top_p,
                "block_length": defaults.config.block_length,
            },
        }  # fmt: skip

    async def health(self) -> Response:
        """200 while requests are taken, 503 when not."""
        engine = self.engine
        body = {"status": "draining" if engine.draining else "ok", "waiting": engine.waiting, "running": engine.running}
        return JSONResponse(body, 503 if engine.draining else 200)

    async def show_metrics(self) -> Response:
        """Prometheus' text format."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")


def create_app(engine: Engine, config: AppConfig) -> FastAPI:
    """The ASGI application; the engine starts and ends with it."""
    service = Service(engine, config)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(
        title="adjust serve", version=adjust_dlm.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
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
    service.metrics.know({path for _, path, *_ in routes} | {"/metrics", *PATHS})
    app.routes.extend(page_routes())
    _handle_errors(app)
    rate = Rate(config.rate_limit)
    app.add_middleware(Guard, api_key=config.api_key, rate=rate, max_body=config.max_body, done=service.metrics.request)
    return app


def _sse_response(pieces: AsyncIterator[str]) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(_with_pings(pieces), media_type="text/event-stream", headers=headers)


async def _with_pings(pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    """The same, with a comment now and then while nothing comes: proxies close connections that are silent."""
    coming: asyncio.Future[str] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(pieces))
            if not (await asyncio.wait({coming}, timeout=PING_SECONDS))[0]:
                yield ": nothing yet\n\n"
                continue
            try:
                piece = coming.result()
            except StopAsyncIteration:
                return
            coming = None
            yield piece
    finally:
        if coming is not None:
            coming.cancel()


async def _pieces(
    shape: Shape, work: Work, prompts: list[Prompt], events: AsyncIterator[Progress | Finished], with_usage: bool
) -> AsyncIterator[str]:
    """OpenAI's chunks: text from left to right as it is finished."""
    rows: list[Finished] = []
    try:
        if shape.chat:
            for index in range(len(work.rows)):
                yield sse(shape.opening(index))
        async for event in events:
            if isinstance(event, Finished):
                rows.append(event)
                yield sse(shape.closing(event))
            elif event.text:
                yield sse(shape.more(event.index, event.text))
        if with_usage:
            yield sse(shape.final_usage(prompts, rows))
        yield DONE
    except ClientGone:
        return
    except Exception as error:
        yield sse(_as_error(error).body())


# Errors ----------------------------------------------------------------------------------------------------------


def _as_error(error: Exception) -> ApiError:
    known = as_api_error(error)
    if known.status == 500 and known is not error:
        logger.error("a request failed", exc_info=error)
    return known


def _handle_errors(app: FastAPI) -> None:
    """Every failure in OpenAI's shape."""

    async def known(_request: Request, error: Exception) -> Response:
        told = as_api_error(error)
        return JSONResponse(told.body(), told.status, told.headers())

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return JSONResponse(_invalid(error).body(), 400)

    async def missing(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, str(error.detail))
        return JSONResponse(told.body(), told.status, dict(error.headers or {}))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, missing)
    app.add_exception_handler(ClientGone, gone)
    for kind in (ApiError, InputError, Exception):
        app.add_exception_handler(kind, known)


def _invalid(error: RequestValidationError) -> ApiError:
    """The first fault, with the name of the parameter; a value that fits none of several types says so once."""
    faults = error.errors()
    first = faults[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if first["type"] == "not_served":
        return ApiError(400, first["msg"], param=first["ctx"]["param"], code="unsupported_parameter")
    if first["type"] == "bad_body":
        return ApiError(400, first["msg"])
    place = [str(part) for part in first["loc"][1:]]
    if not place:
        return ApiError(400, "the body must be a JSON object, sent as content-type application/json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {'.'.join(place)!r}", param=".".join(place), code="unknown_parameter")
    same = [fault["msg"] for fault in faults if fault["loc"][1:2] == first["loc"][1:2]]
    return ApiError(400, f"{place[0]}: {'; or '.join(dict.fromkeys(same))}", param=place[0])
