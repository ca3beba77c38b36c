"""What the engine needs of a model and of its caches, and nothing more.

engine/pipeline and cache/pool satisfy these; tests use small fakes. Letters: R rows, H hidden,
V vocabulary.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from twining.cache.pages import PageAllocator

if TYPE_CHECKING:
    from twining.cache.pool import SequenceState
    from twining.models.glm5_next.model import TrunkRows


class Pool(Protocol):
    """Slots and pages of all sequences."""

    pages: PageAllocator
    plane_names: tuple[str, ...]

    @property
    def num_free_slots(self) -> int: ...
    def open(self) -> "SequenceState | None": ...
    def close(self, state: "SequenceState") -> None: ...
    def reserve(self, state: "SequenceState", num_tokens: int) -> bool: ...
    def snapshot(self, state: "SequenceState") -> dict[str, Tensor]: ...
    def snapshot_at(self, state: "SequenceState", length: int) -> dict[str, Tensor]: ...
    def restore(
        self,
        state: "SequenceState",
        planes: dict[str, Tensor],
        *,
        length: int,
        pages: Sequence[int],
    ) -> None: ...
    def copy_page(self, source: int, target: int) -> None: ...
    def export_pages(self, state: "SequenceState") -> dict[str, Tensor]: ...
    def import_pages(self, state: "SequenceState", planes: dict[str, Tensor]) -> None: ...


class Trunk(Protocol):
    """The text model over num_stages stages; every method is row-invariant (design.md P1).

    launch: a verify pass whose rows come later; its sequences are left alone until they are there.
    """

    num_stages: int

    def prefill(self, state: "SequenceState", ids: Sequence[int]) -> "TrunkRows": ...
    def verify(self, batch: Sequence[tuple["SequenceState", Sequence[int]]]) -> "TrunkRows": ...
    def launch(
        self, batch: Sequence[tuple["SequenceState", Sequence[int]]]
    ) -> "Future[TrunkRows]": ...
    def commit(self, state: "SequenceState", num_rows: int) -> None: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
