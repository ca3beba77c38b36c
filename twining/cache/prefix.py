"""Prefix reuse: a tree over token ids whose nodes hold checkpoints of the state after a prefix.

Source: design.md P2, P3; spec/dflash2.md C.6. An edge is one page: 256 token ids, and the digests
of media inside them. A node may hold an entry: the pages of the prefix, retained in the allocator,
and a copy of every plane that is not paged, in host memory. Salts have trees of their own.

What a hit guarantees. `exact`: entries are made by prefill alone, at multiples of 256 tokens, and a
resumed prompt is computed by prefill from there on. Prefill is the same arithmetic for any split at
multiples of 64, so a warm run equals a cold one bit for bit. `fast`: entries may also hold state
that decode steps made. It continues that very conversation, but decode rounds differently from
prefill, so a warm run may differ from a cold one in low bits and thus, in rare cases, in tokens; it
is a function of the request and of what the cache held. `off`: nothing is kept or restored.

An entry names its planes and has a digest of what it stands for: salt, length, token ids and media
up to the length, and plane names. What does not match, or lacks a plane, is a miss and is counted.
Entries go in order of last use when their bytes exceed the budget, or when pages are needed.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from twining.cache.pages import PageAllocator
from twining.config import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Positions start .. end - 1 stand for media with this digest, whatever their ids."""

    start: int
    end: int
    digest: bytes


@dataclass(slots=True, eq=False)
class _Node:
    parent: "_Node | None"
    key: bytes
    children: dict[bytes, "_Node"] = field(default_factory=dict)
    entry: "PrefixEntry | None" = None


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """State after `length` tokens. pages: its page table; planes: host copies by name."""

    salt: str
    length: int
    pages: tuple[int, ...]
    planes: dict[str, Tensor]
    digest: bytes
    node: _Node

    @property
    def nbytes(self) -> int:
        """Bytes of the planes; the pages are counted in pages."""
        return sum(plane.nbytes for plane in self.planes.values())


@dataclass(frozen=True, slots=True)
class Match:
    """entry: the longest checkpoint that may be restored. num_known: tokens of the longest whole
    pages that the tree has seen, where a checkpoint would serve both branches."""

    entry: PrefixEntry | None
    num_known: int


@dataclass(slots=True)
class PrefixCounters:
    """Since the start. misses: nothing usable found; mismatches: misses because of a digest or a
    missing plane; evictions: entries given up for pages or bytes."""

    hits: int = 0
    misses: int = 0
    mismatches: int = 0
    evictions: int = 0


