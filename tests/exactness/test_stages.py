"""Layers over one, two or three stages, at every partition: the same tokens and log-probabilities.

Several verify passes are under way at once here, on threads of their own.
"""

import itertools
import random

import pytest

from tests.exactness.test_tiny import alone, bench, make_requests, one_thread  # noqa: F401
from tests.exactness.tools import ReplayDrafter, assert_equal_runs, run
from twining.engine.request import Request, SamplingParams

NUM_LAYERS = 8
PARTITIONS = [
    tuple(b - a for a, b in itertools.pairwise((0, *cuts, NUM_LAYERS)))
    for stages in (2, 3)
    for cuts in itertools.combinations(range(1, NUM_LAYERS), stages - 1)
]


@pytest.mark.parametrize("case", range(len(PARTITIONS)), ids=lambda i: str(PARTITIONS[i]))
def test_every_partition(bench, alone, case):  # noqa: F811
    """Each with a share of the requests; all of them see every drafter and length."""
    partition = PARTITIONS[case]
    requests = make_requests()[case % 4 :: 4]
    drafter, num_draft = (("mtp", 3), ("dflash2", 7), ("ngram", 3), ("none", 0))[case // 4 % 4]
    engine = bench.engine(drafter, num_draft, max_seqs=4, partition=partition)
    got = run(engine, requests)
    engine._model.close()
    assert_equal_runs(alone, got, f"{drafter} {num_draft}, stages {partition}")


@pytest.mark.parametrize(("stages", "partition"), [(2, (5, 3)), (3, (2, 1, 5))])
def test_staggered_arrival_and_every_accept_length(bench, alone, stages, partition):  # noqa: F811
    rng = random.Random(stages)
    requests = make_requests()
    rng.shuffle(requests)
    known = {tuple(r.prompt_ids): alone[r.id].token_ids for r in requests}
    engine = bench.engine(
        ReplayDrafter(known, 7, stages),
        7,
        max_seqs=5,
        num_pages=6,
        partition=partition,
        max_batched_tokens=rng.choice([64, 256]),
        prefill_tokens_with_decodes=64,
    )
    most = 0
    launch = engine._model.launch

    def counting(batch):
        nonlocal most
        rows = launch(batch)
        most = max(most, len(engine._rounds) + 1)
        return rows

    engine._model.launch = counting
    got = run(engine, requests, lambda: rng.random() < 0.4)
    engine._model.close()
    assert_equal_runs(alone, got, f"stages {partition}")
    assert most == stages  # that many passes were under way at once


def test_cancelled_while_under_way(bench, alone):  # noqa: F811
    """A sequence that ends in the middle of its pass leaves slot and pages as good as new."""
    rng = random.Random(9)
    engine = bench.engine("mtp", 3, max_seqs=3, num_pages=4, partition=(3, 3, 2))
    num_under_way = 0
    for round_number in range(4):
        victims = [
            Request(
                id=f"v{round_number}{n}",
                prompt_ids=[rng.randrange(480) for _ in range(rng.choice([20, 70]))],
                max_tokens=100,
                sampling=SamplingParams(seed=n),
            )
            for n in range(3)
        ]
        for victim in victims:
            engine.submit(victim)
        for _ in range(rng.randint(4, 7)):
            engine.step()
        for victim in victims:
            num_under_way += engine._sequences[victim.id].under_way
            engine.cancel(victim.id)
            engine.audit()
        requests = make_requests()[round_number::6]
        got = {}
        for request in requests:
            got |= run_one(engine, request)
        assert_equal_runs(alone, got, "after cancels")
    engine._model.close()
    assert num_under_way > 3


def run_one(engine, request):
    engine.step()  # news of the cancelled
    return run(engine, [request])
