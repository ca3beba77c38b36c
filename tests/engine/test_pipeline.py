"""Stages on threads: order, several passes at once, failures that reach who waits, clean ends."""

import threading
from concurrent.futures import Future

import pytest
import torch

from tests.models.synthetic import make_model
from twining.engine.pipeline import Pipeline
from twining.engine.request import Request, SamplingParams
from twining.engine.rounds import Rounds
from twining.engine.sampler import TokenHistory
from twining.engine.sequence import Sequence


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_model(tmp_path_factory.mktemp("small"), taps=(3, 0))
    torch.set_num_threads(before)


@pytest.fixture
def pipeline(model):
    pipeline = Pipeline(model, 2)
    yield pipeline
    pipeline.close()


def opened(pool, num_tokens: int):
    state = pool.open()
    assert pool.reserve(state, num_tokens)
    return state


def make_pool(model, partition=()):
    return model.make_pool(num_pages=4, max_seqs=4, max_draft=3, partition=partition)


IDS = [n * 37 % 203 for n in range(200)]


def test_blocks_of_a_prompt_follow_each_other(model, pipeline):
    want = model.prefill(opened(make_pool(model), 200), IDS)
    state = opened(make_pool(model, (2, 3)), 200)
    got = pipeline.prefill(state, IDS)
    assert torch.equal(got.hidden, want.hidden) and torch.equal(got.taps, want.taps)
    assert state.length == 200


def test_two_passes_are_worked_on_at_once(model, pipeline, monkeypatch):
    """Stage 0 takes the second pass while stage 1 still has the first."""
    pool = make_pool(model, (2, 3))
    states = [opened(pool, 80) for _ in range(2)]
    for state in states:
        pipeline.prefill(state, IDS[:70])
    run_stage = model.run_stage
    meeting = threading.Barrier(2, timeout=30)

    def slow(hop, number):
        first = hop.batch.segments[0].state is states[0]
        if (first and number == 1) or (not first and number == 0):
            meeting.wait()  # both must be here at the same time
        run_stage(hop, number)

    monkeypatch.setattr(model, "run_stage", slow)
    rows = [pipeline.launch([(state, [5, 6])]) for state in states]
    first, second = (r.result(timeout=60) for r in rows)
    assert torch.equal(first.hidden, second.hidden)


@pytest.mark.parametrize("number", [0, 1])
def test_a_failure_reaches_who_waits_and_no_one_else(model, pipeline, monkeypatch, number):
    pool = make_pool(model, (2, 3))
    states = [opened(pool, 80) for _ in range(2)]
    for state in states:
        pipeline.prefill(state, IDS[:70])
    run_stage = model.run_stage

    def failing(hop, at):
        if at == number and hop.batch.segments[0].state is states[0]:
            raise RuntimeError("on purpose")
        run_stage(hop, at)

    monkeypatch.setattr(model, "run_stage", failing)
    rows = [pipeline.launch([(state, [5, 6])]) for state in states]
    with pytest.raises(RuntimeError, match="on purpose"):
        rows[0].result(timeout=60)
    assert len(rows[1].result(timeout=60).hidden) == 2
    with pytest.raises(RuntimeError, match="on purpose"):
        pipeline.verify([(states[0], [1])])


def test_a_round_whose_sequences_are_all_gone_is_dropped():
    """Withdrawing waits for the pass of that sequence, and for no other."""
    rounds, passes = Rounds(), [Future(), Future(), Future()]
    seqs = [[make_sequence(f"{i}{n}") for n in range(2)] for i in range(3)]
    for group, rows in zip(seqs, passes, strict=True):
        rounds.add(group, [[], []], rows, 0.0)
    rounds.audit([s for group in seqs for s in group])
    passes[1].set_result(None)
    for seq in seqs[1]:
        rounds.withdraw(seq)
        rounds.withdraw(seq)  # once is enough
    assert len(rounds) == 2 and not passes[0].done() and not passes[2].done()
    passes[0].set_result(None)
    rounds.withdraw(seqs[0][1])
    oldest = rounds.take()
    assert oldest.withdrawn == {"01"} and not seqs[0][0].under_way
    passes[2].set_exception(RuntimeError("on purpose"))
    with pytest.raises(RuntimeError, match="on purpose"):
        rounds.take()
    rounds.audit([s for group in seqs for s in group])


def make_sequence(name: str) -> Sequence:
    request = Request(id=name, prompt_ids=[1], max_tokens=1, sampling=SamplingParams())
    return Sequence(request=request, order=0, arrived_s=0.0, history=TokenHistory([1]), tokens=[1])


def test_a_refused_prefill_leaves_nothing_under_way(model, pipeline):
    state = opened(make_pool(model, (2, 3)), 200)
    with pytest.raises(ValueError, match="vocabulary"):
        pipeline.prefill(state, [*IDS[:130], 203])
    assert state.length == 128  # two blocks were computed before the bad one
    assert pipeline._stages[0]._queue.empty() and pipeline._stages[1]._queue.empty()


def test_one_stage_needs_no_thread(model):
    before = threading.active_count()
    pipeline = Pipeline(model)
    assert threading.active_count() == before
    state = opened(make_pool(model), 80)
    pipeline.prefill(state, IDS[:64])
    assert pipeline.launch([(state, [1])]).done()
    pipeline.close()


def test_close_ends_the_threads(model):
    before = threading.active_count()
    pipeline = Pipeline(model, 3)
    assert threading.active_count() == before + 3
    pipeline.close()
    assert threading.active_count() == before
