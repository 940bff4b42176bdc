"""What stands before every route: key, rate, size of the body, and the clock."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from adjust_dlm.serve.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
_BODY_SECONDS = 30.0  # a client that sends no more for so long is given up
_CLIENTS = 10_000  # whose rates are remembered


class Rate:
    """Requests a minute of each client; unused ones add up to a minute's worth."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        """0 is no limit."""
        self.per_minute, self._clock = per_minute, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests left, and when that was so

    def check(self, client: str) -> None:
        """Books a request. Raises ApiError (429) if the client has none left."""
        if not self.per_minute:
            return
        now = self._clock()
        left, then = self._left.pop(client, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - then) * self.per_minute / 60)
        allowed = left >= 1
        self._left[client] = (left - 1 if allowed else left, now)
        if len(self._left) > _CLIENTS:
            self._left.popitem(last=False)
        if not allowed:
            wait = math.ceil((1 - left) * 60 / self.per_minute)
            message = f"more than {self.per_minute} requests a minute"
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=wait)


class Guard:
    """ASGI middleware. Everything but /health and the page wants the key, where there is one."""

    def __init__(
        self, app: App, *, api_key: str | None, rate: Rate, max_body: int, done: Callable[[str, int, float], None]
    ) -> None:
        """`done` is told path, status and seconds of every request."""
        self.app, self.rate, self.max_body, self.done = app, rate, max_body, done
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 499  # if nothing is ever sent, the client has gone

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            receive = await self._body(scope, receive)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers())(scope, receive, noting)
        except ClientGone:
            pass
        else:
            await self.app(scope, receive, noting)
        finally:
            self.done(scope["path"], status, time.monotonic() - started)

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        path = scope["path"]
        if path.startswith("/v1/"):
            self.rate.check((scope.get("client") or ("unknown",))[0])
        if self._key is not None and (path.startswith("/v1/") or path == "/metrics"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                raise ApiError(401, "wrong or missing API key", code="invalid_api_key")

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> Receive:
        """Reads the whole body, no more than allowed, and hands it on in one piece."""
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self.max_body:
            raise self._too_large()
        body, more = b"", True
        while more:
            try:
                message = await asyncio.wait_for(receive(), _BODY_SECONDS)
            except TimeoutError:
                raise ApiError(408, f"no more of the body for {_BODY_SECONDS:g} s", code="request_timeout") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > self.max_body:
                raise self._too_large()
        pieces = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pieces.pop() if pieces else await receive()

        return replay

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body} bytes", code="request_too_large")


class ClientGone(Exception):
    """The connection is closed: nobody reads an answer."""
