"""Bit for bit: batching, drafting, chunking, paging and pausing change nothing (P1, P4)."""

import random

import pytest
import torch

from twining.cache.pool import CachePool, SequenceState
from twining.cache.stage import StagePlanes
from twining.models.glm5_next.model import Glm5Next

VOCAB = 203
DRAFT = 7


def poison(planes: StagePlanes) -> None:
    for tensor in planes.latent.tensors():
        if tensor.is_floating_point():
            tensor[:, :-1] = float("nan")
    recurrent, index = planes.recurrent, planes.index
    for tensor in (recurrent.base, recurrent.conv, recurrent.log_k, recurrent.log_v,
                   recurrent.log_decay, recurrent.log_beta, index.keys, index.raw,
                   index.candidates):  # fmt: skip
        tensor.fill_(float("nan"))


def poisoned_pool(model: Glm5Next, rng: random.Random, **kw) -> CachePool:
    """A pool whose pages come in random order and hold NaN, as do slots that were never opened."""
    sizes = {"num_pages": 40, "max_seqs": 9, "max_draft": DRAFT} | kw
    pool = model.make_pool(**sizes)
    for planes in pool.stages:
        poison(planes)
    rng.shuffle(pool.pages._free)
    rng.shuffle(pool._free_slots)
    return pool


def opened(pool: CachePool, num_tokens: int) -> SequenceState:
    state = pool.open()
    assert state is not None and pool.reserve(state, num_tokens)
    return state


def random_ids(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(num)]


def one_by_one(model: Glm5Next, ids: list[int], prompt: int, **kw) -> dict[str, torch.Tensor]:
    """The definition: prefill, then one token per step, alone in the pool."""
    state = opened(model.make_pool(num_pages=8, max_seqs=1, max_draft=DRAFT, **kw), len(ids))
    rows = [model.prefill(state, ids[:prompt])]
    for token in ids[prompt:]:
        rows.append(model.verify([(state, [token])]))
        model.commit(state, 1)
    hidden = torch.cat([r.hidden for r in rows])
    return {
        "hidden": hidden,
        "taps": torch.cat([r.taps for r in rows]),
        "logits": model.logits(hidden),
    }


class Stream:
    """A sequence with a known text, fed in random windows of correct and wrong drafts."""

    def __init__(self, model, pool, rng, prompt: int, num_tokens: int) -> None:
        self.model, self.rng, self.prompt = model, rng, prompt
        self.ids = random_ids(rng, num_tokens)
        self.state = opened(pool, num_tokens + DRAFT + 1)
        self.hidden, self.taps, self.logits = [], [], []
        rows = model.prefill(self.state, self.ids[:prompt])
        self._keep(rows.hidden, rows.taps, model.logits(rows.hidden))

    def _keep(self, hidden, taps, logits) -> None:
        self.hidden.append(hidden)
        self.taps.append(taps)
        self.logits.append(logits)

    @property
    def done(self) -> bool:
        return self.state.length >= len(self.ids)

    def window(self) -> list[int]:
        left = len(self.ids) - self.state.length
        size = self.rng.randint(1, DRAFT + 1)
        self.accept = min(left, self.rng.randint(1, size))
        right = self.ids[self.state.length :][: self.accept]
        return right + random_ids(self.rng, size - self.accept)

    def take(self, hidden, taps, logits) -> None:
        n = self.accept
        self._keep(hidden[:n], taps[:n], logits[:n])
        self.model.commit(self.state, n)

    def check(self, **kw) -> None:
        want = one_by_one(self.model, self.ids, self.prompt, **kw)
        for name in ("hidden", "taps", "logits"):
            assert torch.equal(torch.cat(getattr(self, name)), want[name]), name


def run_together(model: Glm5Next, streams: list[Stream], rng: random.Random) -> None:
    while live := [s for s in streams if not s.done]:
        batch = rng.sample(live, rng.randint(1, len(live)))
        windows = [s.window() for s in batch]
        rows = model.verify([(s.state, w) for s, w in zip(batch, windows, strict=True)])
        logits, at = model.logits(rows.hidden), 0
        for s, w in zip(batch, windows, strict=True):
            span = slice(at, at + len(w))
            s.take(rows.hidden[span], rows.taps[span], logits[span])
            at += len(w)


@pytest.mark.parametrize(("threads", "num_seqs"), [(1, 1), (1, 3), (1, 5), (1, 9), (2, 2)])
def test_batch_drafts_and_pages_change_no_bit(small_model, num_seqs, threads):
    rng = random.Random(100 * threads + num_seqs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pool = poisoned_pool(small_model, rng)
        streams = []
        for _ in range(num_seqs):
            prompt = rng.choice([1, 2, 3, 30, 62, 64, 65, 100, 250, 255])
            streams.append(Stream(small_model, pool, rng, prompt, prompt + rng.randint(7, 12)))
        run_together(small_model, streams, rng)
        for stream in streams:
            stream.check()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "q8", "q4"])
def test_latent_formats_keep_exactness(small_model, fmt):
    rng = random.Random(fmt)
    pool = poisoned_pool(small_model, rng, latent_format=fmt, index_format="fp16")
    streams = [Stream(small_model, pool, rng, n, n + 9) for n in (5, 70)]
    run_together(small_model, streams, rng)
    for stream in streams:
        stream.check(latent_format=fmt, index_format="fp16")


