"""The prefix cache against a plain model of it: what is found, what is held, what is given up."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twining.cache.pages import PageAllocator
from twining.cache.prefix import MediaSpan, PrefixCache, page_keys, prefix_digest

PAGE = 256


def planes(size: int = 10, **more) -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(size, dtype=torch.uint8)} | more


def ids_of(*pages: int) -> list[int]:
    """Whole pages, each told apart by one number."""
    return [n for page in pages for n in [page] * PAGE]


def cache_of(num_pages: int = 20, max_bytes: int = 1000) -> tuple[PrefixCache, PageAllocator]:
    allocator = PageAllocator(num_pages)
    return PrefixCache(allocator, max_bytes=max_bytes), allocator


def put(cache, allocator, numbers, salt="", size=10, release=True):
    """As a sequence would: allocate, insert, and (unless it runs on) release."""
    pages = allocator.alloc(len(numbers))
    entry = cache.insert(salt, page_keys(ids_of(*numbers)), pages, planes(size))
    if release:
        allocator.release(pages)
    return entry


def find(cache, numbers, *, extra=1, salt="", names=("a",), max_length=None):
    ids = ids_of(*numbers) + [0] * extra
    limit = len(ids) - 1 if max_length is None else max_length
    return cache.find(salt, page_keys(ids), max_length=limit, names=names)


def test_keys_are_whole_pages_and_tell_tokens_and_media_apart():
    ids = list(range(600))
    keys = page_keys(ids)
    assert len(keys) == 2 and page_keys(ids, first=1) == keys[1:] and page_keys(ids[:255]) == []
    assert page_keys([1, *ids[1:]])[0] != keys[0]
    span = MediaSpan(250, 300, b"x" * 16)
    with_media = page_keys(ids, [span])
    assert with_media[0] != keys[0] and with_media[1] != keys[1]
    assert page_keys(ids, [MediaSpan(250, 300, b"y" * 16)])[1] != with_media[1]
    assert page_keys(ids, [MediaSpan(250, 301, b"x" * 16)])[1] != with_media[1]
    assert page_keys(ids, [MediaSpan(250, 256, b"x" * 16)])[1] == keys[1]
    assert page_keys(ids, [MediaSpan(512, 600, b"x" * 16)]) == keys


def test_the_digest_covers_every_part():
    base = prefix_digest("s", [b"ab", b"c"], ["p", "q"])
    assert base == prefix_digest("s", [b"ab", b"c"], ["q", "p"])
    others = [
        prefix_digest("t", [b"ab", b"c"], ["p", "q"]),
        prefix_digest("s", [b"a", b"bc"], ["p", "q"]),
        prefix_digest("s", [b"ab"], ["p", "q"]),
        prefix_digest("s", [b"ab", b"c"], ["p"]),
        prefix_digest("s", [b"ab", b"c"], ["pq"]),
        prefix_digest("sab", [b"c"], ["p", "q"]),
    ]
    assert len({base, *others}) == 7


def test_longest_entry_below_the_limit_is_found():
    cache, allocator = cache_of()
    one = put(cache, allocator, [1])
    three = put(cache, allocator, [1, 2, 3])
    assert find(cache, [1, 2, 3]).entry is three
    assert find(cache, [1, 2, 3], extra=0).entry is one  # one token must be left to compute
    match = find(cache, [1, 2, 9])
    assert match.entry is one and match.num_known == 2 * PAGE
    assert find(cache, [1, 2, 3, 4]).num_known == 3 * PAGE
    match = find(cache, [5])
    assert match.entry is None and match.num_known == 0
    assert find(cache, [1], salt="other").entry is None
    assert (cache.counters.hits, cache.counters.misses) == (4, 2)
    cache.audit()


def test_a_missing_plane_is_a_miss_and_counted():
    cache, allocator = cache_of()
    entry = put(cache, allocator, [1, 2])
    assert find(cache, [1, 2], names=("a", "ring")).entry is None
    assert cache.counters.mismatches == cache.counters.misses == 1
    assert find(cache, [1, 2]).entry is entry


@pytest.mark.parametrize("damage", ["digest", "planes", "salt"])
def test_a_wrong_digest_is_a_miss_and_the_entry_goes(damage):
    cache, allocator = cache_of()
    short = put(cache, allocator, [1])
    entry = put(cache, allocator, [1, 2])
    if damage == "digest":
        entry.digest = b"?" * 16
    elif damage == "planes":
        entry.planes["b"] = entry.planes.pop("a")
    else:
        cache._roots["x"] = cache._roots.pop("")
    match = find(cache, [1, 2], salt="x" if damage == "salt" else "")
    assert match.entry is (None if damage == "salt" else short)
    assert cache.counters.mismatches == 1
    assert len(cache) == (0 if damage == "salt" else 1)
    assert allocator.num_free == (20 if damage == "salt" else 19)


def test_bytes_stay_within_the_budget_and_the_oldest_goes_first():
    cache, allocator = cache_of(max_bytes=30)
    first, second = put(cache, allocator, [1]), put(cache, allocator, [2])
    put(cache, allocator, [3])
    cache.touch(first)
    put(cache, allocator, [4])
    assert find(cache, [2]).entry is None and find(cache, [1]).entry is first
    assert cache.nbytes == 30 and second.node.entry is None
    assert put(cache, allocator, [5], size=31) is None and len(cache) == 3
    put(cache, allocator, [6], size=30)
    assert len(cache) == 1 and cache.counters.evictions == 4
    cache.audit()


def test_the_same_prefix_again_replaces():
    cache, allocator = cache_of()
    put(cache, allocator, [1, 2])
    entry = put(cache, allocator, [1, 2], size=20)
    assert find(cache, [1, 2]).entry is entry
    assert len(cache) == 1 and cache.nbytes == 20 and allocator.num_free == 18
    cache.remove(entry)
    cache.remove(entry)
    assert cache.nbytes == 0 and allocator.num_free == 20 and not cache._roots


def test_room_is_made_only_where_it_helps():
    cache, allocator = cache_of(num_pages=6)
    running = allocator.alloc(2)
    busy = cache.insert("", page_keys(ids_of(1, 2)), running, planes())
    idle = put(cache, allocator, [3, 4])
    assert cache.num_evictable == 2 and allocator.num_free == 2
    assert cache.make_room(4) and allocator.num_free == 4
    assert idle.node.entry is None and busy.node.entry is busy
    assert not cache.make_room(5) and len(cache) == 1
    allocator.release(running)
    assert not cache.make_room(6, keep=busy) and len(cache) == 1
    assert cache.make_room(6) and allocator.num_free == 6
    cache.audit()


def test_shared_pages_return_with_their_last_holder():
    cache, allocator = cache_of(num_pages=4)
    pages = allocator.alloc(3)
    cache.insert("", page_keys(ids_of(1, 2)), pages[:2], planes())
    cache.insert("", page_keys(ids_of(1, 2, 3)), pages, planes())
    allocator.release(pages)
    assert allocator.num_free == 1 and cache.num_evictable == 3
    assert cache.make_room(2) and len(cache) == 1  # the short one gives nothing, the long one does
    assert cache.make_room(4) and len(cache) == 0


def test_misuse():
    cache, _ = cache_of()
    with pytest.raises(ValueError, match="0 pages for 1 keys"):
        cache.insert("", [b"x"], [], planes())
    with pytest.raises(ValueError, match="0 pages for 0 keys"):
        cache.insert("", [], [], planes())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_use_agrees_with_a_plain_model(seed):
    rng = random.Random(seed)
    num_pages, max_bytes = rng.randint(4, 12), rng.choice([25, 60, 1000])
    cache, allocator = cache_of(num_pages, max_bytes)
    model: dict[tuple, object] = {}  # (salt, *numbers) -> entry, least recently used first
    running: list[list[int]] = []
    for _ in range(60):
        salt = rng.choice(["", "s"])
        numbers = [rng.randrange(2) for _ in range(rng.randint(1, 4))]
        key = (salt, *numbers)
        action = rng.random()
        if action < 0.5:
            before = list(cache._entries)
            if not cache.make_room(len(numbers)):
                assert list(cache._entries) == before
                continue
            model = {k: e for k, e in model.items() if e in cache._entries}
            size = rng.choice([5, 10, 30])
            pages = allocator.alloc(len(numbers))
            entry = cache.insert(salt, page_keys(ids_of(*numbers)), pages, planes(size))
            assert (entry is None) == (size > max_bytes)
            if entry is not None:
                model.pop(key, None)
                model[key] = entry
            while sum(e.nbytes for e in model.values()) > max_bytes:
                del model[next(iter(model))]
            if rng.random() < 0.3:
                running.append(pages)
            else:
                allocator.release(pages)
        elif action < 0.8:
            limit = rng.randint(0, 5 * PAGE)
            best = max(
                (k for k in model if key[: len(k)] == k and (len(k) - 1) * PAGE <= limit),
                key=len,
                default=None,
            )
            match = find(cache, numbers, salt=salt, max_length=limit)
            assert match.entry is (None if best is None else model[best])
            if best is not None:
                model[best] = model.pop(best)
            known = max(
                (i for i in range(len(key)) if any(k[: i + 1] == key[: i + 1] for k in model)),
                default=0,
            )
            assert match.num_known == known * PAGE
        elif running:
            allocator.release(running.pop(rng.randrange(len(running))))
        assert list(cache._entries) == list(model.values())
        cache.audit()
        held = {p for pages in running for p in pages}
        assert allocator.num_free + len(held) + cache.num_evictable == num_pages
