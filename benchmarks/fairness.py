"""What a running chat keeps of its speed while somebody's long prompt is read.

python benchmarks/fairness.py [--json] [--save] [--plot FILE.png] [--shares 0.25,0.5,0.75]
One chat decodes alone, a prompt of 8,192 tokens arrives, and the chat goes on after it. The chat's
rate while the prompt is read must stay at or above decode_share of its rate alone, up to the one
prefill step that starts before its decode time is paid back. Also told: the longest pause between
two of its tokens, and how long the prompt took. `--clock cpu` lets engine and
benchmark count the processor time of this process: with --threads 1 the two are the same on an idle
machine, and other programs do not disturb it.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import RESULTS, environment, save
from twining.config import DraftConfig, EngineConfig, ScheduleConfig
from twining.demo.paths import demo_paths
from twining.engine.core import Engine
from twining.engine.loading import load_engine
from twining.engine.request import Request, SamplingParams
from twining.engine.scheduler import StepKind

CHAT, LONG = "chat", "long"
CLOCKS = {"wall": time.monotonic, "cpu": time.process_time}
SETTINGS = ("prompt", "chunk", "drafter", "stages", "threads", "clock")
TOLERANCE = 0.05  # of the share: timer noise and the overshoot of the last prefill step


@dataclass
class Trace:
    """Times are seconds since the chat's first token. tokens: (when, how many) of the chat's."""

    tokens: list[tuple[float, int]]
    arrived_s: float = 0.0  # the long prompt came
    read_s: float = 0.0  # and was read
    verify_s: float = 0.0  # engine time of decode steps in between

    def rate(self, begin_s: float, end_s: float) -> float:
        """Tokens per second of the chat."""
        return sum(n for at, n in self.tokens if begin_s < at <= end_s) / (end_s - begin_s)

    def longest_pause_s(self, begin_s: float, end_s: float) -> float:
        times = [at for at, _ in self.tokens if begin_s <= at <= end_s]
        return max(b - a for a, b in pairwise(times))


def warm_up(engine: Engine) -> None:
    """First passes allocate; they are not measured."""
    request = Request(
        id="warm", prompt_ids=list(range(200)), max_tokens=20, sampling=SamplingParams()
    )
    engine.submit(request)
    while engine.has_work:
        engine.step()


def trace(engine: Engine, num_prompt: int, alone_s: float, clock: Callable[[], float]) -> Trace:
    """Drive the engine's loop as the engine process does, and note the chat's tokens."""
    rng = random.Random(1)
    ids = range(256, engine.ready().vocab_size)
    room = engine.ready().max_seq_len
    chat = Request(
        id=CHAT,
        prompt_ids=rng.choices(ids, k=100),
        max_tokens=room - 100,
        sampling=SamplingParams(seed=1, temperature=1.0),
        use_prefix_cache=False,
    )
    long = Request(
        id=LONG,
        prompt_ids=rng.choices(ids, k=num_prompt),
        max_tokens=0,
        sampling=SamplingParams(),
        use_prefix_cache=False,
    )
    result = Trace([])
    engine.submit(chat)
    begun_s = stop_s = 0.0
    while True:
        plan, before_s = engine.plan(), clock()
        deltas = engine.run(plan)
        now_s = clock()
        if result.arrived_s and not result.read_s and plan.kind is StepKind.VERIFY:
            result.verify_s += now_s - before_s
        for delta in deltas:
            if delta.kind == "error":
                raise RuntimeError(f"{delta.request_id}: {delta.message}")
            if delta.request_id == LONG and delta.kind == "finished":
                result.read_s = now_s - begun_s
                stop_s = result.read_s + alone_s
            if delta.request_id == CHAT and delta.token_ids:
                begun_s = begun_s or now_s
                result.tokens.append((now_s - begun_s, len(delta.token_ids)))
            if delta.request_id == CHAT and delta.kind == "finished":
                raise RuntimeError("the chat ended too early; use a shorter --alone")
        if begun_s and not result.arrived_s and now_s - begun_s >= alone_s:
            result.arrived_s = clock() - begun_s
            engine.submit(long)
        if stop_s and now_s - begun_s >= stop_s:
            engine.cancel(CHAT)
            engine.step()
            return result


def measure(
    model_dir: Path, args: argparse.Namespace, share: float
) -> tuple[dict[str, Any], Trace]:
    """One share on a fresh engine: rates before, during and after, and the verdict."""
    config = EngineConfig(
        model_dir=model_dir,
        threads=args.threads,
        draft=DraftConfig(drafter=args.drafter, num_draft_tokens=args.num_draft_tokens),
        schedule=ScheduleConfig(
            max_seqs=2, decode_share=share, prefill_tokens_with_decodes=args.chunk
        ),
        stages=args.stages,
    )
    engine = load_engine(config, clock=CLOCKS[args.clock])
    warm_up(engine)
    found = trace(engine, args.prompt, args.alone, CLOCKS[args.clock])
    before = found.rate(0.0, found.arrived_s)
    during = found.rate(found.arrived_s, found.read_s)
    after = found.rate(found.read_s, found.read_s + args.alone)
    alone = statistics.mean((before, after))
    prompt_s = found.read_s - found.arrived_s
    result = {
        "decode_share": share,
        "before_tok_s": round(before, 2),
        "during_tok_s": round(during, 2),
        "after_tok_s": round(after, 2),
        "kept": round(during / alone, 3),
        "time_share": round(found.verify_s / prompt_s, 3),
        "longest_pause_ms": round(1e3 * found.longest_pause_s(found.arrived_s, found.read_s), 1),
        "prompt_s": round(prompt_s, 2),
        "prompt_tok_s": round(args.prompt / prompt_s, 1),
        "holds": during / alone >= share * (1 - TOLERANCE),
    }
    return result, found


def plot(path: Path, results: list[dict[str, Any]], traces: list[Trace]) -> None:
    """The chat's rate over time, one panel per share; the reading of the prompt is shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(traces), 1, figsize=(8, 2.4 * len(traces)), squeeze=False, sharey=True
    )
    for axis, result, found in zip(axes[:, 0], results, traces, strict=True):
        end = found.tokens[-1][0]
        width = end / 60
        starts = [width * n for n in range(60)]
        axis.step(starts, [found.rate(t, t + width) for t in starts], where="post", color="#1f6f4a")
        axis.axvspan(found.arrived_s, found.read_s, color="#e8c96a", alpha=0.4, lw=0)
        alone = statistics.mean((result["before_tok_s"], result["after_tok_s"]))
        floor = alone * result["decode_share"]
        axis.hlines(floor, found.arrived_s, found.read_s, color="#a03030", linestyles="dashed")
        axis.set_ylim(bottom=0)
        axis.set_ylabel("tokens/s")
        axis.set_title(
            f"decode_share {result['decode_share']:g}: kept {result['kept']:.2f} of the rate alone",
            fontsize=10,
        )
    axes[-1, 0].set_xlabel("seconds; shaded: the prompt is read, dashed: the promise")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show(results: list[dict[str, Any]], num_prompt: int) -> None:
    table = Table(title=f"A chat while a prompt of {num_prompt} tokens is read")
    columns = ("share", "before", "during", "after", "kept", "pause ms", "prompt s", "prompt tok/s")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("holds")
    keys = ("decode_share", "before_tok_s", "during_tok_s", "after_tok_s", "kept")
    for result in results:
        values = [*(result[key] for key in keys), result["longest_pause_ms"], result["prompt_s"]]
        cells = [f"{v:g}" for v in [*values, result["prompt_tok_s"]]]
        table.add_row(*cells, "yes" if result["holds"] else "NO")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="keep files in benchmarks/results")
    parser.add_argument("--plot", type=Path, help="PNG file to draw")
    parser.add_argument("--model", type=Path, help="model folder; the demo model without it")
    parser.add_argument("--shares", default="0.25,0.5,0.75")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens")
    parser.add_argument("--alone", type=float, default=8.0, help="seconds before and after")
    parser.add_argument("--chunk", type=int, default=ScheduleConfig().prefill_tokens_with_decodes)
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--num-draft-tokens", type=int, default=0)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    model_dir = args.model or demo_paths()[0]
    results, traces = [], []
    for share in map(float, args.shares.split(",")):
        result, found = measure(model_dir, args, share)
        results.append(result)
        traces.append(found)
    settings = {name: getattr(args, name) for name in SETTINGS}
    whole = {"settings": settings, "runs": results, "holds": all(r["holds"] for r in results)}
    if args.plot:
        plot(args.plot, results, traces)
    if args.save:
        path = save("fairness", {**whole, "environment": environment(os.cpu_count() or 1)})
        plot(RESULTS / f"{path.stem}.png", results, traces)
    if args.json:
        print(json.dumps(whole))
    else:
        show(results, args.prompt)
    return int(not whole["holds"])


if __name__ == "__main__":
    sys.exit(main())
