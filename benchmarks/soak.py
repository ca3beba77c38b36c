"""Many rude clients for a while: does everything end, does anything leak?

python benchmarks/soak.py --minutes 10 --kills 5 [--clients 64] [--json] [--save]
Each client repeats one of: whole reply, stream, stream dropped half-way, connection dropped at
once, two choices, tool call, prompt beyond the context, malformed JSON, invalid field. The engine
process is killed (SIGKILL) at even distances. Every accepted request must end in time; at the end
no request is open, the port is the same, and pages, file descriptors and memory are back where a
warmed-up server had them.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import environment, save
from benchmarks.server import Server, serving

REQUEST_TIMEOUT_S = 180.0
RECOVERY_TIMEOUT_S = 90.0
MAX_GROWTH_GB = 0.2  # allocators keep some freed memory
PROMPTS = (
    "What is 34 + 57?",
    "Tell me a story about a fox.",
    "Count from 10 to 60 in steps of 5.",
    "Write a Python function add_two(number) that adds 2 to number.",
    "Write a JSON array of 6 invented orders with the keys order_id, total and city.",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
# Answers, not faults: the queue may be full, the engine may just have been killed.
ALLOWED = {200, 429, 503}


class Soak:
    """Counts of what the clients met; `faults` lists what must not happen."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.server, self.rng = server, rng
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self.recovery_s: list[float] = []

    def body(self, **more: Any) -> dict[str, Any]:
        rng = self.rng
        return {
            "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
            "max_tokens": rng.choice((1, 8, 40, 120)),
            "temperature": rng.choice((0, 0.7, 1.0)),
            "seed": rng.randrange(1000),
            "reasoning_effort": rng.choice(("low", "high")),
            **more,
        }

    async def whole(self, client: httpx.AsyncClient, **more: Any) -> None:
        reply = await client.post("/v1/chat/completions", json=self.body(**more))
        self.note("whole", reply.status_code, ALLOWED)

    async def stream(self, client: httpx.AsyncClient, chunks: int | None) -> None:
        """chunks: drop the connection after so many; None reads to the end."""
        body = self.body(stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                self.note("stream", reply.status_code, ALLOWED)
                return
            seen, last = 0, ""
            async for line in reply.aiter_lines():
                seen, last = seen + 1, line or last
                if chunks is not None and seen >= chunks:
                    self.outcomes["dropped by the client"] += 1
                    return
            self.outcomes["stream 200"] += 1
            if last != "data: [DONE]":
                self.faults.append(f"a stream ended with {last[:80]!r}")

    async def dropped(self, client: httpx.AsyncClient) -> None:
        task = asyncio.create_task(self.whole(client))
        await asyncio.sleep(self.rng.random() * 0.2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self.outcomes["dropped by the client"] += 1

    async def bad(self, client: httpx.AsyncClient) -> None:
        kind = self.rng.choice(("long", "json", "field"))
        if kind == "json":
            reply = await client.post(
                "/v1/chat/completions",
                content=b'{"messages": [',
                headers={"content-type": "application/json"},
            )
        elif kind == "field":
            reply = await client.post("/v1/chat/completions", json=self.body(temperature=7))
        else:
            text = "word " * 20_000
            body = self.body(messages=[{"role": "user", "content": text}])
            reply = await client.post("/v1/chat/completions", json=body)
        self.note(f"bad {kind}", reply.status_code, {400, 503})

    def note(self, what: str, status: int, allowed: set[int]) -> None:
        self.outcomes[f"{what} {status}"] += 1
        if status not in allowed:
            self.faults.append(f"{what}: HTTP {status}")

    async def client(self, until: float) -> None:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=REQUEST_TIMEOUT_S) as client:
            while time.monotonic() < until:
                act = self.rng.choices(
                    (
                        lambda: self.whole(client),
                        lambda: self.stream(client, None),
                        lambda: self.stream(client, self.rng.randint(1, 12)),
                        lambda: self.dropped(client),
                        lambda: self.whole(client, n=2),
                        lambda: self.whole(client, tools=[TOOL]),
                        lambda: self.bad(client),
                    ),
                    weights=(4, 6, 3, 2, 1, 1, 2),
                )[0]
                try:
                    await asyncio.wait_for(act(), REQUEST_TIMEOUT_S)
                except TimeoutError:
                    self.faults.append(f"no end within {REQUEST_TIMEOUT_S:g} s")
                except httpx.TransportError as err:
                    self.faults.append(f"connection: {type(err).__name__} {err}")
                await asyncio.sleep(self.rng.random() * 0.1)

    async def killer(self, begun: float, seconds: float, kills: int) -> None:
        for number in range(kills):
            await asyncio.sleep(
                max(0.0, begun + seconds * (number + 1) / (kills + 1) - time.monotonic())
            )
            engine = self.server.engine()
            if engine is None:
                self.faults.append("no engine process to kill")
                continue
            engine.kill()
            killed = time.monotonic()
            # Health may still say ok for the moment in which nobody has noticed yet.
            await asyncio.sleep(0.5)
            if not await self.until_healthy(killed + RECOVERY_TIMEOUT_S):
                self.faults.append(f"not healthy {RECOVERY_TIMEOUT_S:g} s after a kill")
                return
            self.recovery_s.append(round(time.monotonic() - killed, 2))

    async def until_healthy(self, deadline: float) -> bool:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=10) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/health")).status_code == 200:
                        return True
                await asyncio.sleep(0.1)
        return False


