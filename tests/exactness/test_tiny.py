"""The equality suite on the small random glm5_next model: nothing but the request shows in the
output.
"""

import random

import pytest
import torch

from tests.exactness.tools import (
    Bench,
    ReplayDrafter,
    assert_equal_runs,
    content,
    run,
    write_random_drafter,
)
from twining.engine.offline import Result
from twining.engine.request import Request, SamplingParams

MAX_SEQ_LEN = 512
LENGTHS = (1, 2, 3, 4, 5, 15, 63, 64, 65, 66, 127, 128, 129, 190, 255, 256, 257, 259)
CASES = [
    ("none", 0),
    ("ngram", 1),
    ("ngram", 3),
    ("ngram", 7),
    ("mtp", 1),
    ("mtp", 3),
    ("mtp", 7),
    ("dflash2", 1),
    ("dflash2", 3),
    ("dflash2", 7),
    ("replay", 1),
    ("replay", 7),
    ("replay", 15),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small matrices and a shared machine: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench(golden, tmp_path_factory, one_thread) -> Bench:
    folder = golden / "glm5_next" / "tiny"
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}")
    drafter = write_random_drafter(
        tmp_path_factory.mktemp("drafter"), hidden=128, vocab=512, num_layers=8
    )
    return Bench.load(folder, drafter, MAX_SEQ_LEN)


