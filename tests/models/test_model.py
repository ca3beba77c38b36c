"""Glm5Next at its edges: what is refused, and with which words."""

import pytest
import torch

from twining.models.glm5_next.mtp import MtpRows


@pytest.fixture
def pool(small_model):
    return small_model.make_pool(num_pages=3, max_seqs=2, max_draft=3)


@pytest.fixture
def state(small_model, pool):
    state = pool.open()
    assert pool.reserve(state, 200)
    small_model.prefill(state, list(range(70)))
    return state


def test_prefill_refusals(small_model, pool, state):
    with pytest.raises(ValueError, match="multiple of 64"):
        small_model.prefill(state, [1])
    fresh = pool.open()
    with pytest.raises(ValueError, match="no tokens"):
        small_model.prefill(fresh, [])
    with pytest.raises(ValueError, match="are reserved"):
        small_model.prefill(fresh, [1, 2])
    assert pool.reserve(fresh, 100)
    with pytest.raises(ValueError, match="expected 1 to 64"):
        small_model.prefill_block(fresh, [1] * 65)
    with pytest.raises(ValueError, match="embeds are"):
        small_model.prefill(fresh, [1, 2], embeds=torch.zeros(3, 96))
    with pytest.raises(ValueError, match="vocabulary"):
        small_model.prefill(fresh, [203])
    assert fresh.length == 0


def test_verify_refusals(small_model, pool, state):
    for batch, words in (
        ([], "empty batch"),
        ([(state, [])], "expected 1 to 4"),
        ([(state, [1] * 5)], "expected 1 to 4"),
        ([(state, [1]), (state, [2])], "twice"),
        ([(state, [-1])], "vocabulary"),
    ):
        with pytest.raises(ValueError, match=words):
            small_model.verify(batch)
    other = pool.open()
    with pytest.raises(ValueError, match="are reserved"):
        small_model.verify([(state, [1]), (other, [1])])


def test_commit_refusals(small_model, state):
    with pytest.raises(ValueError, match="has 0 rows"):
        small_model.commit(state, 1)
    small_model.verify([(state, [1, 2, 3])])
    for num in (0, 4):
        with pytest.raises(ValueError, match="has 3 rows"):
            small_model.commit(state, num)
    small_model.commit(state, 2)
    assert state.length == 72
    with pytest.raises(ValueError, match="has 0 rows"):
        small_model.commit(state, 1)


def test_embeds_replace_ids(small_model, pool):
    ids = list(range(90))
    rows = []
    for embeds in (None, small_model.embed(ids)):
        state = pool.open()
        assert pool.reserve(state, 90)
        rows.append(small_model.prefill(state, ids, embeds=embeds).hidden)
        pool.close(state)
    assert torch.equal(*rows)


def test_results_may_be_changed_in_place(small_model):
    """Samplers and vision write into these outside inference mode."""
    small_model.embed([1, 2]).zero_()
    small_model.logits(torch.zeros(2, 96)).zero_()


def test_mtp_batches_and_refusals(small_model, pool, state):
    mtp = small_model.mtp
    hidden = torch.randn(70, 96, generator=torch.Generator().manual_seed(1))
    other = pool.open()
    assert pool.reserve(other, 80)
    alone = [mtp.rows(state, list(range(9)), hidden[:9], 0), mtp.rows(other, [7], hidden[9:10], 0)]
    items = [
        MtpRows(state, 0, list(range(9)), hidden[:9]),
        MtpRows(other, 0, [7], hidden[9:10]),
    ]
    torch.testing.assert_close(mtp.rows_batch(items), torch.cat(alone), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="equal counts"):
        mtp.rows(state, [1, 2], hidden[:1], 0)
    with pytest.raises(ValueError, match="are reserved"):
        mtp.rows(state, [1], hidden[:1], 256)
