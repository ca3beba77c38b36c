"""Which cache pages are free: a reference-counted allocator of page numbers. Pure bookkeeping.

A page holds 256 tokens of every paged plane. Pages are shared by counting (prefix reuse); a page
returns to the free list when its last holder releases it.
"""

from collections.abc import Iterable


class PageAllocator:
    """Hands out page numbers 0 … num_pages - 1, each with a count of its holders."""

    __slots__ = ("_counts", "_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"PageAllocator: num_pages={num_pages} must be at least 1")
        self.num_pages = num_pages
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, num: int) -> list[int] | None:
        """`num` pages with one holder each, or None (and no change) when fewer are free."""
        if num < 0:
            raise ValueError(f"PageAllocator.alloc: {num} pages asked for")
        if num > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one holder to each page. Raises ValueError for a page that nobody holds."""
        for page in pages:
            self._held(page)
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one holder of each page. Raises ValueError for a page that nobody holds."""
        for page in pages:
            self._held(page)
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free.append(page)

    def holders(self, page: int) -> int:
        return self._counts[page]

    def _held(self, page: int) -> None:
        if not 0 <= page < self.num_pages or self._counts[page] == 0:
            raise ValueError(f"PageAllocator: page {page} is not allocated")
