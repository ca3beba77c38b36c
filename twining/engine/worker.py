"""The engine process: one loop that reads requests, runs steps and sends deltas.

Started by engine/process.py as `python -m twining.engine.worker FD`, FD being its end of a socket
pair. The parent directs the end of life: signals meant for the terminal's group are ignored,
`Shutdown` stops after the step in progress, and a closed socket (the parent died) ends this process
at once, even in the middle of loading or of a step.
"""

import importlib
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

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
from twining.engine.scheduler import StepKind, StepPlan
from twining.errors import CheckpointError, ConfigError, EngineError, TwiningError

log = logging.getLogger(__name__)

IDLE_TICK_S = 1.0  # heartbeat while nothing runs
STATS_EVERY_S = 0.2  # between two EngineStats while steps run


class EngineLoop(Protocol):
    """What the loop needs of an engine; engine/core.py is the one there is, tests have a small
    one.
    """

    @property
    def has_work(self) -> bool: ...
    def ready(self) -> EngineReady: ...
    def stats(self) -> EngineStats: ...
    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def plan(self) -> StepPlan: ...
    def run(self, plan: StepPlan) -> list[Delta]: ...


EngineFactory = Callable[[EngineConfig], EngineLoop]


class Inbox:
    """Messages of the parent, read by a thread so that its death is noticed at any time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._messages: deque[ToEngine] = deque()
        self._changed = threading.Condition()

    def read_start(self) -> wire.Start:
        """The first frame. Raises EngineError if it is something else."""
        message = self._read()
        if not isinstance(message, wire.Start):
            raise EngineError(
                f"engine process: first message is {type(message).__name__}, not Start"
            )
        return message

    def listen(self) -> None:
        """Read in the background from now on."""
        threading.Thread(target=self._run, name="inbox", daemon=True).start()

    def take(self, timeout_s: float) -> list[ToEngine]:
        """All messages so far; waits up to timeout_s for the first."""
        with self._changed:
            if not self._messages and timeout_s > 0:
                self._changed.wait(timeout_s)
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def _run(self) -> None:
        try:
            while True:
                message = self._read()
                if isinstance(message, wire.Start):
                    raise EngineError("engine process: a second Start message")
                with self._changed:
                    self._messages.append(message)
                    self._changed.notify()
        except (OSError, EOFError):
            os._exit(0)  # the parent is gone: nobody is left to answer
        except (TwiningError, msgspec.MsgspecError):
            log.exception("damaged message from the API process")
            os._exit(1)

    def _read(self) -> wire.Start | ToEngine:
        size = wire.frame_length(self._read_bytes(wire.HEADER_BYTES))
        return wire.decode_to_engine(self._read_bytes(size))

    def _read_bytes(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            count = self._sock.recv_into(view[done:])
            if count == 0:
                raise EOFError
            done += count
        return bytes(data)


def resolve_factory(name: str) -> EngineFactory:
    """`package.module:function`, or `path/to/file.py:function`. Raises EngineError if there is
    none.
    """
    where, _, function = name.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            if spec is None or spec.loader is None:
                raise ImportError(f"no module at {where}")
            module = importlib.util.module_from_spec(spec)
            # Dataclasses and pickles look their module up by name.
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        factory: EngineFactory = getattr(module, function)
    except (ImportError, AttributeError, ValueError, OSError) as err:
        raise EngineError(f"engine factory {name!r} cannot be loaded: {err}") from err
    return factory


def describe_failure(err: Exception) -> EngineFailed:
    """The one-line report of a failed start."""
    if isinstance(err, ConfigError):
        return EngineFailed(message=str(err), kind="config")
    if isinstance(err, CheckpointError):
        return EngineFailed(message=str(err), kind="checkpoint")
    if isinstance(err, TwiningError):
        return EngineFailed(message=str(err))
    text = " ".join(str(err).split())[:500]
    return EngineFailed(message=f"engine could not start: {type(err).__name__}: {text}")


def serve(engine: EngineLoop, inbox: Inbox, send: Callable[[FromEngine], None]) -> None:
    """Run until Shutdown. An exception of a step is not handled: the parent sees the process
    end.
    """
    sent_at = 0.0
    while True:
        for message in inbox.take(0.0 if engine.has_work else IDLE_TICK_S):
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Cancel):
                engine.cancel(message.request_id)
            else:
                engine.submit(message)
        if engine.has_work:
            plan = engine.plan()
            if plan.kind is StepKind.PREFILL:
                send(msgspec.structs.replace(engine.stats(), prefilling=True))
                sent_at = 0.0
            for delta in engine.run(plan):
                send(delta)
        now = time.monotonic()
        if not engine.has_work or now - sent_at >= STATS_EVERY_S:
            send(engine.stats())
            sent_at = now


def main(argv: Sequence[str]) -> int:
    """argv: the number of the socket's file descriptor."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sock = socket.socket(fileno=int(argv[0]))

    def send(message: FromEngine) -> None:
        sock.sendall(wire.encode(message))

    inbox = Inbox(sock)
    try:
        start = inbox.read_start()
        inbox.listen()
        try:
            engine = resolve_factory(start.factory)(start.config)
        except Exception as err:
            if not isinstance(err, TwiningError):
                log.exception("the engine could not start")
            send(describe_failure(err))
            return 2
        send(engine.ready())
        serve(engine, inbox, send)
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
