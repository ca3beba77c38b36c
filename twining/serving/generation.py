"""Runs the choices of one HTTP request in the engine and hands their news to one consumer.

Each choice is an engine request of its own; they share the prompt. Whatever ends the consumer (a
client that left, an error of another choice, a finished reply) also ends every engine request.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from twining.engine.request import Delta, Request, Timings, TokenLogprob
from twining.errors import RequestError
from twining.serving.context import ServerContext
from twining.serving.http_errors import engine_error
from twining.serving.output import ChoiceOutput, Piece

log = logging.getLogger(__name__)

NewsKind = Literal["admitted", "progress", "pieces", "finished"]

FINAL_WAIT_S = 0.25  # for the engine's own timings after a reply was cut by a stop string


@dataclass(slots=True, kw_only=True)
class Choice:
    """One engine request and the text that comes out of it."""

    index: int
    request: Request
    output: ChoiceOutput
    timings: Timings | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    clock: "Clock" = field(default_factory=lambda: Clock())

    def current_timings(self) -> Timings:
        """The engine's final timings, or until they come what was seen from here."""
        return self.timings or self.clock.timings()


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """kind "admitted": prefill begins. "progress": prompt_done tokens are in. "pieces": text.
    "finished": the choice is complete.

    num_ids and reasoning_tokens: counts at this moment, of tokens that no stop string can cut off;
    the choice itself may already be further on when its news is read.
    """

    choice: Choice
    kind: NewsKind
    pieces: list[Piece]
    prompt_done: int = 0
    num_ids: int = 0
    reasoning_tokens: int = 0


class Generation:
    """All choices of one reply. Use as `async with`; iterate `news()` once."""

    def __init__(self, context: ServerContext, choices: list[Choice]) -> None:
        self.choices = choices
        self.prompt_tokens = len(choices[0].request.prompt_ids)
        self._context = context
        self._queue: asyncio.Queue[News | RequestError] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._start = time.monotonic()

    async def __aenter__(self) -> "Generation":
        self._context.phase.active += 1
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in self.choices]
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._context.phase.active -= 1

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request was handed to the engine."""
        return time.monotonic() - self._start

    async def news(self) -> AsyncIterator[News]:
        """News of all choices in order of arrival. Raises RequestError if one of them fails."""
        open_choices = len(self.choices)
        while open_choices:
            item = await self._queue.get()
            if isinstance(item, RequestError):
                raise item
            yield item
            open_choices -= item.kind == "finished"

    async def _run(self, choice: Choice) -> None:
        try:
            await self._follow(choice)
        except RequestError as err:
            if err.code == "queue_full":
                self._context.metrics.rejected()
            self._record(choice, "error")
            self._queue.put_nowait(err)
        except asyncio.CancelledError:
            self._record(choice, "cancelled")
            raise
        except Exception:
            log.exception("request %s failed", choice.request.id)
            self._record(choice, "error")
            self._queue.put_nowait(engine_error("internal_error", ""))

    async def _follow(self, choice: Choice) -> None:
        engine = self._context.engine
        output = choice.output
        clock = choice.clock = Clock()
        stream = engine.submit(choice.request)
        try:
            async for delta in stream:
                if delta.kind == "error":
                    raise engine_error(delta.code, delta.message)
                if delta.prompt_logprobs:
                    choice.prompt_logprobs = list(delta.prompt_logprobs)
                clock.note(delta)
                self._pass_on(choice, delta)
                if delta.kind == "finished":
                    choice.timings = delta.timings
                if output.done:
                    break
            if not output.done:
                raise engine_error("engine_failed", "the engine ended the request without a result")
            if choice.timings is None:
                engine.cancel(choice.request.id)
                choice.timings = await _final_timings(stream) or clock.timings()
        finally:
            if choice.timings is None:
                engine.cancel(choice.request.id)
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        self._record(choice, output.finish_reason)
        self._tell(choice, "finished")

    def _pass_on(self, choice: Choice, delta: Delta) -> None:
        if delta.kind == "admitted":
            self._tell(choice, "admitted")
        elif delta.kind == "progress":
            self._tell(choice, "progress", prompt_done=delta.prompt_done)
        else:
            pieces = choice.output.push(delta)
            if pieces or delta.token_ids:
                self._tell(choice, "pieces", pieces)

    def _tell(
        self,
        choice: Choice,
        kind: NewsKind,
        pieces: list[Piece] | None = None,
        *,
        prompt_done: int = 0,
    ) -> None:
        output = choice.output
        self._queue.put_nowait(
            News(
                choice=choice,
                kind=kind,
                pieces=pieces or [],
                prompt_done=prompt_done,
                num_ids=output.num_certain_ids,
                reasoning_tokens=min(output.reasoning_tokens, output.num_certain_ids),
            )
        )

    def _record(self, choice: Choice, reason: str) -> None:
        output = choice.output
        for outcome in output.outcomes:
            self._context.metrics.tool_call(outcome)
        self._context.metrics.finished(
            reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(output.ids),
            reasoning_tokens=output.reasoning_tokens,
            reasoning_only=output.reasoning_only,
            total_s=self.elapsed_s,
            timings=choice.current_timings(),
        )


class Clock:
    """Times of one request as seen from here, for when the engine's own do not arrive."""

    def __init__(self) -> None:
        self._start = self._admitted = self._first = self._last = time.monotonic()
        self._has_tokens = False

    def note(self, delta: Delta) -> None:
        at = time.monotonic()
        if delta.kind == "admitted":
            self._admitted = self._first = self._last = at
        if delta.token_ids:
            if not self._has_tokens:
                self._first = at
            self._has_tokens = True
            self._last = at

    def timings(self) -> Timings:
        return Timings(
            queue_s=self._admitted - self._start,
            prefill_s=self._first - self._admitted,
            ttft_s=self._first - self._start,
            decode_s=self._last - self._first,
        )


async def _final_timings(stream: AsyncIterator[Delta]) -> Timings | None:
    """The timings of the last delta of a cancelled request, None if it does not come in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FINAL_WAIT_S):
            async for delta in stream:
                if delta.timings is not None:
                    return delta.timings
    return None
