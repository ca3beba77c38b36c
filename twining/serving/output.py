"""Token ids of one choice to reply text: parsing, stop strings, logprobs, what is kept and counted.

Works token by token, so the result does not depend on how the engine bundles tokens into bursts.
Text is released only when no stop string can swallow it; a match cuts text, ids, logprobs and usage
at the token that completed it, even when white-space rules made the parser show the text later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from twining.engine.request import Delta, TokenLogprob
from twining.serving.parsing import (
    CallArguments,
    CallEnded,
    CallOpened,
    ContentText,
    Event,
    ParsedMessage,
    ParserOptions,
    ReasoningText,
    TokenParser,
    ToolCall,
)
from twining.serving.repeats import RepeatFilter
from twining.serving.sources import ChatSource, Source, TextSource
from twining.serving.stops import Span, StopMatch, StopMatcher, TokenSpans
from twining.serving.structured import Mode
from twining.serving.tokenizer import Tokenizer

StartState = Literal["reasoning", "content"]
PieceKind = Literal["reasoning", "content", "call", "arguments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """logprobs: number of alternatives, -1 for none. min_tokens: no stop string before."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()  # end the sequence; never part of the text
    user_stop_ids: frozenset[int] = frozenset()  # those that the client named
    logprobs: int = -1


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of logprobs: its bytes, log probability, and the best alternatives."""

    data: bytes
    logprob: float
    top: list[tuple[bytes, float]]


@dataclass(slots=True)
class Piece:
    """What a client can see of one step. call: an opening with id and name; arguments: its text."""

    kind: PieceKind
    text: str = ""
    call_index: int = 0
    call_id: str = ""
    name: str = ""
    entries: list[TokenEntry] = field(default_factory=list)


class _Track:
    """One text stream (reasoning or content): what was shown, and which tokens it came from."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.fed_bytes = 0
        self.sent_bytes = 0
        self.spans: list[Span] = []
        self._next = 0  # first span that is not released
        self._last_token = -1

    def feed(self, text: str, spans: TokenSpans) -> None:
        """Text that may be sent later; its spans are remembered."""
        found = spans.text(text, self.fed_bytes)
        self.spans.extend(found)
        self.fed_bytes += sum(span.end - span.start for span in found)

    def send(self, text: str) -> list[Span]:
        """Mark text as sent; the first span of every token that is now fully visible."""
        self.text.append(text)
        self.sent_bytes += len(text.encode())
        fresh: list[Span] = []
        while self._next < len(self.spans) and self.spans[self._next].end <= self.sent_bytes:
            span = self.spans[self._next]
            self._next += 1
            if span.token_index != self._last_token:
                fresh.append(span)
                self._last_token = span.token_index
        return fresh

    def cut_span(self) -> Span | None:
        """The visible part of the token in whose middle the text was cut."""
        if self._next < len(self.spans):
            span = self.spans[self._next]
            if span.start < self.sent_bytes and span.token_index != self._last_token:
                return Span(span.token_index, span.start, self.sent_bytes)
        return None

    def owner(self, byte: int) -> int | None:
        """Index of the token that produced a byte."""
        for span in reversed(self.spans):
            if span.start <= byte < span.end:
                return span.token_index
        return None


