"""Verify passes under way: with S stages up to S of them, each with some of the sequences.

A round is one pass: the drafts of its sequences and, later, the rows. Rounds come back in the order
in which they were launched. A sequence that ends while its round is under way is withdrawn, which
waits for the pass: its planes may be handed to another sequence afterwards.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twining.engine.sequence import Sequence

if TYPE_CHECKING:
    from twining.models.glm5_next.model import TrunkRows


@dataclass(slots=True)
class Round:
    """drafts: one list per sequence. began_s: when drafting began. withdrawn: ids of sequences
    that are gone, but whose rows are in the pass.
    """

    seqs: SequenceOf[Sequence]
    drafts: SequenceOf[SequenceOf[int]]
    rows: "Future[TrunkRows]"
    began_s: float
    withdrawn: set[str]

    @property
    def is_empty(self) -> bool:
        """Nobody waits for the rows."""
        return len(self.withdrawn) == len(self.seqs)


class Rounds:
    """All rounds under way, oldest first."""

    def __init__(self) -> None:
        self._rounds: deque[Round] = deque()
        self._num_launched = 0

    def __len__(self) -> int:
        return len(self._rounds)

    def add(
        self,
        seqs: SequenceOf[Sequence],
        drafts: SequenceOf[SequenceOf[int]],
        rows: "Future[TrunkRows]",
        began_s: float,
    ) -> None:
        """A pass was launched."""
        self._num_launched += 1
        for seq in seqs:
            seq.under_way, seq.last_round = True, self._num_launched
        self._rounds.append(Round(seqs, drafts, rows, began_s, set()))

    def take(self) -> Round:
        """The oldest round, its rows computed; its sequences are free for the next one.

        Raises what the pass raised.
        """
        oldest = self._rounds.popleft()
        for seq in oldest.seqs:
            if seq.id not in oldest.withdrawn:
                seq.under_way = False
        oldest.rows.result()
        return oldest

    def withdraw(self, seq: Sequence) -> None:
        """Drop the sequence from its round, if it has one; waits until the pass is over."""
        if not seq.under_way:
            return
        seq.under_way = False
        for item in self._rounds:
            if any(s is seq for s in item.seqs) and seq.id not in item.withdrawn:
                wait([item.rows])
                item.withdrawn.add(seq.id)
        self._rounds = deque(item for item in self._rounds if not item.is_empty)

    def audit(self, sequences: SequenceOf[Sequence]) -> None:
        """Raises AssertionError unless the marks on the sequences tell what is under way."""
        listed = [s.id for r in self._rounds for s in r.seqs if s.id not in r.withdrawn]
        marked = [s.id for s in sequences if s.under_way]
        assert sorted(listed) == sorted(marked), f"under way {listed}, marked {marked}"
