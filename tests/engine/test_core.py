"""The engine loop on a hash model: equality with one-by-one decoding, ends, errors, accounting."""

import logging
import random

import msgspec
import pytest

from tests.engine.fakes import (
    VOCAB,
    FakeDrafter,
    FakeModel,
    make_engine,
    reference_stream,
)
from twining.config import ScheduleConfig
from twining.engine.request import Delta, Request, SamplingParams
from twining.errors import EngineError

MAX_SEQ_LEN = 1024


def prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def request(name: str = "a", ids=(1, 2, 3), max_tokens: int = 8, **values) -> Request:
    values.setdefault("sampling", SamplingParams(seed=7))
    return Request(id=name, prompt_ids=list(ids), max_tokens=max_tokens, **values)


def run(engine, audit: bool = True) -> dict[str, list[Delta]]:
    news: dict[str, list[Delta]] = {}
    for _ in range(100_000):
        if not engine.has_work:
            return news
        for delta in engine.step():
            news.setdefault(delta.request_id, []).append(delta)
        if audit:
            engine.audit()
    raise AssertionError("the engine does not come to an end")


def ids_of(deltas) -> list[int]:
    return [i for d in deltas for i in d.token_ids]


def check_against_reference(deltas: list[Delta], req: Request, max_seq_len=MAX_SEQ_LEN) -> None:
    ids, reason, stop_id, logprobs = reference_stream(req, max_seq_len)
    assert ids_of(deltas) == ids
    last = deltas[-1]
    assert (last.kind, last.finish_reason, last.stop_id) == ("finished", reason, stop_id)
    assert [lp for d in deltas for lp in d.logprobs] == logprobs
    assert [d.kind for d in deltas[:2]] == ["admitted", "progress"]
    assert sum(d.kind == "finished" for d in deltas) == 1
    done = [d.prompt_done for d in deltas if d.kind == "progress"]
    assert done == sorted(set(done)) and done[-1] == len(req.prompt_ids)
    assert all(n % 64 == 0 for n in done[:-1])


def oracle_for(requests: list[Request]):
    """What a perfect drafter would say."""
    truth = {
        tuple(r.prompt_ids): r.prompt_ids + reference_stream(r, MAX_SEQ_LEN)[0] for r in requests
    }

    def oracle(tokens: list[int], count: int) -> list[int]:
        for ids, whole in truth.items():
            if tuple(tokens[: len(ids)]) == ids and whole[: len(tokens)] == tokens:
                return whole[len(tokens) : len(tokens) + count]
        raise AssertionError("the engine left the reference stream")

    return oracle


def random_request(rng: random.Random, name: str) -> Request:
    size = rng.choice([1, 2, 63, 64, 65, 127, 128, 200, 255, 256, 257, 400])
    return request(
        name,
        prompt(rng, size),
        max_tokens=rng.choice([1, 2, 3, 17, 40, 10_000 if size > 390 else 60]),
        sampling=SamplingParams(
            seed=rng.randrange(1 << 60),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            presence_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.3]),
        ),
        stop_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 2]))),
        min_tokens=rng.choice([0, 5]),
        logprobs=rng.choice([-1, 0, 3]),
        num_draft_tokens=rng.choice([-1, 0, 1, 3]),
        force_after=rng.choice([-1, 6]),
        force_id=4,
        priority=rng.randrange(3),
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_equal_one_by_one_decoding(seed):
    rng = random.Random(seed)
    requests = [random_request(rng, f"r{n}") for n in range(rng.randint(1, 9))]
    schedule = ScheduleConfig(
        max_seqs=rng.randint(1, 5),
        max_batched_tokens=rng.choice([64, 128, 2048]),
        prefill_tokens_with_decodes=rng.choice([64, 256]),
        decode_share=rng.choice([0.1, 0.5, 0.9]),
        queue_timeout_s=1e9,
    )
    drafter = FakeDrafter(seed, oracle_for(requests), rng.choice([0.0, 0.6, 1.0]))
    engine = make_engine(
        drafter=drafter if rng.random() < 0.8 else None,
        schedule=schedule,
        num_pages=rng.randint(4, 9),
        num_draft=rng.choice([1, 3, 7]),
        seed=seed,
        model=FakeModel(num_stages=rng.choice([1, 2, 3])),
    )
    waiting, news, cancelled = list(requests), {}, set()
    for _ in range(100_000):
        if waiting and rng.random() < 0.3:
            engine.submit(waiting.pop(0))
        if rng.random() < 0.01:
            victim = rng.choice(requests)
            if victim not in waiting and f"{victim.id}" not in news.get("ended", ()):
                engine.cancel(victim.id)
                cancelled.add(victim.id)
        for delta in engine.step():
            news.setdefault(delta.request_id, []).append(delta)
        engine.audit()
        if not waiting and not engine.has_work:
            break
    assert not drafter.seen
    assert engine.stats().pages_used == engine.stats().running == engine.stats().waiting == 0
    for req in requests:
        deltas = news[req.id]
        if deltas[-1].finish_reason == "cancelled":
            assert req.id in cancelled
            whole = reference_stream(req, MAX_SEQ_LEN)[0]
            assert whole[: len(ids_of(deltas))] == ids_of(deltas)
        else:
            check_against_reference(deltas, req)


