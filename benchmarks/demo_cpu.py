"""The whole demo server on a CPU: start, first token, decode speed, memory.

python benchmarks/demo_cpu.py [--json] [--save] [--drafter dflash2] [--runs 5]
Starts `twining serve` as a user would and measures over HTTP. Asked of two cores: ready in 10 s,
first token of a 1,000-token prompt in 2 s, 40 tokens/s on structured text with DFlash2, 1.2 GB of
resident memory over all processes.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import environment, save
from benchmarks.server import serving
from twining.demo.paths import demo_paths
from twining.demo.tasks import MAKERS, Split, retrieval
from twining.serving.tokenizer import Tokenizer

LIMITS = {"ready_s": 10.0, "ttft_1k_s": 2.0, "decode_tok_s": 40.0, "rss_gb": 1.2}


def stream(client: httpx.Client, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """(seconds to the first chunk with text, the last chunk's timings and usage)."""
    begun, first, last = time.monotonic(), 0.0, {}
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    with client.stream("POST", "/v1/chat/completions", json={**body, **options}) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"HTTP {reply.status_code}: {reply.read().decode()}")
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if not first and (delta.get("content") or delta.get("reasoning_content")):
                    first = time.monotonic() - begun
            if chunk.get("usage"):
                last = chunk
    return first, last


def measure(drafter: str, runs: int) -> dict[str, Any]:
    tokenizer = Tokenizer.load(demo_paths()[0])

    def count(text: str) -> int:
        return len(tokenizer.encode_text(text))

    ttft, speed, length = [], [], []
    with (
        serving("--drafter", drafter) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        for run in range(runs):
            # A new text each time: a prompt seen before could be served from the prefix cache.
            long = retrieval.make(Random(f"ttft {run}"), Split.HELDOUT, "low", 1000, count)
            seconds, _ = stream(client, {"messages": list(long.prompt), "max_tokens": 8})
            ttft.append(seconds)
            task = MAKERS["json_records"](Random(f"decode {run}"), Split.HELDOUT, "low")
            body = {"messages": list(task.prompt), "reasoning_effort": "low", "max_tokens": 256}
            _, last = stream(client, body)
            timings = last["timings"]
            speed.append(timings["predicted_per_second"])
            steps = timings.get("draft_steps", 0)
            length.append(1 + timings.get("draft_n_accepted", 0) / steps if steps else 1.0)
        memory = server.rss_gb()
    return {
        "ready_s": round(server.ready_s, 2),
        "ttft_1k_s": round(statistics.median(ttft), 3),
        "decode_tok_s": round(statistics.median(speed), 1),
        "rss_gb": round(memory, 3),
        "accepted_length": round(statistics.median(length), 2),
        "drafter": drafter,
        "runs": runs,
    }


def show(result: dict[str, Any]) -> None:
    table = Table("figure", "measured", "asked", "")
    for name, limit in LIMITS.items():
        good = result[name] >= limit if name == "decode_tok_s" else result[name] <= limit
        sign = ">=" if name == "decode_tok_s" else "<="
        table.add_row(name, str(result[name]), f"{sign} {limit:g}", "ok" if good else "MISSED")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="keep a file in benchmarks/results")
    parser.add_argument("--drafter", default="dflash2")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    result = measure(args.drafter, args.runs)
    if args.save:
        save("demo-cpu", {**result, "environment": environment(os.cpu_count() or 1)})
    if args.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
