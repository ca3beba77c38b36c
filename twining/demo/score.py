"""What the demo model can do: shares of right answers on held-out items, and accepted draft length.

Items come from `twining.demo.tasks` on the held-out side of the split, so none of their parameters
occurs in training. `generate` is any function from chat requests to token ids: the engine (through
`engine_generate`) or a training model.

Report: arithmetic, json_extraction, tool_call, python_functions (shares 0..1 of num_per_task),
retrieval {length: hits}, accepted_length {kind: mean tokens per verify step}, and the settings.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from twining.demo.tasks import (
    Example,
    Maker,
    Message,
    Split,
    arithmetic,
    json_extraction,
    lists,
    python_functions,
    retrieval,
    stories,
    tool_calls,
)
from twining.engine.offline import StepEngine
from twining.engine.offline import generate as run_engine
from twining.engine.request import Delta, Request, SamplingParams
from twining.serving.chat_format.render import render
from twining.serving.parsing import ParserOptions, TokenParser
from twining.serving.tokenizer import Tokenizer

RETRIEVAL_LENGTHS = (1024, 2048, 4096, 8192)  # tokens of the whole prompt
NUM_RETRIEVAL = 16  # texts per length
NUM_ACCEPTED = 8  # requests per kind for the accepted length
_HEAD_TOKENS = 24  # head, role markers and generation prompt around the text

_SCORED: dict[str, tuple[Maker, int]] = {  # maker, max_tokens
    "arithmetic": (arithmetic.make_two_digit, 96),
    "json_extraction": (json_extraction.make, 256),
    "tool_call": (tool_calls.make_call, 160),
    "python_functions": (python_functions.make, 256),
}
_KINDS: dict[str, tuple[Maker, int]] = {
    "structured": (lists.make_sequence, 200),
    "json": (json_extraction.make_records, 200),
    "code": (python_functions.make, 100),
    "tool_call": (tool_calls.make_call, 100),
    "prose": (stories.make, 200),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One generation: a conversation up to the reply; temperature 0 is greedy."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    effort: str = "low"
    max_tokens: int = 256
    temperature: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResult:
    """token_ids: sampled ids (a final stop token may be included). is_cut: max_tokens ended it.

    draft_steps and num_accepted: verify steps and accepted drafts, 0 without a drafter.
    """

    token_ids: Sequence[int]
    is_cut: bool = False
    draft_steps: int = 0
    num_accepted: int = 0


Generate = Callable[[Sequence[ChatRequest]], Sequence[ChatResult]]


@dataclass(frozen=True, slots=True)
class Item:
    """One planned generation. group: "task", "retrieval" or "accepted"; name within the group."""

    group: Literal["task", "retrieval", "accepted"]
    name: str
    example: Example
    max_tokens: int

    @property
    def request(self) -> ChatRequest:
        example = self.example
        return ChatRequest(
            messages=example.prompt,
            tools=example.tools,
            effort=example.effort,
            max_tokens=self.max_tokens,
        )


@dataclass(slots=True)
class Reply:
    """Parsed output."""

    content: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def prompt_ids(tokenizer: Tokenizer, request: ChatRequest) -> list[int]:
    """Token ids of the rendered prompt, generation prompt included."""
    segments = render(request.messages, list(request.tools), reasoning_effort=request.effort)
    return tokenizer.encode_segments(segments)


def engine_generate(
    engine: StepEngine,
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
) -> Generate:
    """A Generate that runs requests through an engine in this process.

    progress(done, total) is called whenever a request ends.
    """

    def run(requests: Sequence[ChatRequest]) -> list[ChatResult]:
        done = 0

        def note(delta: Delta) -> None:
            nonlocal done
            if delta.finish_reason is not None:
                done += 1
                if progress is not None:
                    progress(done, len(requests))

        made = [
            Request(
                id=f"score-{i}",
                prompt_ids=prompt_ids(tokenizer, r),
                sampling=SamplingParams(seed=i, temperature=r.temperature),
                max_tokens=r.max_tokens,
                stop_ids=tokenizer.stop_ids,
            )
            for i, r in enumerate(requests)
        ]
        return [
            ChatResult(
                token_ids=r.token_ids,
                is_cut=r.finish_reason != "stop",
                draft_steps=r.timings.draft_steps,
                num_accepted=r.timings.num_accepted,
            )
            for r in run_engine(engine, made, on_delta=note)
        ]

    return run


def plan(
    tokenizer: Tokenizer,
    *,
    num_per_task: int,
    seed: int,
    effort: str = "low",
    retrieval_lengths: Sequence[int] = RETRIEVAL_LENGTHS,
    num_retrieval: int = NUM_RETRIEVAL,
    num_accepted: int = NUM_ACCEPTED,
) -> list[Item]:
    """All held-out items of a run; a pure function of its arguments."""
    items: list[Item] = []
    for name, (make, max_tokens) in _SCORED.items():
        rng = Random(f"{seed} {name}")
        for _ in range(num_per_task):
            items.append(Item("task", name, make(rng, Split.HELDOUT, effort), max_tokens))
    count = _counter(tokenizer)
    for length in retrieval_lengths:
        rng = Random(f"{seed} retrieval {length}")
        for _ in range(num_retrieval):
            tokens = length - _HEAD_TOKENS
            example = retrieval.make(rng, Split.HELDOUT, effort, tokens, count)
            items.append(Item("retrieval", str(length), example, 96))
    for name, (make, max_tokens) in _KINDS.items():
        rng = Random(f"{seed} accepted {name}")
        for _ in range(num_accepted):
            items.append(Item("accepted", name, make(rng, Split.HELDOUT, effort), max_tokens))
    return items


def score(
    generate: Generate,
    tokenizer: Tokenizer,
    *,
    num_per_task: int = 100,
    seed: int = 0,
    effort: str = "low",
    retrieval_lengths: Sequence[int] = RETRIEVAL_LENGTHS,
    num_retrieval: int = NUM_RETRIEVAL,
    num_accepted: int = NUM_ACCEPTED,
) -> dict[str, Any]:
    """Run every item in one call of `generate` and report (see the module's docstring)."""
    items = plan(
        tokenizer,
        num_per_task=num_per_task,
        seed=seed,
        effort=effort,
        retrieval_lengths=retrieval_lengths,
        num_retrieval=num_retrieval,
        num_accepted=num_accepted,
    )
    results = generate([item.request for item in items])
    report: dict[str, Any] = dict.fromkeys(_SCORED, 0.0)
    report["retrieval"] = {int(length): 0 for length in retrieval_lengths}
    steps, tokens = dict.fromkeys(_KINDS, 0), dict.fromkeys(_KINDS, 0)
    for item, result in zip(items, results, strict=True):
        if item.group == "accepted":
            steps[item.name] += result.draft_steps
            tokens[item.name] += result.draft_steps + result.num_accepted
            continue
        hit = is_right(item.example, parse_reply(tokenizer, item.example.tools, result))
        if item.group == "retrieval":
            report["retrieval"][int(item.name)] += hit
        else:
            report[item.name] += hit / num_per_task
    report |= {name: round(report[name], 4) for name in _SCORED}
    report["accepted_length"] = {k: round(tokens[k] / n, 3) for k, n in steps.items() if n}
    report["settings"] = {
        "num_per_task": num_per_task,
        "num_retrieval": num_retrieval,
        "seed": seed,
        "effort": effort,
    }
    return report


def is_right(example: Example, reply: Reply) -> bool:
    """The checker of the example's kind."""
    if example.kind == "tool_call":
        return tool_calls.check(example, reply.content, reply.calls)
    checks: dict[str, Callable[[Example, str], bool]] = {
        "arithmetic": arithmetic.check,
        "json_extraction": json_extraction.check,
        "python_functions": python_functions.check,
        "retrieval": retrieval.check,
    }
    return not reply.calls and checks[example.kind](example, reply.content)


def parse_reply(tokenizer: Tokenizer, tools: Sequence[dict[str, Any]], result: ChatResult) -> Reply:
    """Content and complete calls of an output that began in the reasoning block."""
    parser = TokenParser(tokenizer, ParserOptions(tools=tools), start="reasoning")
    parser.feed(i for i in result.token_ids if i not in tokenizer.stop_ids)
    parser.finish("length" if result.is_cut else "eos")
    message = parser.message()
    calls = [(c.name, json.loads(c.arguments)) for c in message.tool_calls if c.is_complete]
    return Reply(message.content or "", calls)


def _counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    return lambda text: len(tokenizer.encode_text(text))