def test_good_drafts_save_verify_steps():
    req = request(max_tokens=41)
    drafter = FakeDrafter(0, oracle_for([req]), skill=1.0)
    model = FakeModel()
    engine = make_engine(model=model, drafter=drafter, num_draft=7)
    engine.submit(req)
    deltas = run(engine)["a"]
    check_against_reference(deltas, req)
    timings = deltas[-1].timings
    assert timings.draft_steps == model.num_verifies < 25
    assert timings.num_accepted + timings.draft_steps == 40
    assert timings.num_accepted <= timings.num_drafted
    stats = engine.stats()
    assert (stats.draft_steps, stats.num_accepted) == (timings.draft_steps, timings.num_accepted)
    assert (stats.prompt_tokens, stats.generated_tokens) == (3, 41)


@pytest.mark.parametrize("size", [1, 64, 1022, 1023])
def test_context_is_filled_to_the_last_position(size):
    rng = random.Random(size)
    req = request(ids=prompt(rng, size), max_tokens=10**9)
    engine = make_engine(drafter=FakeDrafter(0, oracle_for([req])), num_pages=4, num_draft=15)
    engine.submit(req)
    deltas = run(engine)["a"]
    check_against_reference(deltas, req)
    assert len(ids_of(deltas)) == MAX_SEQ_LEN - size


@pytest.mark.parametrize("size", [1, 100, 255, 256])
def test_reserved_pages_are_enough_to_the_last_row(size):
    """The worst case fills its last page exactly; one draft too many would leave it."""
    rng = random.Random(size)
    req = request(ids=prompt(rng, size), max_tokens=513 - size)
    engine = make_engine(drafter=FakeDrafter(0, oracle_for([req]), 0.9), num_draft=7)
    engine.submit(req)
    check_against_reference(run(engine)["a"], req)


def test_prefill_only():
    engine = make_engine()
    engine.submit(request(ids=range(40), max_tokens=0, prompt_logprobs=2))
    deltas = run(engine)["a"]
    assert [d.kind for d in deltas] == ["admitted", "progress", "finished"]
    assert deltas[-1].finish_reason == "length" and not ids_of(deltas)
    assert len(deltas[1].prompt_logprobs) == 40


