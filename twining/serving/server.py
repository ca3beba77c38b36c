"""Start, run and stop the server: one uvicorn, one supervised engine process (spec/api.md 11, 16).

The port is bound before the model loads, so a taken port is a one-line error at once and clients
see `model_loading` meanwhile. The first signal drains, the second one stops at once.
"""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from twining.checkpoint.hf_config import load_config, parse_glm5_next
from twining.config import EngineConfig, ServerConfig
from twining.engine.process import EngineClient
from twining.engine.request import EngineReady
from twining.errors import ConfigError
from twining.serving.access import is_loopback
from twining.serving.app import build_app
from twining.serving.context import ServerContext
from twining.serving.metrics import Metrics
from twining.serving.tokenizer import Tokenizer

log = logging.getLogger(__name__)

HEADER_ROOM = 256 << 10  # the parser's own limit; the access layer refuses less with a clear 431
FLUSH_S = 0.5  # for error events to reach their clients before the sockets close
FORCED_CLOSE_S = 5  # the HTTP server's own patience with open connections
POLL_S = 0.05

DISPLAY_NAMES = {"glm-5.3-flash": "GLM-5.3-Flash"}  # other models are shown by their id


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be used."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(2048)
        except OSError:
            sock.close()
            raise
    except socket.gaierror as err:
        raise ConfigError(f"host {host!r} cannot be resolved ({err.strerror}); check it") from None
    except OSError as err:
        if err.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop the other server or choose another --port"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {err.strerror}") from None
    return sock


def make_context(
    engine: EngineClient, engine_config: EngineConfig, config: ServerConfig
) -> ServerContext:
    """Everything the endpoints need. Raises CheckpointError for an unusable model folder."""
    model = parse_glm5_next(load_config(engine_config.model_dir))
    tokenizer = Tokenizer.load(engine_config.model_dir)
    limit = model.max_position_embeddings
    return ServerContext(
        config=config,
        tokenizer=tokenizer,
        engine=engine,
        max_seq_len=min(engine_config.max_seq_len or limit, limit),
        vocab_size=model.vocab_size,
        trained_length=limit,
        longest_token=max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)),
        display_name=DISPLAY_NAMES.get(config.model_id, config.model_id),
        metrics=Metrics(config.model_id),
    )


class DrainingServer(uvicorn.Server):
    """uvicorn that finishes running requests before it stops."""

    def __init__(
        self, config: uvicorn.Config, context: ServerContext, engine: EngineClient
    ) -> None:
        super().__init__(config)
        self._context = context
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: stop now. Signals are not raised again afterwards."""
        self._loop.call_soon_threadsafe(self._on_signal, sig)

    def _on_signal(self, sig: int) -> None:
        if self._drain is not None:
            log.warning("second signal: stopping at once")
            self.should_exit = self.force_exit = True
            return
        log.info("%s: no new requests; waiting for the running ones", signal.Signals(sig).name)
        self._context.phase.is_draining = True
        self._drain = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        """Wait for running requests, then end the others with an error event."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._context.config.drain_timeout_s):
                while self._context.phase.active:
                    await asyncio.sleep(POLL_S)
        had_open = self._context.phase.active > 0
        await self._engine.close(0.0)
        await asyncio.sleep(FLUSH_S if had_open else 0.0)
        self.should_exit = True


async def _serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    sock: socket.socket,
    on_ready: Callable[[EngineReady], None],
) -> None:
    engine = EngineClient(engine_config)
    context = make_context(engine, engine_config, config)
    server = DrainingServer(
        uvicorn.Config(
            build_app(context),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=HEADER_ROOM,
            timeout_graceful_shutdown=FORCED_CLOSE_S,
        ),
        context,
        engine,
    )
    http = asyncio.create_task(server.serve([sock]))
    start = asyncio.create_task(engine.start())
    try:
        await asyncio.wait({http, start}, return_when=asyncio.FIRST_COMPLETED)
        if start.done() and not context.phase.is_draining:
            on_ready(start.result())
        await http
    finally:
        server.should_exit = True
        await asyncio.gather(http, return_exceptions=True)
        await engine.close(0.0)
        await asyncio.gather(start, return_exceptions=True)


def run_server(
    engine_config: EngineConfig,
    config: ServerConfig,
    *,
    on_bound: Callable[[], None] = lambda: None,
    on_ready: Callable[[EngineReady], None] = lambda ready: None,
) -> None:
    """Serve until a signal comes.

    on_bound: called once the port is taken. on_ready: once the model is loaded. Raises ConfigError,
    CheckpointError or EngineError when it cannot start.
    """
    with bind(config.host, config.port) as sock:
        if not is_loopback(config.host) and not config.api_keys:
            log.warning("%s is reachable from other machines and no API key is set", config.host)
        on_bound()
        asyncio.run(_serve(engine_config, config, sock, on_ready))