class ChoiceOutput:
    """Everything that a reply says about one choice. Feed deltas with `push` until `done`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: OutputOptions,
        source: Source,
        tool_names: frozenset[str] = frozenset(),
    ) -> None:
        self.ids: list[int] = []
        self.done = False
        self.finish_reason: str = ""
        self.stop_reason: str | int | None = None
        self.tool_calls: list[ToolCall] = []
        self.reasoning_only = False
        self.reasoning_tokens = 0
        self.content_entries: list[TokenEntry] = []
        self.reasoning_entries: list[TokenEntry] = []
        self.num_certain_ids = 0  # ids that no later stop string can cut off
        self.outcomes: list[str] = []  # of calls, for metrics: ok, unknown, recovered, truncated
        self._tokenizer = tokenizer
        self._options = options
        self._source = source
        self._tool_names = tool_names
        self._matcher = StopMatcher(options.stops)
        self._spans = TokenSpans()
        self._logprobs: list[TokenLogprob] = []
        self._reasoning = _Track()
        self._content = _Track()

    @classmethod
    def for_chat(
        cls,
        tokenizer: Tokenizer,
        options: OutputOptions,
        *,
        start: StartState,
        tools: Sequence[dict[str, Any]],
        parallel_tool_calls: bool,
        tool_choice: Mode = "auto",
    ) -> "ChoiceOutput":
        """Reasoning, content and calls; tools empty turns call parsing off."""
        parser_options = ParserOptions(
            tools=tools,
            parallel_tool_calls=parallel_tool_calls,
            tool_choice={"type": "function"} if tool_choice == "named" else tool_choice,
        )
        parser = TokenParser(tokenizer, parser_options, start=start)
        names = frozenset(tool["function"]["name"] for tool in tools)
        repeats = RepeatFilter() if tool_choice == "required" else None
        return cls(tokenizer, options, ChatSource(parser, repeats), names)

    @classmethod
    def for_text(
        cls, tokenizer: Tokenizer, options: OutputOptions, *, skip_special: bool
    ) -> "ChoiceOutput":
        """Raw completions: everything is content."""
        return cls(tokenizer, options, TextSource(tokenizer, skip_special))

    @property
    def has_logprobs(self) -> bool:
        return self._options.logprobs >= 0

    @property
    def reasoning(self) -> str:
        """All reasoning shown so far."""
        return "".join(self._reasoning.text)

    @property
    def content(self) -> str:
        """All content shown so far."""
        return "".join(self._content.text)

    def push(self, delta: Delta) -> list[Piece]:
        """Pieces of one delta, neighbours of one kind merged. Tokens after the end are dropped."""
        pieces: list[Piece] = []
        for position, token in enumerate(delta.token_ids):
            if self.done:
                break
            if token in self._options.stop_ids:
                self.ids.append(token)
                break
            entry = delta.logprobs[position] if position < len(delta.logprobs) else None
            self._token(token, entry, pieces)
        if delta.kind == "finished" and not self.done:
            self._finished(delta, pieces)
        return pieces

    def _token(self, token: int, logprob: TokenLogprob | None, pieces: list[Piece]) -> None:
        index = len(self.ids)
        self.ids.append(token)
        self.reasoning_tokens += self._source.is_reasoning  # the closing marker is fed in reasoning
        if self._needs_spans:
            self._spans.token(index, self._tokenizer.token_bytes(token))
        if logprob is not None:
            self._logprobs.append(logprob)
        self._events(self._source.token(token), pieces)
        if not self.done and self._source.wants_stop:
            self._end("eos", pieces)
        if not self._options.stops:
            self.num_certain_ids = len(self.ids)

    @property
    def _needs_spans(self) -> bool:
        return self.has_logprobs or bool(self._options.stops)

    def _finished(self, delta: Delta, pieces: list[Piece]) -> None:
        if delta.stop_id >= 0 and (not self.ids or self.ids[-1] != delta.stop_id):
            self.ids.append(delta.stop_id)
        if delta.stop_id in self._options.user_stop_ids:
            self.stop_reason = delta.stop_id
        self._end("length" if delta.finish_reason == "length" else "eos", pieces)

    def _end(self, end: Literal["eos", "length"], pieces: list[Piece]) -> None:
        """Flush the parser, then what waited for a stop string; set the finish reason."""
        self._events(self._source.finish(end), pieces)
        if not self.done:
            self._send_content(self._matcher.flush(), pieces)
            message = self._source.message()
            self._settle("length" if end == "length" else "stop", message)

    def _settle(self, reason: str, message: ParsedMessage | None) -> None:
        self.done = True
        self.finish_reason = reason
        if message is not None:
            self.finish_reason = message.finish_reason
            self.reasoning_only = message.reasoning_only
            for known, final in zip(self.tool_calls, message.tool_calls, strict=False):
                known.is_complete = final.is_complete
        for call in self.tool_calls:
            if not call.is_complete:
                self.outcomes.append("truncated")
        self.num_certain_ids = len(self.ids)

    def _events(self, events: Sequence[Event], pieces: list[Piece]) -> None:
        for event in events:
            if self.done:
                return  # a stop string matched: the rest of this token is not part of the reply
            match event:
                case ReasoningText():
                    self._show(self._reasoning, "reasoning", event.text, pieces)
                case ContentText():
                    self._content_text(event.text, pieces)
                case CallOpened():
                    self._send_content(self._matcher.flush(), pieces)
                    self._spans.clear()
                    self.tool_calls.append(ToolCall(event.id, event.name))
                    piece = Piece("call", "", event.index, event.id, event.name)
                    pieces.append(piece)
                case CallArguments():
                    self._spans.clear()
                    self.tool_calls[event.index].arguments += event.text
                    last = pieces[-1] if pieces else None
                    if last and last.kind == "arguments" and last.call_index == event.index:
                        last.text += event.text
                    else:
                        pieces.append(Piece("arguments", event.text, event.index))
                case CallEnded():
                    self._spans.clear()
                    self.tool_calls[event.index].is_complete = True
                    is_known = self.tool_calls[event.index].name in self._tool_names
                    good = "ok" if is_known else "unknown"
                    self.outcomes.append("recovered" if event.is_recovered else good)

    def _content_text(self, text: str, pieces: list[Piece]) -> None:
        if self._needs_spans:
            self._content.feed(text, self._spans)
        if len(self.ids) <= self._options.min_tokens:
            self._send_content(self._matcher.skip(text), pieces)
            return
        certain, match = self._matcher.feed(text)
        if match is not None and self._options.include_stop:
            certain += match.text
        self._send_content(certain, pieces)
        if match is not None:
            self._cut(match, pieces)

    def _send_content(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        self._show(self._content, "content", text, pieces, is_fed=True)
        if self._options.stops:
            owner = self._content.owner(self._content.sent_bytes - 1)
            self.num_certain_ids = max(self.num_certain_ids, (owner or 0) + 1)

    def _show(
        self,
        track: _Track,
        kind: Literal["reasoning", "content"],
        text: str,
        pieces: list[Piece],
        *,
        is_fed: bool = False,
    ) -> None:
        if self._needs_spans and not is_fed:
            track.feed(text, self._spans)
        fresh = track.send(text)
        entries = [self._entry(span.token_index) for span in fresh] if self.has_logprobs else []
        kept = self.reasoning_entries if kind == "reasoning" else self.content_entries
        kept.extend(entries)
        last = pieces[-1] if pieces else None
        if last is not None and last.kind == kind:
            last.text += text
            last.entries.extend(entries)
        else:
            pieces.append(Piece(kind, text, entries=entries))

    def _entry(self, index: int, size: int | None = None) -> TokenEntry:
        """The entry of one kept token; size cuts its bytes."""
        data = self._tokenizer.token_bytes
        value = self._logprobs[index]
        top = zip(value.top_ids, value.top_logprobs, strict=True)
        return TokenEntry(
            data(self.ids[index])[:size],
            value.logprob,
            [(data(i), p) for i, p in top][: max(self._options.logprobs, 0)],
        )

    def _cut(self, match: StopMatch, pieces: list[Piece]) -> None:
        """End at a stop string: the token that completed it is the last one kept."""
        self.stop_reason = match.text
        span = self._content.cut_span()
        if span is not None and self.has_logprobs:
            entry = self._entry(span.token_index, span.end - span.start)
            self.content_entries.append(entry)
            if pieces and pieces[-1].kind == "content":
                pieces[-1].entries.append(entry)
            else:
                pieces.append(Piece("content", "", entries=[entry]))
        matched = match.text if not self._options.include_stop else ""
        last = self._content.owner(self._content.sent_bytes + len(matched.encode()) - 1)
        if last is not None:
            self.ids = self.ids[: last + 1]
        self._settle("stop", None)
