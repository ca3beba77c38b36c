"""The API process's side of the engine: start it, talk to it, watch it, restart it. No torch here.

Source: design.md "Process model"; spec/api.md sections 11 and 16. One engine process at a time,
connected by a socket pair (engine/wire.py). If it dies or stalls, every open request ends with an
error delta of code `engine_failed`, `healthy` turns false, and a new process is started after a
growing pause; the caller's port and event loop are not touched. Everything runs on the event loop
that called `start`.
"""

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from enum import StrEnum

import msgspec

from twining.config import EngineConfig
from twining.engine import wire
from twining.engine.request import (
    Cancel,
    Delta,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    Request,
    Shutdown,
    ToEngine,
)
from twining.errors import CheckpointError, ConfigError, EngineError, TwiningError

log = logging.getLogger(__name__)

DEFAULT_FACTORY = "twining.engine.loading:load_engine"
FIRST_PAUSE_S = 0.5  # before the first restart; doubles with every failure
LONGEST_PAUSE_S = 30.0
STEADY_AFTER_S = 60.0  # a process that served this long resets the pause
STOP_GRACE_S = 10.0  # for the step in progress at shutdown, then the process is killed


class EngineState(StrEnum):
    """Life of the engine as callers see it."""

    STOPPED = "stopped"  # not started, or closed
    LOADING = "loading"  # first start in progress
    READY = "ready"
    FAILED = "failed"  # died or could not start; a restart may be under way
    CLOSING = "closing"  # draining, no new requests


_REFUSALS = {
    EngineState.STOPPED: ("shutting_down", "the engine is not running"),
    EngineState.LOADING: ("model_loading", "the model is still loading; retry in a few seconds"),
    EngineState.FAILED: ("engine_failed", "the engine failed and is being restarted; retry later"),
    EngineState.CLOSING: ("shutting_down", "the server is shutting down"),
}
_ERRORS = {"config": ConfigError, "checkpoint": CheckpointError, "engine": EngineError}


