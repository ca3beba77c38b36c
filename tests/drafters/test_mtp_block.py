"""MTP drafter on the real block: incremental rounds equal a recompute from the trunk's states."""

import random

import pytest
import torch

from twining.checkpoint.hf_config import parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.drafters.base import DraftItem
from twining.drafters.mtp import MtpDrafter
from twining.models.glm5_next.model import Glm5Next, TrunkRows

MAX_DRAFT = 4


@pytest.fixture(scope="module")
def model(golden):
    ckpt = Checkpoint.open(golden / "glm5_next" / "tiny")
    config = parse_glm5_next(ckpt.config)
    return Glm5Next.load(ckpt, config)


@pytest.mark.parametrize("seed", [0, 1])
def test_incremental_equals_recompute(model, seed):
    if model.mtp is None:
        pytest.skip("the fixture has no MTP block")
    rng = random.Random(seed)
    vocab = model.config.vocab_size
    pool = model.make_pool(num_pages=4, max_seqs=2, max_draft=MAX_DRAFT)
    drafter = MtpDrafter(model.mtp, model, max_draft=MAX_DRAFT)
    state = pool.open()
    drafter.open(state)
    pool.reserve(state, 200)
    tokens = [rng.randrange(vocab) for _ in range(rng.choice([1, 70]))]
    hidden = []
    rows = model.prefill(state, tokens)
    hidden.append(rows.hidden)
    drafter.extend(state, 0, tokens, rows)
    tokens.append(int(model.logits(rows.hidden[-1:]).argmax()))
    for _ in range(12):
        drafts = drafter.draft([DraftItem(state, tokens, rng.randrange(MAX_DRAFT + 1))])[0]
        assert drafts == recompute(model, pool, tokens, torch.cat(hidden), len(drafts))
        start, ids = state.length, [tokens[-1], *drafts]
        rows = model.verify([(state, ids)])
        accepted = rng.randrange(len(drafts) + 1)  # whatever the target says: any prefix will do
        model.commit(state, accepted + 1)
        kept = TrunkRows(rows.hidden[: accepted + 1], None)
        drafter.extend(state, start, ids[: accepted + 1], kept)
        hidden.append(kept.hidden)
        tokens += [*drafts[:accepted], rng.randrange(vocab)]


def recompute(model, pool, tokens, hidden, num_draft):
    """The same drafts from a fresh sequence whose rows are all computed at once."""
    if not num_draft:
        return []
    fresh = pool.open()
    pool.reserve(fresh, 200)
    fresh.length = len(tokens) - 1
    drafter = MtpDrafter(model.mtp, model, max_draft=MAX_DRAFT)
    drafter.open(fresh)
    drafter.extend(fresh, 0, tokens[:-1], TrunkRows(hidden, None))
    out = drafter.draft([DraftItem(fresh, tokens, num_draft)])[0]
    pool.close(fresh)
    return out
