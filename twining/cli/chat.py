"""`twining chat`: a conversation in the terminal, streamed, with the reasoning dimmed."""

import sys
from typing import Annotated, Any

import typer

from twining.cli.generate import SAMPLING, sampling_params
from twining.cli.options import (
    DEMO,
    DRAFT,
    ENGINE,
    SERVER,
    DrafterDirOption,
    DrafterOption,
    EffortOption,
    MaxSeqLenOption,
    ModelOption,
    NumDraftOption,
    ThreadsOption,
    engine_config,
    note,
    resolve_model,
)
from twining.errors import ConfigError, RequestError

HELP = "/reset starts anew, /quit or end of input leaves"


def chat(
    model: ModelOption = DEMO,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per reply; 0 = no limit.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = SAMPLING.temperature,
    top_p: Annotated[float, typer.Option()] = SAMPLING.top_p,
    seed: Annotated[int | None, typer.Option(help="Repeats replies exactly.")] = None,
    effort: EffortOption = SERVER.default_effort,
    drafter: DrafterOption = DRAFT.drafter,
    drafter_dir: DrafterDirOption = DRAFT.drafter_dir,
    num_draft_tokens: NumDraftOption = DRAFT.num_draft_tokens,
    max_seq_len: MaxSeqLenOption = ENGINE.max_seq_len,
    threads: ThreadsOption = ENGINE.threads,
) -> None:
    """Chat with a model in the terminal."""
    from twining.cli.session import Session

    if max_tokens < 0:
        raise ConfigError(f"max_tokens={max_tokens} is negative; use 0 for no limit")
    sampling = sampling_params(temperature, top_p, seed)
    config = engine_config(
        resolve_model(model, drafter_dir),
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        max_seq_len=max_seq_len,
        threads=threads,
    )
    session = Session.load(config)
    note(f"{model}: {HELP}")
    start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    history = list(start)
    while (line := _read()) is not None:
        if line == "/quit":
            return
        if line == "/reset":
            history = list(start)
            note("new conversation")
            continue
        if line.startswith("/"):
            note(HELP)
            continue
        if not line:
            continue
        turn = {"role": "user", "content": line}
        try:
            job = session.chat_job(
                [*history, turn], effort=effort, sampling=sampling, max_tokens=max_tokens or None
            )
        except (ConfigError, RequestError) as err:
            note(f"{err} (/reset starts anew)")
            continue
        output = session.run([job], on_piece=_Printer())[0].output
        sys.stdout.write("\n")
        history += [
            turn,
            {
                "role": "assistant",
                "content": output.content,
                "reasoning_content": output.reasoning,
            },
        ]


def _read() -> str | None:
    """One line from the user, None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


class _Printer:
    """Writes pieces as they come; reasoning is dimmed on a terminal and left out elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._was_reasoning = False

    def __call__(self, piece: Any) -> None:
        is_reasoning = piece.kind == "reasoning"
        if self._is_terminal:
            if is_reasoning:
                sys.stdout.write(f"\x1b[2m{_printable(piece.text)}\x1b[0m")
            elif self._was_reasoning:
                sys.stdout.write("\n")
        if not is_reasoning:
            sys.stdout.write(_printable(piece.name + " " if piece.kind == "call" else piece.text))
        self._was_reasoning = is_reasoning
        sys.stdout.flush()


def _printable(text: str) -> str:
    """Text without control characters that could steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())
