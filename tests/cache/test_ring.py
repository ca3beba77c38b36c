"""Context ring: whatever is readable holds the row last written at that position."""

import random

import pytest
import torch

from twining.cache.ring import RingCache

LAYERS, HEADS, DIM = 2, 3, 4


def make_ring(num_rows: int, num_slots: int = 3) -> RingCache:
    ring = RingCache(
        num_layers=LAYERS,
        num_slots=num_slots,
        num_kv_heads=HEADS,
        head_dim=DIM,
        num_rows=num_rows,
    )
    ring.k.fill_(torch.nan)  # unwritten rows must not be read
    ring.v.fill_(torch.nan)
    return ring


def random_rows(count: int) -> torch.Tensor:
    return torch.randn(LAYERS, count, HEADS, DIM)


@pytest.mark.parametrize("num_rows", [1, 5, 16])
@pytest.mark.parametrize("seed", range(6))
def test_random_writes_rewinds_and_gaps(num_rows, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ring = make_ring(num_rows)
    model = [{}, {}, {}]  # position -> (k, v) of rows that may be readable, per slot
    for _ in range(300):
        slot = rng.randrange(3)
        rows = model[slot]
        oldest, end = ring.readable(slot)
        if rng.random() < 0.03:
            ring.reset(slot)
            rows.clear()
            assert ring.readable(slot) == (0, 0)
            continue
        kind = rng.random()
        start = end
        if kind < 0.2:
            start = max(0, end - rng.randrange(num_rows + 3))  # rewind
        elif kind < 0.3:
            start = end + rng.randrange(1, 2 * num_rows + 2)  # gap
        count = rng.randrange(0, 3 * num_rows)
        k, v = random_rows(count), random_rows(count)
        ring.write(slot, start, k, v)
        if count:
            for position in [p for p in rows if p >= start]:
                del rows[position]
            if start > end:
                rows.clear()
            for i in range(count):
                rows[start + i] = (k[:, i], v[:, i])
        for other in range(3):
            oldest, end = ring.readable(other)
            assert end - oldest <= num_rows
            if model[other]:
                assert end == max(model[other]) + 1
                assert end - oldest >= 1
            for layer in range(LAYERS):
                first = rng.randrange(oldest, end + 1)
                last = rng.randrange(first, end + 1)
                got_k, got_v = ring.read(other, layer, first, last)
                assert got_k.shape == (HEADS, last - first, DIM)
                for i, position in enumerate(range(first, last)):
                    want_k, want_v = model[other][position]
                    assert torch.equal(got_k[:, i], want_k[layer])
                    assert torch.equal(got_v[:, i], want_v[layer])


def test_whole_ring_is_readable_after_plain_appends():
    ring = make_ring(8)
    for start in range(0, 40, 5):
        ring.write(0, start, random_rows(5), random_rows(5))
    assert ring.readable(0) == (32, 40)


def test_rewind_cannot_reach_rows_that_were_overwritten():
    ring = make_ring(8)
    ring.write(0, 0, random_rows(20), random_rows(20))
    ring.write(0, 15, random_rows(1), random_rows(1))
    assert ring.readable(0) == (12, 16)
    with pytest.raises(ValueError, match=r"rows 11\.\.15 of slot 0 asked, readable are 12\.\.15"):
        ring.read(0, 0, 11, 16)


def test_size_holds_window_chunk_and_block():
    assert RingCache.rows_needed(window=2048, chunk=2048, block=8) == 4352
    ring = make_ring(16)
    assert ring.nbytes() == 2 * LAYERS * 3 * HEADS * 16 * DIM * 4
