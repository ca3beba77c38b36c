"""`twining generate`: one reply without a server."""

import dataclasses
import json
import secrets
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from twining.cli.options import (
    DEMO,
    DRAFT,
    ENGINE,
    SERVER,
    DrafterDirOption,
    DrafterOption,
    EffortOption,
    JsonOption,
    MaxSeqLenOption,
    ModelOption,
    NumDraftOption,
    ThreadsOption,
    engine_config,
    note,
    resolve_model,
)
from twining.config import SamplingDefaults
from twining.engine.request import SamplingParams
from twining.errors import ConfigError

SAMPLING = SamplingDefaults()


def sampling_params(
    temperature: float, top_p: float, seed: int | None, *, top_k: int = 0, min_p: float = 0.0
) -> SamplingParams:
    """Checked sampling values. Raises ConfigError; without a seed one is drawn."""
    checked = SamplingDefaults(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed={seed} is not a signed 64-bit integer; use a smaller one")
    return SamplingParams(
        seed=secrets.randbits(63) if seed is None else seed, **dataclasses.asdict(checked)
    )


def generate(
    model: ModelOption = DEMO,
    prompt: Annotated[str | None, typer.Option(help="One user message.")] = None,
    messages: Annotated[
        Path | None,
        typer.Option(help="JSON file: a list of messages, or an object with messages and tools."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take --prompt as raw text, without the chat format.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens; 0 = up to the context.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = SAMPLING.temperature,
    top_p: Annotated[float, typer.Option()] = SAMPLING.top_p,
    top_k: Annotated[int, typer.Option(help="0 = off.")] = SAMPLING.top_k,
    min_p: Annotated[float, typer.Option(help="0 = off.")] = SAMPLING.min_p,
    seed: Annotated[int | None, typer.Option(help="Repeats the output exactly.")] = None,
    effort: EffortOption = SERVER.default_effort,
    drafter: DrafterOption = DRAFT.drafter,
    drafter_dir: DrafterDirOption = DRAFT.drafter_dir,
    num_draft_tokens: NumDraftOption = DRAFT.num_draft_tokens,
    max_seq_len: MaxSeqLenOption = ENGINE.max_seq_len,
    threads: ThreadsOption = ENGINE.threads,
    as_json: JsonOption = False,
) -> None:
    """Generate one reply in this process and print it."""
    from twining.cli.session import Session, read_messages

    if (prompt is None) == (messages is None):
        raise ConfigError("give exactly one of --prompt and --messages")
    if raw and prompt is None:
        raise ConfigError("--raw needs --prompt; messages always use the chat format")
    if max_tokens < 0:
        raise ConfigError(f"max_tokens={max_tokens} is negative; use 0 for no limit")
    sampling = sampling_params(temperature, top_p, seed, top_k=top_k, min_p=min_p)
    turns, tools = read_messages(messages) if messages is not None else ([], None)
    config = engine_config(
        resolve_model(model, drafter_dir),
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        max_seq_len=max_seq_len,
        threads=threads,
    )
    session = Session.load(config)
    limit = max_tokens or None
    if raw:
        job = session.text_job(prompt or "", sampling=sampling, max_tokens=limit)
    else:
        turns = turns or [{"role": "user", "content": prompt}]
        job = session.chat_job(
            turns, tools=tools, effort=effort, sampling=sampling, max_tokens=limit
        )
    reply = session.run([job])[0]
    if as_json:
        ready = session.engine.ready()
        typer.echo(
            json.dumps(
                report(reply)
                | {
                    "prompt_tokens": len(job.request.prompt_ids),
                    "seed": sampling.seed,
                    "drafter": ready.drafter,
                    "num_draft_tokens": ready.num_draft_tokens,
                },
                ensure_ascii=False,
            )
        )
        return
    for call in reply.output.tool_calls:
        note(f"call {call.name} {call.arguments}")
    if not reply.output.content and not reply.output.tool_calls:
        note(f"no answer: the reasoning took all {len(reply.output.ids)} tokens")
    typer.echo(reply.output.content)


def report(reply: Any) -> dict[str, Any]:
    """The --json object of one reply."""
    output, result = reply.output, reply.result
    return {
        "token_ids": result.token_ids,
        "text": output.content,
        "reasoning": output.reasoning,
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments} for call in output.tool_calls
        ],
        "finish_reason": output.finish_reason,
        "timings": msgspec.to_builtins(result.timings),
        "accepted_length": round(result.accepted_length, 4),
    }
