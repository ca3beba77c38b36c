"""POST /v1/completions: raw text in, raw text out (spec/api.md 8)."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from twining.engine.request import TokenLogprob
from twining.errors import RequestError
from twining.serving.context import ServerContext
from twining.serving.generation import Choice, Generation, News
from twining.serving.http_errors import error_object
from twining.serving.openai.bodies import CompletionBody
from twining.serving.openai.chat import prompt_entries
from twining.serving.openai.endpoint import Endpoint, reply_id
from twining.serving.openai.prepare import Prepared, prepare_completion
from twining.serving.openai.replies import finite, now, timings, usage
from twining.serving.output import TokenEntry
from twining.serving.sse import DONE, event


class CompletionEndpoint(Endpoint):
    """Raw completions."""

    def prepare(self, context: ServerContext, data: dict[str, Any]) -> Prepared:
        """See prepare_completion."""
        return prepare_completion(context, data)

    async def whole(self, request: Request, prepared: Prepared, generation: Generation) -> Response:
        """The reply object once every choice has ended."""
        shape = _Shape(self.context, prepared, generation)
        async for item in generation.news():
            shape.latest[item.choice.index] = item
        reply = shape.base() | {
            "choices": [self._choice(prepared, choice) for choice in generation.choices],
            "usage": shape.usage(),
            "timings": shape.timings(generation.choices),
        }
        return self.json(reply)

    async def stream(
        self,
        request: Request,
        prepared: Prepared,
        generation: Generation,
        news: AsyncIterator[News],
    ) -> AsyncGenerator[bytes, None]:
        """Encoded events; an empty first chunk per choice marks the admission."""
        shape = _Shape(self.context, prepared, generation)
        try:
            async for item in news:
                for chunk in shape.chunks(item):
                    yield event(chunk)
            if shape.include_usage:
                yield event(
                    shape.base()
                    | {
                        "choices": [],
                        "usage": shape.usage(),
                        "timings": shape.timings(generation.choices),
                    }
                )
        except RequestError as err:
            yield event(error_object(err))
        yield DONE

    def _choice(self, prepared: Prepared, choice: Choice) -> dict[str, Any]:
        body = prepared.body
        assert isinstance(body, CompletionBody)
        output = choice.output
        prompt_ids = choice.request.prompt_ids
        entries: list[TokenEntry | None] = list(output.content_entries)
        echoed = ""
        if body.echo:
            echoed = shown_prompt(self.context, choice, body)
            entries = [*self._echo_entries(prompt_ids, choice.prompt_logprobs), *entries]
        result: dict[str, Any] = {
            "index": choice.index,
            "text": echoed + output.content,
            "logprobs": None if body.logprobs is None else self._logprobs(prompt_ids, entries),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if body.return_token_ids:
            result |= {"prompt_token_ids": prompt_ids, "token_ids": output.ids}
        if body.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_entries(
                self.context, prompt_ids, choice.prompt_logprobs
            )
        return result

    def _echo_entries(
        self, prompt_ids: list[int], logprobs: list[TokenLogprob | None]
    ) -> list[TokenEntry | None]:
        decode = self.context.tokenizer.token_bytes
        return [
            TokenEntry(
                decode(token),
                entry.logprob,
                [(decode(i), p) for i, p in zip(entry.top_ids, entry.top_logprobs, strict=True)],
            )
            if entry is not None
            else None
            for token, entry in zip(prompt_ids, logprobs, strict=False)
        ]

    def _logprobs(self, prompt_ids: list[int], entries: list[TokenEntry | None]) -> dict[str, Any]:
        first = self.context.tokenizer.token_bytes(prompt_ids[0])
        return logprobs_lists(entries, first, 0)[0]


def shown_prompt(context: ServerContext, choice: Choice, body: CompletionBody) -> str:
    """The prompt as `echo` shows it."""
    ids = choice.request.prompt_ids
    return context.tokenizer.decode(ids, skip_special=body.skip_special_tokens)


def logprobs_lists(
    entries: list[TokenEntry | None], first: bytes, offset: int
) -> tuple[dict[str, Any], int]:
    """The four lists of spec 8, and the text offset after them. A None entry stands for `first`."""
    lists: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for entry in entries:
        text = (first if entry is None else entry.data).decode(errors="replace")
        lists["tokens"].append(text)
        lists["text_offset"].append(offset)
        offset += len(text)
        if entry is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            continue
        lists["token_logprobs"].append(finite(entry.logprob))
        best = {data.decode(errors="replace"): finite(p) for data, p in reversed(entry.top)}
        lists["top_logprobs"].append(best or None)
    return lists, offset


@dataclass(slots=True)
class _Shape:
    """Chunks and shared members of one reply."""

    context: ServerContext
    prepared: Prepared
    generation: Generation
    id: str = ""
    created: int = field(default_factory=now)
    opened: set[int] = field(default_factory=set)
    latest: dict[int, News] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    sent_ids: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.id or reply_id("cmpl-", self.prepared.body)

    @property
    def body(self) -> CompletionBody:
        assert isinstance(self.prepared.body, CompletionBody)
        return self.prepared.body

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and options.include_usage

    def base(self) -> dict[str, Any]:
        """Members that every chunk and the whole reply share."""
        base: dict[str, Any] = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.prepared.model,
            "system_fingerprint": self.context.fingerprint,
        }
        options = self.body.stream_options
        if self.body.stream and options is not None and options.continuous_usage_stats:
            base["usage"] = self.usage()
        elif self.body.stream and self.include_usage:
            base["usage"] = None
        return base

    def usage(self) -> dict[str, Any]:
        """Each prompt counted once, completions summed."""
        choices = self.generation.choices
        return usage(
            sum(map(len, self.prepared.prompts)),
            sum(item.num_ids for item in self.latest.values()),
            0,
            sum(choice.current_timings().cached_tokens for choice in choices[:: self.body.n]),
        )

    def timings(self, choices: list[Choice]) -> dict[str, Any]:
        """Timings over the given choices."""
        return timings(
            [choice.current_timings() for choice in choices],
            prompt_tokens=max(len(choice.request.prompt_ids) for choice in choices),
            completion_tokens=sum(self.latest[choice.index].num_ids for choice in choices),
            is_drafting=self.context.is_drafting,
        )

    def chunks(self, item: News) -> list[dict[str, Any]]:
        """Chunks for one piece of news."""
        choice = item.choice
        self.latest[choice.index] = item
        chunks = []
        if choice.index not in self.opened and item.kind != "progress":
            self.opened.add(choice.index)
            echoed = shown_prompt(self.context, choice, self.body) if self.body.echo else ""
            chunks.append(self._chunk(choice, echoed, []))
        chunks += [self._chunk(choice, piece.text, piece.entries) for piece in item.pieces]
        if item.kind == "finished":
            chunk = self._chunk(choice, "", [], is_last=True)
            if not self.include_usage:
                chunk["timings"] = self.timings([choice])
            chunks.append(chunk)
        return chunks

    def _chunk(
        self, choice: Choice, text: str, entries: list[TokenEntry], *, is_last: bool = False
    ) -> dict[str, Any]:
        output = choice.output
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": output.finish_reason if is_last else None,
            "stop_reason": output.stop_reason if is_last else None,
        }
        if entries:
            offset = self.offsets.get(choice.index, 0)
            entry["logprobs"], self.offsets[choice.index] = logprobs_lists(
                list(entries), b"", offset
            )
        if self.body.return_token_ids:
            start = self.sent_ids.get(choice.index, 0)
            until = self.latest[choice.index].num_ids
            entry["token_ids"] = output.ids[start:until]
            self.sent_ids[choice.index] = max(start, until)
            if not start and not text and not is_last:
                entry["prompt_token_ids"] = choice.request.prompt_ids
        chunk = self.base() | {"choices": [entry]}
        if self.body.timings_per_token and text:
            chunk["timings"] = self.timings([choice])
        return chunk
