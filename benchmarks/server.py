"""A `twining serve` process for benchmarks: started as a user would, stopped at the end."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil

START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. ready_s: seconds from the start of the process until /health said ok."""

    url: str
    process: psutil.Process
    ready_s: float

    def engine(self) -> psutil.Process | None:
        """The engine process now, or None while there is none."""
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "twining.engine.worker" in child.cmdline():
                    return child
        return None

    def rss_gb(self) -> float:
        """Resident sets of all its processes, 10^9 bytes; shared pages count twice."""
        total = 0
        for p in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += p.memory_info().rss
        return total / 1e9


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def serving(*options: str, model: str = "demo") -> Iterator[Server]:
    """Serve `model` with extra command-line options. Raises RuntimeError when it does not start."""
    port = free_port()
    command = [sys.executable, "-m", "twining", "serve", model, "--port", str(port), *options]
    begun = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_healthy(url):
            if child.poll() is not None or time.monotonic() - begun > START_TIMEOUT_S:
                raise RuntimeError(
                    f"{' '.join(command)} did not start (exit status {child.poll()})"
                )
            time.sleep(0.05)
        yield Server(url, psutil.Process(child.pid), time.monotonic() - begun)
    finally:
        child.terminate()
        child.wait(timeout=90)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
