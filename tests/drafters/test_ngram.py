"""n-gram drafter against a brute-force search."""

import random
import time
from dataclasses import dataclass

import pytest

from twining.drafters.base import DraftItem
from twining.drafters.ngram import MAX_CHAIN, MAX_MATCH, NgramDrafter


@dataclass
class State:
    slot: int
    length: int = 0


def brute_force(tokens: list[int], ngram_min: int, num_draft: int) -> list[int]:
    end = len(tokens) - 1
    seen, best, best_length = 0, None, 0
    for candidate in range(end - 1, -1, -1):
        length = 0
        while (
            length < MAX_MATCH
            and candidate - length >= 0
            and tokens[candidate - length] == tokens[end - length]
        ):
            length += 1
        if length < ngram_min:
            continue
        seen += 1
        if seen <= MAX_CHAIN and length > best_length:
            best, best_length = candidate, length
    if best is None:
        return []
    grown = list(tokens)
    for _ in range(num_draft):
        grown.append(grown[best + 1 + len(grown) - len(tokens)])
    return grown[len(tokens) :]


@pytest.mark.parametrize("ngram_min", [1, 2, 3, 5])
@pytest.mark.parametrize("alphabet", [1, 2, 3, 20])
def test_matches_brute_force_while_the_sequence_grows(ngram_min, alphabet):
    rng = random.Random(ngram_min * 100 + alphabet)
    drafter = NgramDrafter(ngram_min=ngram_min, max_draft=9)
    states = [State(4), State(1)]
    tokens = [[rng.randrange(alphabet) for _ in range(rng.randrange(1, 9))] for _ in states]
    for state in states:
        drafter.open(state)
    for _ in range(120):
        wanted = [rng.randrange(12) for _ in states]
        items = [DraftItem(s, t, k) for s, t, k in zip(states, tokens, wanted, strict=True)]
        got = drafter.draft(items)
        for t, k, drafts in zip(tokens, wanted, got, strict=True):
            assert drafts == brute_force(t, ngram_min, min(k, 9))
            t.extend(rng.randrange(alphabet) for _ in range(rng.randrange(1, 5)))


def test_most_recent_longest_match_and_tiling():
    drafter = NgramDrafter(ngram_min=2, max_draft=15)
    state = State(0)
    drafter.open(state)
    # "1 2" occurs before 7 and, later, before 8; the longer suffix "9 1 2" occurs before 7 only.
    assert drafter.draft([DraftItem(state, [9, 1, 2, 7, 5, 1, 2, 8, 9, 1, 2], 2)]) == [[7, 5]]
    drafter.open(state)
    assert drafter.draft([DraftItem(state, [5, 1, 2, 3, 1, 2, 3], 7)]) == [[1, 2, 3, 1, 2, 3, 1]]


def test_reopened_slot_forgets():
    drafter = NgramDrafter(ngram_min=1, max_draft=3)
    state = State(2)
    drafter.open(state)
    assert drafter.draft([DraftItem(state, [1, 1], 1)]) == [[1]]
    drafter.close(state)
    drafter.open(state)
    assert drafter.draft([DraftItem(state, [1], 1)]) == [[]]


def test_long_prompts_stay_cheap():
    drafter = NgramDrafter(ngram_min=3, max_draft=7)
    state = State(0)
    drafter.open(state)
    tokens = [0] * 200_000  # the worst case: every position matches
    drafter.draft([DraftItem(state, tokens, 7)])
    start = time.process_time()
    for _ in range(100):
        tokens.append(0)
        drafter.draft([DraftItem(state, tokens, 7)])
    assert time.process_time() - start < 1.0  # about 0.4 ms a query, whatever the length
