"""Do the books balance? Slots and pages of all sequences against what the prefix cache holds."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from twining.cache.prefix import PrefixCache
from twining.config import PAGE_SIZE
from twining.engine.protocols import Pool
from twining.engine.scheduler import Phase
from twining.engine.sequence import Sequence

if TYPE_CHECKING:
    from twining.cache.pool import SequenceState


def page_holders(sequences: Iterable[Sequence]) -> Counter[int]:
    """Page -> running sequences that hold it."""
    return Counter(page for s in sequences if s.state is not None for page in s.state.pages)


def audit(sequences: Iterable[Sequence], pool: Pool, cache: PrefixCache, *, max_seqs: int) -> None:
    """Raises AssertionError unless requests, slots and pages add up, page by page."""
    sequences = list(sequences)
    running = [(s, s.state) for s in sequences if s.state is not None]
    assert all((s.phase is Phase.WAITING) == (s.state is None) for s in sequences)
    slots = [state.slot for _, state in running]
    assert len(set(slots)) == len(slots) <= max_seqs, f"slots {slots}"
    for seq, state in running:
        in_caches = seq.prompt_done if seq.phase is Phase.PREFILL else len(seq.tokens) - 1
        assert state.length == in_caches, f"{seq.id}: {state.length} != {in_caches}"
        assert len(set(state.pages)) == len(state.pages), f"{seq.id} holds a page twice"
    cache.audit()
    used, cached = page_holders(sequences), cache.held_pages()
    allocator = pool.pages
    for page in range(allocator.num_pages):
        want = used[page] + cached.get(page, 0)
        assert allocator.holders(page) == want, f"page {page}: {allocator.holders(page)} != {want}"
    free, total = allocator.num_free, allocator.num_pages
    alone = cache.num_evictable
    assert free + len(used) + alone == total, f"{free} free + {len(used)} used + {alone} cached"
    _audit_shared(running, used)


def _audit_shared(running: "list[tuple[Sequence, SequenceState]]", used: Counter[int]) -> None:
    """A page of two sequences holds the same tokens of both, and neither writes there any more."""
    first: dict[int, tuple[int, list[int]]] = {}
    for seq, state in running:
        for i, page in enumerate(state.pages):
            if used[page] > 1:
                end = (i + 1) * PAGE_SIZE
                assert end <= state.length, f"{seq.id} still writes to page {page}"
                mine = (i, seq.tokens[:end])
                assert first.setdefault(page, mine) == mine, f"page {page} has two meanings"
