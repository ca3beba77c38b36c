"""All cache planes of one model, and the sequences that live in them.

Source: design.md P3, P4. The planes of a stage's layers are together (`stages`); slots and pages
are the same for every stage, so one SequenceState serves them all. A sequence owns a slot (planes
of fixed size) and pages (planes that grow with its length), and everything is addressed by logical
position: position p is at row p % 256 of page pages[p // 256]. Opening a slot resets its planes;
pages are not cleared, because nothing above a sequence's length is ever visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twining.cache.index import KEY_DTYPES
from twining.cache.pages import PageAllocator
from twining.cache.stage import StagePlanes
from twining.checkpoint.hf_config import Glm5NextConfig
from twining.config import PAGE_SIZE, LatentFormat
from twining.errors import ConfigError
from twining.kernels.row_linear.reference import WINDOW_ROWS


@dataclass(slots=True, eq=False)
class SequenceState:
    """One open sequence. length: committed tokens; pages: its page table, in order of position.

    num_window: rows of the last verify, until one is committed. num_pending: accepted rows of the
    last verify that the KDA base does not contain yet.
    """

    pool: "CachePool"
    slot: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    num_window: int = 0
    num_pending: int = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pages held."""
        return len(self.pages) * PAGE_SIZE


class CachePool:
    """Planes for max_seqs sequences and num_pages shared pages.

    zero_row: the storage row that reads as zeros in every stage. conv_ring: rows of a convolution
    ring. Whoever calls `snapshot`, `restore` and the like must have no pass of that sequence under
    way; passes of other sequences do not matter.
    """

    plane_names: tuple[str, ...] = (
        "kda_state",
        "kda_conv",
        "index_tail",
    )  # what a snapshot consists of

    def __init__(
        self,
        config: Glm5NextConfig,
        *,
        num_pages: int,
        max_seqs: int,
        max_draft: int,
        latent_format: LatentFormat = "fp32",
        index_format: str = "fp32",
        has_mtp: bool = False,
        partition: Sequence[int] = (),
    ) -> None:
        """partition: trunk layers of each stage, () for one stage with all of them; the MTP block
        is on the last. Raises ConfigError for sizes or formats that cannot be honoured.
        """
        partition = tuple(partition) or (config.num_layers,)
        if num_pages < 1 or max_seqs < 1 or max_draft < 0:
            raise ConfigError(
                f"cache of {num_pages} pages, {max_seqs} sequences, {max_draft} drafts: the first"
                " two must be at least 1 and the last not negative"
            )
        if max_draft >= WINDOW_ROWS:
            raise ConfigError(
                f"max_draft={max_draft} does not fit a verify window of {WINDOW_ROWS} rows;"
                f" use at most {WINDOW_ROWS - 1}"
            )
        if index_format not in KEY_DTYPES:
            raise ConfigError(f"index_format={index_format!r} is unknown; use fp32 or fp16")
        if min(partition) < 1 or sum(partition) != config.num_layers:
            raise ConfigError(
                f"partition {','.join(map(str, partition))} does not divide the model's"
                f" {config.num_layers} layers into stages of at least one"
            )
        self.window = max_draft + 1
        self.pages = PageAllocator(num_pages)
        self.stages: list[StagePlanes] = []
        first = 0
        for num, count in enumerate(partition, 1):
            planes = StagePlanes(
                config,
                range(first, first + count),
                num_pages=num_pages,
                max_seqs=max_seqs,
                window=self.window,
                latent_format=latent_format,
                key_dtype=KEY_DTYPES[index_format],
                has_mtp=has_mtp and num == len(partition),
            )
            self.stages.append(planes)
            first += count
        self.zero_row = self.stages[0].latent.zero_row
        self.conv_ring = self.stages[0].recurrent.ring
        self._free_slots = list(range(max_seqs - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def open(self) -> SequenceState | None:
        """An empty sequence, or None when every slot is taken."""
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        for planes in self.stages:
            planes.reset(slot)
        return SequenceState(self, slot)

    def close(self, state: SequenceState) -> None:
        """Give the slot and the pages back. The state must not be used afterwards."""
        if state.slot < 0:
            raise ValueError("CachePool.close: this sequence is closed already")
        self.pages.release(state.pages)
        self._free_slots.append(state.slot)
        state.pages, state.slot = [], -1

    def reserve(self, state: SequenceState, num_tokens: int) -> bool:
        """Hold pages for num_tokens tokens in total; False (and no change) if too few are free."""
        missing = -(-num_tokens // PAGE_SIZE) - len(state.pages)
        if missing <= 0:
            return True
        fresh = self.pages.alloc(missing)
        if fresh is None:
            return False
        state.pages += fresh
        return True

    def settle(self, state: SequenceState) -> None:
        """Replay pending rows, so that the KDA base is the state after `length` tokens."""
        num, state.num_pending = state.num_pending, 0
        for planes in self.stages:
            planes.recurrent.replay(state.slot, num)

    def rows(self, state: SequenceState, start: int, stop: int) -> Tensor:
        """Storage rows of positions start … stop - 1."""
        positions = torch.arange(start, stop)
        table = torch.tensor(state.pages, dtype=torch.int64)
        return table[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def snapshot(self, state: SequenceState) -> dict[str, Tensor]:
        """Settle, then copy the planes of fixed size, by plane name; the layers of all stages
        together, so that the copy fits any partition.
        """
        self.settle(state)
        return self._copy_slot(state.slot)

    def _copy_slot(self, slot: int) -> dict[str, Tensor]:
        return {
            "kda_state": torch.cat([p.recurrent.base[slot] for p in self.stages]),
            "kda_conv": torch.cat([p.recurrent.conv[slot] for p in self.stages]),
            "index_tail": torch.cat([p.index.raw[slot] for p in self.stages]),
        }

    def snapshot_at(self, state: SequenceState, length: int) -> dict[str, Tensor]:
        """`snapshot` as of an earlier length: start < length <= state.length, start being the
        length before the last commit, whose window is still in the log.

        Raises ValueError for any other length, or when the log was replayed already.
        """
        rows = length - (state.length - state.num_pending)
        if not 1 <= rows <= state.num_pending:
            raise ValueError(
                f"CachePool.snapshot_at: {length} tokens, but the log of slot {state.slot} covers"
                f" {state.num_pending} tokens up to {state.length}"
            )
        slot = state.slot
        bases = [own.recurrent.base[slot].clone() for own in self.stages]
        for own in self.stages:
            own.recurrent.replay(slot, rows)
        planes = self._copy_slot(slot)
        for own, base in zip(self.stages, bases, strict=True):
            own.recurrent.base[slot].copy_(base)
        return planes

    def restore(
        self,
        state: SequenceState,
        planes: dict[str, Tensor],
        *,
        length: int,
        pages: Sequence[int],
    ) -> None:
        """Make a fresh sequence the one that was snapshotted at `length`.

        pages: page table covering `length` tokens; the caller's hold on them passes to the state.
        Raises ValueError when a plane is missing or the state is in use: nothing is changed then.
        """
        missing = [name for name in self.plane_names if name not in planes]
        if missing or state.length or state.pages or len(pages) * PAGE_SIZE < length:
            raise ValueError(
                f"CachePool.restore: missing planes {missing}, state of {state.length} tokens,"
                f" {len(pages)} pages for {length} tokens"
            )
        for own in self.stages:
            kda, index = own.recurrent.layers, own.index.layers
            own.recurrent.base[state.slot].copy_(planes["kda_state"][kda])
            own.recurrent.conv[state.slot].copy_(planes["kda_conv"][kda])
            own.index.raw[state.slot].copy_(planes["index_tail"][index])
        state.length, state.pages = length, list(pages)

    def export_pages(self, state: SequenceState) -> dict[str, Tensor]:
        """Copies of the paged planes up to the sequence's length (for preemption), the layers of
        all stages together.
        """
        num = -(-state.length // PAGE_SIZE)
        rows = self.rows(state, 0, num * PAGE_SIZE)
        table = torch.tensor(state.pages[:num], dtype=torch.int64)
        parts = [p.export_pages(rows, table) for p in self.stages]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def import_pages(self, state: SequenceState, planes: dict[str, Tensor]) -> None:
        """Write exported pages to the pages that the sequence holds now."""
        num = planes["index_keys"].shape[1]
        if num > len(state.pages):
            raise ValueError(f"CachePool.import_pages: {num} pages for {len(state.pages)} held")
        rows = self.rows(state, 0, num * PAGE_SIZE)
        table = torch.tensor(state.pages[:num], dtype=torch.int64)
        for own in self.stages:
            own.import_pages(rows, table, planes)

    def copy_page(self, source: int, target: int) -> None:
        """Paged planes of one page, all layers."""
        planes = self.export_pages(SequenceState(self, -1, PAGE_SIZE, [source]))
        self.import_pages(SequenceState(self, -1, PAGE_SIZE, [target]), planes)

    def nbytes(self) -> dict[str, int]:
        """Bytes of each plane, all stages together."""
        total = dict.fromkeys(self.stages[0].nbytes(), 0)
        for planes in self.stages:
            for name, count in planes.nbytes().items():
                total[name] += count
        return total
