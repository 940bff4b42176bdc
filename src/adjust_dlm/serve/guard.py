"""What stands before every route: key, rate, size of the body, and the clock; and how much an engine takes on."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adjust_dlm.checks import Checked, Count, PositiveOrInf
from adjust_dlm.serve.errors import ApiError, answer

REQUEST_SECONDS = 30.0  # from the first byte of a request to its last


@dataclass(frozen=True, kw_only=True)
class Limits(Checked):
    """How much an engine takes on.

    Attributes:
        rows: decoded at a time, over all lanes.
        tokens: of a lane's padded batch (rows times the longest canvas, see `Lane.fits`); one row is always let in.
        queue: rows that may wait.
        seconds: after which a request is given up, waiting included.
    """

    rows: Count = 16
    tokens: Count = 16384
    queue: Count = 256
    seconds: PositiveOrInf = 600.0


def late() -> ApiError:
    """A request that is not whole in time."""
    return ApiError(408, f"the request was not whole after {REQUEST_SECONDS:g} s", code="request_timeout")


class Rate:
    """Requests of each client in a minute of the clock."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        """0 is no limit."""
        self.per_minute, self._clock = per_minute, clock
        self._minute, self._seen = 0, Counter[str]()

    def check(self, client: str) -> None:
        """Books a request. Raises ApiError (429) if the client has none left."""
        minute, now = divmod(self._clock(), 60)
        if minute != self._minute:
            self._minute, self._seen = int(minute), Counter()
        self._seen[client] += 1
        if 0 < self.per_minute < self._seen[client]:
            message, wait = f"more than {self.per_minute} requests a minute", math.ceil(60 - now)
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(wait)})


class Guard:
    """ASGI middleware. Everything but /health and the page wants the key, where there is one."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, rate: Rate, max_body: int, done: Callable[[str, int, float], None]
    ) -> None:
        """`done` is told path, status and seconds of every request."""
        self.app, self.rate, self.max_body, self.done = app, rate, max_body, done
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 499  # if nothing is ever sent, the client has gone
        size, more = 0, True  # of the body

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        async def bounded() -> Message:
            nonlocal size, more
            if not more:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), started + REQUEST_SECONDS - time.monotonic())
            except TimeoutError:
                raise late() from None
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
            if size > self.max_body:
                raise ApiError(413, f"the body is larger than {self.max_body} bytes", code="request_too_large")
            return message

        try:
            self._check(scope)
        except ApiError as error:
            await answer(error)(scope, receive, noting)
        else:
            await self.app(scope, bounded, noting)
        finally:
            self.done(scope["path"], status, time.monotonic() - started)

    def _check(self, scope: Scope) -> None:
        path = scope["path"]
        if path.startswith("/v1/"):
            self.rate.check((scope.get("client") or ("unknown",))[0])
        if self._key is not None and (path.startswith("/v1/") or path == "/metrics"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                wanted = {"www-authenticate": "Bearer"}
                raise ApiError(401, "wrong or missing API key", code="invalid_api_key", headers=wanted)
