"""Prefix reuse and preemption on the hash model: every stream equals one-by-one decoding, pages
hold what they should, and the books balance after every step.
"""

import logging
import random

import pytest

from tests.engine.fakes import (
    FakeDrafter,
    FakeModel,
    make_engine,
    reference_stream,
)
from tests.engine.test_core import check_against_reference, ids_of, prompt, request, run
from twining.config import CacheConfig, ScheduleConfig
from twining.engine.request import SamplingParams
from twining.errors import ConfigError

MAX_SEQ_LEN = 2048
EXACT = CacheConfig(reuse="exact", checkpoint_every=512)


def cached(news, name) -> int:
    return news[name][-1].timings.cached_tokens


class Talks:
    """Conversations that go on, are edited, retried and forked; their next requests."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.count = rng, 0
        self.system = prompt(rng, rng.choice([0, 100, 256, 600]))
        self.past: list[list[int]] = [self.system]

    def next(self):
        rng = self.rng
        base = list(rng.choice(self.past))
        kind = rng.random()
        if kind < 0.2 and base:  # an edit somewhere
            base = base[: rng.randrange(len(base))]
        ids = base if kind > 0.85 and base else base + prompt(rng, rng.choice([1, 60, 300]))
        ids = ids[: MAX_SEQ_LEN - 200]
        self.count += 1
        req = request(
            f"r{self.count}",
            ids,
            max_tokens=rng.choice([0, 1, 5, 40, 150]),
            sampling=SamplingParams(seed=rng.randrange(1 << 40)),
            logprobs=rng.choice([-1, 1]),
            prompt_logprobs=rng.choice([-1, -1, -1, 0]),
            num_draft_tokens=rng.choice([-1, -1, 0, 2]),
            priority=rng.randrange(2),
            cache_salt=rng.choice(["", "", "s"]),
            use_prefix_cache=rng.random() < 0.9,
        )
        self.past.append(ids + reference_stream(req, MAX_SEQ_LEN)[0])
        return req


def oracle(tokens, count):
    """Nobody knows; the drafter's luck decides."""
    return [tokens[-1]] * count


@pytest.mark.parametrize("seed", range(30))
def test_random_conversations_equal_cold_runs(seed):
    rng = random.Random(seed)
    talks = Talks(rng)
    cache = CacheConfig(
        reuse=rng.choice(["exact", "exact", "fast", "off"]),
        checkpoint_every=rng.choice([256, 512, 2048]),
        checkpoint_gib=rng.choice([2.0, 2.0, 2e-5]),
    )
    schedule = ScheduleConfig(
        max_seqs=rng.randint(1, 5),
        max_batched_tokens=rng.choice([64, 256, 2048]),
        prefill_tokens_with_decodes=64,
        queue_timeout_s=1e9,
        admission=rng.choice(["reserved", "optimistic"]),
    )
    drafter = FakeDrafter(seed, oracle, rng.choice([0.2, 0.9]), rewrites=rng.random() < 0.5)
    engine = make_engine(
        model=FakeModel(num_stages=rng.choice([1, 1, 2, 3])),
        drafter=drafter,
        schedule=schedule,
        num_pages=rng.choice([8, 10, 30]),
        num_draft=rng.choice([0, 3, 7]),
        max_seq_len=MAX_SEQ_LEN,
        seed=seed,
        cache=cache,
    )
    requests, news, cancelled = [], {}, set()
    for step in range(100_000):
        if step < 400 and len(requests) < 25 and rng.random() < 0.2:
            requests.append(talks.next())
            engine.submit(requests[-1])
        if requests and rng.random() < 0.02:
            victim = rng.choice(requests)
            engine.cancel(victim.id)
            cancelled.add(victim.id)
        for delta in engine.step():
            news.setdefault(delta.request_id, []).append(delta)
        engine.audit()
        if len(requests) == 25 and not engine.has_work:
            break
    stats = engine.stats()
    assert stats.pages_used == stats.running == stats.waiting == stats.parked_bytes == 0
    assert not drafter.seen
    for req in requests:
        last = news[req.id][-1]
        if last.finish_reason == "cancelled":
            whole = reference_stream(req, MAX_SEQ_LEN)[0]
            got = ids_of(news[req.id])
            assert req.id in cancelled and whole[: len(got)] == got
        elif req.max_tokens:
            check_against_reference(news[req.id], req, MAX_SEQ_LEN)
        if last.timings.cached_tokens:
            assert cache.reuse != "off" and req.use_prefix_cache and req.prompt_logprobs < 0
            assert last.timings.cached_tokens % 256 == 0
            assert last.timings.cached_tokens < len(req.prompt_ids)
    engine._reuse.cache.make_room(stats.pages_total)
    assert engine._pool.pages.num_free == stats.pages_total and len(engine._reuse.cache) == 0


def small_engine(cache=EXACT, **values):
    values.setdefault("num_pages", 30)
    values.setdefault("schedule", ScheduleConfig(max_seqs=4, queue_timeout_s=1e9))
    return make_engine(max_seq_len=MAX_SEQ_LEN, cache=cache, **values)


