"""The choice of draft length: arithmetic, limits, and that it finds the best one of a machine."""

import random

import pytest

from twining.engine.adaptive import (
    PROBE_EVERY,
    CostFit,
    DraftPolicy,
    choose_num_draft,
    note_accepted,
)


def fitted(fixed_s: float, row_s: float, counts=(1, 4, 8, 2)) -> CostFit:
    cost = CostFit()
    for n in counts * 20:
        cost = cost.add(n, fixed_s + row_s * n)
    return cost


def test_cost_is_the_line_through_the_rounds():
    cost = fitted(0.010, 0.002)
    for rows in (1, 3, 16):
        assert cost.seconds_of(rows) == pytest.approx(0.010 + 0.002 * rows)


def test_cost_of_one_row_count_and_of_none():
    cost = CostFit().add(4, 0.032)
    assert cost.seconds_of(4) == pytest.approx(0.032)
    assert cost.seconds_of(1) == pytest.approx(0.020)  # 0.02 + 3 rows of 0.004
    assert cost.seconds_of(5) == pytest.approx(0.036)
    assert CostFit().seconds_of(2) > CostFit().seconds_of(1) > 0


def test_cost_never_falls_and_is_never_negative():
    rng = random.Random(1)
    for _ in range(200):
        cost = CostFit()
        for _ in range(rng.randint(1, 30)):
            cost = cost.add(rng.randint(1, 40), rng.random())
        values = [cost.seconds_of(n) for n in range(1, 130)]
        assert values == sorted(values) and values[0] >= 0


def test_rates_see_only_what_was_tried():
    assert note_accepted((0.5, 0.5, 0.5), 3, 1) == pytest.approx((0.55, 0.45, 0.5))
    assert note_accepted((0.5, 0.5, 0.5), 3, 3) == pytest.approx((0.55, 0.55, 0.55))
    assert note_accepted((0.5, 0.5), 0, 0) == (0.5, 0.5)
    assert note_accepted((0.5, 0.5), 5, 4) == pytest.approx((0.55, 0.55))  # more than it knows


def test_length_follows_acceptance_and_cost():
    cheap, dear = fitted(0.1, 0.0001), fitted(0.0001, 0.1)
    assert choose_num_draft([(0.9,) * 7], cheap, 7) == 7
    assert choose_num_draft([(0.9,) * 7], dear, 7) == 0
    assert choose_num_draft([(0.0,) * 7], cheap, 7) == 0
    assert choose_num_draft([(0.9,) * 7], cheap, 0) == 0
    assert choose_num_draft([(0.95, 0.95, 0.0, 0.9)], fitted(0.1, 0.005), 4) == 2


@pytest.mark.parametrize(("p", "fixed", "row"), [(0.9, 10, 1), (0.6, 10, 2), (0.4, 4, 2)])
@pytest.mark.parametrize("num_seqs", [1, 4])
def test_it_finds_the_best_length_of_a_machine(p, fixed, row, num_seqs):
    """Simulated acceptance and cost: after a while it is as fast as the best constant length."""
    most = 7

    def speed(k: int) -> float:
        tokens = num_seqs * sum(p**i for i in range(k + 1))
        return tokens / (fixed + row * num_seqs * (k + 1))

    rng = random.Random(int(p * 100) + num_seqs)
    policy, rates = DraftPolicy.start(most), [None] * num_seqs
    tokens = seconds = 0.0
    for turn in range(3000):
        k = policy.choose(rates)
        assert 0 <= k <= most and (turn % PROBE_EVERY or k)
        took = (fixed + row * num_seqs * (k + 1)) * rng.uniform(0.9, 1.1)
        policy = policy.note_round(num_seqs * (k + 1), took)
        for i in range(num_seqs):
            accepted = 0
            while accepted < k and rng.random() < p:
                accepted += 1
            policy, rates[i] = policy.note_sequence(rates[i], k, accepted)
            tokens += (accepted + 1) * (turn >= 300)
        seconds += took * (turn >= 300)
    assert tokens / seconds > 0.93 * max(map(speed, range(most + 1)))
