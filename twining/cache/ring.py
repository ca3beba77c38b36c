"""Ring of recent context rows (K and V) of a sliding-window drafter, one per sequence slot.

Source: spec/dflash2.md section C. A row depends on its own token alone and every layer slides, so
keeping only the last rows loses nothing. Rows are addressed by absolute position: position p lives
at index p mod R. Readable are positions oldest .. end - 1; a rewind only lowers `end`, and a gap
(rows that were never computed) raises `oldest`, so that nothing unwritten is ever read.

Letters: L layers, S slots, KV key heads, R ring rows, D head dim, T rows of one write.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twining.config import PAGE_SIZE


@dataclass(slots=True)
class _Span:
    oldest: int = 0  # valid_from: nothing below is readable
    end: int = 0  # one past the newest row


class RingCache:
    """Planes k and v, each [L, S, KV, R, D]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        num_rows: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_rows = num_rows
        shape = (num_layers, num_slots, num_kv_heads, num_rows, head_dim)
        self.k = torch.zeros(shape, dtype=dtype)
        self.v = torch.zeros(shape, dtype=dtype)
        self._spans = [_Span() for _ in range(num_slots)]

    @staticmethod
    def rows_needed(*, window: int, chunk: int, block: int) -> int:
        """R for a window, the largest write (or rewind) and a block, rounded up to whole pages."""
        return -(-(window - 1 + chunk + block) // PAGE_SIZE) * PAGE_SIZE

    def nbytes(self) -> int:
        """Bytes of both planes."""
        return self.k.nbytes + self.v.nbytes

    def reset(self, slot: int) -> None:
        """Empty the slot; old rows stay in memory but cannot be read."""
        self._spans[slot] = _Span()

    def readable(self, slot: int) -> tuple[int, int]:
        """(oldest, end): positions that can be read."""
        span = self._spans[slot]
        return span.oldest, span.end

    def first_kept(self, num_tokens: int) -> int:
        """Rows of a write of num_tokens that need not be computed, since the ring overwrites
        them."""
        return max(0, num_tokens - self.num_rows)

    def write(self, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        """Rows [L, T, KV, D] of positions start .. start + T - 1; only the last R are stored.

        A start beyond the end leaves a gap: older rows become unreadable. A start before it is a
        rewind: rows from `start` on are replaced.
        """
        num_tokens = k.shape[1]
        if num_tokens == 0:
            return
        span = self._spans[slot]
        skip = self.first_kept(num_tokens)
        first, end = start + skip, start + num_tokens
        if first > span.end or start < span.oldest:
            span.oldest = first
        index = torch.arange(first, end) % self.num_rows
        # [L, T, KV, D] -> [L, KV, T, D], the order of the plane.
        self.k[:, slot].index_copy_(2, index, k[:, skip:].transpose(1, 2).to(self.k.dtype))
        self.v[:, slot].index_copy_(2, index, v[:, skip:].transpose(1, 2).to(self.v.dtype))
        span.end = end
        # Monotone even after a rewind: a row that was overwritten by a later position stays lost.
        span.oldest = max(span.oldest, end - self.num_rows)

    def export(self, slot: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies [L, T, KV, D] of readable positions, in the form that `write` takes.

        Raises ValueError when a position outside the readable range is asked for.
        """
        self._check_readable(slot, first, end)
        index = torch.arange(first, end) % self.num_rows
        k, v = (plane[:, slot].index_select(2, index) for plane in (self.k, self.v))
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def _check_readable(self, slot: int, first: int, end: int) -> None:
        span = self._spans[slot]
        if first < end and not (span.oldest <= first and end <= span.end):
            raise ValueError(
                f"ring rows {first}..{end - 1} of slot {slot} asked,"
                f" readable are {span.oldest}..{span.end - 1}"
            )

    def read(self, slot: int, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """(k, v), each [KV, end - first, D], of readable positions; a view where they do not wrap.

        Raises ValueError when a position outside the readable range is asked for.
        """
        self._check_readable(slot, first, end)
        start = first % self.num_rows
        count = end - first
        if start + count <= self.num_rows:
            rows = slice(start, start + count)
            return self.k[layer, slot, :, rows], self.v[layer, slot, :, rows]
        index = torch.arange(first, end) % self.num_rows
        return self.k[layer, slot][:, index], self.v[layer, slot][:, index]