def state(server: Server) -> dict[str, Any]:
    """What must come back to its start: open requests, cache share, descriptors, memory."""
    load = httpx.get(f"{server.url}/load", timeout=30).json()["server_load"]
    metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
    usage = re.search(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)", metrics, re.MULTILINE)
    engine = server.engine()
    return {
        "open_requests": load,
        "cache_usage": float(usage[1]) if usage else -1.0,
        "api_fds": server.process.num_fds(),
        "engine_fds": engine.num_fds() if engine else -1,
        "rss_gb": round(server.rss_gb(), 3),
    }


def settled(server: Server) -> dict[str, Any]:
    """The state once no request is open (waits 60 s at most) and connections had time to close."""
    for _ in range(120):
        now = state(server)
        if now["open_requests"] == 0:
            break
        time.sleep(0.5)
    time.sleep(3)
    return state(server)


def leaks(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = []
    for name in ("open_requests", "cache_usage"):
        if after[name] != before[name]:
            found.append(f"{name} was {before[name]} and is {after[name]}")
    for name in ("api_fds", "engine_fds"):
        if after[name] > before[name]:
            found.append(f"{name} grew from {before[name]} to {after[name]}")
    if after["rss_gb"] > before["rss_gb"] + MAX_GROWTH_GB:
        found.append(f"memory grew from {before['rss_gb']} to {after['rss_gb']} GB")
    return found


async def run(server: Server, args: argparse.Namespace) -> Soak:
    soak = Soak(server, random.Random(args.seed))
    begun, seconds = time.monotonic(), args.minutes * 60
    clients = [soak.client(begun + seconds) for _ in range(args.clients)]
    await asyncio.gather(soak.killer(begun, seconds, args.kills), *clients)
    return soak


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with serving(*(("--reuse", args.reuse) if args.reuse else ())) as server:
        # Warm up: allocators, thread pools and lazily opened descriptors of normal use.
        for _ in range(2):
            warm = argparse.Namespace(**{**vars(args), "minutes": 0.1, "kills": 0})
            asyncio.run(run(server, warm))
        before = settled(server)
        soak = asyncio.run(run(server, args))
        after = settled(server)
        pid_alive = psutil.pid_exists(server.process.pid)
    return {
        "ok": not (soak.faults or leaks(before, after)) and pid_alive,
        "minutes": args.minutes,
        "clients": args.clients,
        "kills": args.kills,
        "outcomes": dict(sorted(soak.outcomes.items())),
        "recovery_s": soak.recovery_s,
        "faults": dict(collections.Counter(soak.faults)),
        "leaks": leaks(before, after),
        "before": before,
        "after": after,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reuse", default="", help="passed on to serve")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    result = measure(args)
    if args.save:
        save("soak", {**result, "environment": environment(os.cpu_count() or 1)})
    print(json.dumps(result) if args.json else json.dumps(result, indent=1))
    return int(not result["ok"])


if __name__ == "__main__":
    sys.exit(main())
