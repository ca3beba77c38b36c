"""The message that travels from stage to stage: rows in flight through the layers.

Source: spec/performance.md 4.4; design.md P1. One message holds everything a stage needs: the row
plan (`batch`, with the selection that layers share across a stage border), the materialised streams
and the taps collected so far. Letters: R rows, N streams, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from twining.models.glm5_next.batch import RowBatch


@dataclass(slots=True)
class Hop:
    """streams [R, N, H] of `batch`. taps: layer to [R, H] of the real rows.

    pending: (slot, rows) of the last verifies that each stage replays into its KDA bases before
    anything else (design.md P4).
    """

    batch: RowBatch
    streams: Tensor
    pending: Sequence[tuple[int, int]]
    taps: dict[int, Tensor] = field(default_factory=dict)