def make_requests() -> list[Request]:
    rng = random.Random(11)
    requests = []
    for n, size in enumerate(LENGTHS):
        ids = [rng.randrange(480) for _ in range(size)]
        if n % 3 == 0:  # something for the n-gram drafter to find
            ids = (ids[: max(2, size // 5)] * 6)[:size]
        requests.append(
            Request(
                id=f"r{n}",
                prompt_ids=ids,
                max_tokens=(5, 9, 14)[n % 3],
                sampling=SamplingParams(
                    seed=1000 + n,
                    temperature=(0.0, 1.0)[n % 2],
                    top_p=(1.0, 0.9)[n % 4 // 2],
                    frequency_penalty=(0.0, 0.4)[n % 5 == 0],
                    repetition_penalty=(1.0, 1.2)[n % 7 == 0],
                    logit_bias={7: 12.0, 9: 6.0} if n % 6 == 0 else {},
                ),
                stop_ids=(7,) if n % 4 == 0 else (),
                min_tokens=3,
                logprobs=2,
                prompt_logprobs=1 if n % 5 == 1 else -1,
                force_after=4 if n % 8 == 3 else -1,
                force_id=20,
            )
        )
    return requests


@pytest.fixture(scope="module")
def alone(bench):
    """Every request for itself, without a drafter: the definition of right."""
    return run(bench.engine(), make_requests())


def test_the_requests_are_worth_comparing(alone):
    results = list(alone.values())
    assert {r.finish_reason for r in results} == {"stop", "length"}
    assert len({tuple(r.token_ids) for r in results}) == len(results)
    assert any(20 in r.token_ids[4:5] for r in results)


@pytest.mark.parametrize("max_seqs", [1, 4])
@pytest.mark.parametrize(("drafter", "num_draft"), CASES)
def test_drafters_and_company(bench, alone, drafter, num_draft, max_seqs):
    requests = make_requests()
    if max_seqs == 1:  # alone: every third is enough, each drafter another third
        requests = requests[num_draft % 3 :: 3]
    if drafter == "replay":
        known = {tuple(r.prompt_ids): alone[r.id].token_ids for r in requests}
        drafter = ReplayDrafter(known, num_draft, seed=num_draft)
    engine = bench.engine(drafter, num_draft, max_seqs=max_seqs)
    got = run(engine, requests)
    assert_equal_runs(alone, got, f"{drafter} {num_draft}, {max_seqs} at a time")
    if isinstance(drafter, ReplayDrafter):
        assert engine.stats().num_accepted > 0


@pytest.mark.parametrize(
    ("drafter", "partition"), [("mtp", ()), ("replay", ()), ("replay", (3, 5))]
)
def test_adaptive_draft_length(bench, alone, drafter, partition):
    """Lengths that depend on the clock; the tokens do not."""
    requests = make_requests()
    known = {tuple(r.prompt_ids): alone[r.id].token_ids for r in requests}
    if drafter == "replay":
        drafter = ReplayDrafter(known, 7, seed=2)
    lengths = set()

    def noting(items):
        lengths.update(item.num_draft for item in items)
        return draft(items)

    engine = bench.engine(drafter, 7, max_seqs=3, partition=partition, adaptive_draft=True)
    draft, engine._drafter.draft = engine._drafter.draft, noting
    got = run(engine, requests)
    assert_equal_runs(alone, got, f"adaptive {drafter} {partition}")
    assert len(lengths) > 2


@pytest.mark.parametrize("seed", range(4))
def test_arrival_chunks_and_pages(bench, alone, seed):
    """Staggered arrival in any order, any chunk size, few pages, several drafters."""
    rng = random.Random(seed)
    requests = make_requests()
    rng.shuffle(requests)
    known = {tuple(r.prompt_ids): alone[r.id].token_ids for r in requests}
    engine = bench.engine(
        ReplayDrafter(known, 5, seed),
        5,
        max_seqs=rng.choice([2, 5, 8]),
        num_pages=rng.choice([2, 5, 16]),
        max_batched_tokens=rng.choice([64, 128, 1024]),
        prefill_tokens_with_decodes=64,
        decode_share=rng.choice([0.2, 0.8]),
    )
    got = run(engine, requests, lambda: rng.random() < 0.4)
    assert_equal_runs(alone, got, f"seed {seed}")


def test_cancelled_neighbours_leave_no_trace(bench, alone):
    """Slots and pages that cancelled requests used are as good as new."""
    rng = random.Random(5)
    engine = bench.engine("mtp", 3, max_seqs=3, num_pages=4)
    for round_number in range(3):
        victims = [
            Request(
                id=f"v{round_number}{n}",
                prompt_ids=[rng.randrange(480) for _ in range(rng.choice([40, 200]))],
                max_tokens=100,
                sampling=SamplingParams(seed=n),
            )
            for n in range(2)
        ]
        for victim in victims:
            engine.submit(victim)
        for _ in range(rng.randint(1, 6)):
            engine.step()
        for victim in victims:
            engine.cancel(victim.id)
        engine.step()
        engine.audit()
        for request in make_requests()[round_number::6]:
            engine.submit(request)
            deltas = []
            while engine.has_work:
                deltas += engine.step()
            ids = [i for d in deltas for i in d.token_ids]
            assert ids == alone[request.id].token_ids


def poison(pool, slots) -> None:
    """NaN into everything that a running sequence of these slots, or a free page, could hold."""
    planes = pool.stages[0]
    planes.latent._values[:, : planes.latent.zero_row] = float("nan")
    planes.index.keys.fill_(float("nan"))
    recurrent = planes.recurrent
    for plane in (
        planes.index.raw,
        planes.index.candidates,
        recurrent.base,
        recurrent.conv,
        recurrent.log_k,
        recurrent.log_v,
        recurrent.log_decay,
        recurrent.log_beta,
    ):
        plane[slots] = float("nan")


def test_nothing_is_read_before_it_is_written(bench, alone):
    """Caches full of NaN at the start: a sequence sees only what it wrote."""
    engine = bench.engine("mtp", 3, max_seqs=4)
    poison(engine._pool, slice(None))
    assert_equal_runs(alone, run(engine, make_requests()[::2]), "poisoned caches")


def test_a_sequence_gone_wrong_hurts_nobody(bench, alone):
    """One slot turns to NaN while four run: it ends with an error, the others and the next do
    not.
    """
    requests = make_requests()
    victim = Request(
        id="victim", prompt_ids=[3, 4, 5], max_tokens=50, sampling=SamplingParams(seed=1)
    )
    engine = bench.engine("ngram", 3, max_seqs=4)
    engine.submit(victim)
    engine.step()
    engine.step()
    state = engine._sequences["victim"].state
    engine._pool.settle(state)
    engine._pool.stages[0].recurrent.base[state.slot] = float("nan")
    results = {r.id: Result(request_id=r.id) for r in [victim, *requests]}
    for request in requests[:9]:
        engine.submit(request)
    while engine.has_work:
        for delta in engine.step():
            results[delta.request_id].add(delta)
        engine.audit()
    assert results["victim"].code == "internal_error"
    assert_equal_runs(alone, {r.id: results[r.id] for r in requests[:9]}, "beside NaN")


@pytest.mark.parametrize("latent_format", ["bf16", "q8", "q4"])
def test_smaller_latents_are_exact_among_themselves(bench, latent_format):
    requests = make_requests()[1::3]
    want = run(bench.engine(latent_format=latent_format), requests)
    known = {tuple(r.prompt_ids): want[r.id].token_ids for r in requests}
    engine = bench.engine(ReplayDrafter(known, 7, 1), 7, max_seqs=4, latent_format=latent_format)
    assert_equal_runs(want, run(engine, requests), latent_format)


def test_the_whole_context_is_usable(bench):
    """A prompt of max_seq_len - 1 gives one token; a long generation ends exactly at the limit."""
    ids = [n * 7 % 480 for n in range(MAX_SEQ_LEN - 1)]
    cases = [(ids, 1), (ids[: MAX_SEQ_LEN - 6], 6)]
    for drafter, num_draft in (("none", 0), ("mtp", 7), ("dflash2", 7)):
        engine = bench.engine(drafter, num_draft, max_seqs=2)
        requests = [
            Request(id=f"{n}", prompt_ids=prompt, max_tokens=1000, sampling=SamplingParams(seed=n))
            for n, (prompt, _) in enumerate(cases)
        ]
        got = run(engine, requests)
        if drafter == "none":
            want = got
        for n, (_, count) in enumerate(cases):
            assert len(got[f"{n}"].token_ids) == count
            assert content(got[f"{n}"]) == content(want[f"{n}"])
