"""Drafting with the checkpoint's own MTP block: one exact row, then a chain on its own states.

Source: spec/dflash2.md E.1-E.2, spec/glm5_next.md section 11. Row i takes (h_i, token i + 1). Rows
of committed tokens wait here until the next draft and are computed in one pass with its first step
(the last of them takes the anchor), so catching up costs nothing extra. Rows above that come from
drafted states; they are recomputed from the trunk's states once their tokens are accepted.

Letters: N sequences, H hidden, S position of the anchor, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from twining.drafters.base import DraftItem, HeadAndEmbedding
from twining.models.glm5_next.mtp import MtpBlock, MtpRows

if TYPE_CHECKING:
    from twining.cache.pool import SequenceState
    from twining.models.glm5_next.model import TrunkRows

MAX_WAITING: Final = 16  # rows that wait for the next draft; more (prompt chunks) are computed


@dataclass(slots=True)
class _Waiting:
    """Trunk states h of positions first .. first + n - 1 whose rows are not computed yet.

    tokens: ids of positions first + 1 ..., as far as committed: n - 1 of them.
    is_whole: every row below `first` is in the block's caches.
    """

    first: int = 0
    hidden: list[Tensor] = field(default_factory=list)  # each [T, H]
    tokens: list[int] = field(default_factory=list)
    is_whole: bool = True

    @property
    def count(self) -> int:
        return sum(len(part) for part in self.hidden)


class MtpDrafter:
    """Chains up to max_draft tokens; every further token is one more pass of the block."""

    name = "mtp"
    needs_taps = False
    needs_hidden = True
    plane_names: tuple[str, ...] = ("mtp_hidden", "mtp_tokens")
    rewrites_last_page = True  # row i needs token i + 1, the first one after a restored prefix

    def __init__(self, block: MtpBlock, target: HeadAndEmbedding, *, max_draft: int) -> None:
        self.max_draft = max_draft
        self._block, self._target = block, target
        self._waiting: dict[int, _Waiting] = {}

    def open(self, state: "SequenceState") -> None:
        """Start without rows."""
        self._waiting[state.slot] = _Waiting()

    def close(self, state: "SequenceState") -> None:
        """Forget the waiting states; the rows live in the sequence's pages."""
        self._waiting.pop(state.slot, None)

    @torch.inference_mode()
    def extend(
        self, state: "SequenceState", start: int, ids: Sequence[int], rows: "TrunkRows"
    ) -> None:
        """Keep the states [T, H] of committed tokens; compute rows when many are waiting."""
        waiting = self._waiting[state.slot]
        if start != waiting.first + waiting.count:
            # Rows in between were never seen: nothing this block could say would be of use.
            waiting.is_whole = False
        if not waiting.is_whole or not ids:
            return
        waiting.tokens += [token for i, token in enumerate(ids, start) if i > waiting.first]
        # A copy: a slice would keep the states of the whole step alive.
        waiting.hidden.append(rows.hidden[: len(ids)].clone())
        if waiting.count > MAX_WAITING:
            self._compute_all_but_last(state, waiting)

    def _compute_all_but_last(self, state: "SequenceState", waiting: _Waiting) -> None:
        """The newest row lacks its next token and goes on waiting."""
        hidden = torch.cat(waiting.hidden)
        self._block.rows(state, waiting.tokens, hidden[:-1], waiting.first)
        waiting.first += len(waiting.tokens)
        waiting.hidden, waiting.tokens = [hidden[-1:].clone()], []

    def snapshot(self, state: "SequenceState", length: int) -> dict[str, Tensor] | None:
        """The waiting states [T, H] up to `length` and the T - 1 tokens after the first."""
        waiting = self._waiting[state.slot]
        count = length - waiting.first
        if not waiting.is_whole or not 1 <= count <= waiting.count:
            return None
        return {
            "mtp_hidden": torch.cat(waiting.hidden)[:count].clone(),
            "mtp_tokens": torch.tensor(waiting.tokens[: count - 1], dtype=torch.int64),
        }

    def restore(self, state: "SequenceState", planes: dict[str, Tensor], length: int) -> None:
        """Wait again where the snapshot waited."""
        hidden = planes["mtp_hidden"]
        self._waiting[state.slot] = _Waiting(
            first=length - len(hidden),
            hidden=[hidden.clone()],
            tokens=planes["mtp_tokens"].tolist(),
        )

    @torch.inference_mode()
    def draft(self, items: Sequence[DraftItem]) -> list[list[int]]:
        """Greedy chains; empty for a sequence whose rows are incomplete."""
        drafts: list[list[int]] = [[] for _ in items]
        active = [i for i, item in enumerate(items) if self._can_draft(item)]
        if not active:
            return drafts
        passes = [self._first_pass(items[i]) for i in active]
        last_rows = torch.tensor([len(rows.ids_next) for rows in passes]).cumsum(0) - 1
        hidden = self._block.rows_batch(passes)[last_rows]
        while active:
            ids = self._target.logits(hidden).argmax(-1).tolist()
            for i, token in zip(active, ids, strict=True):
                drafts[i].append(token)
            going = [n for n, i in enumerate(active) if self._wants_more(items[i], drafts[i])]
            active = [active[n] for n in going]
            if not active:
                break
            # Draft j of a sequence stands at position S + j and is row S + j - 1.
            chain = [
                MtpRows(
                    items[i].state,
                    items[i].state.length + len(drafts[i]) - 1,
                    [drafts[i][-1]],
                    hidden[n : n + 1],
                )
                for n, i in zip(going, active, strict=True)
            ]
            hidden = self._block.rows_batch(chain)
        return drafts

    def _can_draft(self, item: DraftItem) -> bool:
        waiting = self._waiting[item.state.slot]
        is_current = waiting.first + waiting.count == item.state.length and waiting.count > 0
        return item.num_draft > 0 and waiting.is_whole and is_current

    def _wants_more(self, item: DraftItem, drafted: list[int]) -> bool:
        """A row needs a page: the last draft's row is the highest one that is computed."""
        room = item.state.length + len(drafted) <= item.state.capacity
        return len(drafted) < min(item.num_draft, self.max_draft) and room

    def _first_pass(self, item: DraftItem) -> MtpRows:
        """All waiting rows, the last one with the anchor; they count as computed from here on."""
        waiting = self._waiting[item.state.slot]
        rows = MtpRows(
            item.state,
            waiting.first,
            [*waiting.tokens, item.tokens[-1]],
            torch.cat(waiting.hidden),
        )
        self._waiting[item.state.slot] = _Waiting(first=item.state.length)
        return rows
