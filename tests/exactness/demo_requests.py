"""Fifty prompts of the demo model's held-out tasks, as requests."""

import random
from pathlib import Path

from twining.demo.tasks import MAKERS, Split
from twining.engine.request import Request, SamplingParams
from twining.serving.chat_format.prompt import build_prompt
from twining.serving.tokenizer import Tokenizer

NUM_PROMPTS = 50
CASES = [(name, k) for name in ("ngram", "mtp", "dflash2") for k in (1, 3, 7)] + [("none", 0)]
TEMPERATURES = (0.0, 1.0)


def make_requests(
    model_dir: Path, temperature: float, num_prompts: int = NUM_PROMPTS
) -> list[Request]:
    """All kinds of tasks in turn, with and without thinking; the same list every time."""
    tokenizer = Tokenizer.load(model_dir)
    requests = []
    makers = list(MAKERS.items())
    for n in range(num_prompts):
        kind, make = makers[n % len(makers)]
        example = make(random.Random(1000 + n), Split.HELDOUT, ("low", "high")[n % 2])
        body = {
            "messages": list(example.prompt),
            "tools": list(example.tools),
            "reasoning_effort": example.effort,
        }
        requests.append(
            Request(
                id=f"{kind}-{n}-T{temperature}",
                prompt_ids=tokenizer.encode_segments(build_prompt(body).segments),
                max_tokens=(12, 16, 32)[n % 3],
                sampling=SamplingParams(
                    seed=77 + n, temperature=temperature, top_p=1.0 if n % 2 else 0.95
                ),
                stop_ids=tokenizer.stop_ids,
                logprobs=1,
            )
        )
    return requests
