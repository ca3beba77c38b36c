"""A scripted engine and a real HTTP server around it, for tests of the serving layer."""

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import tiny_tokenizer
import uvicorn

from twining.config import ServerConfig
from twining.engine.request import (
    Delta,
    EngineReady,
    EngineStats,
    Request,
    Timings,
    TokenLogprob,
)
from twining.serving.app import build_app
from twining.serving.context import ServerContext
from twining.serving.tokenizer import Tokenizer

CONTEXT = 2048


@dataclass
class Script:
    """What the engine does with one request. ids None: the default reply."""

    ids: list[int] = field(default_factory=list)
    burst: int = 1
    stop_id: int = -1  # appended as the stop token; -1: ends by length
    delay_s: float = 0.0  # between bursts
    queued_s: float = 0.0  # before admission
    prefill_s: float = 0.0  # between admission and the first token
    error: tuple[str, str] | None = None
    error_after: int = -1  # tokens before the error; -1: before admission


class FakeEngine:
    """Plays scripts in order of submission, then `default` for ever."""

    def __init__(self, context: int = CONTEXT, vocab_size: int = 400) -> None:
        self.ready: EngineReady | None = EngineReady(
            max_seq_len=context,
            vocab_size=vocab_size,
            max_seqs=4,
            drafter="ngram",
            num_draft_tokens=3,
            num_pages=64,
            load_s=0.1,
        )
        self.healthy = True
        self.stats = EngineStats(pages_total=64)
        self.scripts: deque[Script] = deque()
        self.default = Script()
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.open: set[str] = set()

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        self.requests.append(request)
        script = self.scripts.popleft() if self.scripts else self.default
        self.open.add(request.id)
        return self._play(request, script)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def _play(self, request: Request, script: Script) -> AsyncIterator[Delta]:
        try:
            async for delta in self._deltas(request, script):
                yield delta
        finally:
            self.open.discard(request.id)

    async def _deltas(self, request: Request, script: Script) -> AsyncIterator[Delta]:
        name = request.id
        if script.queued_s:
            await asyncio.sleep(script.queued_s)
        if script.error is not None and script.error_after < 0:
            yield _error(name, script.error)
            return
        yield Delta(request_id=name, kind="admitted")
        yield Delta(
            request_id=name,
            kind="progress",
            prompt_done=len(request.prompt_ids),
            prompt_logprobs=self._prompt_logprobs(request),
        )
        await asyncio.sleep(script.prefill_s)
        ids = script.ids + ([script.stop_id] if script.stop_id >= 0 else [])
        ids = ids[: request.max_tokens]
        sent = 0
        while sent < len(ids):
            if name in self.cancelled:
                yield Delta(request_id=name, kind="finished", finish_reason="cancelled")
                return
            if script.error is not None and sent >= script.error_after:
                yield _error(name, script.error)
                return
            part = ids[sent : sent + script.burst]
            sent += len(part)
            yield Delta(
                request_id=name,
                kind="tokens",
                token_ids=part,
                logprobs=[logprob_of(i) for i in part] if request.logprobs >= 0 else [],
            )
            if script.delay_s:
                await asyncio.sleep(script.delay_s)
        is_stop = bool(ids) and ids[-1] == script.stop_id
        yield Delta(
            request_id=name,
            kind="finished",
            finish_reason="stop" if is_stop else "length",
            stop_id=script.stop_id if is_stop else -1,
            timings=Timings(
                queue_s=0.5,
                prefill_s=2.0,
                ttft_s=2.5,
                decode_s=4.0,
                draft_steps=4,
                num_drafted=12,
                num_accepted=6,
            ),
        )

    def _prompt_logprobs(self, request: Request) -> list[TokenLogprob | None]:
        if request.prompt_logprobs < 0:
            return []
        return [None, *(logprob_of(i) for i in request.prompt_ids[1:])]


def logprob_of(token: int) -> TokenLogprob:
    """Values that tell the tokens apart."""
    return TokenLogprob(-token / 100, [token, (token + 1) % 300], [-token / 100, -9.5])


def _error(name: str, error: tuple[str, str]) -> Delta:
    return Delta(
        request_id=name, kind="error", finish_reason="error", code=error[0], message=error[1]
    )


class Served:
    """A running server: its base URL, its engine and tokenizer."""

    def __init__(self, config: ServerConfig, engine: FakeEngine) -> None:
        self.engine = engine
        self.tokenizer = Tokenizer(tiny_tokenizer.description())
        self.context = ServerContext(
            config=config,
            tokenizer=self.tokenizer,
            engine=engine,
            max_seq_len=CONTEXT,
            vocab_size=self.tokenizer.vocab_size,
            trained_length=4 * CONTEXT,
            longest_token=max(
                len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.vocab_size)
            ),
        )
        self.app = build_app(self.context)
        self.url = ""

    @property
    def stop(self) -> int:
        return self.tokenizer.markers.user

    def ids(self, *parts: str) -> list[int]:
        """Token ids of a reply; markers are recognised."""
        return [i for part in parts for i in self.tokenizer.encode_with_markers(part)]

    def say(self, text: str, **options: object) -> None:
        """Script the next reply: marker text becomes marker tokens, a stop token ends it."""
        self.engine.scripts.append(
            Script(ids=self.ids(text), **{"stop_id": self.stop, **options})  # type: ignore[arg-type]
        )

    def wait_idle(self, limit_s: float = 2.0) -> None:
        """Wait until no request is open in the engine."""
        end = time.monotonic() + limit_s
        while self.engine.open and time.monotonic() < end:
            time.sleep(0.01)
        assert not self.engine.open, f"still open: {self.engine.open}"


@contextlib.contextmanager
def serve(config: ServerConfig | None = None, engine: FakeEngine | None = None) -> Iterator[Served]:
    """A real uvicorn server on a free port, in a thread."""
    served = Served(config or ServerConfig(), engine or FakeEngine())
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    served.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(
            served.app,
            log_level="critical",
            lifespan="off",
            h11_max_incomplete_event_size=256 << 10,
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < end, "server did not start"
        time.sleep(0.005)
    try:
        yield served
    finally:
        server.should_exit = True
        thread.join(5)
        sock.close()