def test_prompt_logprobs_do_not_depend_on_chunks():
    rng = random.Random(3)
    ids = prompt(rng, 300)
    results = []
    for tokens in (64, 128, 2048):
        schedule = ScheduleConfig(max_batched_tokens=tokens)
        engine = make_engine(schedule=schedule)
        engine.submit(request(ids=ids, max_tokens=1, prompt_logprobs=2))
        results.append([e for d in run(engine)["a"] for e in d.prompt_logprobs])
    assert results[0] == results[1] == results[2]
    assert results[0][0] is None and len(results[0]) == 300
    engine = make_engine()  # the entry of token i is what decoding after the first i tokens says
    engine.submit(request(ids=ids[:100], max_tokens=1, logprobs=VOCAB))
    (entry,) = [e for d in run(engine)["a"] for e in d.logprobs]
    at = entry.top_ids.index(ids[100])
    assert entry.top_logprobs[at] == pytest.approx(results[0][100].logprob, abs=0)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"ids": []}, "invalid_value"),
        ({"ids": [VOCAB]}, "out_of_range"),
        ({"ids": [-1]}, "out_of_range"),
        ({"ids": [0] * 1024}, "context_length_exceeded"),
        ({"ids": [0] * 5000}, "context_length_exceeded"),
        ({"max_tokens": -1}, "out_of_range"),
    ],
)
def test_refusals(values, code):
    engine = make_engine()
    engine.submit(request(**values))
    (delta,) = run(engine)["a"]
    assert (delta.kind, delta.finish_reason, delta.code) == ("error", "error", code)
    assert "\n" not in delta.message


def test_context_message_begins_as_clients_expect():
    engine = make_engine()
    engine.submit(request(ids=[0] * 2000))
    (delta,) = run(engine)["a"]
    assert delta.message.startswith("This model's maximum context length is 1024 tokens.")
    assert "2000" in delta.message


def test_duplicate_id_and_full_queue():
    engine = make_engine(schedule=ScheduleConfig(max_seqs=2, max_queue=1))
    for name in ("a", "a", "b", "c", "d"):
        engine.submit(request(name, max_tokens=2))
    news = run(engine)
    assert [d.code for d in news["a"] if d.kind == "error"] == ["invalid_value"]
    assert [d.code for d in news["d"]] == ["queue_full"]
    assert all(news[n][-1].finish_reason == "length" for n in "abc")


def test_queue_timeout():
    schedule = ScheduleConfig(max_seqs=1, queue_timeout_s=0.5)
    engine = make_engine(schedule=schedule)
    engine.submit(request("long", max_tokens=900))
    engine.submit(request("late"))
    news = run(engine)
    assert [d.code for d in news["late"]] == ["queue_timeout"]
    assert len(ids_of(news["long"])) == 900


def test_cancel_in_every_phase():
    engine = make_engine(schedule=ScheduleConfig(max_seqs=1, max_batched_tokens=64))
    engine.cancel("unknown")
    engine.submit(request("decoding", ids=[1] * 10, max_tokens=500))
    engine.step(), engine.step()
    engine.submit(request("waiting"))
    engine.cancel("waiting")
    engine.cancel("decoding")
    engine.cancel("decoding")
    engine.submit(request("loading", ids=[1] * 300))
    news = engine.step()
    engine.cancel("loading")
    news += engine.step()
    ends = [(d.request_id, d.finish_reason) for d in news if d.kind == "finished"]
    assert ends == [(n, "cancelled") for n in ("waiting", "decoding", "loading")]
    assert not engine.has_work
    engine.audit()


def nan_case(bad: int) -> tuple[Request, list[int]]:
    """A request whose stream runs into token `bad` after a few others, and the tokens up to it."""
    for seed in range(1000):
        req = request("bad", [seed % 40, 1], 60, sampling=SamplingParams(seed=seed))
        ids = reference_stream(req, MAX_SEQ_LEN)[0]
        if bad in ids[5:20] and bad not in ids[:5] and bad not in req.prompt_ids:
            return req, ids[: ids.index(bad) + 1]
    raise AssertionError("no such seed")


@pytest.mark.parametrize("skill", [None, 0.5, 1.0])
def test_nan_ends_one_request_only_and_at_the_same_token(skill):
    bad = 44
    req, want = nan_case(bad)
    neighbours = []
    for seed in range(1000):
        other = request(f"n{seed}", [5, 6], 30, sampling=SamplingParams(seed=seed))
        if bad not in reference_stream(other, MAX_SEQ_LEN)[0]:
            neighbours.append(other)
        if len(neighbours) == 2:
            break
    drafter = None
    if skill is not None:
        drafter = FakeDrafter(0, oracle_for([req, *neighbours]), skill)
    engine = make_engine(model=FakeModel(nan_after=bad), drafter=drafter)
    for r in (neighbours[0], req, neighbours[1]):
        engine.submit(r)
    news = run(engine)
    last = news["bad"][-1]
    assert (last.kind, last.code) == ("error", "internal_error")
    assert ids_of(news["bad"]) == want
    for r in neighbours:
        check_against_reference(news[r.id], r)
    assert engine.stats().pages_used == 0


def test_nan_in_the_prompt_and_failing_prefill(caplog):
    engine = make_engine(model=FakeModel(nan_after=9, fail_prefill_of=8))
    engine.submit(request("nan", [1, 9]))
    engine.submit(request("fail", [1, 8, 2]))
    engine.submit(request("good", [1, 2], 3, stop_ids=()))
    with caplog.at_level(logging.CRITICAL):
        news = run(engine)
    for name in ("nan", "fail"):
        assert news[name][-1].code == "internal_error" and not ids_of(news[name])
    assert news["good"][-1].finish_reason == "length"


@pytest.mark.parametrize("fail_at", [1, 3])
def test_failing_drafter_is_dropped_and_output_is_the_same(fail_at, caplog):
    requests = [request(n, [i, 2], 30) for i, n in enumerate("abc")]
    drafter = FakeDrafter(1, oracle_for(requests), fail_at=fail_at)
    engine = make_engine(drafter=drafter)
    for req in requests:
        engine.submit(req)
    with caplog.at_level(logging.CRITICAL):
        news = run(engine)
    for req in requests:
        check_against_reference(news[req.id], req)
    assert drafter.num_drafts == fail_at


def test_an_admission_is_told_before_its_prefill_runs():
    engine = make_engine()
    engine.submit(request("a", [1] * 200, 3))
    assert [(d.request_id, d.kind) for d in engine.step()] == [("a", "admitted")]
    assert engine.step()[0].kind == "progress"


def test_failure_of_a_whole_verify_is_the_engines():
    class Broken(FakeModel):
        def verify(self, batch):
            raise RuntimeError("device lost")

    engine = make_engine(model=Broken())
    engine.submit(request())
    engine.step()  # admission
    engine.step()  # prefill
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()


def test_pool_smaller_than_the_context_is_refused():
    with pytest.raises(EngineError, match=r"4 pages holds 1024 tokens.*max_seq_len=1025"):
        make_engine(num_pages=4, max_seq_len=1025)


def test_more_requests_than_pages_run_one_after_the_other():
    engine = make_engine(num_pages=4, schedule=ScheduleConfig(queue_timeout_s=1e9))
    for n in range(6):
        engine.submit(request(f"r{n}", [n], 1000))
    news = run(engine)
    assert all(len(ids_of(news[f"r{n}"])) == 1000 for n in range(6))


def test_fairness_holds_for_measured_time():
    schedule = ScheduleConfig(
        max_seqs=4, prefill_tokens_with_decodes=64, decode_share=0.75, queue_timeout_s=1e9
    )
    engine = make_engine(schedule=schedule, num_pages=16, seed=5)
    engine.submit(request("chat", [1], 1000))
    engine.step()  # admission
    engine.step()  # prefill
    kinds = []
    engine.submit(request("long", [2] * 1000, 1))
    engine.step()  # admission of the long prompt
    while engine.num_open == 2:
        plan = engine.plan()
        kinds.append(plan.kind)
        engine.run(plan)
    assert kinds.count("prefill") == 16
    # Steps take the same time on average here, so 3 of 4 must be verify steps.
    assert kinds.count("verify") / len(kinds) > 0.65


def test_timings_add_up():
    engine = make_engine()
    engine.submit(request(max_tokens=20))
    last = run(engine)["a"][-1].timings
    assert last.queue_s > 0 and last.prefill_s > 0 and last.decode_s > 0
    assert last.ttft_s == pytest.approx(last.queue_s + last.prefill_s, abs=0.05)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(last), type=type(last)) == last
