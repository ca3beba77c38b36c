"""What the HTTP layer needs from the engine: the one boundary that tests replace by a script.

The real one is twining.engine.process.EngineClient. Nothing on this side imports torch.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from twining.engine.request import Delta, EngineReady, EngineStats, Request


class EngineLike(Protocol):
    """An engine that may be loading, serving or failed."""

    @property
    def ready(self) -> EngineReady | None:
        """Facts about the engine, or None while it loads (or restarts)."""

    @property
    def healthy(self) -> bool:
        """True while the engine loop answers its heartbeat."""

    @property
    def stats(self) -> EngineStats:
        """The latest counters; all zero before the first ones arrive."""

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Deltas of one request, ending with kind "finished" or "error".

        Refusals (loading, queue full) come as one error delta. Closing the iterator cancels.
        """

    def cancel(self, request_id: str) -> None:
        """Stop a request within one step; unknown ids are ignored."""