def test_a_retry_a_continuation_and_a_fork():
    rng = random.Random(1)
    ids = prompt(rng, 1300)
    engine = small_engine()

    def ask(name, tokens, **values):
        engine.submit(request(name, tokens, 3, **values))
        return cached(run(engine), name)

    assert ask("first", ids) == 0
    assert ask("retry", ids) == 1280
    assert ask("longer", ids + prompt(rng, 700)) == 1280
    fork = ids[:900] + prompt(rng, 200)
    assert ask("fork", fork) == 512  # every 512 and the last; 768 is known but was not kept ...
    assert ask("same fork", ids[:900] + prompt(rng, 200)) == 768  # ... until somebody left there
    assert ask("short", ids[:512]) == 0  # one token must be computed
    assert ask("short again", ids[:512]) == 256
    assert ask("salted", ids, cache_salt="x") == 0
    assert ask("salted again", ids, cache_salt="x") == 1280
    assert ask("not asked", ids, use_prefix_cache=False) == 0
    assert ask("logprobs", ids, prompt_logprobs=1) == 0
    stats = engine.stats()
    assert stats.cached_tokens == 3 * 1280 + 512 + 768 + 256
    assert stats.prompt_tokens == 7 * 1300 + 2000 - 1300 + 2 * 1100 + 2 * 512 + 1300 - 1300
    assert stats.pages_used == 0 and stats.pages_cached > 0 and stats.checkpoints > 0
    assert (stats.prefix_hits, stats.prefix_misses) == (6, 3)


def test_requests_that_opt_out_leave_nothing():
    engine = small_engine()
    engine.submit(request("a", [1] * 600, 300, use_prefix_cache=False))
    run(engine)
    assert engine.stats().checkpoints == 0 and engine.stats().pages_cached == 0


def test_reuse_off_keeps_nothing():
    engine = small_engine(CacheConfig(reuse="off"))
    for name in "ab":
        engine.submit(request(name, [1] * 600, 2))
        assert cached(run(engine), name) == 0
    assert engine.stats().checkpoints == 0
    assert engine.stats().prefix_misses == 0


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_only_fast_mode_resumes_from_decoded_state(mode):
    first = request("a", [1] * 300, 400)
    whole = first.prompt_ids + reference_stream(first, MAX_SEQ_LEN)[0]
    drafter = FakeDrafter(3, lambda tokens, n: whole[len(tokens) : len(tokens) + n], 0.8)
    engine = small_engine(CacheConfig(reuse=mode), drafter=drafter, num_draft=7)
    engine.submit(first)
    check_against_reference(run(engine)["a"], first, MAX_SEQ_LEN)
    engine.submit(request("b", [*whole, 5], 1))
    assert cached(run(engine), "b") == (256 if mode == "exact" else 512)


def test_checkpoints_survive_a_cancel_in_mid_prefill():
    schedule = ScheduleConfig(max_seqs=2, max_batched_tokens=128, queue_timeout_s=1e9)
    engine = small_engine(schedule=schedule)
    ids = prompt(random.Random(2), 1500)
    engine.submit(request("a", ids, 3))
    for _ in range(9):
        engine.step()
    engine.cancel("a")
    engine.submit(request("b", ids, 3))
    news = run(engine)
    assert cached(news, "b") == 1024
    check_against_reference(news["b"], request("b", ids, 3), MAX_SEQ_LEN)


def test_a_failed_prefill_takes_its_checkpoints_along(caplog):
    schedule = ScheduleConfig(max_seqs=2, max_batched_tokens=128, queue_timeout_s=1e9)
    engine = small_engine(schedule=schedule, model=FakeModel(fail_prefill_of=9))
    engine.submit(request("a", [1] * 600 + [9], 3))
    with caplog.at_level(logging.CRITICAL):
        news = run(engine)
    assert news["a"][-1].code == "internal_error"
    assert engine.stats().checkpoints == 0 and engine.stats().pages_cached == 0


def test_entries_give_way_when_pages_are_needed():
    engine = small_engine(num_pages=8)
    for n in range(6):
        engine.submit(request(f"r{n}", [n] * 1000, 1000))
    news = run(engine)
    assert all(len(ids_of(news[f"r{n}"])) == 1000 for n in range(6))
    assert engine.stats().prefix_evictions > 0


def test_the_last_page_is_copied_for_a_drafter_that_rewrites_it():
    ids = prompt(random.Random(4), 600)
    for rewrites in (False, True):
        engine = small_engine(drafter=FakeDrafter(0, oracle, rewrites=rewrites))
        engine.submit(request("a", ids, 2))
        run(engine)
        for name in "bc":
            engine.submit(request(name, ids, 100))
        engine.step()
        pages = [engine._sequences[name].state.pages for name in "bc"]
        shared = [x == y for x, y in zip(*pages, strict=True)]
        assert shared == [True, not rewrites, False]
        engine.audit()
        run(engine)


