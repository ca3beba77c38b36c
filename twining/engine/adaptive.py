"""How many drafts the next round verifies: from what was accepted and what rounds cost. Pure.

Source: spec/performance.md 4.3. The number maximises the expected tokens per second of the round,

    sum over sequences of (1 + p1 + p1 p2 + ... + p1 ... pk)  /  (a + b rows),

where p_i is how often draft i was right when the drafts before it were, as a moving average per
sequence, and a, b are fitted to the measured rounds. It is one number for the whole round. Now and
then a round drafts about twice as many, so that positions given up on are seen again. Times differ
from run to run, so the choice does too; no choice can change a token (design.md "Drafting").

Letters: k drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

Rates = tuple[float, ...]  # p_1 .. p_k of one sequence

START_RATE: Final = 0.7  # of drafts nobody has seen yet; high, so that they are tried
RATE_STEP: Final = 0.1  # weight of the newest observation
COST_DECAY: Final = 0.98  # weight of all older rounds when one is added
PROBE_EVERY: Final = 16  # rounds from one longer round to the next
ROW_SHARE: Final = 0.2  # of a one-row round: a row's cost before two row counts were measured


@dataclass(frozen=True, slots=True)
class CostFit:
    """Decayed sums over rounds: weight, rows, seconds, rows squared, rows times seconds."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_rows: float = 0.0
    rows_seconds: float = 0.0

    def add(self, num_rows: int, took_s: float) -> "CostFit":
        """With one more round, the older ones weighing a little less."""
        return CostFit(
            COST_DECAY * self.weight + 1.0,
            COST_DECAY * self.rows + num_rows,
            COST_DECAY * self.seconds + took_s,
            COST_DECAY * self.rows_rows + num_rows * num_rows,
            COST_DECAY * self.rows_seconds + num_rows * took_s,
        )

    def seconds_of(self, num_rows: int) -> float:
        """Expected seconds of a round, positive; an arbitrary unit before the first measurement.

        A line through the measured rounds, never falling; with only one row count measured, each
        row costs ROW_SHARE of the rest.
        """
        if self.weight == 0.0 or self.seconds <= 0.0:
            return 1.0 + ROW_SHARE * (num_rows - 1)
        rows, seconds = self.rows / self.weight, self.seconds / self.weight
        spread = self.rows_rows / self.weight - rows * rows
        if spread > 1e-6 * rows * rows:
            slope = (self.rows_seconds / self.weight - rows * seconds) / spread
        else:
            slope = seconds * ROW_SHARE / (1.0 + ROW_SHARE * (rows - 1.0))
        # At most proportional to the rows: a round without rows does not have negative cost.
        slope = min(max(slope, 0.0), seconds / rows)
        return seconds + slope * (num_rows - rows)


def note_accepted(rates: Rates, num_drafted: int, num_accepted: int) -> Rates:
    """The averages after a round. Drafts behind the first wrong one were not tried."""
    tried = min(num_accepted + 1, num_drafted, len(rates))
    seen = (
        rate + RATE_STEP * (float(i < num_accepted) - rate) for i, rate in enumerate(rates[:tried])
    )
    return (*seen, *rates[tried:])


def choose_num_draft(rates: Sequence[Rates], cost: CostFit, most: int) -> int:
    """The k of 0..most with the best expected tokens per second, the smallest among equals.

    rates: of each sequence of the round, at least `most` long each.
    """
    best, best_speed = 0, 0.0
    tokens = float(len(rates))
    right = [1.0] * len(rates)
    for k in range(most + 1):
        if k:
            right = [r * own[k - 1] for r, own in zip(right, rates, strict=True)]
            tokens += sum(right)
        speed = tokens / cost.seconds_of(len(rates) * (k + 1))
        if speed > best_speed * (1 + 1e-9):
            best, best_speed = k, speed
    return best


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """What one engine has learned. average: rates that a new sequence starts with."""

    most: int
    average: Rates
    cost: CostFit = CostFit()
    num_rounds: int = 0

    @classmethod
    def start(cls, most: int) -> "DraftPolicy":
        """Nothing learned yet; at most `most` drafts."""
        return cls(most, (START_RATE,) * most)

    def choose(self, rates: Sequence[Rates | None]) -> int:
        """Drafts of the next round for these sequences (None: new)."""
        best = choose_num_draft([r or self.average for r in rates], self.cost, self.most)
        is_probe = self.num_rounds % PROBE_EVERY == 0
        return min(self.most, 2 * best + 1) if is_probe else best

    def note_round(self, num_rows: int, took_s: float) -> "DraftPolicy":
        """After a round of that many rows (anchors and drafts), drafting included in the time."""
        return replace(self, cost=self.cost.add(num_rows, took_s), num_rounds=self.num_rounds + 1)

    def note_sequence(
        self, rates: Rates | None, num_drafted: int, num_accepted: int
    ) -> "tuple[DraftPolicy, Rates]":
        """After a sequence's part of a round: the policy and the sequence's new rates."""
        own = note_accepted(rates or self.average, num_drafted, num_accepted)
        average = note_accepted(self.average, num_drafted, num_accepted)
        return replace(self, average=average), own
