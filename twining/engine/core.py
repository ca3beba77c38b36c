"""The engine: requests in, deltas out, one step at a time.

Source: design.md "Data flow of one request", P1-P7; spec/dflash2.md section I for one round. A step
is what scheduler.schedule says: prompt chunks, or one verify of every decoding sequence. Whatever
the drafter, the number of drafts, the company or the order of arrival, a request's tokens are the
same: prompt tokens are computed by prefill, generated ones by verify, noise belongs to (seed,
position), and everything else is row-invariant. Prefixes restored from checkpoints change nothing
either (cache/prefix.py; `reuse = "fast"` is the exception), nor does preemption.

A step launches one round, a verify of some or all decoding sequences, and takes in the oldest
round under way; with one stage that is the same round. With S stages up to S rounds are under way,
so that a stage works on one while others are drafted, accepted or computed elsewhere.

A failure of one request (NaN logits, a bad prefill) ends that request alone. A failure of a whole
verify pass is a failure of the engine and propagates. Letters: R rows, K drafts, V vocabulary.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import msgspec
import torch

from twining.config import PAGE_SIZE, CacheConfig, ScheduleConfig
from twining.drafters.base import Drafter, DraftItem
from twining.engine import scheduler
from twining.engine.accounts import audit, page_holders
from twining.engine.adaptive import DraftPolicy
from twining.engine.admission import check_request
from twining.engine.batch import accept_prefix, prompt_logprobs, slice_rows
from twining.engine.grammar import GrammarVocab, compile_grammar
from twining.engine.protocols import Pool, Trunk
from twining.engine.request import (
    Delta,
    EngineReady,
    EngineStats,
    FinishReason,
    Request,
    TokenLogprob,
)
from twining.engine.reuse import Reuse
from twining.engine.rounds import Round, Rounds
from twining.engine.sampler import LogitsError, TokenHistory
from twining.engine.scheduler import Chunk, Phase, SchedulerState, StepKind, StepPlan
from twining.engine.sequence import Sequence
from twining.engine.verify import Accepted, accept
from twining.errors import EngineError, RequestError

if TYPE_CHECKING:
    from twining.models.glm5_next.model import TrunkRows

log = logging.getLogger(__name__)


class Engine:
    """Owns the model, the drafter, the caches and all open requests. Not thread-safe."""

    def __init__(
        self,
        model: Trunk,
        drafter: Drafter,
        pool: Pool,
        *,
        vocab_size: int,
        max_seq_len: int,
        num_draft_tokens: int,
        adaptive_draft: bool = False,
        schedule: ScheduleConfig,
        cache: CacheConfig | None = None,
        grammar_vocab: GrammarVocab | None = None,
        load_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cache: what prefix reuse may do; None turns it off. grammar_vocab: None refuses requests
        with a grammar.

        Raises EngineError if the pool cannot hold one sequence of max_seq_len tokens.
        """
        num_pages = pool.pages.num_pages
        if num_pages * PAGE_SIZE < max_seq_len:
            raise EngineError(
                f"a cache of {num_pages} pages holds {num_pages * PAGE_SIZE} tokens, less than"
                f" max_seq_len={max_seq_len}; raise max_pages or lower max_seq_len"
            )
        self._model = model
        self._drafter = drafter
        self._pool = pool
        self._schedule = schedule
        self._grammar_vocab = grammar_vocab
        self._clock = clock
        self._num_draft = min(num_draft_tokens, drafter.max_draft)
        self._drafter_works = True
        self._policy = DraftPolicy.start(self._num_draft) if adaptive_draft else None
        self._reuse = Reuse(
            pool, drafter, cache or CacheConfig(reuse="off"), drop_drafter=self._drop_drafter
        )
        self._sequences: dict[str, Sequence] = {}
        self._rounds = Rounds()
        self._outbox: list[Delta] = []
        self._num_arrived = 0
        self._decode_debt_s = 0.0
        self._stats = EngineStats(pages_total=num_pages)
        self._ready = EngineReady(
            max_seq_len=max_seq_len,
            vocab_size=vocab_size,
            max_seqs=schedule.max_seqs,
            drafter=drafter.name,
            num_draft_tokens=self._num_draft,
            num_pages=num_pages,
            load_s=load_s,
        )

    # -------------------------------------------------------------------- callers' side

    @property
    def has_work(self) -> bool:
        """A step has something to do or to report."""
        return bool(self._sequences or self._outbox)

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        return len(self._sequences)

    def ready(self) -> EngineReady:
        """Limits and settings in force."""
        return self._ready

    def stats(self) -> EngineStats:
        """Gauges now, counters since the start."""
        waiting = sum(s.phase is Phase.WAITING for s in self._sequences.values())
        parked = (s.parked.nbytes for s in self._sequences.values() if s.parked is not None)
        cache = self._reuse.cache
        return msgspec.structs.replace(
            self._stats,
            running=len(self._sequences) - waiting,
            waiting=waiting,
            pages_used=self._ready.num_pages - self._reuse.num_obtainable,
            pages_cached=cache.num_evictable,
            checkpoints=len(cache),
            checkpoint_bytes=cache.nbytes,
            parked_bytes=sum(parked),
            prefix_hits=cache.counters.hits,
            prefix_misses=cache.counters.misses,
            prefix_mismatches=cache.counters.mismatches,
            prefix_evictions=cache.counters.evictions,
        )

    def submit(self, request: Request) -> None:
        """Queue a request. A refusal becomes an error delta of the next step, never an
        exception.
        """
        try:
            check_request(
                request,
                self._ready,
                self._schedule,
                is_open=request.id in self._sequences,
                num_open=len(self._sequences),
            )
            grammar = compile_grammar(self._grammar_vocab, request)
        except RequestError as err:
            self._outbox.append(_error_delta(request.id, err.code, str(err)))
            return
        room = self._ready.max_seq_len - len(request.prompt_ids)
        request = msgspec.structs.replace(request, max_tokens=min(request.max_tokens, room))
        self._sequences[request.id] = Sequence(
            request=request,
            order=self._num_arrived,
            arrived_s=self._clock(),
            history=TokenHistory(request.prompt_ids),
            tokens=list(request.prompt_ids),
            grammar=grammar,
        )
        self._num_arrived += 1

    def cancel(self, request_id: str) -> None:
        """End a request at once with reason "cancelled"; unknown ids are ignored."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._finish(seq, "cancelled")

    def step(self) -> list[Delta]:
        """Plan and run one step; returns all news since the last one."""
        return self.run(self.plan())

    def plan(self) -> StepPlan:
        """What the next step will do. Changes nothing."""
        now_s = self._clock()
        sequences = self._sequences.values()
        holders = page_holders(sequences)
        views = []
        for seq in sequences:
            pages = [] if seq.state is None else seq.state.pages
            own = sum(holders[page] == 1 for page in pages)
            views.append(seq.view(now_s, self._num_reserved(seq), own))
        state = SchedulerState(
            sequences=tuple(views),
            free_pages=self._reuse.num_obtainable,
            free_slots=self._schedule.max_seqs - sum(s.state is not None for s in sequences),
            decode_debt_s=self._decode_debt_s,
            num_stages=self._model.num_stages,
        )
        return scheduler.schedule(state, self._schedule)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Delta]:
        """Carry out a plan made just now. Raises only if the engine itself is broken."""
        began_s = self._clock()
        decoding = any(s.phase is Phase.DECODE for s in self._sequences.values())
        for name in plan.expired:
            limit_s = self._schedule.queue_timeout_s
            text = f"waited {limit_s:g} s for a free place; retry later"
            self._fail(self._sequences[name], "queue_timeout", text)
        for name in plan.preempted:
            self._preempt(self._sequences[name])
        is_new = any(self._sequences[name].parked is None for name in plan.admitted)
        for name in plan.admitted:
            self._admit(self._sequences[name])
        if is_new:
            # News of an admission leaves before the work it starts: a stream's status line must
            # not wait for a prefill step. The next plan does that work.
            return self._take_news()
        if plan.kind is StepKind.PREFILL:
            for chunk in plan.chunks:
                self._prefill(self._sequences[chunk.id], chunk)
        elif plan.kind is StepKind.VERIFY:
            self._verify([self._sequences[name] for name in plan.verify], began_s)
        self._decode_debt_s = scheduler.update_debt(
            self._decode_debt_s,
            plan.kind,
            self._clock() - began_s,
            decode_share=self._schedule.decode_share,
            decoding=decoding,
        )
        return self._take_news()

    def _take_news(self) -> list[Delta]:
        deltas, self._outbox = self._outbox, []
        return deltas

    def audit(self) -> None:
        """Raises AssertionError unless requests, slots, pages and checkpoints add up."""
        audit(
            self._sequences.values(),
            self._pool,
            self._reuse.cache,
            max_seqs=self._schedule.max_seqs,
        )
        self._rounds.audit(list(self._sequences.values()))

    # -------------------------------------------------------------------- admission

    def _admit(self, seq: Sequence) -> None:
        state = self._pool.open()
        assert state is not None, "the plan admits no more requests than there are slots"
        seq.state = state
        self._drafter.open(state)
        if seq.parked is not None:
            self._reuse.unpark(seq, self._num_reserved(seq))
            return
        seq.phase = Phase.PREFILL
        seq.admitted_s = self._clock()
        seq.prompt_done = self._reuse.restore(seq, with_drafter=self._is_drafting)
        seq.cached_tokens = seq.prompt_done
        self._count(prompt_tokens=seq.cached_tokens, cached_tokens=seq.cached_tokens)
        reserved = self._reuse.reserve(seq, self._num_reserved(seq))
        assert reserved, "the plan admits a request only when its pages are free"
        self._outbox.append(Delta(request_id=seq.id, kind="admitted"))

    def _num_reserved(self, seq: Sequence) -> int:
        """Positions that must have pages before the sequence's next step."""
        if self._schedule.admission == "reserved":
            return seq.num_positions
        return seq.num_needed(self._num_draft)

    def _preempt(self, seq: Sequence) -> None:
        self._reuse.park(seq, with_drafter=self._is_drafting)
        self._give_back(seq)
        seq.phase = Phase.WAITING
        self._count(preemptions=1)

    @property
    def _is_drafting(self) -> bool:
        return self._drafter_works and self._num_draft > 0

    # -------------------------------------------------------------------- prefill

    def _prefill(self, seq: Sequence, chunk: Chunk) -> None:
        try:
            self._prefill_chunk(seq, chunk.num_tokens)
        except LogitsError as err:
            self._fail(seq, "internal_error", str(err))
        except Exception:
            log.exception("prefill of request %s failed", seq.id)
            self._fail(seq, "internal_error", "the engine could not process this prompt")

    def _prefill_chunk(self, seq: Sequence, num_tokens: int) -> None:
        assert seq.state is not None
        # The plan may not know yet that a prefix was restored.
        num_tokens = min(num_tokens, seq.num_prompt - seq.prompt_done)
        logprobs: list[TokenLogprob | None] = []
        for count in self._reuse.pieces(seq, num_tokens):
            start = seq.prompt_done
            ids = seq.tokens[start : start + count]
            rows = self._model.prefill(seq.state, ids)
            seq.prompt_done += count
            self._extend(seq, start, ids, rows)
            logprobs += prompt_logprobs(self._model, seq, start, rows)
            self._reuse.take(seq, with_drafter=self._is_drafting)
        self._count(prompt_tokens=num_tokens)
        self._outbox.append(
            Delta(
                request_id=seq.id,
                kind="progress",
                prompt_done=seq.prompt_done,
                prompt_logprobs=logprobs,
            )
        )
        if seq.prompt_done < seq.num_prompt:
            return
        if seq.request.max_tokens == 0:
            seq.prefilled_s = self._clock()
            self._finish(seq, "length")
            return
        logits_1V = self._model.logits(rows.hidden[-1:])
        accepted = accept(logits_1V, (), seq.request, seq.history, seq.grammar)
        seq.prefilled_s = self._clock()
        seq.phase = Phase.DECODE
        self._emit(seq, accepted)

    # -------------------------------------------------------------------- verify

    def _verify(self, seqs: SequenceOf[Sequence], began_s: float) -> None:
        """Launch a round of these; take one in unless more can be launched beside it."""
        if seqs:
            for seq in seqs:
                reserved = self._reuse.reserve(seq, self._num_reserved(seq))
                assert reserved, "the plan launches a verify only when its pages are there"
            drafts = self._draft(seqs)
            batch = []
            for seq, ids in zip(seqs, drafts, strict=True):
                assert seq.state is not None
                batch.append((seq.state, [seq.tokens[-1], *ids]))
            self._rounds.add(seqs, drafts, self._model.launch(batch), began_s)
        is_full = len(self._rounds) >= self._model.num_stages
        if not seqs or is_full or not any(s.is_ready for s in self._sequences.values()):
            self._take_in(self._rounds.take())

    def _take_in(self, item: Round) -> None:
        """Accept and commit what a round has verified."""
        rows = item.rows.result()
        logits_RV = self._model.logits(rows.hidden)
        end = 0
        for seq, ids in zip(item.seqs, item.drafts, strict=True):
            begin, end = end, end + 1 + len(ids)
            if seq.id in item.withdrawn:
                continue
            own = slice_rows(rows, begin, end)
            try:
                accepted = accept_prefix(
                    logits_RV[begin:end], ids, seq.request, seq.history, seq.grammar
                )
            except LogitsError as err:
                self._fail(seq, "internal_error", str(err))
                continue
            seq.draft_steps += 1
            seq.num_drafted += len(ids)
            seq.num_accepted += accepted.num_accepted
            self._count(draft_steps=1, num_drafted=len(ids), num_accepted=accepted.num_accepted)
            if self._policy is not None:
                self._policy, seq.draft_rates = self._policy.note_sequence(
                    seq.draft_rates, len(ids), accepted.num_accepted
                )
            if accepted.finish_reason is None:
                self._commit(seq, accepted, own)
            self._emit(seq, accepted)
        if self._policy is not None:
            self._policy = self._policy.note_round(end, self._clock() - item.began_s)

    def _commit(self, seq: Sequence, accepted: Accepted, rows: "TrunkRows") -> None:
        """The anchor and the accepted drafts enter the caches."""
        assert seq.state is not None
        num_rows = accepted.num_accepted + 1
        ids = [seq.tokens[-1], *accepted.token_ids[:-1]]
        start = len(seq.tokens) - 1
        self._model.commit(seq.state, num_rows)
        self._extend(seq, start, ids, slice_rows(rows, 0, num_rows))
        self._reuse.note_decoded(seq, num_rows, with_drafter=self._is_drafting)

    def _draft(self, seqs: SequenceOf[Sequence]) -> list[list[int]]:
        """Drafts of each sequence, at most as many as it may use, all ids inside the vocabulary."""
        limit = self._num_draft
        if self._policy is not None:
            limit = self._policy.choose([seq.draft_rates for seq in seqs])
        wanted = [seq.num_draft(limit) if self._drafter_works else 0 for seq in seqs]
        asking = [i for i, count in enumerate(wanted) if count]
        drafts: list[list[int]] = [[] for _ in seqs]
        if not asking:
            return drafts
        items = []
        for i in asking:
            state = seqs[i].state
            assert state is not None
            items.append(DraftItem(state, seqs[i].tokens, wanted[i]))
        try:
            proposed = self._drafter.draft(items)
        except Exception:
            self._drop_drafter("draft")
            return drafts
        for i, ids in zip(asking, proposed, strict=True):
            for token in ids[: wanted[i]]:
                if not 0 <= token < self._ready.vocab_size:
                    break
                drafts[i].append(int(token))
        return drafts

    def _extend(self, seq: Sequence, start: int, ids: SequenceOf[int], rows: "TrunkRows") -> None:
        """Tell the drafter what was committed. It cannot change a token, so it cannot fail one."""
        if not self._is_drafting:
            return
        assert seq.state is not None
        try:
            self._drafter.extend(seq.state, start, ids, rows)
        except Exception:
            self._drop_drafter("extend")

    def _drop_drafter(self, what: str) -> None:
        log.exception("drafter %s: %s failed; drafting is off", self._drafter.name, what)
        self._drafter_works = False

    # -------------------------------------------------------------------- news and ends

    def _emit(self, seq: Sequence, accepted: Accepted) -> None:
        now_s = self._clock()
        seq.tokens.extend(accepted.token_ids)
        seq.history.extend(accepted.token_ids)
        seq.note_tokens(now_s)
        self._count(generated_tokens=len(accepted.token_ids))
        self._outbox.append(
            Delta(
                request_id=seq.id,
                kind="tokens",
                token_ids=accepted.token_ids,
                logprobs=accepted.logprobs,
            )
        )
        if accepted.finish_reason is not None:
            self._finish(seq, accepted.finish_reason, accepted.stop_id)

    def _finish(self, seq: Sequence, reason: FinishReason, stop_id: int = -1) -> None:
        timings = seq.timings(self._clock())
        self._reuse.keep_decoded(seq)
        self._release(seq)
        self._outbox.append(
            Delta(
                request_id=seq.id,
                kind="finished",
                finish_reason=reason,
                stop_id=stop_id,
                timings=timings,
            )
        )

    def _fail(self, seq: Sequence, code: str, message: str) -> None:
        self._reuse.forget(seq)
        self._release(seq)
        self._outbox.append(_error_delta(seq.id, code, message))

    def _release(self, seq: Sequence) -> None:
        del self._sequences[seq.id]
        seq.parked = None
        self._rounds.withdraw(seq)
        self._give_back(seq)

    def _give_back(self, seq: Sequence) -> None:
        if seq.state is not None:
            self._drafter.close(seq.state)
            self._pool.close(seq.state)
            seq.state = None

    def _count(self, **counts: int) -> None:
        values = {name: getattr(self._stats, name) + n for name, n in counts.items()}
        self._stats = msgspec.structs.replace(self._stats, **values)


def _error_delta(request_id: str, code: str, message: str) -> Delta:
    return Delta(
        request_id=request_id, kind="error", finish_reason="error", code=code, message=message
    )