def test_a_copy_that_has_no_page_is_a_miss():
    engine = small_engine(num_pages=8, drafter=FakeDrafter(0, oracle, rewrites=True))
    ids = prompt(random.Random(5), 2047)
    engine.submit(request("a", ids, 1))
    run(engine)
    engine._reuse.cache.make_room(0)
    assert engine._pool.pages.num_free == 1
    taken = engine._pool.pages.alloc(1)  # somebody else holds the last one
    engine._reuse.cache.find("", [], max_length=0, names=())
    engine.submit(request("b", ids[:1900], 1))
    seq = engine._sequences["b"]
    seq.state = engine._pool.open()
    engine._drafter.open(seq.state)
    for entry in list(engine._reuse.cache._entries)[:-1]:
        engine._reuse.cache.remove(entry)
    (entry,) = engine._reuse.cache._entries
    assert not engine._reuse._load(seq, entry, with_drafter=True)
    assert seq.state.length == 0 and seq.state.pages == []
    engine._pool.pages.release(taken)


@pytest.mark.parametrize("method", ["snapshot", "restore"])
def test_a_drafter_that_fails_here_is_dropped_and_nothing_else(method, caplog):
    drafter = FakeDrafter(0, oracle)
    engine = small_engine(drafter=drafter)

    def fail(*args):
        raise RuntimeError("on purpose")

    setattr(drafter, method, fail)
    requests = [request(n, [1] * 600, 20) for n in "ab"]
    with caplog.at_level(logging.CRITICAL):
        for req in requests:
            engine.submit(req)
            check_against_reference(run(engine)[req.id], req, MAX_SEQ_LEN)
    assert not engine._drafter_works


# ------------------------------------------------------------------------------- preemption


def crowded(seed: int, num: int = 4, num_stages: int = 1):
    """Long generations that cannot all have their pages at once."""
    requests = [request(f"r{n}", prompt(random.Random(seed + n), 200 + n), 800) for n in range(num)]
    drafter = FakeDrafter(seed, oracle, 0.5)
    schedule = ScheduleConfig(max_seqs=num, admission="optimistic", queue_timeout_s=1e9)
    model = FakeModel(num_stages=num_stages)
    return small_engine(model=model, schedule=schedule, num_pages=8, drafter=drafter), requests


@pytest.mark.parametrize("seed", range(6))
def test_preempted_sequences_go_on_as_if_nothing_had_been(seed):
    engine, requests = crowded(seed, num_stages=1 + seed % 3)
    for req in requests:
        engine.submit(req)
    parked = 0
    news = {}
    while engine.has_work:
        for delta in engine.step():
            news.setdefault(delta.request_id, []).append(delta)
        engine.audit()
        parked = max(parked, engine.stats().parked_bytes)
    for req in requests:
        check_against_reference(news[req.id], req, MAX_SEQ_LEN)
        assert sum(d.kind == "admitted" for d in news[req.id]) == 1
    assert engine.stats().preemptions > 0 and parked > 0
    assert engine.stats().parked_bytes == 0
    ends = [name for name in news if news[name][-1].finish_reason == "length"]
    assert len(ends) == 4


def test_the_oldest_is_never_preempted_and_nobody_new_overtakes_the_preempted():
    engine, requests = crowded(7, num=4)
    for req in requests:
        engine.submit(req)
    late = request("late", [3] * 10, 2)
    sent = False
    while engine.has_work:
        plan = engine.plan()
        assert "r0" not in plan.preempted
        waiting = [s for s in engine._sequences.values() if s.parked is not None]
        if waiting and not sent:
            engine.submit(late)
            sent = True
        if sent and any(s.id not in plan.admitted for s in waiting):
            assert "late" not in plan.admitted
        engine.run(plan)
    assert sent


def test_a_preempted_request_can_be_cancelled():
    engine, requests = crowded(3)
    for req in requests:
        engine.submit(req)
    while not any(s.parked for s in engine._sequences.values()):
        engine.step()
    victim = next(s for s in engine._sequences.values() if s.parked)
    engine.cancel(victim.id)
    assert engine.stats().parked_bytes == 0
    news = run(engine)
    last = news[victim.id][-1]
    assert last.finish_reason == "cancelled" and last.timings.ttft_s > 0
    assert engine.stats().pages_used == 0


def test_priority_decides_who_goes():
    engine, requests = crowded(3)
    engine.submit(requests[0])
    engine.submit(request("low", [1] * 200, 800, priority=5))
    engine.submit(requests[1])
    engine.submit(requests[2])
    first = None
    while engine.has_work:
        plan = engine.plan()
        first = first or plan.preempted
        engine.run(plan)
    assert first[0] == "low"


@pytest.mark.parametrize(
    "values",
    [
        {"reuse": "some"},
        {"checkpoint_gib": -1.0},
        {"checkpoint_gib": float("nan")},
        {"checkpoint_every": 100},
        {"checkpoint_every": 0},
    ],
)
def test_settings_that_cannot_be_honoured(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        CacheConfig(**values)


def test_unknown_admission():
    with pytest.raises(ConfigError, match="admission"):
        ScheduleConfig(admission="greedy")
