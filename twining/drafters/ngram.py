"""Weightless drafting: repeat what followed the last time the same tokens were written.

Source: spec/dflash2.md E.3. The index is the hash chain of LZ77 coders: every n-gram of the
sequence's own tokens (prompt and output) points to where it ended before. Adding a token is O(1);
a query follows at most MAX_CHAIN earlier occurrences and takes the longest match, the most recent
one on ties.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from torch import Tensor

from twining.drafters.base import DraftItem

if TYPE_CHECKING:
    from twining.cache.pool import SequenceState
    from twining.models.glm5_next.model import TrunkRows

MAX_CHAIN: Final = 64  # earlier occurrences looked at per query
MAX_MATCH: Final = 64  # tokens; longer matches count as equal, so the most recent one wins


class SuffixIndex:
    """Earlier occurrences of every n-gram of one growing token list.

    It copies no tokens: the caller passes the same list each time, possibly longer.
    """

    def __init__(self, ngram_min: int) -> None:
        self._n = ngram_min
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> position of its last token
        self._before: list[int] = []  # position -> end of the same n-gram earlier, or -1

    def update(self, tokens: Sequence[int]) -> None:
        """Index the tokens that were appended since the last call."""
        n = self._n
        for end in range(len(self._before), len(tokens)):
            if end < n - 1:
                self._before.append(-1)
                continue
            key = tuple(tokens[end - n + 1 : end + 1])
            self._before.append(self._last.get(key, -1))
            self._last[key] = end

    def find(self, tokens: Sequence[int]) -> int:
        """End of the longest earlier match of the suffix of `tokens` (all indexed), or -1."""
        if not tokens:
            return -1
        end = len(tokens) - 1
        best, best_length = -1, 0
        candidate = self._before[end]
        for _ in range(MAX_CHAIN):
            if candidate < 0:
                break
            length, limit = self._n, min(candidate + 1, MAX_MATCH)
            while length < limit and tokens[candidate - length] == tokens[end - length]:
                length += 1
            if length > best_length:
                best, best_length = candidate, length
            candidate = self._before[candidate]
        return best


def continue_from(tokens: Sequence[int], match_end: int, num_draft: int) -> list[int]:
    """num_draft ids that follow the match; where it meets the end, its period is repeated."""
    period = len(tokens) - 1 - match_end
    out: list[int] = []
    for i in range(num_draft):
        out.append(tokens[match_end + 1 + i] if i < period else out[i - period])
    return out


class NgramDrafter:
    """Suffix matching on the request's own tokens, at least ngram_min of them."""

    name = "ngram"
    needs_taps = False
    needs_hidden = False
    plane_names: tuple[str, ...] = ()
    rewrites_last_page = False

    def __init__(self, *, ngram_min: int, max_draft: int) -> None:
        self.max_draft = max_draft
        self._ngram_min = ngram_min
        self._index: dict[int, SuffixIndex] = {}

    def open(self, state: "SequenceState") -> None:
        """Start an empty index; it fills from the tokens given to `draft`."""
        self._index[state.slot] = SuffixIndex(self._ngram_min)

    def close(self, state: "SequenceState") -> None:
        """Free the slot's index."""
        self._index.pop(state.slot, None)

    def extend(
        self, state: "SequenceState", start: int, ids: Sequence[int], rows: "TrunkRows"
    ) -> None:
        """Nothing to do: `draft` receives all tokens, the anchor too."""

    def snapshot(self, state: "SequenceState", length: int) -> dict[str, Tensor] | None:
        """Nothing: the index is made anew from the tokens."""
        return {}

    def restore(self, state: "SequenceState", planes: dict[str, Tensor], length: int) -> None:
        """Nothing: the index is made anew from the tokens."""

    def draft(self, items: Sequence[DraftItem]) -> list[list[int]]:
        """The continuation of each item's longest earlier match; empty without one."""
        out = []
        for item in items:
            index = self._index[item.state.slot]
            index.update(item.tokens)
            num_draft = min(item.num_draft, self.max_draft)
            match_end = index.find(item.tokens) if num_draft > 0 else -1
            out.append([] if match_end < 0 else continue_from(item.tokens, match_end, num_draft))
        return out
