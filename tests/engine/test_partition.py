"""Layers per stage: the balanced division is the best one, and texts that cannot be honoured."""

import itertools
import random

import pytest

from twining.config import EngineConfig
from twining.engine.partition import balance, parse_partition, resolve_partition
from twining.errors import ConfigError


def worst(costs, parts) -> int:
    ends = list(itertools.accumulate(parts))
    return max(sum(costs[end - n : end]) for end, n in zip(ends, parts, strict=True))


def every_division(num: int, stages: int):
    for cuts in itertools.combinations(range(1, num), stages - 1):
        edges = [0, *cuts, num]
        yield tuple(b - a for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize("seed", range(30))
def test_balance_is_the_best_of_all_divisions(seed):
    rng = random.Random(seed)
    costs = [rng.choice([1, 2, 5, 30]) for _ in range(rng.randint(1, 9))]
    first, last = rng.choice([0, 7]), rng.choice([0, 20])
    whole = list(costs)
    whole[0] += first
    whole[-1] += last
    for stages in range(1, len(costs) + 1):
        parts = balance(costs, stages, first_cost=first, last_cost=last)
        assert len(parts) == stages and sum(parts) == len(costs) and min(parts) >= 1
        best = min(worst(whole, p) for p in every_division(len(costs), stages))
        assert worst(whole, parts) == best


def test_head_and_embedding_weigh():
    assert balance([1] * 8, 2) == (4, 4)
    assert balance([1] * 8, 2, last_cost=2) == (5, 3)
    assert balance([1] * 8, 2, first_cost=2) == (3, 5)
    assert balance([1] * 7, 2) == (4, 3)


def test_an_explicit_partition_stands():
    assert resolve_partition("5,3", 2, [1] * 8, first_cost=0, last_cost=9) == (5, 3)
    assert resolve_partition("", 1, [1] * 8, first_cost=0, last_cost=9) == (8,)


@pytest.mark.parametrize("text", ["5,x", "5,", ",", "0,8", "-1,9", "5 3", "5,3.0", "1" * 99, "٣,5"])
def test_texts_that_are_no_partition(text):
    with pytest.raises(ConfigError, match="layers per stage; write it as 23,22"):
        parse_partition(text)


@pytest.mark.parametrize(
    ("text", "stages", "words"),
    [
        ("5,4", 2, r"partition='5,4' has 9 layers, the model has 8; use 4,4 for example"),
        ("", 9, r"stages=9, but the model has 8 layers.*use stages=8"),
    ],
)
def test_models_that_it_does_not_fit(text, stages, words):
    with pytest.raises(ConfigError, match=words):
        resolve_partition(text, stages, [1] * 8, first_cost=0, last_cost=0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stages": 0}, "stages=0"),
        ({"stages": 65}, "stages=65"),
        ({"stages": 2, "partition": "8"}, r"names 1 stages, but stages=2"),
        ({"partition": "5,3"}, r"names 2 stages, but stages=1"),
    ],
)
def test_settings_are_checked_together(tmp_path, values, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(model_dir=tmp_path, **values)
