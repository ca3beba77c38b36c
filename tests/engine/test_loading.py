"""From a configuration to a running engine, in this process and as the engine process."""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from tests.exactness.tools import write_random_drafter
from twining.config import CacheConfig, DraftConfig, EngineConfig, ScheduleConfig
from twining.engine import loading
from twining.engine.loading import default_threads, load_engine
from twining.engine.offline import Result, generate
from twining.engine.process import EngineClient
from twining.engine.request import Request, SamplingParams
from twining.errors import CheckpointError, ConfigError, EngineError


@pytest.fixture
def tiny(golden) -> Path:
    folder = golden / "glm5_next" / "tiny"
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}")
    return folder


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config(folder: Path, **values) -> EngineConfig:
    values.setdefault("schedule", ScheduleConfig(max_seqs=2))
    return EngineConfig(model_dir=folder, threads=1, **values)


REQUEST = Request(
    id="a", prompt_ids=[5, 6, 7, 8], max_tokens=6, sampling=SamplingParams(seed=3), logprobs=1
)


@pytest.mark.parametrize(
    ("draft", "name", "num_draft"),
    [
        (DraftConfig(), "mtp", 7),
        (DraftConfig(num_draft_tokens=0), "none", 0),
        (DraftConfig(drafter="ngram", num_draft_tokens=3), "ngram", 3),
    ],
)
def test_what_is_resolved_and_the_first_tokens(tiny, draft, name, num_draft):
    engine = load_engine(config(tiny, draft=draft))
    ready = engine.ready()
    assert (ready.drafter, ready.num_draft_tokens) == (name, num_draft)
    assert (ready.max_seq_len, ready.vocab_size, ready.max_seqs) == (4096, 512, 2)
    assert ready.num_pages == 2 * 4096 // 256 and ready.load_s > 0
    assert torch.get_num_threads() == 1
    (result,) = generate(engine, [REQUEST])
    assert len(result.token_ids) == 6 and result.finish_reason == "length"


def test_engine_process_with_the_real_model_gives_the_same_tokens(tiny, tmp_path):
    drafter = write_random_drafter(tmp_path / "drafter", hidden=128, vocab=512, num_layers=8)
    (want,) = generate(load_engine(config(tiny, max_seq_len=300)), [REQUEST])

    async def run() -> None:
        draft = DraftConfig(drafter_dir=drafter, num_draft_tokens=15)
        client = EngineClient(config(tiny, max_seq_len=300, draft=draft))
        ready = await client.start()
        assert (ready.drafter, ready.num_draft_tokens) == ("dflash2", 7)  # a block of 8
        result = Result(request_id="a")
        async for delta in client.submit(REQUEST):
            result.add(delta)
        await client.close()
        assert (result.token_ids, result.logprobs) == (want.token_ids, want.logprobs)

    asyncio.run(run())


def test_stages_give_the_same_tokens(tiny):
    want = generate(load_engine(config(tiny, max_seq_len=300)), [REQUEST])
    for values in ({"stages": 2}, {"stages": 3, "partition": "1,6,1"}):
        engine = load_engine(config(tiny, max_seq_len=300, **values))
        got = generate(engine, [REQUEST])
        assert (got[0].token_ids, got[0].logprobs) == (want[0].token_ids, want[0].logprobs)
        assert len(engine._pool.stages) == values["stages"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_seq_len": 5000}, r"max_seq_len=5000.*4096"),
        ({"max_seq_len": 1}, r"max_seq_len=1 "),
        ({"cache": CacheConfig(max_pages=3)}, r"max_pages=3 holds 768.*max_pages=16"),
        ({"draft": DraftConfig(drafter="dflash2")}, r"drafter_dir"),
        ({"stages": 2, "partition": "5,4"}, r"has 9 layers, the model has 8; use \d,\d for"),
        ({"stages": 2, "partition": "a,b"}, r"partition='a,b'.*23,22"),
        ({"stages": 9}, r"stages=9, but the model has 8 layers"),
    ],
)
def test_settings_that_cannot_be_honoured(tiny, values, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_engine(config(tiny, **values))
    assert "\n" not in str(caught.value)


def test_cache_beyond_memory_is_one_line(tiny, monkeypatch):
    def too_large(self, **sizes):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(loading.Glm5Next, "make_pool", too_large)
    with pytest.raises(ConfigError, match=r"32 pages and 2 sequences does not fit") as caught:
        load_engine(config(tiny))
    assert "\n" not in str(caught.value)


def test_machine_that_is_not_row_invariant_is_refused(tiny, monkeypatch):
    verify = loading.Pipeline.verify

    def drifting(self, batch):
        rows = verify(self, batch)
        return dataclasses.replace(rows, hidden=rows.hidden * (1 + 1e-6 * len(rows.hidden)))

    monkeypatch.setattr(loading.Pipeline, "verify", drifting)
    with pytest.raises(EngineError, match="row-invariance check failed"):
        load_engine(config(tiny))


def test_damaged_checkpoint_reaches_the_caller_of_the_process(tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder, copy_function=shutil.copyfile)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    async def run() -> None:
        client = EngineClient(config(folder))
        with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
            await client.start()
        assert "\n" not in str(caught.value)
        await client.close()

    asyncio.run(run())


def test_threads_are_a_power_of_two(monkeypatch):
    for cpus, want in ((1, 1), (2, 2), (3, 2), (7, 4), (64, 64)):
        monkeypatch.setattr(loading.os, "sched_getaffinity", lambda _, n=cpus: range(n))
        assert default_threads() == want