class EngineClient:
    """Handle on the engine process. One event loop, no threads."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str = DEFAULT_FACTORY,
        stall_timeout_s: float = 60.0,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """factory: `module:function` that builds the engine in the child
        (worker.resolve_factory).
        """
        self._start_message = wire.Start(config=config, factory=factory)
        self._stall_timeout_s = stall_timeout_s
        self._first_pause_s = first_pause_s
        self._streams: dict[str, asyncio.Queue[Delta]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.state = EngineState.STOPPED
        self.ready: EngineReady | None = None
        self.stats = EngineStats()
        self.num_restarts = 0
        self.failure = ""  # the last failure, one line

    # ------------------------------------------------------------------ callers' side

    @property
    def healthy(self) -> bool:
        """Requests can be served: the process is ready and its loop gave a recent sign of life."""
        return self.state is EngineState.READY and not self._stalled()

    @property
    def pid(self) -> int | None:
        """Process id of the engine while one exists."""
        return self._process.pid if self._process else None

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def start(self) -> EngineReady:
        """Start the process and wait until it is ready.

        Raises ConfigError, CheckpointError or EngineError with the engine's one-line message if it
        cannot start; there is no restart in that case.
        """
        if self._supervisor is not None or self.state is not EngineState.STOPPED:
            raise EngineError("the engine is already started; close it first")
        self.state = EngineState.LOADING
        started: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(started), name="engine supervisor")
        return await asyncio.shield(started)

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Send a request now; the iterator yields its deltas and ends after "finished" or "error".

        Refusals (loading, failed, closing, duplicate id) come as one error delta. Closing the
        iterator early cancels the request; call `cancel` for prompt effect.
        """
        refusal = _REFUSALS.get(self.state)
        if request.id in self._streams:
            refusal = ("invalid_value", "a request with this id is already open")
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        if refusal:
            queue.put_nowait(_error(request.id, *refusal))
        else:
            self._streams[request.id] = queue
            self._idle.clear()
            self._send(request)
        return self._deltas(request.id, queue)

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request; its iterator ends with reason "cancelled". Unknown ids:
        no-op.
        """
        if request_id in self._streams:
            self._send(Cancel(request_id))

    async def close(self, drain_timeout_s: float = 30.0) -> None:
        """Refuse new requests, let open ones finish for up to drain_timeout_s, then end the
        process.
        """
        supervisor = self._supervisor
        if supervisor is None:
            self.state = EngineState.STOPPED
            return
        draining = self.state is EngineState.READY
        self.state = EngineState.CLOSING
        if draining and drain_timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_timeout_s)
        self._end_streams("shutting_down", "the server is shutting down")
        self._send(Shutdown())
        await self._reap(STOP_GRACE_S if draining else 0.0)
        supervisor.cancel()
        await asyncio.wait({supervisor})
        self._supervisor = None
        self.state = EngineState.STOPPED

    # ------------------------------------------------------------------ streams

    async def _deltas(self, request_id: str, queue: asyncio.Queue[Delta]) -> AsyncIterator[Delta]:
        try:
            while True:
                delta = await queue.get()
                yield delta
                if delta.kind in ("finished", "error"):
                    return
        finally:
            if self._streams.get(request_id) is queue:
                self.cancel(request_id)

    def _receive(self, delta: Delta) -> None:
        queue = self._streams.get(delta.request_id)
        if queue is None:
            return
        if delta.kind in ("finished", "error"):
            del self._streams[delta.request_id]
            if not self._streams:
                self._idle.set()
        queue.put_nowait(delta)

    def _end_streams(self, code: str, message: str) -> None:
        for request_id in list(self._streams):
            self._receive(_error(request_id, code, message))

    def _send(self, message: wire.Start | ToEngine) -> None:
        # A writer whose peer died drops the bytes; the supervisor ends the streams.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    # ------------------------------------------------------------------ supervision

    async def _supervise(self, started: asyncio.Future[EngineReady]) -> None:
        """Run engine processes one after the other until closed; the first must come up."""
        pause_s = self._first_pause_s
        while True:
            try:
                served_s = await self._run_once(started)
            finally:
                # Also on cancellation and on a bug of ours: nobody may wait for ever.
                if not started.done():
                    started.set_exception(EngineError("the engine was closed while it loaded"))
            if self.state is EngineState.CLOSING or started.exception() is not None:
                return
            if served_s > STEADY_AFTER_S:
                pause_s = self._first_pause_s
            log.error("engine process ended (%s); restart in %.1f s", self.failure, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self.num_restarts += 1

    async def _run_once(self, started: asyncio.Future[EngineReady]) -> float:
        """One engine process from spawn to its end; returns the seconds it served."""
        ready_at: float | None = None
        try:
            reader = await self._spawn()
            ready = await self._read_ready(reader)
            ready_at = self._heard_at = time.monotonic()
            self.ready = ready
            if self.state is not EngineState.CLOSING:
                self.state = EngineState.READY
            if not started.done():
                started.set_result(ready)
            await self._listen(reader)
        except (TwiningError, OSError, EOFError, msgspec.MsgspecError) as err:
            self._note_failure(err, ready_at is not None)
            if not started.done() and self.state is not EngineState.CLOSING:
                started.set_exception(
                    err if isinstance(err, TwiningError) else EngineError(self.failure)
                )
        finally:
            if self.state is not EngineState.CLOSING:
                self.state = EngineState.FAILED
            self._end_streams("engine_failed", "the engine failed while the request was open")
            await self._reap(0.0)
        return time.monotonic() - ready_at if ready_at is not None else 0.0

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            # Output of the child goes to stderr: stdout may carry a command's JSON.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "twining.engine.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(self._start_message)
        return reader

    async def _read_ready(self, reader: asyncio.StreamReader) -> EngineReady:
        """Raises the engine's own error if it reports a failed start."""
        message = await _read_message(reader)
        if isinstance(message, EngineReady):
            return message
        if isinstance(message, EngineFailed):
            raise _ERRORS[message.kind](message.message)
        raise EngineError(f"engine sent {type(message).__name__} before it was ready")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Pass deltas on until the process ends or stalls, which both raise."""
        tick_s = min(1.0, self._stall_timeout_s / 4)
        pending = asyncio.create_task(_read_message(reader))
        try:
            while True:
                done, _ = await asyncio.wait({pending}, timeout=tick_s)
                if not done:
                    if self._stalled():
                        raise EngineError(
                            f"no sign of life from the engine for {self._stall_timeout_s:g} s"
                        )
                    continue
                message = pending.result()
                pending = asyncio.create_task(_read_message(reader))
                self._heard_at = time.monotonic()
                if isinstance(message, Delta):
                    self._receive(message)
                elif isinstance(message, EngineStats):
                    self.stats = message
        finally:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, EOFError, OSError, TwiningError):
                await pending

    def _stalled(self) -> bool:
        """Silent for too long; a prefill step in progress is allowed to take its time."""
        silent_s = time.monotonic() - self._heard_at
        return silent_s > self._stall_timeout_s and not self.stats.prefilling

    def _note_failure(self, err: Exception, was_ready: bool) -> None:
        if isinstance(err, TwiningError):
            self.failure = str(err)
        else:
            when = "while it served" if was_ready else "while it loaded; see its log"
            self.failure = f"the engine process ended {when}"

    async def _reap(self, grace_s: float) -> None:
        """Wait grace_s for the process to end by itself, then end it, and close our side."""
        process, writer = self._process, self._writer
        self._process = self._writer = None
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _read_message(reader: asyncio.StreamReader) -> FromEngine:
    """Raises EOFError (IncompleteReadError) when the process is gone."""
    size = wire.frame_length(await reader.readexactly(wire.HEADER_BYTES))
    return wire.decode_from_engine(await reader.readexactly(size))


def _error(request_id: str, code: str, message: str) -> Delta:
    return Delta(
        request_id=request_id, kind="error", finish_reason="error", code=code, message=message
    )
