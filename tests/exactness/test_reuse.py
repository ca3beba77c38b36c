"""Prefix reuse and preemption on the small random glm5_next model: warm runs equal cold ones bit
for bit, and so does every state that a checkpoint, a restore or a preemption leaves behind.
"""

import random
from dataclasses import replace

import pytest
import torch

from tests.exactness.tools import (
    Bench,
    ReplayDrafter,
    assert_equal_runs,
    content,
    run,
    write_random_drafter,
)
from twining.cache.prefix import page_keys
from twining.config import CacheConfig
from twining.engine.offline import Result
from twining.engine.request import Request, SamplingParams
from twining.engine.scheduler import Phase

MAX_SEQ_LEN = 1536
EXACT = CacheConfig(reuse="exact", checkpoint_every=256)
DRAFTERS = [("none", 0), ("mtp", 3), ("dflash2", 7)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench(golden, tmp_path_factory, one_thread) -> Bench:
    folder = golden / "glm5_next" / "tiny"
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}")
    drafter = write_random_drafter(
        tmp_path_factory.mktemp("drafter"), hidden=128, vocab=512, num_layers=8
    )
    return Bench.load(folder, drafter, MAX_SEQ_LEN)


def ids_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(480) for _ in range(count)]


def ask(name: str, ids: list[int], max_tokens: int = 6, **values) -> Request:
    return Request(
        id=name,
        prompt_ids=ids,
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=len(ids), temperature=0.8),
        logprobs=1,
        **values,
    )


def equal_planes(want: dict, got: dict) -> None:
    assert want.keys() == got.keys()
    for name in want:
        assert torch.equal(want[name], got[name]), name