def test_prefill_chunks_change_no_bit(small_model):
    rng = random.Random(7)
    ids = random_ids(rng, 333)
    pool = poisoned_pool(small_model, rng)
    whole = opened(pool, 340)
    want = small_model.prefill(whole, ids)
    for sizes in ([64] * 5 + [13], [128, 64, 141], [256, 77], [320, 13]):
        state = opened(pool, 340)
        parts, at = [], 0
        for size in sizes:
            parts.append(small_model.prefill(state, ids[at : at + size]))
            at += size
        assert state.length == 333
        assert torch.equal(torch.cat([p.hidden for p in parts]), want.hidden)
        assert torch.equal(torch.cat([p.taps for p in parts]), want.taps)
        for name, plane in pool.snapshot(state).items():
            if name != "index_tail":  # older rows of the ring differ in nothing that is read
                assert torch.equal(plane, pool.snapshot(whole)[name]), name
        pool.close(state)


def test_verify_without_commit_leaves_no_trace(small_model):
    rng = random.Random(11)
    pool = poisoned_pool(small_model, rng)
    stream = Stream(small_model, pool, rng, 70, 90)
    while not stream.done:
        for _ in range(2):
            small_model.verify([(stream.state, random_ids(rng, rng.randint(1, DRAFT + 1)))])
        run_together_once(small_model, stream)
    stream.check()


def run_together_once(model: Glm5Next, stream: Stream) -> None:
    window = stream.window()
    rows = model.verify([(stream.state, window)])
    stream.take(rows.hidden, rows.taps, model.logits(rows.hidden))


@pytest.mark.parametrize("pause", ["settle", "preempt"])
def test_pausing_changes_no_bit(small_model, pause):
    """Settling early is harmless; a preempted sequence continues in other pages and slots."""
    rng = random.Random(13)
    pool = poisoned_pool(small_model, rng)
    stream = Stream(small_model, pool, rng, 250, 280)
    while not stream.done:
        run_together_once(small_model, stream)
        if pause == "settle":
            pool.settle(stream.state)
            continue
        old = stream.state
        fixed, paged = pool.snapshot(old), pool.export_pages(old)
        length = old.length
        pool.close(old)
        hog = opened(pool, 300)  # takes the pages and the slot that were just freed
        pages = pool.pages.alloc(2)
        assert pages is not None
        state = pool.open()
        pool.restore(state, fixed, length=length, pages=pages)
        pool.import_pages(state, paged)
        stream.state = state
        pool.close(hog)
    stream.check()


def test_prefix_reuse_from_a_checkpoint(small_model):
    """Shared pages and the fixed planes at a 256-aligned boundary: warm equals cold."""
    rng = random.Random(17)
    pool = poisoned_pool(small_model, rng)
    ids = random_ids(rng, 400)
    cold = opened(pool, 400)
    head = small_model.prefill(cold, ids[:256])
    planes = pool.snapshot(cold)
    want = small_model.prefill(cold, ids[256:])
    shared = cold.pages[:1]
    pool.pages.retain(shared)
    warm = pool.open()
    pool.restore(warm, planes, length=256, pages=shared)
    assert pool.reserve(warm, 400)
    got = small_model.prefill(warm, ids[256:])
    assert torch.equal(got.hidden, want.hidden) and len(head.hidden) == 256
    pool.close(cold)
    pool.close(warm)
    assert pool.pages.num_free == pool.pages.num_pages


def test_fp16_candidates_score_as_committed_pools(small_model):
    rng = random.Random(29)
    pool = poisoned_pool(small_model, rng, index_format="fp16")
    state = opened(pool, 90)
    small_model.prefill(state, random_ids(rng, 62))
    small_model.verify([(state, random_ids(rng, 8))])
    candidates = pool.stages[0].index.candidates[state.slot, :-1, :2].clone()
    small_model.commit(state, 7)
    assert torch.equal(pool.stages[0].index.keys[:-1, state.pages[0], 15:17], candidates)


def test_slots_are_clean_after_reuse(small_model):
    rng = random.Random(19)
    pool = poisoned_pool(small_model, rng, max_seqs=1)
    for _ in range(2):
        stream = Stream(small_model, pool, rng, rng.randint(1, 70), 76)
        run_together(small_model, [stream], rng)
        stream.check()
        pool.close(stream.state)


def test_logits_rows_stand_alone(small_model):
    hidden = torch.randn(37, 96, generator=torch.Generator().manual_seed(3))
    want = small_model.logits(hidden)
    for i in range(37):
        assert torch.equal(small_model.logits(hidden[i : i + 1]), want[i : i + 1])


def test_mtp_rows_do_not_disturb_the_trunk(small_model):
    rng = random.Random(23)
    pool = poisoned_pool(small_model, rng)
    stream = Stream(small_model, pool, rng, 66, 90)
    small_model.mtp.rows(stream.state, stream.ids[1:66], stream.hidden[0][:-1], 0)
    while not stream.done:
        h = stream.hidden[-1][-1:]
        start = stream.state.length - 1
        for i in range(3):
            h = small_model.mtp.rows(stream.state, random_ids(rng, 1), h, start + i)
        run_together_once(small_model, stream)
    stream.check()
