"""An engine in this process for the offline commands: messages or raw text in, parsed replies out.

Uses the server's own preparation and output code, so a command shows what the server would answer.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twining.config import Effort, EngineConfig
from twining.engine.offline import Result, StepEngine
from twining.engine.offline import generate as run_requests
from twining.engine.request import Delta, Request, SamplingParams
from twining.errors import ConfigError, EngineError
from twining.serving.chat_format import build_prompt
from twining.serving.output import ChoiceOutput, OutputOptions, Piece
from twining.serving.parsing import start_state
from twining.serving.tokenizer import Tokenizer

MAX_MESSAGES_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One generation: token ids, how to sample, how to read the output."""

    request: Request
    output: ChoiceOutput


@dataclass(slots=True, kw_only=True)
class Reply:
    """A finished job."""

    output: ChoiceOutput
    result: Result


@dataclass(slots=True)
class Session:
    """A loaded model. Not thread-safe."""

    engine: StepEngine
    tokenizer: Tokenizer
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def load(cls, config: EngineConfig) -> "Session":
        """Raises ConfigError, CheckpointError or EngineError with one line."""
        from twining.engine.loading import load_engine

        tokenizer = Tokenizer.load(config.model_dir)
        return cls(load_engine(config), tokenizer)

    def chat_job(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        effort: Effort = "high",
        sampling: SamplingParams,
        max_tokens: int | None,
    ) -> Job:
        """A chat turn. Raises RequestError for unusable messages, ConfigError if too long."""
        body = {"messages": messages, "tools": tools}
        prompt = build_prompt(body, default_effort=effort)
        if prompt.media:
            raise ConfigError("messages hold pictures or video; this version takes text only")
        ids = self.tokenizer.encode_segments(prompt.segments)
        start = start_state(ids, self.tokenizer.markers) or "content"
        options = OutputOptions(stop_ids=frozenset(self.tokenizer.stop_ids))
        output = ChoiceOutput.for_chat(
            self.tokenizer, options, start=start, tools=prompt.tools, parallel_tool_calls=True
        )
        return self._job(ids, sampling, max_tokens, output)

    def text_job(self, text: str, *, sampling: SamplingParams, max_tokens: int | None) -> Job:
        """A raw completion; markers in the text are recognised."""
        ids = self.tokenizer.encode_with_markers(text)
        if not ids:
            raise ConfigError("the prompt is empty; give some text")
        options = OutputOptions(stop_ids=frozenset(self.tokenizer.stop_ids))
        output = ChoiceOutput.for_text(self.tokenizer, options, skip_special=True)
        return self._job(ids, sampling, max_tokens, output)

    def _job(
        self,
        ids: list[int],
        sampling: SamplingParams,
        max_tokens: int | None,
        output: ChoiceOutput,
    ) -> Job:
        limit = self.engine.ready().max_seq_len
        if len(ids) >= limit:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, max_seq_len is {limit}; shorten it or raise"
                " --max-seq-len"
            )
        room = limit - len(ids)
        request = Request(
            id=f"job-{next(self._numbers)}",
            prompt_ids=ids,
            sampling=sampling,
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            stop_ids=self.tokenizer.stop_ids,
        )
        return Job(request=request, output=output)

    def run(
        self, jobs: list[Job], *, on_piece: Callable[[Piece], None] | None = None
    ) -> list[Reply]:
        """Run jobs together. Raises EngineError if one of them fails."""
        outputs = {job.request.id: job.output for job in jobs}

        def take(delta: Delta) -> None:
            if delta.kind in ("tokens", "finished"):
                for piece in outputs[delta.request_id].push(delta):
                    if on_piece is not None:
                        on_piece(piece)

        results = run_requests(self.engine, [job.request for job in jobs], on_delta=take)
        for result in results:
            if result.finish_reason == "error":
                raise EngineError(f"generation failed: {result.message or result.code}")
        return [
            Reply(output=job.output, result=result)
            for job, result in zip(jobs, results, strict=True)
        ]


def read_messages(path: Path) -> tuple[list[Any], list[Any] | None]:
    """(messages, tools) from a JSON file: a list of messages, or an object with both."""
    try:
        if path.stat().st_size > MAX_MESSAGES_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_MESSAGES_BYTES >> 20} MiB; shorten it")
        value = json.loads(path.read_bytes())
    except OSError as err:
        raise ConfigError(f"{path}: {err.strerror}; check the path") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not valid JSON; give a list of messages") from None
    tools = None
    if isinstance(value, dict):
        tools, value = value.get("tools"), value.get("messages")
    if not isinstance(value, list) or not value or not isinstance(tools, list | None):
        raise ConfigError(f"{path} holds no list of messages; give [{{role, content}}, ...]")
    return value, tools