def fresh_state(bench, ids, latent_format, window):
    """A prefill of its own, in one go: (planes of fixed size, pages)."""
    pool = bench.model.make_pool(
        num_pages=-(-len(ids) // 256), max_seqs=1, max_draft=window - 1, latent_format=latent_format
    )
    state = pool.open()
    pool.reserve(state, len(ids))
    bench.model.prefill(state, ids)
    return pool.snapshot(state), pool.export_pages(state)


def trunk_only(bench, planes: dict) -> dict:
    """Without the MTP block, which knows the tokens that follow, and is no part of the output."""
    config = bench.model.config
    num = {"latent": len(config.mla_layers), "latent_scale": len(config.mla_layers)}
    full = sum(config.indexer_types[i] == "full" for i in config.mla_layers)
    num |= {"index_keys": full, "index_tail": full}
    return {name: t[: num.get(name, len(t))] for name, t in planes.items()}


@pytest.mark.parametrize(
    ("drafter", "num_draft", "latent_format"),
    [("none", 0, "q8"), ("mtp", 3, "fp32"), ("dflash2", 7, "q4")],
)
def test_every_checkpoint_is_a_fresh_prefill(bench, drafter, num_draft, latent_format):
    """Also those that a restored sequence leaves, and those beside decoding neighbours."""
    engine = bench.engine(
        drafter,
        num_draft,
        max_seqs=3,
        cache=EXACT,
        latent_format=latent_format,
        max_batched_tokens=192,
        prefill_tokens_with_decodes=64,
    )
    first = ids_of(1, 600)
    requests = [ask("a", first), ask("b", first[:530] + ids_of(2, 250)), ask("c", ids_of(3, 513))]
    run(engine, requests, lambda: engine.num_open == 0)
    run(engine, [ask("d", requests[1].prompt_ids + ids_of(4, 270))])
    assert engine.stats().prefix_hits == 2
    cache, pool = engine._reuse.cache, engine._pool
    last = requests[1].prompt_ids + ids_of(4, 270)
    prompts = [r.prompt_ids for r in requests] + [last]
    checked = 0
    for ids in prompts:
        keys = page_keys(ids)
        for count in range(1, len(keys) + 1):
            entry = cache.get("", keys[:count])
            if entry is None:
                continue
            slots, pages = fresh_state(bench, ids[: entry.length], latent_format, pool.window)
            got = {name: entry.planes[name] for name in slots}
            equal_planes(trunk_only(bench, slots), trunk_only(bench, got))
            state = pool.open()
            pool.pages.retain(entry.pages)
            pool.restore(state, entry.planes, length=entry.length, pages=entry.pages)
            held = pool.export_pages(state)
            equal_planes(trunk_only(bench, pages), trunk_only(bench, held))
            pool.close(state)
            checked += 1
    assert checked >= 8


@pytest.mark.parametrize(("drafter", "num_draft"), DRAFTERS)
def test_a_restored_sequence_is_a_cold_one(bench, drafter, num_draft):
    """State after the prompt, drafts and output are the same warm and cold."""
    ids = ids_of(5, 700)
    seen = []
    for warm in (False, True):
        engine = bench.engine(drafter, num_draft, max_seqs=2, cache=EXACT)
        if warm:
            run(engine, [ask("before", ids[:640] + ids_of(6, 90), 30)])
        drafts, draft = [], engine._drafter.draft

        def record(items, drafts=drafts, draft=draft):
            out = draft(items)
            drafts += out
            return out

        engine._drafter.draft = record
        engine.submit(ask("x", ids, 12))
        while engine._sequences["x"].phase is not Phase.DECODE:
            engine.step()
        state = engine._sequences["x"].state
        slots = engine._pool.snapshot(state)
        planes = (trunk_only(bench, slots), trunk_only(bench, engine._pool.export_pages(state)))
        result = Result(request_id="x")
        while engine.has_work:
            for delta in engine.step():
                result.add(delta)
        assert result.timings.cached_tokens == (512 if warm else 0)
        seen.append((planes, drafts, result.token_ids[-8:]))
    (cold, cold_drafts, cold_ids), (warm, warm_drafts, warm_ids) = seen
    equal_planes(cold[0], warm[0])
    tokens = 700  # rows above are left over from whoever had the page before
    for name in ("latent",):
        assert torch.equal(cold[1][name][:, :tokens], warm[1][name][:, :tokens])
    keys = [planes[1]["index_keys"].flatten(1, 2)[:, : tokens // 4] for planes in (cold, warm)]
    assert torch.equal(*keys)
    assert cold_drafts == warm_drafts and cold_ids == warm_ids
    assert not num_draft or any(cold_drafts)


def test_without_the_drafters_planes_there_is_no_hit(bench):
    """Checkpoints of a time without a drafter are of no use to one, and are replaced."""
    engine = bench.engine("mtp", 3, cache=EXACT)
    engine._drafter_works = False
    ids = ids_of(7, 600)
    cold = run(engine, [ask("a", ids)])
    engine._drafter_works = True
    again = run(engine, [ask("a", ids)])
    assert again["a"].timings.cached_tokens == 0
    assert engine.stats().prefix_mismatches == 1
    warm = run(engine, [ask("a", ids)])
    assert warm["a"].timings.cached_tokens == 512
    assert content(cold["a"]) == content(again["a"]) == content(warm["a"])


class Conversations:
    """Turns that go on, are edited, retried and forked, with the replies of a cold engine."""

    def __init__(self, bench: Bench, seed: int, latent_format: str = "fp32") -> None:
        self.rng = random.Random(seed)
        self.cold = bench.engine(latent_format=latent_format)
        self.past = [ids_of(seed, self.rng.choice([130, 300]))]
        self.want: dict[str, Result] = {}

    def next(self) -> Request:
        rng = self.rng
        base = rng.choice(self.past[-4:])
        kind = rng.random()
        if kind < 0.2:
            base = base[: rng.randrange(1, len(base))]
        ids = base if kind > 0.85 else base + ids_of(rng.random(), rng.choice([1, 40, 150]))
        ids = ids[:900]
        name = f"t{len(self.want)}"
        request = ask(
            name,
            ids,
            rng.choice([1, 5, 20]),
            cache_salt=rng.choice(["", "", "", "s"]),
            prompt_logprobs=rng.choice([-1] * 8 + [0]),
        )
        self.want |= run(self.cold, [request])
        self.past.append(ids + self.want[name].token_ids)
        return request


@pytest.mark.parametrize("seed", range(4))
def test_conversations_with_reuse_equal_cold_ones(bench, seed):
    """Turns of which some are cancelled in mid-prefill or mid-reply and asked again."""
    rng = random.Random(seed)
    latent_format = ("fp32", "q8")[seed % 2]
    talks = Conversations(bench, seed, latent_format)
    requests = [talks.next() for _ in range((30, 12, 12, 12)[seed])]
    known = {tuple(r.prompt_ids): talks.want[r.id].token_ids for r in requests}
    drafter, num_draft = [(ReplayDrafter(known, 5, seed), 5), *DRAFTERS[1:], ("ngram", 3)][seed]
    engine = bench.engine(
        drafter,
        num_draft,
        max_seqs=(1, 3, 4, 2)[seed],
        num_pages=(6, 8, 14, 30)[seed],
        latent_format=latent_format,
        max_batched_tokens=rng.choice([64, 256]),
        admission=("reserved", "optimistic")[seed // 2],
        cache=replace(EXACT, checkpoint_every=(256, 512)[seed % 2]),
    )
    for turn, request in enumerate(requests):
        if rng.random() < 0.3:
            engine.submit(replace_id(request, f"gone{turn}"))
            for _ in range(rng.randint(1, 5)):
                engine.step()
                engine.audit()
            engine.cancel(f"gone{turn}")
            engine.step()
    got = run(engine, requests, lambda: rng.random() < 0.5)
    assert_equal_runs(talks.want, got, f"seed {seed}")
    assert engine.stats().cached_tokens > 0
    engine._reuse.cache.make_room(engine.stats().pages_total)
    assert engine._pool.pages.num_free == engine.stats().pages_total


def replace_id(request: Request, name: str) -> Request:
    fields = {f: getattr(request, f) for f in request.__struct_fields__}
    return Request(**(fields | {"id": name}))


@pytest.mark.parametrize(("drafter", "num_draft"), [*DRAFTERS, ("replay", 6)])
def test_preemption_changes_nothing(bench, drafter, num_draft):
    """Every reply crosses into a second page, and there are three pages for two sequences."""
    bench = replace(bench, max_seq_len=512)
    requests = [ask(f"p{n}", ids_of(20 + n, 250 - 4 * n), 40) for n in range(4)]
    want = run(bench.engine(), requests)
    if drafter == "replay":
        known = {tuple(r.prompt_ids): want[r.id].token_ids for r in requests}
        drafter = ReplayDrafter(known, num_draft, 1)
    engine = bench.engine(
        drafter, num_draft, max_seqs=4, num_pages=3, admission="optimistic", cache=EXACT
    )
    got = run(engine, requests)
    assert_equal_runs(want, got, "preempted")
    assert engine.stats().preemptions >= 1


def test_a_sequence_survives_the_move_bit_for_bit(bench):
    """Parked with accepted rows still in the log, into another slot and other pages."""
    engine = bench.engine("mtp", 3, max_seqs=3, admission="optimistic", cache=EXACT)
    engine.submit(ask("x", ids_of(30, 300), 60))
    engine.submit(ask("y", ids_of(31, 70), 60))
    for _ in range(8):
        engine.step()
    seq = engine._sequences["x"]
    assert seq.phase is Phase.DECODE and seq.state.num_pending > 0
    pool = engine._pool
    slot, table = seq.state.slot, list(seq.state.pages)
    engine._preempt(seq)
    blocker = pool.open()
    pool.reserve(blocker, 256)
    parked = seq.parked
    engine._admit(seq)
    assert (seq.state.slot, seq.state.pages) != (slot, table)
    equal_planes(parked.slots, pool.snapshot(seq.state))
    equal_planes(parked.pages, pool.export_pages(seq.state))
    equal_planes(parked.drafter, engine._drafter.snapshot(seq.state, seq.state.length))
    pool.close(blocker)
    while engine.has_work:
        engine.step()


def test_fast_mode_is_deterministic_and_resumes_later(bench):
    """The state at the last page's end that decoding passed, made by replaying part of a window."""
    known, texts = {}, []
    cold = run(bench.engine(), [ask("a", ids_of(40, 490), 60)])["a"]
    known[tuple(ids_of(40, 490))] = cold.token_ids
    follow = ids_of(40, 490) + cold.token_ids + [5, 6, 7]
    for _ in range(2):
        engine = bench.engine(
            ReplayDrafter(known, 6, 2), 6, cache=CacheConfig(reuse="fast"), max_seqs=2
        )
        first = run(engine, [ask("a", ids_of(40, 490), 60)])
        assert content(first["a"]) == content(cold)
        second = run(engine, [ask("b", follow, 10)])["b"]
        assert second.timings.cached_tokens == 512
        texts.append(content(second))
    assert texts[0] == texts[1]


def test_decoded_checkpoint_is_the_state_of_token_by_token_decoding(bench):
    ids = ids_of(41, 250)
    whole = {}
    cold = run(bench.engine(), [ask("a", ids, 40)])["a"].token_ids
    for num_draft in (0, 7):
        drafter = ReplayDrafter({tuple(ids): cold}, 7, 3) if num_draft else "none"
        engine = bench.engine(drafter, num_draft, cache=CacheConfig(reuse="fast"))
        run(engine, [ask("a", ids, 40)])
        entry = engine._reuse.cache.get("", page_keys((ids + cold)[:256]))
        whole[num_draft] = entry.planes
    assert torch.equal(whole[0]["kda_state"], whole[7]["kda_state"])


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_stages_divide_checkpoints_and_preempted_sequences_too(bench, mode):
    """Prefixes, replayed windows and moved sequences over stages with several rounds under way."""
    bench = replace(bench, max_seq_len=768)
    base = ids_of(50, 300)
    requests = [ask(f"s{n}", base + ids_of(51 + n, 200 - 5 * n), 30) for n in range(2)]
    requests += [ask(f"u{n}", ids_of(60 + n, 250 - 4 * n), 30) for n in range(3)]
    want = run(bench.engine(), requests)
    known = {tuple(r.prompt_ids): want[r.id].token_ids for r in requests}
    engine = bench.engine(
        ReplayDrafter(known, 5, 4),
        5,
        max_seqs=4,
        num_pages=4,
        partition=(3, 1, 4),
        admission="optimistic",
        cache=CacheConfig(reuse=mode, checkpoint_every=256),
    )
    got = run(engine, requests[:1]) | run(engine, requests[1:])
    assert_equal_runs(want, got, "three stages")
    stats = engine.stats()
    assert stats.preemptions >= 1 and stats.prefix_hits >= 1
    engine._model.close()
