"""The page allocator: counting, refusals, and random histories."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twining.cache.pages import PageAllocator


def test_alloc_is_all_or_nothing():
    pages = PageAllocator(3)
    first = pages.alloc(2)
    assert first is not None and len(set(first)) == 2
    assert pages.alloc(2) is None and pages.num_free == 1
    assert pages.alloc(0) == []
    pages.release(first)
    assert pages.num_free == 3


def test_refusals():
    with pytest.raises(ValueError, match="at least 1"):
        PageAllocator(0)
    pages = PageAllocator(2)
    (page,) = pages.alloc(1)
    for call in (pages.release, pages.retain):
        for wrong in (1 - page, 2, -1):
            with pytest.raises(ValueError, match="not allocated"):
                call([wrong])
    with pytest.raises(ValueError, match="-1 pages"):
        pages.alloc(-1)
    pages.release([page])
    with pytest.raises(ValueError, match="not allocated"):
        pages.release([page])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["alloc", "retain", "release"]), st.integers(0, 5))))
def test_counts_add_up(history):
    pages = PageAllocator(8)
    held: list[int] = []
    for what, num in history:
        if what == "alloc":
            got = pages.alloc(num)
            assert (got is None) == (num > 8 - len(set(held)))
            held += got or []
        elif held and what == "retain":
            page = held[num % len(held)]
            pages.retain([page])
            held.append(page)
        elif held:
            page = held.pop(num % len(held))
            pages.release([page])
        assert pages.num_free == 8 - len(set(held))
        assert all(pages.holders(p) == held.count(p) for p in range(8))
