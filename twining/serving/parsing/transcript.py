"""The output so far: text streams with their white-space rules, calls as JSON text (spec 8.4-8.7).

Everything sent is appended both to the pending events and to the message, so that joined events and
the final message are equal by construction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from twining.serving.json_text import dump_json, dump_string
from twining.serving.parsing.events import (
    CallArguments,
    CallEnded,
    CallOpened,
    ContentText,
    Event,
    ParsedMessage,
    ParserOptions,
    ReasoningText,
    Tokens,
    ToolCall,
)
from twining.serving.parsing.names import ToolTable
from twining.serving.parsing.schema import (
    STRING_ONLY,
    convert_argument,
    declared_arguments,
    schema_types,
)

Piece = tuple[str, Tokens]  # text and the sampled tokens it came from


@dataclass(slots=True)
class _OpenCall:
    """The call being written. index -1: hidden (undeclared name under unknown_tools "drop")."""

    index: int
    name: str
    parameters: object
    call: ToolCall
    keys: set[str] = field(default_factory=set)
    has_arguments: bool = False
    sent: list[str] = field(default_factory=list)  # pieces of the arguments text
    # The current value: key None means that the value is ignored.
    key: str | None = None
    types: frozenset[str] = frozenset()
    pieces: list[str] = field(default_factory=list)


class Transcript:
    """Writes reasoning, content and one call at a time; `take` gives the events since the last."""

    def __init__(self, options: ParserOptions, table: ToolTable) -> None:
        self._options = options
        self._table = table
        self._events: list[Event] = []
        self._attributed: set[int] = set()
        self._reasoning: list[str] = []
        self._reasoning_held: list[Piece] = []  # leading white space: a blank block is no block
        self._content: list[str] = []
        self._content_held: list[Piece] = []  # the white space since the last visible text
        self._open: _OpenCall | None = None
        self.calls: list[ToolCall] = []
        self.num_opened = 0  # hidden calls included

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def message(
        self, *, is_cut: bool, has_left_reasoning: bool, unclosed_reasoning: str
    ) -> ParsedMessage:
        """The whole output (spec 8.6); is_cut: the length limit ended it."""
        reasoning, content = "".join(self._reasoning) or None, "".join(self._content) or None
        reasoning_only = not (is_cut or has_left_reasoning or self.calls)
        if reasoning_only and unclosed_reasoning == "content":
            reasoning, content, reasoning_only = None, reasoning, False
        is_tool_turn = bool(self.calls) and not self._options.is_named
        return ParsedMessage(
            reasoning_content=reasoning,
            content=content,
            tool_calls=self.calls,
            finish_reason="length" if is_cut else "tool_calls" if is_tool_turn else "stop",
            reasoning_only=reasoning_only,
        )

    def add_reasoning(self, piece: Piece) -> None:
        """Verbatim, but nothing is sent before the first visible character."""
        self._reasoning_held.append(piece)
        if self._reasoning or piece[0].strip():
            text, tokens = self._join(self._reasoning_held)
            self._reasoning_held = []
            self._reasoning.append(text)
            self._push(ReasoningText(text, tokens))

    def add_content(self, piece: Piece) -> None:
        """Each run of white space waits for what follows it."""
        text, tokens = piece
        visible = text.rstrip()
        if visible:
            self._content_held.append((visible, tokens))
            self._send_content()
        if len(visible) < len(text):
            self._content_held.append((text[len(visible) :], tokens))

    def end_content(self) -> None:
        """End of output: trailing white space belongs to an answer without calls only."""
        if self._content_held and self._content and not self.num_opened:
            self._send_content()
        self._content_held = []

    def open_call(self, name: str, pieces: Sequence[Piece]) -> None:
        """pieces: the text that made up the opening marker and the name."""
        self._content_held = []
        self.num_opened += 1
        call = ToolCall(self._options.make_id(), name)
        is_hidden = name not in self._table and self._options.unknown_tools == "drop"
        index = -1 if is_hidden else len(self.calls)
        self._open = _OpenCall(index, name, self._table.parameters(name), call)
        if not is_hidden:
            self.calls.append(call)
            _, tokens = self._join(pieces)
            self._push(CallOpened(index, call.id, name, tokens))

    def mark_recovered(self) -> None:
        """The open call's markup needed repair."""
        self._current.call.is_recovered = True

    def is_new_argument(self, key: str) -> bool:
        """True if key is a declared argument of the open call, not given yet."""
        call = self._current
        return key in declared_arguments(call.parameters) and key not in call.keys

    def begin_value(self, key: str | None) -> None:
        """None, an empty key or a repeated one: the value is read but ignored."""
        call = self._current
        call.key = key if key and key not in call.keys else None
        call.pieces = []
        if call.key is None:
            return
        call.keys.add(call.key)
        call.types = schema_types(call.parameters, call.key)
        if call.types == STRING_ONLY:
            self._write_argument(self._key_text(call) + '"')

    def add_value(self, text: str) -> None:
        call = self._current
        if call.key is None or not text:
            return
        if call.types == STRING_ONLY:
            self._write_argument(dump_string(text)[1:-1])
        else:
            call.pieces.append(text)

    def close_value(self) -> None:
        call = self._current
        if call.key is None:
            return
        if call.types == STRING_ONLY:
            self._write_argument('"')
        else:
            value = convert_argument("".join(call.pieces), call.types)
            self._write_argument(self._key_text(call) + dump_json(value))
        call.key = None
        call.pieces = []

    def end_call(self) -> None:
        call = self._current
        self._write_argument("}" if call.has_arguments else "{}")
        self._finish_call(call)

    def write_whole_call(self, name: str, arguments: dict[str, object], piece: Piece) -> None:
        """A call that came as JSON: opened, filled and ended at once; values are not converted."""
        self.open_call(name, [piece])
        self.mark_recovered()
        self._write_argument(dump_json(arguments))
        self._finish_call(self._current)

    def leave_open(self) -> None:
        """The length limit cut the open call: its text stays as it was streamed."""
        self._current.call.arguments = "".join(self._current.sent)
        self._open = None

    @property
    def _current(self) -> _OpenCall:
        assert self._open is not None, "no call is open"
        return self._open

    def _finish_call(self, call: _OpenCall) -> None:
        call.call.is_complete = True
        call.call.arguments = "".join(call.sent)
        if call.index >= 0:
            self._push(CallEnded(call.index, call.call.is_recovered))
        self._open = None

    def _key_text(self, call: _OpenCall) -> str:
        assert call.key is not None
        start = ", " if call.has_arguments else "{"
        call.has_arguments = True
        return start + dump_string(call.key) + ": "

    def _write_argument(self, text: str) -> None:
        call = self._current
        call.sent.append(text)
        if call.index >= 0:
            self._push(CallArguments(call.index, text))

    def _send_content(self) -> None:
        text, tokens = self._join(self._content_held)
        self._content_held = []
        self._content.append(text)
        self._push(ContentText(text, tokens))

    def _join(self, pieces: Sequence[Piece]) -> Piece:
        """Joined text, and those tokens that no earlier event has named."""
        tokens = dict.fromkeys(token for _, found in pieces for token in found)
        fresh = tuple(token for token in tokens if token not in self._attributed)
        self._attributed.update(fresh)
        return "".join(text for text, _ in pieces), fresh

    def _push(self, event: Event) -> None:
        """Append an event; neighbours of one stream become one."""
        last = self._events[-1] if self._events else None
        match last, event:
            case ReasoningText(), ReasoningText():
                merged = ReasoningText(last.text + event.text, last.tokens + event.tokens)
                self._events[-1] = merged
            case ContentText(), ContentText():
                self._events[-1] = ContentText(last.text + event.text, last.tokens + event.tokens)
            case CallArguments(), CallArguments() if last.index == event.index:
                self._events[-1] = CallArguments(last.index, last.text + event.text)
            case _:
                self._events.append(event)
