"""No drafting: every verify pass has one row."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

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
    plane_names: tuple[str, ...] = ()
    rewrites_last_page = False

    def open(self, state: "SequenceState") -> None:
        """Nothing is kept."""

    def close(self, state: "SequenceState") -> None:
        """Nothing is kept."""

    def extend(
        self, state: "SequenceState", start: int, ids: Sequence[int], rows: "TrunkRows"
    ) -> None:
        """Nothing is kept."""

    def snapshot(self, state: "SequenceState", length: int) -> dict[str, Tensor] | None:
        """Nothing is kept."""
        return {}

    def restore(self, state: "SequenceState", planes: dict[str, Tensor], length: int) -> None:
        """Nothing is kept."""

    def draft(self, items: Sequence[DraftItem]) -> list[list[int]]:
        """Empty drafts."""
        return [[] for _ in items]
