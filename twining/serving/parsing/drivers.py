"""Two ways to feed the machine: by token ids (service) and by characters (engines without ids).

With ids only the single marker token is structure; the same letters spelled with ordinary tokens
are text (spec/chat_format.md 8.2).
"""

import re
from collections.abc import Iterable, Sequence

from twining.serving.parsing.events import (
    CallOpened,
    Channel,
    ContentText,
    End,
    Event,
    Marker,
    ParsedMessage,
    ParserOptions,
    ReasoningText,
    StartState,
)
from twining.serving.parsing.machine import OutputParser
from twining.serving.tokenizer import IncrementalDecoder, Markers, Tokenizer

_MARKER = re.compile("|".join(re.escape(marker.value) for marker in Marker))
# Every proper prefix of a marker: text ending in one may still become the marker.
_PREFIXES = frozenset(m.value[:end] for m in Marker for end in range(1, len(m.value)))
_LONGEST = max(len(marker.value) for marker in Marker) - 1


def start_state(prompt_ids: Sequence[int], markers: Markers) -> StartState | None:
    """Where the output begins, from the prompt's tail (spec 7); None: no chat turn, no parsing."""
    for token_id in reversed(prompt_ids):
        if token_id == markers.think_close:
            # Before any role marker, so it belongs to the last assistant turn if there is one.
            is_chat = markers.assistant in prompt_ids
            return "content" if is_chat else None
        if token_id == markers.assistant:
            return "reasoning"
    return None


class TokenParser:
    """Parses sampled token ids. Stop tokens need not be fed; all hidden tokens are skipped.

    `channels[i]` says where the text of the i-th fed token went so far; "none" until it is known
    (held white space, an undecided call) and for markers and dropped tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, options: ParserOptions | None = None, *, start: StartState
    ) -> None:
        self._tokenizer = tokenizer
        self._machine = OutputParser(options, start=start)
        self._markers = dict(zip(tokenizer.markers.structure_ids, Marker, strict=True))
        self._decoder = IncrementalDecoder()
        self._undecoded: list[int] = []  # ordinals of tokens that hold the unfinished character
        self._fed_in_reasoning = bytearray()  # per token: the machine was in reasoning before it
        self.channels: list[Channel] = []

    @property
    def stop_generation(self) -> bool:
        """True when the server must end generation (parallel_tool_calls false, one call ended)."""
        return self._machine.stop_generation

    @property
    def is_reasoning(self) -> bool:
        """True while the next ordinary token would be reasoning."""
        return self._machine.is_reasoning

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its closing marker included (for `usage`)."""
        pairs = zip(self._fed_in_reasoning, self.channels, strict=True)
        return sum(bool(fed) and channel != "call" for fed, channel in pairs)

    def feed(self, token_ids: Iterable[int]) -> list[Event]:
        """Events of several tokens; equal to feeding them one by one."""
        return [event for token_id in token_ids for event in self.feed_token(token_id)]

    def feed_token(self, token_id: int) -> list[Event]:
        """Events of one sampled token."""
        ordinal = len(self.channels)
        self.channels.append("none")
        self._fed_in_reasoning.append(self._machine.is_reasoning)
        marker = self._markers.get(token_id)
        events: list[Event] = []
        if marker is not None:
            self._drop_unfinished()
            events = self._machine.feed_marker(marker, (ordinal,))
        elif token_id in self._tokenizer.hidden_ids:
            self._drop_unfinished()
        else:
            text = self._decoder.feed(self._tokenizer.token_bytes(token_id))
            self._undecoded.append(ordinal)
            if text:
                tokens = tuple(self._undecoded)
                self._undecoded = [ordinal] if self._decoder.has_pending else []
                events = self._machine.feed_text(text, tokens)
        self._note(events)
        if self._machine.is_in_call and marker is None:
            self.channels[ordinal] = "call"
        return events

    def finish(self, end: End) -> list[Event]:
        """Last events. end: "eos" for a stop token or the server's own stop, "length" for a cut."""
        self._drop_unfinished()
        events = self._machine.finish(end)
        self._note(events)
        return events

    def message(self, *, unclosed_reasoning: str = "keep") -> ParsedMessage:
        """The whole output, after `finish`."""
        return self._machine.message(unclosed_reasoning=unclosed_reasoning)

    def _drop_unfinished(self) -> None:
        self._decoder.reset()
        self._undecoded = []

    def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            channel: Channel
            match event:
                case ReasoningText():
                    channel = "reasoning"
                case ContentText():
                    channel = "content"
                case CallOpened():
                    channel = "call"
                case _:
                    continue
            for token in event.tokens:
                self.channels[token] = channel


class TextParser:
    """Parses decoded text in which markers are known by their letters alone."""

    def __init__(self, options: ParserOptions | None = None, *, start: StartState) -> None:
        self._machine = OutputParser(options, start=start)
        self._held = ""  # a proper prefix of a marker, at most

    @property
    def stop_generation(self) -> bool:
        return self._machine.stop_generation

    def feed(self, text: str) -> list[Event]:
        """Events of a chunk; a tail that may begin a marker waits for the next one."""
        text = self._held + text
        events: list[Event] = []
        at = 0
        for match in _MARKER.finditer(text):
            events += self._machine.feed_text(text[at : match.start()])
            events += self._machine.feed_marker(Marker(match[0]))
            at = match.end()
        keep = _held_length(text, at)
        self._held = text[len(text) - keep :]
        return events + self._machine.feed_text(text[at : len(text) - keep])

    def finish(self, end: End) -> list[Event]:
        """Last events; a held prefix was text."""
        events = self._machine.feed_text(self._held)
        self._held = ""
        return events + self._machine.finish(end)

    def message(self, *, unclosed_reasoning: str = "keep") -> ParsedMessage:
        """The whole output, after `finish`."""
        return self._machine.message(unclosed_reasoning=unclosed_reasoning)


def _held_length(text: str, start: int) -> int:
    """Length of the longest tail of text[start:] that is a proper prefix of a marker."""
    longest = min(_LONGEST, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text[-n:] in _PREFIXES), 0)
