"""Place layers and single parts on devices so that the tightest device keeps as much as possible.

Layers stay whole and in order; each device has a contiguous run. Embedding, head, vision, MTP and
drafter may go to any device. Pure. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from twining.planner.sizes import PlanRequest, Problem, size_up

MAX_FREE_PLACEMENT_DEVICES: Final = 3  # beyond, single parts go where most room is left


def _fill(budgets: Sequence[float], layers: Sequence[int]) -> list[int] | None:
    """Layers per device, first come; None when some are left over."""
    counts, at, used = [0] * len(budgets), 0, 0.0
    for size in layers:
        while used + size > budgets[at]:
            at += 1
            if at == len(budgets):
                return None
            used = 0.0
        used += size
        counts[at] += 1
    return counts


def _balanced(budgets: Sequence[int], layers: Sequence[int]) -> tuple[list[int], float]:
    """The split whose tightest device has most left, and what it has left (negative: short)."""
    # With what the smallest device lacks lent on top, every device takes all layers.
    low, high = float(min(0, *budgets) - sum(layers)), float(max(budgets))
    counts = _fill([b - low for b in budgets], layers)
    assert counts is not None
    for _ in range(48):
        middle = (low + high) / 2
        found = _fill([b - middle for b in budgets], layers)
        if found is None:
            high = middle
        else:
            low, counts = middle, found
    return counts, low


def _placements(count: int, devices: int) -> Iterator[tuple[int, ...]]:
    return product(range(devices), repeat=count)


@dataclass(frozen=True, slots=True)
class Placement:
    counts: tuple[int, ...]
    singles: tuple[int, ...]  # device of each single part
    slack: float


def _fixed_slack(problem: Problem, counts: Sequence[int], budgets: Sequence[int]) -> float:
    slack, at = float("inf"), 0
    for count, budget in zip(counts, budgets, strict=True):
        slack = min(slack, budget - sum(problem.layers[at : at + count]))
        at += count
    return slack


def place(request: PlanRequest, problem: Problem) -> Placement:
    """The best placement: the tightest device keeps as much as possible."""
    num = len(problem.budgets)
    if num > MAX_FREE_PLACEMENT_DEVICES:
        return _place_greedily(request, problem)
    best: Placement | None = None
    for places in _placements(len(problem.singles), num):
        budgets = list(problem.budgets)
        for single, at in zip(problem.singles, places, strict=True):
            budgets[at] -= single.num_bytes
        if request.split:
            counts = list(request.split)
            slack = _fixed_slack(problem, counts, budgets)
        else:
            counts, slack = _balanced(budgets, problem.layers)
        if best is None or slack > best.slack:
            best = Placement(tuple(counts), places, slack)
    assert best is not None
    return best


def _place_greedily(request: PlanRequest, problem: Problem) -> Placement:
    """Many devices: split the layers evenly, then the largest part goes where most is left."""
    counts = list(request.split) or _balanced(problem.budgets, problem.layers)[0]
    left, at = [], 0
    for count, budget in zip(counts, problem.budgets, strict=True):
        left.append(budget - sum(problem.layers[at : at + count]))
        at += count
    places = [0] * len(problem.singles)
    order = sorted(range(len(places)), key=lambda i: -problem.singles[i].num_bytes)
    for i in order:
        places[i] = max(range(len(left)), key=left.__getitem__)
        left[places[i]] -= problem.singles[i].num_bytes
    return Placement(tuple(counts), tuple(places), min(left))


def slack_of(request: PlanRequest) -> float:
    """Bytes that the tightest device of the best placement keeps; negative: it does not fit."""
    return place(request, size_up(request, request.shape())).slack
