"""What both generation endpoints do around their own shapes: read, prepare, run, watch the client.

Order of one request: availability, body, preparation (on a thread when the body is long), engine
requests, then either the whole reply or, once the engine has admitted it, a stream.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from twining.errors import RequestError
from twining.serving.access import add_warnings, random_id
from twining.serving.body import read_object
from twining.serving.context import ServerContext
from twining.serving.generation import Generation, News
from twining.serving.openai.bodies import SamplingBody
from twining.serving.openai.prepare import Prepared
from twining.serving.sse import EventStream, wait_disconnect

THREAD_ABOVE_BYTES = 16 << 10  # longer bodies are tokenised off the event loop
CLIENT_GONE = 499  # never written: the client has left

T = TypeVar("T")


def reply_id(prefix: str, body: SamplingBody) -> str:
    """Id of the reply object; the body's request_id if it has one."""
    return prefix + body.request_id if body.request_id else random_id(prefix)


class ClientGone(Exception):
    """The client left before its reply began."""


class Endpoint(ABC):
    """A POST endpoint that generates."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context

    @abstractmethod
    def prepare(self, context: ServerContext, data: dict[str, Any]) -> Prepared:
        """Validate and tokenise. Raises RequestError."""

    @abstractmethod
    async def whole(self, request: Request, prepared: Prepared, generation: Generation) -> Response:
        """The reply when not streaming. Raises RequestError."""

    @abstractmethod
    def stream(
        self,
        request: Request,
        prepared: Prepared,
        generation: Generation,
        news: AsyncIterator[News],
    ) -> AsyncGenerator[bytes, None]:
        """Encoded events; errors of the engine become an error event."""

    async def __call__(self, request: Request) -> Response:
        """Answer one request. Raises RequestError before the first byte only."""
        unavailable = self.context.availability()
        if unavailable is not None:
            raise unavailable
        data = await read_object(request, self.context.config.max_body_mib << 20)
        prepared = await self._prepared(request, data)
        add_warnings(request, prepared.warnings)
        self.context.metrics.warned(prepared.warnings)
        if prepared.body.request_id:
            request.scope["state"]["request_id"] = prepared.body.request_id
        gone = asyncio.create_task(wait_disconnect(request))
        try:
            if prepared.body.stream:
                return await self._start_stream(request, prepared, gone)
            async with Generation(self.context, prepared.choices) as generation:
                return await _unless_gone(self.whole(request, prepared, generation), gone)
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        finally:
            if not prepared.body.stream:
                gone.cancel()

    async def _prepared(self, request: Request, data: dict[str, Any]) -> Prepared:
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:19]) <= THREAD_ABOVE_BYTES:
            return self.prepare(self.context, data)
        return await asyncio.to_thread(self.prepare, self.context, data)

    async def _start_stream(
        self, request: Request, prepared: Prepared, gone: asyncio.Task[None]
    ) -> Response:
        """The status line waits for the engine's first news, so refusals keep their status."""
        source = self._source(request, prepared)
        try:
            first = await _unless_gone(anext(source), gone)
        except BaseException:
            gone.cancel()
            await source.aclose()
            raise
        return EventStream(
            _rejoin(first, source), gone, heartbeat_s=self.context.config.heartbeat_s
        )

    async def _source(self, request: Request, prepared: Prepared) -> AsyncGenerator[bytes, None]:
        async with Generation(self.context, prepared.choices) as generation:
            news = generation.news()
            first = await anext(news)
            async with contextlib.aclosing(
                self.stream(request, prepared, generation, _rejoin(first, news))
            ) as events:
                async for data in events:
                    yield data

    def json(self, reply: dict[str, Any]) -> Response:
        """A JSON reply; non-ASCII text is sent as it is."""
        return Response(msgspec.json.encode(reply), media_type="application/json")


async def _rejoin(first: T, rest: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """first, then the rest; closing it closes the rest."""
    try:
        yield first
        async for item in rest:
            yield item
    finally:
        if isinstance(rest, AsyncGenerator):
            await rest.aclose()


async def _unless_gone(work: Awaitable[T], gone: asyncio.Task[None]) -> T:
    """The result of an awaitable, or ClientGone if the client leaves first."""

    async def run() -> T:
        return await work

    task = asyncio.create_task(run())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, RequestError):
            await task
