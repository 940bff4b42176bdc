"""What a client is told when a request does not work out: OpenAI's error object and its status."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from adjust_dlm.types import InputError

_KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout_error"}


class ApiError(HTTPException):
    """An answer other than 200: status and one line for people; for programs a code, and the parameter at fault."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(status, message, headers)
        self.code, self.param = code, param


def as_http(error: BaseException) -> HTTPException:
    """What to tell a client about any exception: bad input is explained, a fault of ours is not."""
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed on this request; its log says why", code="internal")


def body(error: HTTPException) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _KINDS.get(error.status_code, "invalid_request_error")
    named = {name: getattr(error, name, None) for name in ("param", "code")}
    return {"error": {"message": str(error.detail), "type": kind, **named}}


def answer(error: Exception) -> Response:
    """The whole answer, in ASCII: a message may repeat half a character that the request held."""
    told = as_http(error)
    return Response(json.dumps(body(told)), told.status_code, told.headers, "application/json")
