"""The state machine of spec/chat_format.md 8.3: text and markers in, events out.

The result depends only on the sequence of characters and markers, never on how text was cut.
Letters of states are the spec's. "Redo" feeds the same marker to the new state; it always makes
progress. States inside a value (V, P, Q, Z, X, X2) live in values.py.
"""

from twining.serving.parsing.events import (
    End,
    Event,
    Marker,
    ParsedMessage,
    ParserOptions,
    StartState,
    Tokens,
)
from twining.serving.parsing.names import (
    MAX_NAME,
    NameStep,
    ToolTable,
    is_forbidden,
    is_plain_name,
)
from twining.serving.parsing.states import CALL_STATES, State
from twining.serving.parsing.transcript import Piece, Transcript
from twining.serving.parsing.values import ValueReader, ValueStep


class OutputParser:
    """Parses one output. Feed text and markers in order, then `finish` once."""

    def __init__(self, options: ParserOptions | None = None, *, start: StartState) -> None:
        self._options = options or ParserOptions()
        self._table = ToolTable(self._options.tools)
        self._has_calls = bool(self._table) and self._options.tool_choice != "none"
        self._out = Transcript(self._options, self._table)
        self._state = State.REASONING if start == "reasoning" else State.CONTENT
        self._has_left_reasoning = start == "content"
        self._outer = self._state  # where N was entered from
        self._pieces: list[Piece] = []  # since CALL_OPEN, while it may still be text
        self._first_name = ""  # N2
        self._second_at = 0  # N2: index in pieces of the second CALL_OPEN
        self._name = ""  # text of N, N2 after leading white space
        self._key = ""
        self._value = ValueReader(self._out)
        self._is_abort_pending = False
        self._end: End | None = None
        self._is_stopped = False

    @property
    def stop_generation(self) -> bool:
        """True once parallel_tool_calls is false and a call has ended; later input is ignored."""
        return self._is_stopped

    @property
    def is_in_call(self) -> bool:
        """True while the input belongs to a call that has opened."""
        return self._state in CALL_STATES

    @property
    def is_reasoning(self) -> bool:
        """True while ordinary text would be reasoning (a quoted call inside it included)."""
        return self._state is State.REASONING or (
            self._state in (State.NAME, State.JSON) and self._outer is State.REASONING
        )

    def feed_text(self, text: str, tokens: Tokens = ()) -> list[Event]:
        """Ordinary text; tokens are the ordinals it came from."""
        while text and not self._is_stopped:
            text = self._text(text, tokens)
        return self._out.take()

    def feed_marker(self, marker: Marker, tokens: Tokens = ()) -> list[Event]:
        """One structural marker."""
        self._marker(marker, (marker.value, tokens))
        return self._out.take()

    def finish(self, end: End) -> list[Event]:
        """The output ended with a stop token ("eos") or was cut ("length"). Call once."""
        assert self._end is None, "finish was called twice"
        self._end = "eos" if self._is_stopped else end
        if self._end == "eos":
            self._finish_turn()
        elif self._state is State.NAME_CALL:
            self._out.open_call(self._first_name, self._pieces)
            self._out.leave_open()
        elif self._state in CALL_STATES:
            self._out.leave_open()
        self._out.end_content()
        return self._out.take()

    def message(self, *, unclosed_reasoning: str = "keep") -> ParsedMessage:
        """The whole output, after `finish`. unclosed_reasoning "content": a thought that was never
        closed becomes the answer (only for replies that are not streamed)."""
        assert self._end is not None, "message needs finish first"
        return self._out.message(
            is_cut=self._end == "length",
            has_left_reasoning=self._has_left_reasoning,
            unclosed_reasoning=unclosed_reasoning,
        )

    # Text: each step returns what it did not consume.

    def _text(self, text: str, tokens: Tokens) -> str:
        match self._state:
            case State.REASONING | State.CONTENT:
                self._stream((text, tokens))
            case State.NAME:
                return self._name_text(text, tokens)
            case State.NAME_CALL:
                return self._second_name_text(text, tokens)
            case State.JSON:
                self._pieces.append((text, tokens))
            case State.KEY:
                self._key += text
            case State.AFTER_KEY:
                if text := text.lstrip():
                    self._begin_value(self._key, is_repair=True)
                    return text
            case State.VALUE:
                self._value.text(text)
            case State.BETWEEN:
                pass
        return ""

    def _stream(self, piece: Piece) -> None:
        if self._state is State.REASONING:
            self._out.add_reasoning(piece)
        else:
            self._out.add_content(piece)

    def _name_text(self, text: str, tokens: Tokens) -> str:
        for at, char in enumerate(text):
            if not self._name and char.isspace():
                continue
            self._name += char
            step = self._table.judge(self._name)
            if step is NameStep.WAIT:
                continue
            self._pieces.append((text[: at + 1], tokens))
            if step is NameStep.ABORT:
                self._abort()
            else:
                self._state = State.JSON
            return text[at + 1 :]
        self._pieces.append((text, tokens))
        return ""

    def _second_name_text(self, text: str, tokens: Tokens) -> str:
        for at, char in enumerate(text):
            if not self._name and char.isspace():
                continue
            is_inner = self._name[-1:].isspace() and not char.isspace()
            self._name += char
            is_long = len(self._name.rstrip()) > MAX_NAME
            if is_inner or is_long or (is_forbidden(char) and not char.isspace()):
                self._pieces.append((text[: at + 1], tokens))
                self._split()
                return text[at + 1 :]
        self._pieces.append((text, tokens))
        return ""

    # Markers.

    def _marker(self, marker: Marker, piece: Piece) -> None:
        if self._is_stopped:
            return
        match self._state:
            case State.REASONING:
                self._marker_in_reasoning(marker, piece)
            case State.CONTENT:
                self._marker_in_content(marker, piece)
            case State.NAME:
                self._marker_in_name(marker, piece)
            case State.NAME_CALL:
                self._marker_in_second_name(marker, piece)
            case State.JSON:
                body = self._pieces[1:]
                self._pieces.append(piece)
                if marker is Marker.CALL_CLOSE:
                    self._decide_json(body)
            case State.KEY:
                self._marker_in_key(marker)
            case State.AFTER_KEY:
                self._marker_after_key(marker)
            case State.BETWEEN:
                self._marker_between(marker, piece)
            case State.VALUE:
                self._marker_in_value(marker, piece)

    def _marker_in_reasoning(self, marker: Marker, piece: Piece) -> None:
        if marker is Marker.THINK_CLOSE:
            self._state = State.CONTENT
            self._has_left_reasoning = True
        elif marker is Marker.CALL_OPEN and self._has_calls:
            self._enter_name(piece, State.REASONING)
        elif marker is not Marker.THINK_OPEN:
            self._stream(piece)

    def _marker_in_content(self, marker: Marker, piece: Piece) -> None:
        if marker is Marker.THINK_OPEN:
            self._state = State.REASONING
        elif marker is Marker.CALL_OPEN and self._has_calls:
            self._enter_name(piece, State.CONTENT)
        elif marker is Marker.CALL_CLOSE:
            if self._is_abort_pending or not self._out.num_opened:
                self._stream(piece)
            self._is_abort_pending = False
        elif marker is not Marker.THINK_CLOSE:
            self._stream(piece)

    def _marker_in_name(self, marker: Marker, piece: Piece) -> None:
        name = self._name.rstrip()
        is_declared = name in self._table
        is_accepted = is_declared or (self._outer is State.CONTENT and is_plain_name(name))
        match marker:
            case Marker.THINK_OPEN | Marker.THINK_CLOSE:
                self._abort()
                self._marker(marker, piece)
            case Marker.CALL_OPEN if not name:
                self._enter_name(piece, self._outer)
            case Marker.CALL_OPEN if is_declared:
                self._first_name, self._name = name, ""
                self._state, self._second_at = State.NAME_CALL, len(self._pieces)
                self._pieces.append(piece)
            case Marker.CALL_OPEN:
                self._abort()
                self._enter_name(piece, self._state)
            case Marker.KEY_OPEN if is_accepted:
                self._open_call(name)
                self._enter_key()
            case Marker.CALL_CLOSE if is_accepted:
                self._open_call(name)
                self._end_call()
            case Marker.VALUE_OPEN if is_declared:
                self._open_call(name, is_repair=True)
                self._begin_value(None)
            case Marker.VALUE_CLOSE if is_declared:
                self._open_call(name, is_repair=True)
            case Marker.KEY_CLOSE if is_declared:
                self._open_call(name, is_repair=True)
            case Marker.KEY_CLOSE if (found := self._table.split_key(name)) is not None:
                self._open_call(found[0], is_repair=True)
                self._key = found[1]
                self._state = State.AFTER_KEY
            case _:
                self._pieces.append(piece)
                self._abort()

    def _marker_in_second_name(self, marker: Marker, piece: Piece) -> None:
        text = self._name.rstrip()
        if marker is Marker.CALL_OPEN and not text:
            return
        if marker is Marker.KEY_CLOSE and text:
            self._open_call(self._first_name, is_repair=True)
            self._key = text
            self._state = State.AFTER_KEY
            return
        self._split()
        self._marker(marker, piece)

    def _marker_in_key(self, marker: Marker) -> None:
        match marker:
            case Marker.KEY_OPEN:
                self._out.mark_recovered()
                self._enter_key()
            case Marker.KEY_CLOSE:
                self._state = State.AFTER_KEY
            case Marker.VALUE_OPEN:
                self._begin_value(self._key, is_repair=True)
            case Marker.VALUE_CLOSE:
                self._out.mark_recovered()
                self._state = State.BETWEEN
            case Marker.CALL_CLOSE:
                self._out.mark_recovered()
                self._end_call()

    def _marker_after_key(self, marker: Marker) -> None:
        match marker:
            case Marker.VALUE_OPEN:
                self._begin_value(self._key)
            case Marker.VALUE_CLOSE:
                self._begin_value(self._key, is_repair=True)
                self._value.marker(marker)
            case Marker.KEY_OPEN:
                self._out.mark_recovered()
                self._enter_key()
            case Marker.KEY_CLOSE:
                self._out.mark_recovered()
            case Marker.CALL_CLOSE:
                self._out.mark_recovered()
                self._end_call()

    def _marker_between(self, marker: Marker, piece: Piece) -> None:
        match marker:
            case Marker.KEY_OPEN:
                self._enter_key()
            case Marker.VALUE_OPEN:
                self._out.mark_recovered()
                self._begin_value(None)
            case Marker.CALL_OPEN:
                self._out.mark_recovered()
                self._end_call()
                self._marker(marker, piece)
            case Marker.CALL_CLOSE:
                self._end_call()

    def _marker_in_value(self, marker: Marker, piece: Piece) -> None:
        match self._value.marker(marker):
            case ValueStep.NEXT_KEY:
                self._enter_key()
            case ValueStep.END_CALL:
                self._end_call()
            case ValueStep.END_CALL_REDO:
                self._end_call()
                self._marker(marker, piece)
            case ValueStep.STAY:
                pass

    # Transitions.

    def _enter_name(self, piece: Piece, outer: State) -> None:
        self._state, self._outer = State.NAME, outer
        self._pieces, self._name = [piece], ""

    def _open_call(self, name: str, *, is_repair: bool = False) -> None:
        """The call of N or N2 opens; the state is B until the caller sets another."""
        self._out.open_call(name, self._pieces)
        if is_repair:
            self._out.mark_recovered()
        self._pieces = []
        self._state = State.BETWEEN

    def _end_call(self) -> None:
        self._out.end_call()
        self._after_call()

    def _after_call(self) -> None:
        self._state = State.CONTENT
        self._has_left_reasoning = True
        self._is_stopped = not self._options.parallel_tool_calls

    def _enter_key(self) -> None:
        self._state, self._key = State.KEY, ""

    def _begin_value(self, key: str | None, *, is_repair: bool = False) -> None:
        if is_repair:
            self._out.mark_recovered()
        self._value.begin(key)
        self._state = State.VALUE

    def _abort(self) -> None:
        """It was not a call: everything since CALL_OPEN is text of the outer state."""
        self._state = self._outer
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self._stream(piece)
        self._is_abort_pending = self._is_abort_pending or self._outer is State.CONTENT

    def _split(self) -> None:
        """N2 was two calls: the first has no arguments, the rest starts over as a name."""
        rest = self._pieces[self._second_at :]
        del self._pieces[self._second_at :]
        self._open_call(self._first_name, is_repair=True)
        self._end_call()
        if self._is_stopped:
            return
        self._enter_name(rest[0], State.CONTENT)
        for text, tokens in rest[1:]:
            while text:
                text = self._text(text, tokens)

    def _decide_json(self, body: list[Piece]) -> None:
        """J has ended: a complete call if the body is one, else text."""
        found = self._table.json_call("".join(text for text, _ in body))
        if found is None:
            self._abort()
            return
        pieces, self._pieces = self._pieces, []
        tokens = tuple(token for _, tokens in pieces for token in tokens)
        self._out.write_whole_call(*found, ("", tokens))
        self._after_call()

    def _finish_turn(self) -> None:
        """The model ended its turn by itself: what is open counts as closed (spec 8.6)."""
        if self._state is State.NAME_CALL:
            self._split()
        if self._state is State.NAME:
            name = self._name.rstrip()
            if name in self._table:
                self._open_call(name, is_repair=True)
                self._end_call()
            else:
                self._abort()
        elif self._state is State.JSON:
            self._decide_json(self._pieces[1:])
        elif self._state in CALL_STATES:
            if self._state is State.VALUE:
                self._value.finish()
            self._out.mark_recovered()
            self._end_call()
