"""A model, a cache and drafters that follow the engine's contracts strictly and cost nothing.

The model is a hash: the hidden row of a position is a 64-bit digest of all ids up to it, and logits
are a random function of that digest. It complains about every misuse of the contract (unreserved
pages, unaligned chunks, commits of rows that were not verified, use after close), and when a page
does not hold the tokens that it should.
Letters: R rows, H = 4 hidden, V vocabulary.
"""

import random
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from twining.cache.pages import PageAllocator
from twining.config import PAGE_SIZE, CacheConfig, EngineConfig, ScheduleConfig
from twining.engine.core import Engine
from twining.engine.request import Request
from twining.engine.sampler import TokenHistory
from twining.engine.verify import accept

VOCAB = 50
MASK = (1 << 64) - 1


@dataclass
class Rows:
    """Stands in for TrunkRows."""

    hidden: torch.Tensor
    taps: torch.Tensor | None = None


@dataclass(eq=False)
class FakeState:
    slot: int
    pool: "FakePool"
    length: int = 0
    pages: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    digest: int = 1
    window: list[int] | None = None
    committed: int = 0
    is_open: bool = True


class FakePool:
    plane_names = ("ids",)

    def __init__(self, num_pages: int, max_seqs: int) -> None:
        self.pages = PageAllocator(num_pages)
        self.slots = list(range(max_seqs))
        self.content = [[-1] * PAGE_SIZE for _ in range(num_pages)]

    def write(self, state: FakeState, start: int, ids) -> None:
        for p, token in enumerate(ids, start):
            self.content[state.pages[p // PAGE_SIZE]][p % PAGE_SIZE] = token

    def check(self, state: FakeState) -> None:
        """The pages hold the sequence's tokens."""
        held = [token for page in state.pages for token in self.content[page]]
        assert held[: state.length] == state.ids, "pages hold something else"

    def snapshot(self, state: FakeState) -> dict[str, torch.Tensor]:
        assert state.is_open
        return {"ids": torch.tensor(state.ids, dtype=torch.int64)}

    def snapshot_at(self, state: FakeState, length: int) -> dict[str, torch.Tensor]:
        assert state.length - state.committed < length <= state.length
        return {"ids": torch.tensor(state.ids[:length])}

    def restore(self, state: FakeState, planes, *, length: int, pages) -> None:
        assert state.is_open and not state.pages and not state.ids
        state.ids, state.length, state.pages = planes["ids"].tolist(), length, list(pages)
        assert len(state.ids) == length
        for token in state.ids:
            state.digest = mix(state.digest, token)

    def copy_page(self, source: int, target: int) -> None:
        self.content[target] = list(self.content[source])

    def export_pages(self, state: FakeState) -> dict[str, torch.Tensor]:
        self.check(state)
        pages = state.pages[: -(-state.length // PAGE_SIZE)]
        return {"pages": torch.tensor([self.content[page] for page in pages])}

    def import_pages(self, state: FakeState, planes) -> None:
        for page, tokens in zip(state.pages, planes["pages"].tolist(), strict=False):
            self.content[page] = tokens
        self.check(state)

    @property
    def num_free_slots(self) -> int:
        return len(self.slots)

    def open(self) -> FakeState | None:
        return FakeState(self.slots.pop(), self) if self.slots else None

    def close(self, state: FakeState) -> None:
        assert state.is_open
        state.is_open = False
        self.pages.release(state.pages)
        state.pages = []
        self.slots.append(state.slot)

    def reserve(self, state: FakeState, num_tokens: int) -> bool:
        fresh = self.pages.alloc(max(0, -(-num_tokens // PAGE_SIZE) - len(state.pages)))
        if fresh is None:
            return False
        state.pages += fresh
        return True


def mix(digest: int, token: int) -> int:
    x = (digest * 6364136223846793005 + token + 1442695040888963407) & MASK
    return (x ^ (x >> 29)) & MASK


def hidden_of(digest: int) -> list[float]:
    return [float((digest >> (16 * i)) & 0xFFFF) for i in range(4)]


class FakeModel:
    """nan_after: a token id; every row whose own token is this id has NaN logits."""

    def __init__(self, nan_after: int = -1, fail_prefill_of: int = -1, num_stages: int = 1) -> None:
        self.num_stages = num_stages
        self.nan_after = nan_after
        self.fail_prefill_of = fail_prefill_of
        self.num_verifies = 0

    def prefill(self, state: FakeState, ids) -> Rows:
        assert state.is_open and ids and state.length % 64 == 0
        assert state.length + len(ids) <= len(state.pages) * PAGE_SIZE
        if self.fail_prefill_of in ids:
            raise RuntimeError("prefill fails on purpose")
        state.pool.check(state)
        rows = self._rows(state, ids)
        state.pool.write(state, state.length, ids)
        state.digest = self._digests(state, ids)[-1]
        state.ids += ids
        state.length += len(ids)
        return rows

    def verify(self, batch) -> Rows:
        self.num_verifies += 1
        assert batch
        rows = []
        for state, ids in batch:
            assert state.is_open and state.length and 1 <= len(ids) <= 16
            assert state.length + len(ids) <= len(state.pages) * PAGE_SIZE
            state.pool.check(state)
            state.pool.write(state, state.length, ids)
            state.window = list(ids)
            rows.append(self._rows(state, ids).hidden)
        return Rows(torch.cat(rows))

    def launch(self, batch) -> Future:
        rows: Future = Future()
        rows.set_result(self.verify(batch))
        return rows

    def commit(self, state: FakeState, num_rows: int) -> None:
        assert state.is_open and state.window and 1 <= num_rows <= len(state.window)
        ids = state.window[:num_rows]
        state.digest = self._digests(state, ids)[-1]
        state.ids += ids
        state.length += num_rows
        state.committed = num_rows
        state.window = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = []
        for row in hidden.tolist():
            if row[0] != row[0]:
                rows.append(np.full(VOCAB, np.nan))
                continue
            digest = sum(int(x) << (16 * i) for i, x in enumerate(row))
            rows.append(2 * np.random.default_rng(digest).standard_normal(VOCAB))
        return torch.tensor(np.array(rows), dtype=torch.float32)

    def _digests(self, state: FakeState, ids) -> list[int]:
        digests, digest = [], state.digest
        for token in ids:
            digest = mix(digest, token)
            digests.append(digest)
        return digests

    def _rows(self, state: FakeState, ids) -> Rows:
        rows = [hidden_of(d) for d in self._digests(state, ids)]
        for row, token in zip(rows, ids, strict=True):
            if token == self.nan_after:
                row[0] = float("nan")
        return Rows(torch.tensor(rows))


class NoDrafter:
    name, max_draft, needs_taps, needs_hidden = "none", 0, False, False
    plane_names, rewrites_last_page = (), False

    def open(self, state) -> None: ...
    def close(self, state) -> None: ...
    def snapshot(self, state, length):
        raise AssertionError("nobody needs this")

    def extend(self, state, start, ids, rows) -> None:
        raise AssertionError("nobody needs this")

    def draft(self, items):
        raise AssertionError("nobody asked")


class FakeDrafter:
    """Guesses right with probability `skill`, else anything, also ids that do not exist.

    It keeps what it was told and checks that it is told every committed token once, in order, with
    its row. `oracle` is the stream that is right, by (prompt, position); skill 0 needs none.
    """

    name, max_draft, needs_taps, needs_hidden = "fake", 15, True, True
    plane_names = ("seen",)

    def __init__(
        self, seed: int, oracle=None, skill: float = 0.7, fail_at: int = -1, rewrites: bool = False
    ) -> None:
        self.rewrites_last_page = rewrites
        self.random = random.Random(seed)
        self.oracle = oracle or (lambda tokens, count: [])
        self.skill = skill
        self.fail_at = fail_at
        self.num_drafts = 0
        self.seen: dict[int, list[int]] = {}
        self.digest: dict[int, int] = {}

    def open(self, state) -> None:
        assert state.slot not in self.seen
        self.seen[state.slot], self.digest[state.slot] = [], 1

    def close(self, state) -> None:
        del self.seen[state.slot], self.digest[state.slot]

    def extend(self, state, start, ids, rows) -> None:
        assert start == len(self.seen[state.slot]) and len(rows.hidden) == len(ids) > 0
        assert state.length == start + len(ids)
        self.seen[state.slot] += ids
        for token, row in zip(ids, rows.hidden.tolist(), strict=True):
            self.digest[state.slot] = mix(self.digest[state.slot], token)
            assert row[1:] == hidden_of(self.digest[state.slot])[1:]
        assert self.seen[state.slot] == state.ids

    def snapshot(self, state, length):
        assert state.slot in self.seen
        return {"seen": torch.tensor(self.seen[state.slot][:length], dtype=torch.int64)}

    def restore(self, state, planes, length) -> None:
        assert self.seen[state.slot] == [] and state.length == length
        self.seen[state.slot] = planes["seen"].tolist()
        for token in self.seen[state.slot]:
            self.digest[state.slot] = mix(self.digest[state.slot], token)
        assert self.seen[state.slot] == state.ids

    def draft(self, items):
        self.num_drafts += 1
        if self.num_drafts == self.fail_at:
            raise RuntimeError("the drafter fails on purpose")
        drafts = []
        for item in items:
            assert item.num_draft >= 1
            assert list(item.tokens[:-1]) == self.seen[item.state.slot] == item.state.ids
            truth = self.oracle(list(item.tokens), item.num_draft)
            count = self.random.choice([item.num_draft, item.num_draft + 2, 0, 1])
            right = [t if self.random.random() < self.skill else VOCAB - 1 for t in truth]
            ids = [*right[:count], self.random.choice([-1, 3, VOCAB, 10**9])]
            drafts.append(ids)
        return drafts


def reference_stream(request: Request, max_seq_len: int, model: FakeModel | None = None):
    """One sequence, token by token, no cache: (ids, finish reason, stop id, logprobs)."""
    model = model or FakeModel()
    digest = 1
    for token in request.prompt_ids:
        digest = mix(digest, token)
    history = TokenHistory(request.prompt_ids)
    limit = min(request.max_tokens, max_seq_len - len(request.prompt_ids))
    logprobs = []
    while len(history.generated) < limit:
        step = accept(model.logits(torch.tensor([hidden_of(digest)])), (), request, history)
        history.extend(step.token_ids)
        logprobs += step.logprobs
        if step.finish_reason == "stop":
            return history.generated, "stop", step.stop_id, logprobs
        digest = mix(digest, step.token_ids[0])
    return history.generated, "length", -1, logprobs


class FakeClock:
    """A clock that moves by a random amount at every reading."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.random.random() * 0.02
        return self.now


def make_engine(
    *,
    model: FakeModel | None = None,
    drafter=None,
    schedule: ScheduleConfig | None = None,
    num_pages: int = 8,
    max_seq_len: int = 1024,
    num_draft: int = 4,
    seed: int = 0,
    cache: CacheConfig | None = None,
) -> Engine:
    schedule = schedule or ScheduleConfig(max_seqs=4)
    return Engine(
        model or FakeModel(),
        drafter or NoDrafter(),
        FakePool(num_pages, schedule.max_seqs),
        vocab_size=VOCAB,
        max_seq_len=max_seq_len,
        num_draft_tokens=num_draft,
        schedule=schedule,
        cache=cache,
        clock=FakeClock(seed),
    )


def make_worker_engine(config: EngineConfig) -> Engine:
    """Factory for tests that run the engine in its process."""
    return make_engine(schedule=config.schedule)
