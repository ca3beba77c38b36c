"""One request inside the engine: its tokens, its place in the caches, and its clock readings.

`tokens` is prompt plus everything sampled. Between steps the last sampled token, the anchor, is not
yet in the caches: a decoding sequence has len(tokens) == state.length + 1 (spec/dflash2.md I).
Times are seconds of the engine's monotonic clock.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from twining.config import PAGE_SIZE
from twining.engine.adaptive import Rates
from twining.engine.request import Request, Timings
from twining.engine.sampler import TokenHistory
from twining.engine.scheduler import Phase, SequenceView

if TYPE_CHECKING:
    from twining.cache.pool import SequenceState
    from twining.engine.grammar import GrammarState
    from twining.engine.reuse import Parked


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Everything the engine knows about one open request.

    request.max_tokens is already clamped to the context. order: arrival number. prompt_done: prompt
    tokens in the caches. carried_logits [V]: what the last row of a prompt chunk says about the
    next chunk's first token; kept only for prompt_logprobs. under_way: a verify pass of it was
    launched and not taken in. last_round: number of the last one launched. draft_rates: how often
    its drafts were right (engine/adaptive.py).

    Prefix reuse (engine/reuse.py): cached_tokens were restored at admission; page_keys name the
    whole pages of `tokens` so far; marks are lengths at which a checkpoint is due, taken those at
    which one was left; decoded is the newest (length, planes) at a page's end that decoding passed.
    parked: a preempted sequence's planes; it waits without a state.
    """

    request: Request
    order: int
    arrived_s: float
    history: TokenHistory
    tokens: list[int]
    phase: Phase = Phase.WAITING
    state: "SequenceState | None" = None
    prompt_done: int = 0
    under_way: bool = False
    last_round: int = 0
    draft_rates: Rates | None = None
    carried_logits: Tensor | None = None
    grammar: "GrammarState | None" = None
    admitted_s: float = 0.0
    prefilled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    decoded: tuple[int, dict[str, Tensor]] | None = None
    parked: "Parked | None" = None
    draft_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_positions(self) -> int:
        """Positions of the worst case; the last sampled token never enters the caches."""
        return self.num_prompt + max(self.request.max_tokens, 1) - 1

    def num_needed(self, limit: int) -> int:
        """Positions up to the end of the next verify, or of the first one, with `limit` drafts."""
        return len(self.tokens) + self.num_draft(limit)

    @property
    def is_ready(self) -> bool:
        """It could be verified now."""
        return self.phase is Phase.DECODE and not self.under_way

    def num_draft(self, limit: int) -> int:
        """Drafts for the next verify: at most `limit`, the request's own, and what may still come.

        One token always comes from the target itself, so drafts beyond remaining - 1 are in vain;
        that also keeps every verify row inside the context and inside the reserved pages.
        """
        remaining = self.request.max_tokens - len(self.history.generated)
        asked = self.request.num_draft_tokens
        return max(0, min(limit, limit if asked < 0 else asked, remaining - 1))

    def view(self, now_s: float, num_reserved: int, own_pages: int) -> SequenceView:
        """What the scheduler sees. num_reserved: positions that must have pages before the next
        verify; own_pages: pages that no other running sequence holds."""
        num_pages = -(-num_reserved // PAGE_SIZE)
        held = 0 if self.state is None else len(self.state.pages)
        waits = self.phase is Phase.WAITING and self.parked is None
        return SequenceView(
            id=self.request.id,
            order=self.order,
            phase=self.phase,
            priority=self.request.priority,
            prompt_left=self.num_prompt - self.prompt_done,
            num_pages=num_pages,
            under_way=self.under_way,
            last_round=self.last_round,
            missing_pages=max(0, num_pages - held) if self.phase is Phase.DECODE else 0,
            own_pages=own_pages,
            is_preempted=self.parked is not None,
            waited_s=now_s - self.arrived_s if waits else 0.0,
        )

    def note_tokens(self, now_s: float) -> None:
        """Read the clock for tokens sampled just now."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s

    def timings(self, now_s: float) -> Timings:
        """Readings at the end of the request; what was never reached is 0."""
        if self.phase is Phase.WAITING and self.parked is None:
            return Timings(queue_s=now_s - self.arrived_s)
        prefilled_s = now_s if self.prefilled_s is None else self.prefilled_s
        first_s, last_s = self.first_token_s, self.last_token_s
        return Timings(
            queue_s=self.admitted_s - self.arrived_s,
            prefill_s=prefilled_s - self.admitted_s,
            ttft_s=0.0 if first_s is None else first_s - self.arrived_s,
            decode_s=0.0 if last_s is None else last_s - prefilled_s,
            cached_tokens=self.cached_tokens,
            draft_steps=self.draft_steps,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )
