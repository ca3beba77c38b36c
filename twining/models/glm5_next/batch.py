"""The rows of one pass through the layers: which sequences, positions, storage rows and slots.

Source: design.md P1. Built once per pass and read by every layer. An inert row computes something
that nobody reads: it writes to no plane and routes nowhere.
Letters: R rows (real rows first, then inert ones up to whole blocks), T real rows, n sequences,
K convolution taps, W attention width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twining.cache.pool import CachePool, SequenceState
from twining.config import PAGE_SIZE
from twining.kernels.row_linear.reference import DECODE_ROWS, PREFILL_ROWS, padded_rows


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence: rows offset … offset + count - 1, positions from start."""

    state: SequenceState
    offset: int
    count: int
    start: int


@dataclass(slots=True)
class Selection:
    """Where each row attends: storage rows [R, W] and which of them count."""

    rows: Tensor
    valid: Tensor


class RowBatch:
    """What attention layers need.

    `planes`: those of the stage whose layers run. `commits`: completed pools go to their pages at
    once (prompt rows, MTP rows) instead of being candidates until accepted (verify rows).
    """

    def __init__(
        self, pool: CachePool, segments: Sequence[Segment], *, block: int, commits: bool
    ) -> None:
        self.pool = pool
        self.segments = segments
        self.block = block
        self.commits = commits
        self.num_real = sum(s.count for s in segments)
        self.num_rows = padded_rows(self.num_real, block)
        positions: list[int] = []
        sequence: list[int] = []
        for i, s in enumerate(segments):
            positions += range(s.start, s.start + s.count)
            sequence += [i] * s.count
        inert = [0] * (self.num_rows - self.num_real)
        self.positions = torch.tensor(positions + inert)
        self.sequence = torch.tensor(sequence + inert)
        longest = max(len(s.state.pages) for s in segments)
        self.tables = torch.tensor(
            [s.state.pages + [0] * (longest - len(s.state.pages)) for s in segments]
        )
        self.write_rows = self.storage_rows(self.positions.unsqueeze(1))[: self.num_real, 0]
        self.planes = pool.stages[0]
        self.selection: Selection | None = None  # of the last layer with its own indexer

    def storage_rows(self, positions_RW: Tensor) -> Tensor:
        """Storage row of each position of each row's sequence; positions must be >= 0."""
        pages = self.tables[self.sequence.unsqueeze(1), positions_RW // PAGE_SIZE]
        return pages * PAGE_SIZE + positions_RW % PAGE_SIZE

    def select(self, positions_RW: Tensor) -> Selection:
        """Remember the positions of this layer (-1: none) for it and for the layers that share."""
        valid = positions_RW >= 0
        rows = self.storage_rows(positions_RW.clamp(min=0))
        rows = rows.masked_fill(~valid, self.pool.zero_row)
        self.selection = Selection(rows, valid)
        return self.selection


class PrefillBlock(RowBatch):
    """Up to 64 prompt tokens of one sequence, starting at its committed length."""

    def __init__(self, state: SequenceState, count: int) -> None:
        segment = Segment(state, 0, count, state.length)
        super().__init__(state.pool, [segment], block=PREFILL_ROWS, commits=True)
        self.segment = segment


class VerifyBatch(RowBatch):
    """Anchor and drafts of several sequences, with the index lists of the KDA layers.

    slots, window_rows, ring_rows [T]: slot, row within the window, and convolution ring row.
    taps [R, K] with tap_slots [R, 1]: ring rows of each row's inputs. by_time [m n]: row of each
    (window row, sequence), any row where a sequence has none. from_time [R]: the way back.
    """

    def __init__(
        self, pool: CachePool, batch: Sequence[tuple[SequenceState, int]], *, kernel: int
    ) -> None:
        segments, offset = [], 0
        for state, count in batch:
            segments.append(Segment(state, offset, count, state.length))
            offset += count
        super().__init__(pool, segments, block=DECODE_ROWS, commits=False)
        ring = pool.conv_ring
        self.sequence_slots = torch.tensor([s.state.slot for s in segments])
        slots = self.sequence_slots[self.sequence]
        window: list[int] = []
        for s in segments:
            window += range(s.count)
        window_rows = torch.tensor(window + [0] * (self.num_rows - self.num_real))
        back = torch.arange(1 - kernel, 1)
        self.taps = (self.positions.unsqueeze(1) + back).remainder_(ring)
        self.tap_slots = slots.unsqueeze(1)
        self.slots = slots[: self.num_real]
        self.window_rows = window_rows[: self.num_real]
        self.ring_rows = self.taps[: self.num_real, -1]
        self.longest = max(s.count for s in segments)
        self.by_time = torch.tensor(
            [s.offset + min(j, s.count - 1) for j in range(self.longest) for s in segments]
        )
        self.from_time = window_rows * len(segments) + self.sequence
