"""MTP glue on a block that remembers which rows it was asked for."""

import random
from dataclasses import dataclass

import pytest
import torch

from twining.drafters.base import DraftItem
from twining.drafters.mtp import MAX_WAITING, MtpDrafter

VOCAB = 50


@dataclass
class State:
    slot: int
    length: int = 0
    capacity: int = 10_000


@dataclass
class Rows:
    hidden: torch.Tensor
    taps: None = None


class FakeBlock:
    """Row output = (token, h) mixed into one number; keeps the last inputs of every row."""

    def __init__(self):
        self.cache: dict[int, dict[int, tuple[int, float]]] = {}
        self.num_passes = 0

    def rows(self, state, ids_next, hidden, start):
        assert len(ids_next) == len(hidden)
        rows = self.cache.setdefault(state.slot, {})
        for i, token in enumerate(ids_next):
            assert start + i == 0 or start + i - 1 in rows, "a hole below this row"
            rows[start + i] = (token, float(hidden[i, 0]))
        self.num_passes += 1
        tokens = torch.tensor(ids_next, dtype=torch.float32)[:, None]
        return (tokens * 7 + hidden * 3 + 1) % 1009

    def rows_batch(self, items):
        return torch.cat([self.rows(i.state, i.ids_next, i.hidden, i.start) for i in items])


class FakeTarget:
    def embed(self, ids):
        raise AssertionError("the block has the embedding")

    def logits(self, hidden):
        assert hidden.shape[1] == 1
        return -((torch.arange(VOCAB) - hidden % VOCAB).abs())


def trunk_h(position: int) -> float:
    return float(position * position % 997)


def expected_chain(tokens, num_draft):
    """Drafts by the definition: h of the position before the anchor, then own states."""
    h, token, out = trunk_h(len(tokens) - 2), tokens[-1], []
    for _ in range(num_draft):
        h = (token * 7 + h * 3 + 1) % 1009
        token = int(h % VOCAB)
        out.append(token)
    return out


class Sequence:
    def __init__(self, rng, slot, drafter):
        self.rng, self.drafter = rng, drafter
        self.state = State(slot)
        drafter.open(self.state)
        self.tokens = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 15, 17, 18, 90]))]
        prompt = len(self.tokens)
        self.tokens.append(rng.randrange(VOCAB))  # the anchor
        done = 0
        while done < prompt:
            size = min(rng.choice([1, 16, 64]), prompt - done)
            self.extend(done, size)
            done += size

    def extend(self, start, size):
        hidden = torch.tensor([[trunk_h(p)] for p in range(start, start + size)])
        ids = self.tokens[start : start + size]
        self.drafter.extend(self.state, start, ids, Rows(hidden))
        self.state.length = start + size

    def commit(self, drafts):
        accepted = self.rng.randrange(len(drafts) + 1)
        start = self.state.length
        self.tokens += [*drafts[:accepted], self.rng.randrange(VOCAB)]
        self.extend(start, accepted + 1)


@pytest.mark.parametrize("seed", range(8))
def test_rows_and_chains(seed):
    rng = random.Random(seed)
    block = FakeBlock()
    drafter = MtpDrafter(block, FakeTarget(), max_draft=5)
    sequences = [Sequence(rng, slot, drafter) for slot in (3, 0, 1)]
    for _ in range(40):
        chosen = rng.sample(sequences, rng.randrange(1, 4))
        wanted = [rng.choice([0, 0, 1, 3, 7]) for _ in chosen]
        items = [DraftItem(s.state, s.tokens, k) for s, k in zip(chosen, wanted, strict=True)]
        for s, k, drafts in zip(chosen, wanted, drafter.draft(items), strict=True):
            assert drafts == expected_chain(s.tokens, min(k, 5))
            rows = block.cache.get(s.state.slot, {})
            if k:
                for i in range(s.state.length):  # every committed row from the trunk's own state
                    assert rows[i] == (s.tokens[i + 1], trunk_h(i))
            s.commit(drafts)
            assert drafter._waiting[s.state.slot].count <= MAX_WAITING


def test_a_hole_ends_drafting_until_reopened():
    drafter = MtpDrafter(FakeBlock(), FakeTarget(), max_draft=3)
    state = State(0)
    drafter.open(state)
    drafter.extend(state, 5, [1, 2], Rows(torch.ones(2, 1)))
    state.length = 7
    assert drafter.draft([DraftItem(state, [0] * 8, 3)]) == [[]]
    drafter.open(state)
    drafter.extend(state, 0, [1], Rows(torch.tensor([[trunk_h(0)]])))
    state.length = 1
    assert drafter.draft([DraftItem(state, [1, 4], 3)]) == [expected_chain([1, 4], 3)]


def test_chain_stops_at_the_reserved_pages():
    block = FakeBlock()
    drafter = MtpDrafter(block, FakeTarget(), max_draft=9)
    state = State(0, capacity=12)
    drafter.open(state)
    drafter.extend(state, 0, [1] * 10, Rows(torch.tensor([[trunk_h(p)] for p in range(10)])))
    state.length = 10
    assert drafter.draft([DraftItem(state, [1] * 11, 9)])[0] == expected_chain([1] * 11, 9)[:3]
    assert max(block.cache[0]) < 12
