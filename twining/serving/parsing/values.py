"""Inside an argument value (spec/chat_format.md 8.3.3): which markers are data, which structure.

A marker that may close the value is held until what follows decides. `depth` counts calls quoted as
data, so that a quoted call keeps its own closing marks.
"""

from enum import Enum, auto

from twining.serving.parsing.events import Marker
from twining.serving.parsing.transcript import Transcript

MAX_KEY_GUESS = 128  # characters of a key whose value was not closed before it


class ValueStep(Enum):
    """What the machine must do after a marker."""

    STAY = auto()
    NEXT_KEY = auto()
    END_CALL = auto()
    END_CALL_REDO = auto()


class _State(Enum):
    VALUE = "V"
    CLOSED = "P"  # after VALUE_CLOSE
    CALL_CLOSED = "Q"  # after CALL_CLOSE without VALUE_CLOSE
    BOTH_CLOSED = "Z"  # after both, inside a quoted call
    KEY = "X"  # after KEY_OPEN without VALUE_CLOSE
    KEY_CLOSED = "X2"


class ValueReader:
    """Reads one value at a time into the transcript's open call."""

    def __init__(self, out: Transcript) -> None:
        self._out = out
        self._state = _State.VALUE
        self._depth = 0
        self._held: list[str] = []
        self._guess = ""  # X: text of the key

    def begin(self, key: str | None) -> None:
        """Start a value; None reads and ignores it."""
        self._out.begin_value(key.strip() if key is not None else None)
        self._state, self._depth, self._held = _State.VALUE, 0, []

    def text(self, text: str) -> None:
        """Ordinary text inside the value."""
        if self._state is _State.KEY:
            self._guess += text
            self._held.append(text)
            if len(self._guess) > MAX_KEY_GUESS:
                self._release()
        elif self._state is _State.VALUE:
            self._out.add_value(text)
        elif not text.strip():
            self._held.append(text)
        else:
            self._release()
            self._out.add_value(text)

    def marker(self, marker: Marker) -> ValueStep:
        """One marker; the value is closed unless the answer is STAY."""
        match self._state:
            case _State.VALUE:
                self._in_value(marker)
                return ValueStep.STAY
            case _State.CLOSED:
                return self._after_value_close(marker)
            case _State.CALL_CLOSED | _State.BOTH_CLOSED:
                if marker is Marker.CALL_OPEN:
                    return self._close(ValueStep.END_CALL_REDO, is_repair=True)
            case _State.KEY:
                key = self._guess.strip()
                if marker is Marker.KEY_CLOSE and self._out.is_new_argument(key):
                    self._hold(marker, _State.KEY_CLOSED)
                    return ValueStep.STAY
            case _State.KEY_CLOSED:
                if marker is Marker.VALUE_OPEN:
                    self._close(ValueStep.STAY, is_repair=True)
                    self.begin(self._guess)
                    return ValueStep.STAY
        self._release()
        self._in_value(marker)
        return ValueStep.STAY

    def finish(self) -> None:
        """The turn ended inside the value: a held closing mark counts, a held key is data."""
        if self._state in (_State.KEY, _State.KEY_CLOSED):
            self._release()
        self._out.close_value()

    def _in_value(self, marker: Marker) -> None:
        match marker:
            case Marker.VALUE_CLOSE:
                self._hold(marker, _State.CLOSED)
            case Marker.CALL_CLOSE:
                self._hold(marker, _State.CALL_CLOSED)
            case Marker.KEY_OPEN:
                self._hold(marker, _State.KEY)
            case Marker.CALL_OPEN:
                self._depth += 1
                self._out.add_value(marker.value)
            case _:
                self._out.add_value(marker.value)

    def _after_value_close(self, marker: Marker) -> ValueStep:
        match marker:
            case Marker.CALL_OPEN:
                return self._close(ValueStep.END_CALL_REDO, is_repair=True)
            case Marker.KEY_OPEN if self._depth == 0:
                return self._close(ValueStep.NEXT_KEY)
            case Marker.KEY_OPEN:
                self._hold(marker, _State.KEY)
            case Marker.VALUE_CLOSE:
                self._hold(marker, _State.CLOSED)
            case Marker.CALL_CLOSE if self._depth == 0:
                return self._close(ValueStep.END_CALL)
            case Marker.CALL_CLOSE:
                self._hold(marker, _State.BOTH_CLOSED)
            case _:
                self._release()
                self._in_value(marker)
        return ValueStep.STAY

    def _hold(self, marker: Marker, state: _State) -> None:
        self._held.append(marker.value)
        self._state = state
        if state is _State.KEY:
            self._guess = ""

    def _release(self) -> None:
        """The held text is data after all."""
        if self._state in (_State.CALL_CLOSED, _State.BOTH_CLOSED):
            self._depth = max(0, self._depth - 1)
        for text in self._held:
            self._out.add_value(text)
        self._state, self._held = _State.VALUE, []

    def _close(self, step: ValueStep, *, is_repair: bool = False) -> ValueStep:
        if is_repair or self._held.count(Marker.VALUE_CLOSE.value) > 1:
            self._out.mark_recovered()
        self._out.close_value()
        self._held = []
        return step
