"""What the next engine step does: a pure function from snapshots to a plan.

Source: design.md "Steps and scheduling" and P5; spec/performance.md 4.5; spec/api.md section 11.
A step is homogeneous: prefill chunks, or one verify of decoding sequences, never both. With one
stage a verify has all decoding sequences; with S stages they are spread over up to S passes that
are under way at once, and a verify step launches one of them. Nothing here touches a cache or a
clock, and nothing the plan contains can change a token: chunk sizes and the company of a row are
invisible to the arithmetic (P1, P2).

Guarantees, each with a property test:

Fairness.  Let r = decode_share / (1 - decode_share). While sequences decode, a prefill step that
  took t seconds is followed by at least r * t seconds of verify steps before the next prefill step
  runs. So over any span in which somebody decodes, running chats get at least `decode_share` of the
  engine's time, and thus of their own token rate, up to the overshoot of one prefill step. Decode
  time beyond that is not saved up as credit. Prefill is not starved either: each verify step works
  the debt off.
Progress.  Every prefill step advances the sequence that arrived first among those that prefill;
  every verify step launches the decoding sequences that have waited longest, so that each is
  verified once in about S steps (S stages).
Order.  Admission is by (priority, arrival); a request that does not fit yet is never overtaken by a
  later one of the same or a worse priority, so large requests are not starved by small ones.
No deadlock.  With admission = "reserved" a request is admitted only when pages for its worst case
  are free, so an admitted sequence never waits for pages. With "optimistic" it is admitted with the
  pages of its prompt, and when the next verify lacks pages, sequences are preempted: the youngest
  of the lowest priority first, never the oldest one running. So the oldest always progresses, and
  one sequence alone always fits. Preempted sequences come back before anybody new is admitted,
  which bounds their number and lets each of them become the oldest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from twining.config import PREFILL_BLOCK, Admission, ScheduleConfig

# A verify step beside a prefill is slower than alone, since each finds the other's data in the
# processor's caches: with plain time shares a chat kept 47 % of its rate where 50 % were promised
# (benchmarks/fairness.py, two cores).
DEBT_MARGIN = 1.25


class Phase(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class StepKind(StrEnum):
    """What a step runs."""

    IDLE = "idle"
    PREFILL = "prefill"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """One request as the scheduler sees it.

    order: arrival number, unique. priority: lower first. num_pages: pages it must get at admission.
    under_way: a verify pass of it was launched and is not taken in yet; last_round: number of the
    last one launched, 0 for none. prompt_left: prompt tokens not yet in the caches. missing_pages:
    pages its next verify lacks. own_pages: pages that its preemption would set free. is_preempted:
    it ran before and waits to go on. waited_s: time in the queue so far.
    """

    id: str
    order: int
    phase: Phase
    priority: int = 0
    prompt_left: int = 0
    num_pages: int = 0
    under_way: bool = False
    last_round: int = 0
    missing_pages: int = 0
    own_pages: int = 0
    is_preempted: bool = False
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """All requests, the free pages and slots, and the time that prefill owes to decoding
    sequences. num_stages: verify passes that may be under way at once.
    """

    sequences: tuple[SequenceView, ...]
    free_pages: int
    free_slots: int
    decode_debt_s: float = 0.0
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill the next `num_tokens` prompt tokens of sequence `id`."""

    id: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """expired: waited too long, to be refused. preempted: move these to host memory. admitted: open
    these then, in this order. Then one step. A verify step launches `verify`, if any are left to
    launch, and takes in the oldest pass when as many as there are stages are under way or nothing
    else can be launched.
    """

    kind: StepKind
    expired: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    verify: tuple[str, ...] = ()


def schedule(state: SchedulerState, config: ScheduleConfig) -> StepPlan:
    """Plan the next step. IDLE only if nothing prefills, decodes, or can be admitted."""
    expired = tuple(
        s.id
        for s in state.sequences
        if s.phase is Phase.WAITING and not s.is_preempted and s.waited_s > config.queue_timeout_s
    )
    preempted = preempt(state)
    moved = tuple(s.id for s in preempted)
    if preempted:
        left = tuple(s for s in state.sequences if s.id not in moved)
        pages = state.free_pages + sum(s.own_pages for s in preempted)
        state = replace(state, sequences=left, free_pages=pages)
    admitted = [] if preempted else admit(state, expired, config.admission)
    names = tuple(s.id for s in admitted)
    running = (s for s in state.sequences if s.phase is Phase.PREFILL)
    prefilling = sorted([*running, *admitted], key=lambda s: s.order)
    decoding = [s for s in state.sequences if s.phase is Phase.DECODE]
    if prefilling and not (decoding and state.decode_debt_s > 0):
        limit = config.prefill_tokens_with_decodes if decoding else config.max_batched_tokens
        chunks = plan_chunks(prefilling, min(limit, config.max_batched_tokens))
        return StepPlan(
            kind=StepKind.PREFILL,
            expired=expired,
            preempted=moved,
            admitted=names,
            chunks=chunks,
        )
    return StepPlan(
        kind=StepKind.VERIFY if decoding else StepKind.IDLE,
        expired=expired,
        preempted=moved,
        admitted=names,
        verify=plan_round(decoding, state.num_stages, free_pages=state.free_pages),
    )


