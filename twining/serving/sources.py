"""Where parser events come from: a chat output with markers, or raw text.

One token in, its events out; the parser's own end and message afterwards.
"""

from typing import Literal, Protocol

from twining.serving.parsing import ContentText, Event, ParsedMessage, TokenParser
from twining.serving.repeats import RepeatFilter
from twining.serving.tokenizer import IncrementalDecoder, Tokenizer


class Source(Protocol):
    """Tokens in, parser events out."""

    @property
    def is_reasoning(self) -> bool:
        """True while the next ordinary token would be reasoning."""

    @property
    def wants_stop(self) -> bool:
        """True when the reply is complete although the model goes on."""

    def token(self, token_id: int) -> list[Event]:
        """Events of one token that is not a stop token."""

    def finish(self, end: Literal["eos", "length"]) -> list[Event]:
        """Events at the end of output."""

    def message(self) -> ParsedMessage | None:
        """The parsed whole after finish; None for raw text."""


class ChatSource:
    """Reasoning, content and calls of a chat reply; repeats: the filter of forced calls, if any."""

    def __init__(self, parser: TokenParser, repeats: RepeatFilter | None = None) -> None:
        self._parser = parser
        self._repeats = repeats

    @property
    def is_reasoning(self) -> bool:
        return self._parser.is_reasoning

    @property
    def wants_stop(self) -> bool:
        is_over = self._repeats is not None and self._repeats.is_over
        return is_over or self._parser.stop_generation

    def token(self, token_id: int) -> list[Event]:
        return self._filtered(self._parser.feed_token(token_id))

    def finish(self, end: Literal["eos", "length"]) -> list[Event]:
        return self._filtered(self._parser.finish(end))

    def message(self) -> ParsedMessage | None:
        return self._parser.message()

    def _filtered(self, events: list[Event]) -> list[Event]:
        return events if self._repeats is None else self._repeats.take(events)


class TextSource:
    """Everything is content; special tokens are dropped or shown."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden_ids if skip_special else frozenset()
        self._decoder = IncrementalDecoder()

    @property
    def is_reasoning(self) -> bool:
        return False

    @property
    def wants_stop(self) -> bool:
        return False

    def token(self, token_id: int) -> list[Event]:
        if token_id in self._hidden:
            return []
        text = self._decoder.feed(self._tokenizer.token_bytes(token_id))
        return [ContentText(text)] if text else []

    def finish(self, end: Literal["eos", "length"]) -> list[Event]:
        return []

    def message(self) -> ParsedMessage | None:
        return None
