"""Stop strings over a stream, and which token each visible byte came from.

Both are independent of how the stream is cut: the match that *ends* first wins (the longest one on
a tie), so text fed in one burst stops where text fed by characters would.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A found stop string; start and end are character offsets in everything fed so far."""

    text: str
    start: int
    end: int


class StopMatcher:
    """Searches visible text for stop strings; holds back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings."""
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self._base = 0  # offset of the first held character

    def feed(self, text: str) -> tuple[str, StopMatch | None]:
        """(text that is now certain, match). After a match the text ends before the match."""
        if not self._stops:
            self._base += len(text)
            return text, None
        buffer = self._held + text
        found = self._search(buffer)
        if found is not None:
            self._held = ""
            return buffer[: found.start - self._base], found
        keep = self._partial(buffer)
        certain = buffer[: len(buffer) - keep]
        self._held = buffer[len(certain) :]
        self._base += len(certain)
        return certain, None

    def flush(self) -> str:
        """What was held back; called where no further text can complete a stop string."""
        held, self._held = self._held, ""
        self._base += len(held)
        return held

    def skip(self, text: str) -> str:
        """Text in which nothing is searched (before min_tokens); returns all that can be sent."""
        self._base += len(text)
        return self.flush() + text

    def _search(self, buffer: str) -> StopMatch | None:
        best: StopMatch | None = None
        for stop in self._stops:
            at = buffer.find(stop)
            if at < 0:
                continue
            end = at + len(stop)
            if best is None or (end, at) < (best.end - self._base, best.start - self._base):
                best = StopMatch(stop, self._base + at, self._base + end)
        return best

    def _partial(self, buffer: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        for size in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class Span(NamedTuple):
    """Bytes [start, end) of a text stream that one token produced."""

    token_index: int
    start: int
    end: int


class TokenSpans:
    """Maps emitted text back to tokens, byte by byte.

    Tokens are queued as they arrive; text comes out later and may miss some of their bytes
    (markers, dropped white space), so tokens that do not fit the next byte are skipped.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, bytes]] = deque()
        self._last = 0

    def token(self, index: int, data: bytes) -> None:
        """A token that may show up in text."""
        if data:
            self._queue.append((index, data))

    def clear(self) -> None:
        """Nothing queued so far can still show up (a call took it)."""
        self._queue.clear()

    def text(self, text: str, start: int) -> list[Span]:
        """Spans of `text`, which begins at byte `start` of its stream."""
        data = text.encode()
        spans: list[Span] = []
        done = 0
        while done < len(data):
            size = self._take(data, done)
            spans.append(Span(self._last, start + done, start + done + size))
            done += size
        return spans

    def _take(self, data: bytes, at: int) -> int:
        """Bytes of data[at:] that the next fitting token produced; sets the last index."""
        while self._queue:
            index, rest = self._queue.popleft()
            size = _common(rest, data, at)
            if size == 0:
                rest = rest.lstrip()
                size = _common(rest, data, at)
            if size == len(rest) or (size and at + size == len(data)):
                if size < len(rest):
                    self._queue.appendleft((index, rest[size:]))
                if size:
                    self._last = index
                    return size
            elif data[at : at + 3] == b"\xef\xbf\xbd":
                self._last = index  # bytes that are no character show as U+FFFD
                return 3
        return len(data) - at


def _common(left: bytes, right: bytes, at: int) -> int:
    """Length of the common beginning of left and right[at:]."""
    size = min(len(left), len(right) - at)
    if left[:size] == right[at : at + size]:
        return size
    return next(i for i in range(size) if left[i] != right[at + i])
