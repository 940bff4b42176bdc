"""A server as a process: a socket, uvicorn, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from adjust_dlm.serve.engine import Engine

logger = logging.getLogger(__name__)
_LAST_BYTES_SECONDS = 5  # for answers that are written while the server stops
# Clients drop an idle connection after 5 to 60 s. One that the server drops first may have a request on its way.
_KEEP_ALIVE_SECONDS = 75


class Server(uvicorn.Server):
    """Uvicorn that drains: the first SIGTERM or Ctrl-C lets what is there finish and refuses the rest, then it exits.

    A second one, or `drain_seconds`, ends what is left with 503.
    """

    def __init__(self, app: FastAPI, engine: Engine, *, drain_seconds: float) -> None:
        """Listens to nothing yet."""
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, server_header=False, proxy_headers=False,
                timeout_graceful_shutdown=_LAST_BYTES_SECONDS, timeout_keep_alive=_KEEP_ALIVE_SECONDS,
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
        elif time.monotonic() > self._last_moment:
            await asyncio.to_thread(self.engine.close)
            self.should_exit = True
        return await super().on_tick(counter)


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, not yet listening; port 0 is any free one. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from error
    return sock
