"""From the engine's thread to a coroutine, with an eye on the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request

from adjust_dlm.serve.engine import Engine
from adjust_dlm.serve.errors import as_api_error
from adjust_dlm.serve.guard import ClientGone
from adjust_dlm.serve.work import Event, Failed, Finished, Progress, Work


class Listener:
    """A submitted request. It is cancelled as soon as the client hangs up or nobody listens any more."""

    def __init__(self, engine: Engine, work: Work, request: Request) -> None:
        """Submits; raises what `Engine.submit` raises."""
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._rows = len(work.rows)

        def sink(event: Event) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, event)

        self._ticket = engine.submit(work, sink)
        self._watching = asyncio.create_task(self._watch(request))

    async def _watch(self, request: Request) -> None:
        """Starlette does not stop a handler whose client has gone; nobody else reads this connection."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._ticket.cancel()
        self._queue.put_nowait(None)

    async def events(self) -> AsyncIterator[Progress | Finished]:
        """What happens, up to the last row's end.

        Raises:
            ApiError: the request failed.
            ClientGone: nobody is there any more.
        """
        left = self._rows
        try:
            while left:
                event = await self._queue.get()
                if event is None:
                    raise ClientGone
                if isinstance(event, Failed):
                    raise as_api_error(event.error)
                left -= isinstance(event, Finished)
                yield event
        finally:
            self._watching.cancel()
            self._ticket.cancel()


async def finished(events: AsyncIterator[Progress | Finished]) -> list[Finished]:
    """The rows' ends alone, by index."""
    rows = [event async for event in events if isinstance(event, Finished)]
    return sorted(rows, key=lambda row: row.index)


async def started(events: AsyncIterator[Progress | Finished]) -> AsyncIterator[Progress | Finished]:
    """The same events once the first is there: what fails before that still gets a status of its own."""
    first = await anext(events)

    async def again() -> AsyncIterator[Progress | Finished]:
        yield first
        async for event in events:
            yield event

    return again()
