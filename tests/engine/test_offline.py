"""Batches through an engine in this process, and the start-up check of row invariance."""

import pytest

from tests.engine.fakes import FakeModel, FakePool, make_engine, reference_stream
from twining.config import ScheduleConfig
from twining.engine.invariance import check_row_invariance
from twining.engine.offline import generate
from twining.engine.request import Request, SamplingParams
from twining.errors import EngineError


def requests(count: int) -> list[Request]:
    return [
        Request(
            id=f"r{n}",
            prompt_ids=[n % 50, 3],
            sampling=SamplingParams(seed=n),
            max_tokens=5 + n % 7,
            logprobs=1,
        )
        for n in range(count)
    ]


def test_results_come_in_order_and_the_queue_never_overflows():
    engine = make_engine(schedule=ScheduleConfig(max_seqs=3, max_queue=0))
    todo = requests(40)
    seen = []
    results = generate(engine, iter(todo), on_delta=seen.append)
    assert [r.request_id for r in results] == [r.id for r in todo]
    for result, request in zip(results, todo, strict=True):
        ids, reason, _, logprobs = reference_stream(request, 1024)
        assert (result.token_ids, result.finish_reason) == (ids, reason)
        assert result.logprobs == logprobs and not result.code
        assert result.accepted_length == 1.0
    assert sum(d.kind == "finished" for d in seen) == 40


def test_empty_batch_and_errors_and_repeated_id():
    engine = make_engine()
    assert generate(engine, []) == []
    bad = Request(id="bad", prompt_ids=[], sampling=SamplingParams(), max_tokens=1)
    result, good = generate(engine, [bad, requests(1)[0]])
    assert (result.finish_reason, result.code) == ("error", "invalid_value")
    assert result.message and good.finish_reason == "length"
    with pytest.raises(ValueError, match="twice"):
        generate(engine, requests(1) * 2)


@pytest.mark.parametrize("max_seqs", [1, 2, 5])
@pytest.mark.parametrize("max_seq_len", [2, 40, 70, 71, 512])
@pytest.mark.parametrize("max_draft", [0, 1, 15])
def test_invariance_check_passes_and_leaves_the_pool_idle(max_seqs, max_seq_len, max_draft):
    pool = FakePool(4, max_seqs)
    check_row_invariance(
        FakeModel(), pool, vocab_size=50, max_seq_len=max_seq_len, max_draft=max_draft
    )
    assert pool.num_free_slots == max_seqs and pool.pages.num_free == 4


@pytest.mark.parametrize(("max_seqs", "max_draft"), [(1, 3), (2, 0)])
def test_invariance_check_sees_rows_that_depend_on_company(max_seqs, max_draft):
    pool = FakePool(4, max_seqs)
    model = LeakyModel()
    with pytest.raises(EngineError, match="row-invariance check failed"):
        check_row_invariance(model, pool, vocab_size=50, max_seq_len=512, max_draft=max_draft)
    assert pool.num_free_slots == max_seqs and pool.pages.num_free == 4


class LeakyModel(FakeModel):
    """Rows of a larger batch differ a little."""

    def verify(self, batch):
        rows = super().verify(batch)
        if len(rows.hidden) > 1:
            rows.hidden[:, 0] += 1.0
        return rows


def test_invariance_check_needs_an_idle_pool():
    pool = FakePool(1, 1)
    pool.open()
    with pytest.raises(EngineError, match="idle"):
        check_row_invariance(FakeModel(), pool, vocab_size=50, max_seq_len=256, max_draft=0)
