"""What a client is told when a request does not work out: OpenAI's error object and its status."""

from __future__ import annotations

from typing import Any

from adjust_dlm.types import InputError


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: one line for people.
        kind: `type` in the body: invalid_request_error, rate_limit_error, server_error, ...
        code: for programs, or None.
        param: the parameter at fault, or None.
        retry_after: seconds after which it is worth another try, or None.
    """

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None,
        param: str | None = None, retry_after: int | None = None,
    ) -> None:  # fmt: skip
        """See the class."""
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Of the answer."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def queue_full(waiting: int, most: int) -> ApiError:
    """429: too many rows wait already."""
    message = f"{waiting} rows wait already and the queue takes {most}; try again later"
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after=1)


def draining() -> ApiError:
    """503: the server is about to stop."""
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down", retry_after=5)


def timed_out(seconds: float) -> ApiError:
    """504: the request took longer than the server allows."""
    return ApiError(504, f"not finished after {seconds:g} s", kind="timeout_error", code="request_timeout")


def as_api_error(error: Exception) -> ApiError:
    """What to tell a client about any exception: bad input is explained, a fault of ours is not."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed on this request; its log says why", kind="server_error", code="internal")
