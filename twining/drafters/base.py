"""What the engine asks of a drafter. A drafter may be wrong in any way without changing a token.

Life of one sequence: `open`, then `extend` after every prefill chunk and every commit (in position
order, each committed token once), `draft` before a verify pass, `close`. Per-sequence state is
keyed by `state.slot`. Source: design.md "Drafting and acceptance", spec/dflash2.md section I.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from twining.cache.pool import SequenceState
    from twining.models.glm5_next.model import TrunkRows


@dataclass(frozen=True, slots=True)
class DraftItem:
    """One sequence that is about to be verified.

    tokens: every id so far, prompt included; the last one is the anchor, sampled but not in any
    cache: len(tokens) == state.length + 1. num_draft: the most drafts wanted, 0 allowed.
    """

    state: "SequenceState"
    tokens: Sequence[int]
    num_draft: int


class Drafter(Protocol):
    """A source of drafts. max_draft: the most it can propose at once.

    needs_taps: TrunkRows.taps must be filled; needs_hidden: TrunkRows.hidden is read for every row.
    plane_names: what a snapshot consists of. rewrites_last_page: after `restore` it writes once
    more to the page that ends there, so that page must not be shared.
    """

    name: str
    max_draft: int
    needs_taps: bool
    needs_hidden: bool
    plane_names: tuple[str, ...]
    rewrites_last_page: bool

    def open(self, state: "SequenceState") -> None:
        """Start a sequence in a fresh slot; forget whatever the slot held."""
        ...

    def close(self, state: "SequenceState") -> None:
        """The slot is about to be given back."""
        ...

    def extend(
        self, state: "SequenceState", start: int, ids: Sequence[int], rows: "TrunkRows"
    ) -> None:
        """Committed tokens `ids` at positions start, start + 1, ... and their trunk rows, in
        order."""
        ...

    def snapshot(self, state: "SequenceState", length: int) -> dict[str, Tensor] | None:
        """Copies of what it needs to go on after the first `length` committed tokens (a plane for
        each of plane_names), or None if it does not have that (any more)."""
        ...

    def restore(self, state: "SequenceState", planes: dict[str, Tensor], length: int) -> None:
        """After `open`: stand where the snapshot of `length` tokens was taken. Paged planes are in
        the sequence's pages already."""
        ...

    def draft(self, items: Sequence[DraftItem]) -> list[list[int]]:
        """For each item up to num_draft ids that may follow its anchor; fewer or none is fine."""
        ...


class HeadAndEmbedding(Protocol):
    """The parts of the target that drafters share."""

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> rows [..., H] float32."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] float32 -> [R, V] float32."""
        ...
