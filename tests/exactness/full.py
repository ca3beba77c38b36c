"""Every demo prompt on every drafter, K, temperature and company: `python -m tests.exactness.full`.

Prints one JSON line per combination and a last line with the verdict; exit status 1 on a
difference. --model and --drafter-dir take another checkpoint with the demo's tokenizer; --prompts
shortens the run.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from tests.exactness.demo_requests import CASES, NUM_PROMPTS, TEMPERATURES, make_requests
from tests.exactness.tools import Bench, content, run
from twining.demo.paths import demo_paths
from twining.engine.loading import default_threads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--drafter-dir", type=Path)
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--threads", type=int, default=default_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model_dir, drafter_dir = args.model, args.drafter_dir
    if model_dir is None:
        model_dir, drafter_dir = demo_paths()
    bench = Bench.load(model_dir, drafter_dir, 2048)
    num_wrong = 0
    for temperature in TEMPERATURES:
        requests = make_requests(model_dir, temperature, args.prompts)
        want = run(bench.engine(), requests)
        for drafter, num_draft in CASES:
            for max_seqs in (1, 4):
                began = time.monotonic()
                engine = bench.engine(drafter, num_draft, max_seqs=max_seqs)
                got = run(engine, requests)
                wrong = [r.id for r in requests if content(got[r.id]) != content(want[r.id])]
                num_wrong += len(wrong)
                stats = engine.stats()
                line = {
                    "drafter": drafter,
                    "num_draft_tokens": num_draft,
                    "temperature": temperature,
                    "at_a_time": max_seqs,
                    "requests": len(requests),
                    "tokens": stats.generated_tokens,
                    "accepted_length": round(1 + stats.num_accepted / stats.draft_steps, 3),
                    "seconds": round(time.monotonic() - began, 2),
                    "different": wrong,
                }
                print(json.dumps(line), flush=True)
    print(json.dumps({"equal": num_wrong == 0, "different_requests": num_wrong}))
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