def preempt(state: SchedulerState) -> list[SequenceView]:
    """Running sequences to move out, so that the others have the pages of their next verify. One
    whose pass is under way cannot be moved; then there may be too few.
    """
    running = [s for s in state.sequences if s.phase is not Phase.WAITING]
    missing = sum(s.missing_pages for s in running)
    pages = state.free_pages
    if missing <= pages:
        return []
    oldest = min(running, key=lambda s: s.order)
    victims: list[SequenceView] = []
    for seq in sorted(running, key=lambda s: (s.priority, s.order), reverse=True):
        if missing <= pages:
            break
        if seq is not oldest and not seq.under_way:
            victims.append(seq)
            pages += seq.own_pages
            missing -= seq.missing_pages
    return victims


def admit(
    state: SchedulerState, expired: Sequence[str], admission: Admission = "reserved"
) -> list[SequenceView]:
    """Waiting requests that get a slot and their pages now, in order of admission.

    Optimistic admission leaves a page to grow into for each sequence that runs already.
    """
    dropped = set(expired)
    waiting = [s for s in state.sequences if s.phase is Phase.WAITING and s.id not in dropped]
    running = [s for s in state.sequences if s.phase is not Phase.WAITING]
    pages = state.free_pages - sum(s.missing_pages for s in running)
    slots, num_running = state.free_slots, len(running)
    chosen: list[SequenceView] = []
    for seq in sorted(waiting, key=lambda s: (not s.is_preempted, s.priority, s.order)):
        spare = num_running if admission == "optimistic" else 0
        if slots == 0 or seq.num_pages + spare > pages:
            break
        chosen.append(seq)
        slots -= 1
        num_running += 1
        pages -= seq.num_pages
    return chosen


def plan_round(
    decoding: Sequence[SequenceView], num_stages: int, *, free_pages: int
) -> tuple[str, ...]:
    """The next verify pass: of those not under way, an S-th of all that decode, rounded up, so that
    S passes hold everybody; the ones launched longest ago go first. In the order of `decoding`.
    Where pages are too few for all, the oldest get theirs and the others are left out. With nothing
    under way the very oldest is always launched: own_pages leaves out what two victims share, so
    there are more pages than counted.
    """
    ready: list[SequenceView] = []
    is_idle = not any(s.under_way for s in decoding)
    for seq in sorted((s for s in decoding if not s.under_way), key=lambda s: s.order):
        if seq.missing_pages <= free_pages or (is_idle and not ready):
            free_pages -= seq.missing_pages
            ready.append(seq)
    ready.sort(key=decoding.index)
    size = -(-len(decoding) // num_stages)
    chosen = {s.id for s in sorted(ready, key=lambda s: (s.last_round, s.order))[:size]}
    return tuple(s.id for s in ready if s.id in chosen)


def plan_chunks(prefilling: Sequence[SequenceView], limit: int) -> tuple[Chunk, ...]:
    """Divide `limit` prompt tokens (a positive multiple of 64) over the sequences.

    The first 64-token block belongs to the oldest sequence (`prefilling` comes by arrival); the
    rest goes by (priority, arrival). Every chunk but the last of a prompt is whole blocks, and a
    partial block costs a whole one, as it does in the arithmetic.
    """
    left = limit // PREFILL_BLOCK
    grant = {prefilling[0].id: 1}
    left -= 1
    for seq in sorted(prefilling, key=lambda s: (s.priority, s.order)):
        wanted = -(-seq.prompt_left // PREFILL_BLOCK) - grant.get(seq.id, 0)
        given = min(wanted, left)
        grant[seq.id] = grant.get(seq.id, 0) + given
        left -= given
    return tuple(
        Chunk(s.id, min(s.prompt_left, grant[s.id] * PREFILL_BLOCK))
        for s in prefilling
        if grant[s.id]
    )


def update_debt(
    debt_s: float, kind: StepKind, took_s: float, *, decode_share: float, decoding: bool
) -> float:
    """The time prefill owes after a step of `took_s` seconds; `decoding`: sequences were decoding
    in it.

    A prefill step during decodes adds r * took_s and a margin, a verify step pays its time back,
    and with nobody decoding there is no one to owe to.
    """
    if not decoding:
        return 0.0
    if kind is StepKind.PREFILL:
        return debt_s + DEBT_MARGIN * took_s * decode_share / (1.0 - decode_share)
    return max(0.0, debt_s - took_s)
