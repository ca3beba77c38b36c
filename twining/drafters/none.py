"""No drafting: every verify pass has one row."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twining.drafters.base import DraftItem

if TYPE_CHECKING:
    from twining.cache.pool import SequenceState
    from twining.models.glm5_next.model import TrunkRows


class NoDrafter:
    """Proposes nothing."""

    name = "none"
    max_draft = 0
    needs_taps = False
    needs_hidden = False

    def open(self, state: "SequenceState") -> None:
        """Nothing is kept."""

    def close(self, state: "SequenceState") -> None:
        """Nothing is kept."""

    def extend(
        self, state: "SequenceState", start: int, ids: Sequence[int], rows: "TrunkRows"
    ) -> None:
        """Nothing is kept."""

    def draft(self, items: Sequence[DraftItem]) -> list[list[int]]:
        """Empty drafts."""
        return [[] for _ in items]
