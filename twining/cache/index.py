"""Planes of the indexer: paged pooled keys, and per slot the raw rows of pools not yet complete.

Source: spec/glm5_next.md 8.5, 17; design.md P4.
Letters: L layers, P tokens per pool, K pools per page, D index head dimension, T rows of a step.
Raw rows live in a ring addressed by position: long enough for a prefill block or a verify window on
top of an incomplete pool, so that a rolled-back window finds its older rows in place. A verify
stores the pools that its window would complete as candidates; commit copies the accepted ones.
"""

import torch
from torch import Tensor

from twining.config import PAGE_SIZE, PREFILL_BLOCK
from twining.errors import ConfigError

KEY_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


class IndexPlane:
    """Pooled keys [L, pages, K, D] and, per slot, raw [L, ring, 2 D] and candidates [L, c, D]."""

    __slots__ = ("candidates", "first", "keys", "pool", "pools_per_page", "raw", "ring")

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_slots: int,
        *,
        pool: int,
        dim: int,
        window: int,
        dtype: torch.dtype = torch.float32,
        first: int = 0,
    ) -> None:
        """window: most rows of one verify; first: see cache/stage.py.

        Raises ConfigError unless pools divide a page.
        """
        if PAGE_SIZE % pool:
            raise ConfigError(f"index_kpool={pool} does not divide the page of {PAGE_SIZE} tokens")
        self.pool = pool
        self.first = first
        self.pools_per_page = PAGE_SIZE // pool
        self.ring = PREFILL_BLOCK + pool + window
        self.keys = torch.zeros(num_layers, num_pages, self.pools_per_page, dim, dtype=dtype)
        self.raw = torch.zeros(num_slots, num_layers, self.ring, 2 * dim)
        # In the keys' own type: a candidate scores exactly as it will once it is committed.
        self.candidates = torch.zeros(num_slots, num_layers, -(-window // pool), dim, dtype=dtype)

    def write_raw(self, slot: int, layer: int, start: int, rows_TE: Tensor) -> None:
        """Raw rows (key, then gate logits) of positions start, start + 1, …"""
        at = torch.arange(start, start + len(rows_TE)).remainder_(self.ring)
        self.raw[slot, layer].index_copy_(0, at, rows_TE)

    def read_raw(self, slot: int, layer: int, first_pool: int, num_pools: int) -> Tensor:
        """Raw rows of whole pools, [num_pools, P, 2 D]."""
        start = first_pool * self.pool
        at = torch.arange(start, start + num_pools * self.pool).remainder_(self.ring)
        rows = self.raw[slot, layer].index_select(0, at)
        return rows.view(num_pools, self.pool, -1)

    def write_pools(
        self, layer: int | slice, pages: list[int], first_pool: int, keys: Tensor
    ) -> None:
        """Store pooled keys [n, D] (or [L, n, D] for a slice of layers) from pool first_pool on."""
        index = torch.arange(first_pool, first_pool + keys.shape[-2])
        page = torch.tensor(pages)[index // self.pools_per_page]
        at = page * self.pools_per_page + index % self.pools_per_page
        flat = self.keys[layer].flatten(-3, -2)
        flat.index_copy_(-2, at, keys.to(flat.dtype))

    def read_pages(self, layer: int, pages: Tensor) -> Tensor:
        """A float32 copy [G, K, D] of the pooled keys of the given pages."""
        return self.keys[layer].index_select(0, pages).float()

    def reset(self, slot: int) -> None:
        self.raw[slot].zero_()

    @property
    def layers(self) -> slice:
        """Which of the whole model's layers of this kind are here."""
        return slice(self.first, self.first + len(self.keys))

    @property
    def nbytes_paged(self) -> int:
        return self.keys.nbytes

    @property
    def nbytes_slots(self) -> int:
        return self.raw.nbytes + self.candidates.nbytes
