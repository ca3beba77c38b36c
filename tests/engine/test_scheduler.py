"""The plan of a step: limits, order, admission, and the stated guarantees under random load."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twining.config import ScheduleConfig
from twining.engine.scheduler import (
    DEBT_MARGIN,
    Chunk,
    Phase,
    SchedulerState,
    SequenceView,
    StepKind,
    schedule,
    update_debt,
)

CONFIG = ScheduleConfig(
    max_seqs=4, max_batched_tokens=256, prefill_tokens_with_decodes=128, queue_timeout_s=10.0
)


def seq(order: int, phase: Phase, **values) -> SequenceView:
    return SequenceView(id=f"s{order}", order=order, phase=phase, **values)


def state(*sequences: SequenceView, pages=100, slots=4, debt=0.0) -> SchedulerState:
    return SchedulerState(
        sequences=sequences, free_pages=pages, free_slots=slots, decode_debt_s=debt
    )


def test_nothing_to_do_is_idle():
    plan = schedule(state(), CONFIG)
    assert plan.kind is StepKind.IDLE and not plan.chunks and not plan.verify


def test_step_is_homogeneous_and_debt_decides():
    sequences = (seq(0, Phase.DECODE), seq(1, Phase.PREFILL, prompt_left=500))
    plan = schedule(state(*sequences), CONFIG)
    assert (plan.kind, plan.chunks, plan.verify) == (StepKind.PREFILL, (Chunk("s1", 128),), ())
    plan = schedule(state(*sequences, debt=0.001), CONFIG)
    assert (plan.kind, plan.chunks, plan.verify) == (StepKind.VERIFY, (), ("s0",))


def test_debt_without_decodes_does_not_hold_prefill():
    plan = schedule(state(seq(1, Phase.PREFILL, prompt_left=500), debt=5.0), CONFIG)
    assert plan.chunks == (Chunk("s1", 256),)


def test_smaller_limit_wins():
    config = replace(CONFIG, max_batched_tokens=64)
    sequences = (seq(0, Phase.DECODE), seq(1, Phase.PREFILL, prompt_left=500))
    assert schedule(state(*sequences), config).chunks == (Chunk("s1", 64),)


@pytest.mark.parametrize(
    ("lefts", "want"),
    [
        ((64,), (64,)),
        ((1,), (1,)),
        ((300,), (256,)),
        ((65, 65, 65), (65, 65)),  # a partial block costs a whole one
        ((63, 64, 65, 1), (63, 64, 65)),
        ((100, 1000), (100, 128)),
    ],
)
def test_chunks_are_whole_blocks_except_at_the_end(lefts, want):
    sequences = [seq(i, Phase.PREFILL, prompt_left=n) for i, n in enumerate(lefts)]
    plan = schedule(state(*sequences), CONFIG)
    assert plan.chunks == tuple(Chunk(f"s{i}", n) for i, n in enumerate(want))


def test_priority_gets_the_budget_but_the_oldest_still_advances():
    sequences = (
        seq(0, Phase.PREFILL, prompt_left=900, priority=5),
        seq(1, Phase.PREFILL, prompt_left=900, priority=1),
    )
    assert schedule(state(*sequences), CONFIG).chunks == (Chunk("s0", 64), Chunk("s1", 192))


def test_admission_order_slots_and_pages():
    sequences = (
        seq(0, Phase.WAITING, prompt_left=10, num_pages=3, priority=1),
        seq(1, Phase.WAITING, prompt_left=10, num_pages=3),
        seq(2, Phase.WAITING, prompt_left=10, num_pages=1),
    )
    assert schedule(state(*sequences), CONFIG).admitted == ("s1", "s2", "s0")
    assert schedule(state(*sequences, slots=2), CONFIG).admitted == ("s1", "s2")
    assert schedule(state(*sequences, pages=4), CONFIG).admitted == ("s1", "s2")
    # s1 does not fit: nobody overtakes it.
    assert schedule(state(*sequences, pages=2), CONFIG).admitted == ()


def test_admitted_requests_prefill_in_the_same_step():
    plan = schedule(state(seq(3, Phase.WAITING, prompt_left=70, num_pages=1)), CONFIG)
    assert plan.admitted == ("s3",) and plan.chunks == (Chunk("s3", 70),)


def test_admitted_during_a_verify_step_waits_its_turn():
    sequences = (seq(0, Phase.DECODE), seq(1, Phase.WAITING, prompt_left=9, num_pages=1))
    plan = schedule(state(*sequences, debt=1.0), CONFIG)
    assert plan.admitted == ("s1",) and plan.kind is StepKind.VERIFY


def test_expired_requests_are_refused_not_admitted():
    sequences = (
        seq(0, Phase.WAITING, prompt_left=9, num_pages=1, waited_s=10.5),
        seq(1, Phase.WAITING, prompt_left=9, num_pages=1, waited_s=10.0),
        seq(2, Phase.DECODE, waited_s=99.0),
    )
    plan = schedule(state(*sequences), CONFIG)
    assert plan.expired == ("s0",) and plan.admitted == ("s1",)


def test_debt_arithmetic():
    share = {"decode_share": 0.75, "decoding": True}
    owed = 1.0 + DEBT_MARGIN * 6.0
    assert update_debt(1.0, StepKind.PREFILL, 2.0, **share) == pytest.approx(owed)
    assert update_debt(7.0, StepKind.VERIFY, 2.0, **share) == pytest.approx(5.0)
    assert update_debt(1.0, StepKind.VERIFY, 2.0, **share) == 0.0  # nothing is saved up
    assert update_debt(7.0, StepKind.PREFILL, 2.0, decode_share=0.5, decoding=False) == 0.0


def test_a_round_is_a_share_of_those_that_decode():
    names = [f"s{i}" for i in range(5)]
    ready = [seq(i, Phase.DECODE) for i in range(5)]
    assert schedule(state(*ready), CONFIG).verify == tuple(names)
    for stages, want in ((2, names[:3]), (3, names[:2]), (9, names[:1])):
        assert schedule(replace(state(*ready), num_stages=stages), CONFIG).verify == tuple(want)
    # Those under way stay out; of the rest, the ones launched longest ago go, in order of arrival.
    rounds = [
        seq(0, Phase.DECODE, last_round=3),
        seq(1, Phase.DECODE, last_round=4, under_way=True),
        seq(2, Phase.DECODE, last_round=2),
        seq(3, Phase.DECODE, last_round=1),
    ]
    plan = schedule(replace(state(*rounds), num_stages=2), CONFIG)
    assert plan.verify == ("s2", "s3")
    away = [seq(i, Phase.DECODE, under_way=True) for i in range(2)]
    plan = schedule(replace(state(*away), num_stages=3), CONFIG)
    assert (plan.kind, plan.verify) == (StepKind.VERIFY, ())


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_nobody_who_decodes_waits_long_for_a_round(stages):
    """Sequences come and go; a ready one is launched within 2 S launches."""
    rng = random.Random(stages)
    live = {i: seq(i, Phase.DECODE) for i in range(7)}
    rounds: list[tuple[str, ...]] = []
    since = dict.fromkeys(live, 0)
    count = 7
    for turn in range(1, 400):
        if rng.random() < 0.2 and len(live) < 12:
            live[count], since[count] = seq(count, Phase.DECODE), 0
            count += 1
        plan = schedule(replace(state(*live.values()), num_stages=stages), CONFIG)
        assert set(plan.verify) <= {s.id for s in live.values() if not s.under_way}
        if plan.verify:
            rounds.append(plan.verify)
        for key, view in live.items():
            since[key] += 1
            if view.id in plan.verify:
                assert since[key] <= 2 * stages, f"{view.id} waited {since[key]} launches"
                live[key], since[key] = replace(view, under_way=True, last_round=turn), 0
        idle = all(s.under_way for s in live.values())
        if rounds and (len(rounds) >= stages or idle):
            back = rounds.pop(0)
            live = {k: replace(v, under_way=v.under_way and v.id not in back)
                    for k, v in live.items()}  # fmt: skip
            ended = [k for k, v in live.items() if v.id in back and rng.random() < 0.1]
            if len(live) > 3:
                live = {k: v for k, v in live.items() if k not in ended}


class Simulation:
    """Runs plans against a model of the engine in which every step takes a random time."""

    def __init__(self, seed: int, config: ScheduleConfig, pages: int) -> None:
        self.random = random.Random(seed)
        self.config, self.total_pages = config, pages
        self.live: dict[str, SequenceView] = {}
        self.left_to_decode: dict[str, int] = {}
        self.now, self.debt, self.count = 0.0, 0.0, 0
        self.log: list[tuple[StepKind, float, bool]] = []
        self.ended: set[str] = set()

    def arrive(self) -> None:
        view = seq(
            self.count,
            Phase.WAITING,
            priority=self.random.randrange(3),
            prompt_left=self.random.choice([1, 63, 64, 65, 300, 3000]),
            num_pages=self.random.randint(1, self.total_pages),
        )
        self.count += 1
        self.live[view.id] = view
        self.left_to_decode[view.id] = self.random.randint(1, 30)

    def step(self) -> StepKind:
        running = [s for s in self.live.values() if s.phase is not Phase.WAITING]
        free = self.total_pages - sum(s.num_pages for s in running)
        snapshot = SchedulerState(
            sequences=tuple(self.live.values()),
            free_pages=free,
            free_slots=self.config.max_seqs - len(running),
            decode_debt_s=self.debt,
        )
        plan = schedule(snapshot, self.config)
        assert plan == schedule(snapshot, self.config)
        self.check(plan, running, free)
        for name in plan.admitted:
            self.live[name] = replace(self.live[name], phase=Phase.PREFILL)
        took = self.random.expovariate(1.0) + 0.01
        self.now += took
        decoding = any(s.phase is Phase.DECODE for s in running)
        self.log.append((plan.kind, took, decoding))
        self.debt = update_debt(
            self.debt,
            plan.kind,
            took,
            decode_share=self.config.decode_share,
            decoding=decoding,
        )
        self.apply(plan)
        return plan.kind

    def check(self, plan, running, free) -> None:
        assert not plan.expired
        assert len(running) + len(plan.admitted) <= self.config.max_seqs
        assert sum(self.live[n].num_pages for n in plan.admitted) <= free
        decoding = [s.id for s in running if s.phase is Phase.DECODE]
        assert list(plan.verify) == (decoding if plan.kind is StepKind.VERIFY else [])
        if plan.kind is StepKind.IDLE:
            assert not running and not plan.admitted and not self.live
        if plan.kind is StepKind.PREFILL:
            admitted = set(plan.admitted)
            filling = [
                s for s in self.live.values() if s.phase is Phase.PREFILL or s.id in admitted
            ]
            oldest = min(filling, key=lambda s: s.order).id
            assert oldest in {c.id for c in plan.chunks}
            cost = sum(-(-c.num_tokens // 64) * 64 for c in plan.chunks)
            limit = self.config.prefill_tokens_with_decodes if decoding else 10**9
            assert 0 < cost <= min(limit, self.config.max_batched_tokens)
            for chunk in plan.chunks:
                left = self.live[chunk.id].prompt_left
                assert chunk.num_tokens == left or (
                    chunk.num_tokens < left and chunk.num_tokens % 64 == 0
                )

    def apply(self, plan) -> None:
        for chunk in plan.chunks:
            view = self.live[chunk.id]
            left = view.prompt_left - chunk.num_tokens
            phase = Phase.PREFILL if left else Phase.DECODE
            self.live[chunk.id] = replace(view, prompt_left=left, phase=phase)
        for name in plan.verify:
            self.left_to_decode[name] -= 1
            if self.left_to_decode[name] == 0:
                del self.live[name]
                self.ended.add(name)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.1, 0.5, 0.8]),
    max_seqs=st.integers(1, 6),
    pages=st.integers(1, 12),
)
def test_random_load_keeps_every_guarantee(seed, share, max_seqs, pages):
    config = ScheduleConfig(
        max_seqs=max_seqs,
        max_batched_tokens=512,
        prefill_tokens_with_decodes=128,
        decode_share=share,
        queue_timeout_s=1e9,
    )
    simulation = Simulation(seed, config, pages)
    for _ in range(40):
        if simulation.random.random() < 0.4:
            simulation.arrive()
        simulation.step()
    for _ in range(20_000):
        if simulation.step() is StepKind.IDLE:
            break
    assert len(simulation.ended) == simulation.count  # nobody starves
    ratio = share / (1 - share)
    owed = 0.0
    for kind, took, decoding in simulation.log:
        if not decoding:
            owed = 0.0
        elif kind is StepKind.PREFILL:
            assert owed <= 1e-9, "a prefill step ran before the last one was paid back"
            owed = ratio * took
        else:
            owed = max(0.0, owed - took)


# ------------------------------------------------------------------------ optimistic admission

OPTIMISTIC = replace(CONFIG, admission="optimistic")


def test_the_youngest_of_the_lowest_priority_makes_room_and_the_oldest_never():
    sequences = (
        seq(0, Phase.DECODE, priority=9, missing_pages=1, own_pages=2),
        seq(1, Phase.DECODE, own_pages=2),
        seq(2, Phase.DECODE, priority=1, missing_pages=1, own_pages=1),
        seq(3, Phase.PREFILL, priority=1, own_pages=1, prompt_left=64),
        seq(4, Phase.DECODE, own_pages=2),
    )
    plan = schedule(state(*sequences, pages=2, debt=1.0), OPTIMISTIC)
    assert plan.preempted == () and plan.verify == ("s0", "s1", "s2", "s4")
    plan = schedule(state(*sequences, pages=1, debt=1.0), OPTIMISTIC)
    assert plan.preempted == ("s3",) and plan.verify == ("s0", "s1", "s2", "s4")
    short = (replace(sequences[0], missing_pages=4), *sequences[1:])
    plan = schedule(state(*short, pages=1, debt=1.0), OPTIMISTIC)
    assert plan.preempted == ("s3", "s2", "s4") and plan.verify == ("s0", "s1")
    plan = schedule(state(*short[:3], pages=0), OPTIMISTIC)
    assert plan.preempted == ("s2", "s1") and plan.verify == ("s0",)


def test_a_pass_under_way_keeps_its_sequence_in_place():
    sequences = (
        seq(0, Phase.DECODE, missing_pages=1, own_pages=1),
        seq(1, Phase.DECODE, own_pages=2, under_way=True),
        seq(2, Phase.DECODE, own_pages=1),
    )
    snapshot = replace(state(*sequences[:2], pages=0), num_stages=2)
    plan = schedule(snapshot, OPTIMISTIC)
    assert plan.kind is StepKind.VERIFY and plan.preempted == () and plan.verify == ()
    snapshot = replace(state(*sequences, pages=0), num_stages=2)
    plan = schedule(snapshot, OPTIMISTIC)
    assert plan.preempted == ("s2",) and plan.verify == ("s0",)


def test_preempted_sequences_come_back_first_and_do_not_expire():
    back = seq(1, Phase.WAITING, priority=5, num_pages=3, is_preempted=True, waited_s=99.0)
    sequences = (
        seq(0, Phase.DECODE),
        back,
        seq(2, Phase.WAITING, num_pages=1, prompt_left=5),
    )
    plan = schedule(state(*sequences, pages=6, debt=1.0), OPTIMISTIC)
    assert plan.expired == () and plan.admitted == ("s1", "s2")
    assert schedule(state(*sequences, pages=5, debt=1.0), OPTIMISTIC).admitted == ("s1",)
    assert schedule(state(*sequences, pages=3, debt=1.0), OPTIMISTIC).admitted == ()


def test_optimistic_admission_leaves_a_page_for_each_that_runs():
    sequences = (
        seq(0, Phase.DECODE, missing_pages=1),
        seq(1, Phase.WAITING, num_pages=2, prompt_left=300),
    )
    assert schedule(state(*sequences, pages=4, debt=1.0), OPTIMISTIC).admitted == ("s1",)
    assert schedule(state(*sequences, pages=3, debt=1.0), OPTIMISTIC).admitted == ()
    alone = state(sequences[1], pages=2)
    assert schedule(alone, OPTIMISTIC).admitted == ("s1",)  # nobody runs: it may have them all
