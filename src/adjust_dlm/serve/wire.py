"""A client's connection: HTTP/1.1, with a clock for every request and a limit for its headers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from adjust_dlm.serve import errors, guard
from adjust_dlm.serve.errors import ApiError

HEADER_BYTES = 1 << 15
_READ_BYTES = 1 << 13  # at a time: a client that sends much takes turns with the others
_LINGER_SECONDS = 2.0  # a connection that is closed while its client sends is reset, and the reason is lost


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """Uvicorn's protocol on h11, which has a limit on headers; on httptools it has none. Upgrades are not served.

    A request that is not whole after `guard.REQUEST_SECONDS` is 408, headers beyond `HEADER_BYTES` are 431; then the
    connection is closed. One that says nothing is idle, as one between two requests.
    """

    _clock: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Idle at first."""
        super().connection_made(transport)
        self._buffer = bytearray(_READ_BYTES)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the next bytes go."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come; empty lines before a request count for nothing."""
        data = bytes(self._buffer[:nbytes])
        if self.conn.their_state in (h11.IDLE, h11.DONE) and not self.conn.trailing_data[0]:
            data = data.lstrip(b"\r\n")
        if data and not self._refused:
            self.data_received(data)

    def pause_writing(self) -> None:
        """A client that takes nothing of its answer for as long as a request may last is given up."""
        super().pause_writing()
        self._stuck = self.loop.call_later(guard.REQUEST_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It takes something again."""
        super().resume_writing()
        self._stuck.cancel()

    def handle_events(self) -> None:
        """Uvicorn's. Then the clock runs if a request has begun that is not whole."""
        super().handle_events()
        state = self.conn.their_state
        half = state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))
        if not half:
            self._stop()
        elif self._clock is None:
            self._clock = self.loop.call_later(guard.REQUEST_SECONDS, self._refuse, guard.late())

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls where h11 refuses to go on."""
        large = len(self.conn.trailing_data[0]) > HEADER_BYTES
        limit = f"the headers are larger than {HEADER_BYTES} bytes"
        self._refuse(ApiError(431, limit, code="headers_too_large") if large else ApiError(400, "this is not HTTP/1.1"))

    def _refuse(self, error: ApiError) -> None:
        """The last word on this connection; none where an answer has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        if self.cycle is not None:  # the application waits for the rest of the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        told, self._refused = errors.answer(error), True
        status, headers = told.status_code, [*told.raw_headers, (b"connection", b"close")]
        start = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
        for event in (start, h11.Data(data=bytes(told.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        with suppress(OSError):  # the client has reset it
            self.transport.write_eof()

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The clock ends with it."""
        self._stop()
        super().connection_lost(exc)