def page_keys(
    ids: Sequence[int], media: Sequence[MediaSpan] = (), *, first: int = 0
) -> list[bytes]:
    """Edge keys of the whole pages of `ids`, from page `first` on."""
    keys = []
    for page in range(first, len(ids) // PAGE_SIZE):
        start, end = page * PAGE_SIZE, (page + 1) * PAGE_SIZE
        key = array("I", ids[start:end]).tobytes()
        for span in media:
            if span.start < end and start < span.end:
                where = array("q", (span.start - start, span.end - start)).tobytes()
                key += where + span.digest
        keys.append(key)
    return keys


def prefix_digest(salt: str, keys: Sequence[bytes], names: Iterable[str]) -> bytes:
    """What an entry stands for. Every part is hashed with its length, so parts cannot run
    together."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (salt.encode(), *keys, b"planes", *(name.encode() for name in sorted(names))):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class PrefixCache:
    """Entries by token prefix. Holds pages of `pages`, and at most max_bytes of planes."""

    def __init__(self, pages: PageAllocator, *, max_bytes: int) -> None:
        self._pages = pages
        self._max_bytes = max_bytes
        self._roots: dict[str, _Node] = {}
        self._entries: dict[PrefixEntry, None] = {}  # least recently used first
        self._holds: dict[int, int] = {}  # page -> entries that hold it
        self.nbytes = 0
        self.counters = PrefixCounters()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_evictable(self) -> int:
        """Pages that nobody but entries holds: free for the asking."""
        return sum(self._pages.holders(page) == n for page, n in self._holds.items())

    def find(
        self, salt: str, keys: Sequence[bytes], *, max_length: int, names: Iterable[str]
    ) -> Match:
        """The longest entry of at most max_length tokens that has all planes of `names`.

        Counts a hit or a miss. An entry whose digest is wrong is removed.
        """
        needed, best = set(names), None
        lacking, damaged = False, []
        node, depth = self._roots.get(salt), 0
        while node is not None:
            entry = node.entry
            if entry is not None and entry.length <= max_length:
                if entry.digest != prefix_digest(salt, keys[:depth], entry.planes):
                    damaged.append(entry)
                elif needed <= entry.planes.keys():
                    best = entry
                else:
                    lacking = True
            if depth == len(keys) or keys[depth] not in node.children:
                break
            node, depth = node.children[keys[depth]], depth + 1
        if best is None:
            self.counters.misses += 1
        else:
            self.counters.hits += 1
            self.touch(best)
        self.counters.mismatches += lacking or bool(damaged)
        for entry in damaged:
            self.remove(entry)
        return Match(best, depth * PAGE_SIZE)

    def get(self, salt: str, keys: Sequence[bytes]) -> PrefixEntry | None:
        """The entry of exactly these pages."""
        node = self._roots.get(salt)
        for key in keys:
            node = node.children.get(key) if node is not None else None
        return None if node is None else node.entry

    def touch(self, entry: PrefixEntry) -> None:
        """Used just now."""
        del self._entries[entry]
        self._entries[entry] = None

    def insert(
        self, salt: str, keys: Sequence[bytes], pages: Sequence[int], planes: dict[str, Tensor]
    ) -> PrefixEntry | None:
        """Keep the state after the given whole pages; replaces an entry of the same prefix.

        The planes belong to the cache from now on; the pages get one more holder. None, and no
        change, when the planes alone exceed the byte budget. Raises ValueError unless there is one
        page per key and at least one.
        """
        if not keys or len(pages) != len(keys):
            raise ValueError(f"PrefixCache.insert: {len(pages)} pages for {len(keys)} keys")
        size = sum(plane.nbytes for plane in planes.values())
        if size > self._max_bytes:
            return None
        old = self.get(salt, keys)
        if old is not None:
            self.remove(old)
        while self.nbytes + size > self._max_bytes:
            self._evict(next(iter(self._entries)))
        node = self._roots.setdefault(salt, _Node(None, b""))
        for key in keys:
            node = node.children.setdefault(key, _Node(node, key))
        length = len(keys) * PAGE_SIZE
        digest = prefix_digest(salt, keys, planes)
        entry = node.entry = PrefixEntry(salt, length, tuple(pages), planes, digest, node)
        self._pages.retain(pages)
        for page in pages:
            self._holds[page] = self._holds.get(page, 0) + 1
        self._entries[entry] = None
        self.nbytes += size
        return entry

    def remove(self, entry: PrefixEntry) -> None:
        """Give up an entry and its holds; nothing happens if it is gone already."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        self.nbytes -= entry.nbytes
        self._pages.release(entry.pages)
        for page in entry.pages:
            self._holds[page] -= 1
            if not self._holds[page]:
                del self._holds[page]
        entry.node.entry = None
        node = entry.node
        while node.parent is not None and not node.children and node.entry is None:
            del node.parent.children[node.key]
            node = node.parent
        if node.parent is None and not node.children:
            self._roots.pop(entry.salt, None)

    def make_room(self, num_pages: int, *, keep: PrefixEntry | None = None) -> bool:
        """Evict until num_pages are free; False, and no change, if that cannot be had.

        Least recently used first among those that free a page at once: an entry whose pages are
        all held by sequences or by longer entries too would be given up for nothing.
        """
        kept = set(keep.pages) if keep is not None else set()
        spare = sum(self._is_evictable(page, kept) for page in self._holds)
        if self._pages.num_free + spare < num_pages:
            return False
        while self._pages.num_free < num_pages:
            others = [entry for entry in self._entries if entry is not keep]
            freeing = (e for e in others if any(self._pages.holders(p) == 1 for p in e.pages))
            shared = (e for e in others if any(self._is_evictable(p, kept) for p in e.pages))
            self._evict(next(freeing, None) or next(shared))
        return True

    def _is_evictable(self, page: int, kept: set[int]) -> bool:
        return page not in kept and self._pages.holders(page) == self._holds[page]

    def _evict(self, entry: PrefixEntry) -> None:
        self.counters.evictions += 1
        self.remove(entry)

    def held_pages(self) -> dict[int, int]:
        """Page -> entries that hold it."""
        return dict(self._holds)

    def audit(self) -> None:
        """Raises AssertionError unless tree, entries, bytes and page counts agree."""
        found: list[PrefixEntry] = []
        for salt, root in self._roots.items():
            stack: list[tuple[_Node, list[bytes]]] = [(root, [])]
            assert root.children and root.entry is None
            while stack:
                node, keys = stack.pop()
                assert node.children or node.entry is not None, "a node that leads nowhere"
                if node.entry is not None:
                    entry = node.entry
                    found.append(entry)
                    assert entry.node is node and entry.salt == salt
                    assert entry.length == len(keys) * PAGE_SIZE == len(entry.pages) * PAGE_SIZE
                    assert entry.digest == prefix_digest(salt, keys, entry.planes)
                for key, child in node.children.items():
                    assert child.parent is node and child.key == key
                    stack.append((child, [*keys, key]))
        assert set(found) == set(self._entries) and len(found) == len(self._entries)
        assert self.nbytes == sum(entry.nbytes for entry in found) <= self._max_bytes
        holds: dict[int, int] = {}
        for entry in found:
            for page in entry.pages:
                holds[page] = holds.get(page, 0) + 1
        assert holds == self._holds
        assert all(self._pages.holders(page) >= n for page, n in holds.items())
