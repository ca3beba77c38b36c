"""POST /v1/chat/completions: whole replies and streams (spec/api.md 5A, 6)."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from twining.engine.request import Timings, TokenLogprob
from twining.errors import RequestError
from twining.serving.context import ServerContext
from twining.serving.generation import Choice, Generation, News
from twining.serving.http_errors import error_object
from twining.serving.openai.bodies import ChatBody
from twining.serving.openai.endpoint import Endpoint, reply_id
from twining.serving.openai.prepare import Prepared, prepare_chat
from twining.serving.openai.replies import finite, now, timings, usage
from twining.serving.output import Piece, TokenEntry
from twining.serving.sse import DONE, event

PROGRESS_INTERVAL_S = 0.5


class ChatEndpoint(Endpoint):
    """Chat completions."""

    def prepare(self, context: ServerContext, data: dict[str, Any]) -> Prepared:
        """See prepare_chat."""
        return prepare_chat(context, data)

    async def whole(self, request: Request, prepared: Prepared, generation: Generation) -> Response:
        """The reply object once every choice has ended."""
        body = prepared.body
        assert isinstance(body, ChatBody)
        shape = _Shape(self.context, prepared, generation)
        async for item in generation.news():
            shape.latest[item.choice.index] = item
        reply: dict[str, Any] = {
            "id": shape.id,
            "object": "chat.completion",
            "created": shape.created,
            "model": prepared.model,
            "system_fingerprint": self.context.fingerprint,
            "choices": [_whole_choice(prepared, choice) for choice in generation.choices],
            "usage": shape.usage(),
            "timings": shape.timings(generation.choices),
        }
        if body.return_token_ids:
            reply["prompt_token_ids"] = prepared.prompts[0]
        if body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_entries(
                self.context, prepared.prompts[0], generation.choices[0].prompt_logprobs
            )
        return self.json(reply)

    async def stream(
        self,
        request: Request,
        prepared: Prepared,
        generation: Generation,
        news: AsyncIterator[News],
    ) -> AsyncGenerator[bytes, None]:
        """Encoded events in the order of spec 6.2."""
        shape = _Shape(self.context, prepared, generation)
        try:
            async for item in news:
                for chunk in shape.chunks(item):
                    yield event(chunk)
            if shape.include_usage:
                yield event(shape.usage_chunk())
        except RequestError as err:
            yield event(error_object(err))
        yield DONE


def _whole_choice(prepared: Prepared, choice: Choice) -> dict[str, Any]:
    output = choice.output
    reasoning: str | None = prepared.partial_reasoning + output.reasoning
    if not prepared.show_reasoning or not reasoning:
        reasoning = None
    content: str | None = prepared.partial_content + output.content
    if output.tool_calls and not content:
        content = None
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        "refusal": None,
    }
    if output.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in output.tool_calls
        ]
    result: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs_object(output.content_entries, output.reasoning_entries)
        if output.has_logprobs
        else None,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.reasoning_only:
        result["reasoning_only"] = True
    if prepared.body.return_token_ids:
        result["token_ids"] = output.ids
    return result


def logprobs_object(
    content: list[TokenEntry], reasoning: list[TokenEntry]
) -> dict[str, list[dict[str, Any]]]:
    """The chat form of logprobs (spec 5A)."""
    return {
        "content": [_entry(entry) for entry in content],
        "reasoning": [_entry(entry) for entry in reasoning],
    }


def _entry(entry: TokenEntry) -> dict[str, Any]:
    return {
        **_token(entry.data, entry.logprob),
        "top_logprobs": [_token(data, logprob) for data, logprob in entry.top],
    }


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": data.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(data),
    }


@dataclass(slots=True)
class _Shape:
    """Turns news into chunks; remembers what was already sent."""

    context: ServerContext
    prepared: Prepared
    generation: Generation
    id: str = ""
    created: int = field(default_factory=now)
    progress_at: float = -1e9
    sent_ids: dict[int, int] = field(default_factory=dict)
    has_sent_prompt: bool = False
    admitted: set[int] = field(default_factory=set)
    latest: dict[int, News] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.id or reply_id("chatcmpl-", self.prepared.body)

    @property
    def body(self) -> ChatBody:
        assert isinstance(self.prepared.body, ChatBody)
        return self.prepared.body

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and options.include_usage

    def usage(self) -> dict[str, Any]:
        """Usage of all choices, as far as their news was read (all of it for a whole reply)."""
        cached = [choice.current_timings().cached_tokens for choice in self.generation.choices]
        return usage(
            self.generation.prompt_tokens,
            sum(item.num_ids for item in self.latest.values()),
            sum(item.reasoning_tokens for item in self.latest.values()),
            min(cached),
        )

    def timings(self, choices: list[Choice]) -> dict[str, Any]:
        """Timings over the given choices."""
        parts: list[Timings] = [choice.current_timings() for choice in choices]
        return timings(
            parts,
            prompt_tokens=self.generation.prompt_tokens,
            completion_tokens=sum(self.latest[choice.index].num_ids for choice in choices),
            is_drafting=self.context.is_drafting,
        )

    def chunks(self, item: News) -> list[dict[str, Any]]:
        """Chunks for one piece of news."""
        choice = item.choice
        self.latest[choice.index] = item
        chunks: list[dict[str, Any]] = []
        if choice.index not in self.admitted and item.kind != "progress":
            self.admitted.add(choice.index)
            chunks.append(self._choice_chunk(choice, {"role": "assistant", "content": ""}))
            chunks += self._echo(choice)
        if item.kind == "progress":
            chunks += self._progress(item)
        for piece in item.pieces:
            delta = self._delta(piece)
            if delta is not None:
                chunks.append(self._choice_chunk(choice, delta, piece=piece))
        if item.kind == "finished":
            chunks.append(self._finish(choice))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk with include_usage."""
        return {
            **self._base(),
            "choices": [],
            "usage": self.usage(),
            "timings": self.timings(self.generation.choices),
        }

    def _base(self) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.prepared.model,
            "system_fingerprint": self.context.fingerprint,
        }
        options = self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self.usage()
        elif self.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice_chunk(
        self, choice: Choice, delta: dict[str, Any], *, piece: Piece | None = None
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._base()
        if piece is not None and piece.entries:
            is_reasoning = piece.kind == "reasoning"
            entry["logprobs"] = logprobs_object(
                [] if is_reasoning else piece.entries, piece.entries if is_reasoning else []
            )
        if self.body.return_token_ids:
            if not self.has_sent_prompt:
                self.has_sent_prompt = True
                chunk["prompt_token_ids"] = self.prepared.prompts[0]
            entry["token_ids"] = self._new_ids(choice, self.latest[choice.index].num_ids)
        if self.body.timings_per_token and piece is not None:
            chunk["timings"] = self.timings([choice])
        chunk["choices"] = [entry]
        return chunk

    def _new_ids(self, choice: Choice, until: int) -> list[int]:
        start = self.sent_ids.get(choice.index, 0)
        self.sent_ids[choice.index] = max(start, until)
        return choice.output.ids[start:until]

    def _delta(self, piece: Piece) -> dict[str, Any] | None:
        if piece.kind == "reasoning":
            if not self.prepared.show_reasoning:
                return None
            return {"reasoning_content": piece.text, "reasoning": piece.text, "content": None}
        if piece.kind == "content":
            return {"content": piece.text}
        call: dict[str, Any] = {"index": piece.call_index, "function": {"arguments": piece.text}}
        if piece.kind == "call":
            call = {
                "index": piece.call_index,
                "id": piece.call_id,
                "type": "function",
                "function": {"name": piece.name, "arguments": piece.text},
            }
        return {"content": None, "tool_calls": [call]}

    def _echo(self, choice: Choice) -> list[dict[str, Any]]:
        """The partial reply that a continuation with echo starts from."""
        chunks = []
        for piece in (
            Piece("reasoning", self.prepared.partial_reasoning),
            Piece("content", self.prepared.partial_content),
        ):
            delta = self._delta(piece) if piece.text else None
            if delta is not None:
                chunks.append(self._choice_chunk(choice, delta))
        return chunks

    def _progress(self, item: News) -> list[dict[str, Any]]:
        elapsed = self.generation.elapsed_s
        if not self.body.return_progress or elapsed - self.progress_at < PROGRESS_INTERVAL_S:
            return []
        self.progress_at = elapsed
        progress = {
            "total": self.generation.prompt_tokens,
            "cache": item.choice.current_timings().cached_tokens,
            "processed": item.prompt_done,
            "time_ms": round(elapsed * 1000, 3),
        }
        return [{**self._base(), "choices": [], "prompt_progress": progress}]

    def _finish(self, choice: Choice) -> dict[str, Any]:
        output = choice.output
        chunk = self._choice_chunk(choice, {"content": None})
        entry = chunk["choices"][0]
        entry["finish_reason"] = output.finish_reason
        entry["stop_reason"] = output.stop_reason
        if output.reasoning_only:
            entry["reasoning_only"] = True
        if self.body.return_token_ids:
            entry["token_ids"] += self._new_ids(choice, len(output.ids))
        if not self.include_usage:
            chunk["timings"] = self.timings([choice])
        return chunk


def prompt_entries(
    context: ServerContext, ids: list[int], logprobs: list[TokenLogprob | None]
) -> list[dict[str, Any] | None]:
    """prompt_logprobs: one object per prompt token, by token id; the first token has none."""
    result: list[dict[str, Any] | None] = []
    decode = context.tokenizer.token_bytes
    for token, entry in zip(ids, logprobs, strict=False):
        if entry is None:
            result.append(None)
            continue
        ranks = {top: rank for rank, top in enumerate(entry.top_ids, 1)}
        values = dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) | {token: entry.logprob}
        result.append(
            {
                str(token_id): {
                    "logprob": finite(value),
                    "rank": ranks.get(token_id),
                    "decoded_token": decode(token_id).decode(errors="replace"),
                }
                for token_id, value in values.items()
            }
        )
    return result
