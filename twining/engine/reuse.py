"""State that outlives its sequence: prefix checkpoints, and whole sequences moved to host memory.

Source: design.md P2, P3. What a restored prefix guarantees is said in cache/prefix.py. A preempted
sequence is another thing: every plane and page is copied as it is, settled, and put back later, so
it goes on with the same bits; no prefix cache setting matters for it.

Checkpoints are taken where prefill stands at a multiple of 256 tokens: every `checkpoint_every`, at
the last multiple below the end of a prompt (a retry) and at the end itself (a continuation), and
where a prompt leaves the known tree (the other branch). In `fast` mode the last multiple of 256
that decoding passed is kept as well, when the request ends.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from twining.cache.prefix import PrefixCache, PrefixCounters, PrefixEntry, page_keys
from twining.config import PAGE_SIZE, CacheConfig
from twining.drafters.base import Drafter
from twining.engine.protocols import Pool
from twining.engine.scheduler import Phase
from twining.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Parked:
    """A preempted sequence in host memory. drafter: None if the drafter had nothing to keep."""

    phase: Phase
    length: int
    slots: dict[str, Tensor]
    pages: dict[str, Tensor]
    drafter: dict[str, Tensor] | None

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        parts = (self.slots, self.pages, self.drafter or {})
        return sum(plane.nbytes for part in parts for plane in part.values())


class Reuse:
    """Restores, takes and evicts on behalf of the engine. Owns the prefix cache."""

    def __init__(
        self,
        pool: Pool,
        drafter: Drafter,
        config: CacheConfig,
        *,
        drop_drafter: Callable[[str], None],
    ) -> None:
        """drop_drafter: called inside the handler of an exception that the drafter raised."""
        self._pool, self._drafter, self._config = pool, drafter, config
        self._drop_drafter = drop_drafter
        max_bytes = int(config.checkpoint_gib * 2**30)
        self.cache = PrefixCache(pool.pages, max_bytes=max_bytes)

    @property
    def counters(self) -> PrefixCounters:
        """Hits, misses and evictions since the start."""
        return self.cache.counters

    @property
    def num_obtainable(self) -> int:
        """Pages that are free, or become free by eviction."""
        return self._pool.pages.num_free + self.cache.num_evictable

    def reserve(self, seq: Sequence, num_positions: int) -> bool:
        """Hold pages for num_positions in total, evicting entries if need be."""
        assert seq.state is not None
        missing = -(-num_positions // PAGE_SIZE) - len(seq.state.pages)
        if missing > self._pool.pages.num_free:
            self.cache.make_room(missing)
        return self._pool.reserve(seq.state, num_positions)

    # -------------------------------------------------------------------- prefixes

    def _stores(self, seq: Sequence) -> bool:
        return self._config.reuse != "off" and seq.request.use_prefix_cache

    def restore(self, seq: Sequence, *, with_drafter: bool) -> int:
        """Start an opened, empty sequence from the longest fitting entry; tokens restored, or 0.

        with_drafter: the drafter's planes must be there too. Also decides where this prompt leaves
        checkpoints of its own. At least one prompt token is left to compute, and all of them if the
        request asks for log-probabilities of its prompt.
        """
        if not self._stores(seq):
            return 0
        self._extend_keys(seq)
        entry, num_known = None, 0
        if seq.request.prompt_logprobs < 0:
            names = self._pool.plane_names
            if with_drafter:
                names = (*names, *self._drafter.plane_names)
            match = self.cache.find(
                seq.request.cache_salt,
                seq.page_keys,
                max_length=seq.num_prompt - 1,
                names=names,
            )
            entry, num_known = match.entry, match.num_known
        length = 0
        if entry is not None and self._load(seq, entry, with_drafter=with_drafter):
            length = entry.length
        seq.marks = self._marks(seq.num_prompt, start=length, num_known=num_known)
        return length

    def _load(self, seq: Sequence, entry: PrefixEntry, *, with_drafter: bool) -> bool:
        """Share the entry's pages, or copy the last one if the drafter will write to it."""
        assert seq.state is not None
        allocator, pages = self._pool.pages, list(entry.pages)
        if with_drafter and self._drafter.rewrites_last_page:
            self.cache.make_room(1, keep=entry)
            copy = allocator.alloc(1)
            if copy is None:
                return False
            self._pool.copy_page(pages[-1], copy[0])
            allocator.retain(pages[:-1])
            pages[-1:] = copy
        else:
            allocator.retain(pages)
        self._pool.restore(seq.state, entry.planes, length=entry.length, pages=pages)
        if with_drafter:
            self._restore_drafter(seq, entry.planes, entry.length)
        return True

    def _restore_drafter(self, seq: Sequence, planes: dict[str, Tensor], length: int) -> None:
        assert seq.state is not None
        try:
            self._drafter.restore(seq.state, planes, length)
        except Exception:
            self._drop_drafter("restore")

    def _marks(self, num_prompt: int, *, start: int, num_known: int) -> list[int]:
        """Lengths, ascending, at which this prompt leaves a checkpoint."""
        every = self._config.checkpoint_every
        ends = ((num_prompt - 1) // PAGE_SIZE * PAGE_SIZE, num_prompt // PAGE_SIZE * PAGE_SIZE)
        marks = {*range(every, num_prompt + 1, every), *ends, num_known}
        return sorted(mark for mark in marks if mark > start)

    def pieces(self, seq: Sequence, num_tokens: int) -> Iterator[int]:
        """Cut the next num_tokens prompt tokens at the checkpoints to be taken."""
        start = seq.prompt_done
        end = start + num_tokens
        for mark in [*seq.marks, end]:
            if start < mark <= end:
                yield mark - start
                start = mark

    def take(self, seq: Sequence, *, with_drafter: bool) -> None:
        """Keep a checkpoint if the prompt stands where one is due."""
        assert seq.state is not None
        length = seq.state.length
        if length not in seq.marks:
            return
        salt, keys = seq.request.cache_salt, seq.page_keys[: length // PAGE_SIZE]
        present = self.cache.get(salt, keys)
        names = set(self._pool.plane_names)
        if with_drafter:
            names |= set(self._drafter.plane_names)
        if present is not None and names <= present.planes.keys():
            self.cache.touch(present)
            return
        planes = self._pool.snapshot(seq.state)
        if with_drafter:
            planes |= self._drafter_planes(seq, length) or {}
        if names <= planes.keys():
            self.cache.insert(salt, keys, seq.state.pages[: len(keys)], planes)
            seq.taken.append(length)

    def _drafter_planes(self, seq: Sequence, length: int) -> dict[str, Tensor] | None:
        assert seq.state is not None
        try:
            return self._drafter.snapshot(seq.state, length)
        except Exception:
            self._drop_drafter("snapshot")
            return None

    def note_decoded(self, seq: Sequence, num_rows: int, *, with_drafter: bool) -> None:
        """After a commit of num_rows rows: in `fast` mode keep the state at a page's end."""
        assert seq.state is not None
        length = seq.state.length // PAGE_SIZE * PAGE_SIZE
        if self._config.reuse != "fast" or not self._stores(seq):
            return
        if length <= seq.state.length - num_rows:
            return
        planes = self._pool.snapshot_at(seq.state, length)
        extra = self._drafter_planes(seq, length) if with_drafter else {}
        seq.decoded = None if extra is None else (length, planes | extra)

    def keep_decoded(self, seq: Sequence) -> None:
        """The request ends well: what `note_decoded` has becomes an entry."""
        if seq.decoded is None or seq.state is None:
            return
        length, planes = seq.decoded
        seq.decoded = None
        self._extend_keys(seq)
        keys = seq.page_keys[: length // PAGE_SIZE]
        self.cache.insert(seq.request.cache_salt, keys, seq.state.pages[: len(keys)], planes)

    def forget(self, seq: Sequence) -> None:
        """The sequence went wrong: nothing that it computed is kept."""
        for length in seq.taken:
            entry = self.cache.get(seq.request.cache_salt, seq.page_keys[: length // PAGE_SIZE])
            if entry is not None:
                self.cache.remove(entry)
        seq.taken, seq.decoded = [], None

    def _extend_keys(self, seq: Sequence) -> None:
        seq.page_keys += page_keys(seq.tokens, first=len(seq.page_keys))

    # -------------------------------------------------------------------- preemption

    def park(self, seq: Sequence, *, with_drafter: bool) -> None:
        """Copy a running sequence whole to host memory; the caller then gives its slot back."""
        state = seq.state
        assert state is not None
        seq.parked = Parked(
            phase=seq.phase,
            length=state.length,
            slots=self._pool.snapshot(state),
            pages=self._pool.export_pages(state),
            drafter=self._drafter_planes(seq, state.length) if with_drafter else None,
        )

    def unpark(self, seq: Sequence, num_positions: int) -> None:
        """Put a parked sequence into the slot it has just been given."""
        parked, state = seq.parked, seq.state
        assert parked is not None and state is not None
        reserved = self.reserve(seq, max(num_positions, parked.length))
        assert reserved, "the plan resumes a sequence only when its pages are free"
        pages, state.pages = state.pages, []
        self._pool.restore(state, parked.slots, length=parked.length, pages=pages)
        self._pool.import_pages(state, parked.pages)
        if parked.drafter is not None:
            self._restore_drafter(seq, parked.drafter, parked.length)
        seq.phase, seq.parked = parked.phase, None
