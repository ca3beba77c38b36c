"""Server-sent events (spec/api.md 6.1): one flush per event, heartbeats, and a watch on the client.

A client that goes away, or accepts no bytes for a minute, ends the stream; the source is closed and
with it the work in the engine.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SLOW_READER_S = 60.0
HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(data: dict[str, Any]) -> bytes:
    """One `data:` event holding one-line JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def wait_disconnect(request: Request) -> None:
    """Returns when the client has gone; call after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streamed reply fed by an async generator of encoded events."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        gone: asyncio.Task[None],
        *,
        heartbeat_s: float,
        slow_reader_s: float = SLOW_READER_S,
    ) -> None:
        """gone: a task that ends when the client has left. heartbeat_s 0 = none."""
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._source = source
        self._gone = gone
        self._heartbeat_s = heartbeat_s or None
        self._slow_reader_s = slow_reader_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs until the source ends, the client leaves, or it stops reading."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        pending: asyncio.Task[bytes] | None = None
        try:
            while True:
                pending = pending or asyncio.create_task(self._next())
                done, _ = await asyncio.wait(
                    {pending, self._gone},
                    timeout=self._heartbeat_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if self._gone in done:
                    return
                if pending in done:
                    data = pending.result()
                    pending = None
                    if not data:
                        break
                else:
                    data = HEARTBEAT
                await self._write(send, data, more=True)
            await self._write(send, b"", more=False)
        except TimeoutError:
            return  # slow reader: give up, the server closes the connection
        finally:
            if pending is not None:
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pending
            await self._source.aclose()
            self._gone.cancel()

    async def _next(self) -> bytes:
        """The next event, empty at the end."""
        return await anext(self._source, b"")

    async def _write(self, send: Send, data: bytes, *, more: bool) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        async with asyncio.timeout(self._slow_reader_s):
            await send(message)
