"""A loaded engine against its plan: planes per stage to the byte, all tensors within 1 %."""

import json
import subprocess
import sys
from functools import cache

import pytest
import torch

from tests.planner.test_engine_bytes import resident_bytes
from twining.config import CacheConfig, DraftConfig, EngineConfig, ScheduleConfig
from twining.demo.paths import demo_paths
from twining.engine import loading
from twining.engine.loading import load_engine
from twining.engine.partition import resolve_partition
from twining.models.glm5_next.model import Glm5Next
from twining.planner.inventory import drafter_from_folder, from_folder
from twining.planner.plan import plan
from twining.planner.planes import LATENT_FORMATS
from twining.planner.sizes import PlanRequest
from twining.planner.stages import layer_costs, stages_of
from twining.planner.units import parse_devices

MODEL, DRAFTER = demo_paths()
LOAD = Glm5Next.load
CONTEXT, SEQUENCES, CHUNK, DRAFTS = 4096, 2, 256, 7


def engine_config(fmt, stages, partition=""):
    return EngineConfig(
        model_dir=MODEL,
        max_seq_len=CONTEXT,
        threads=1,
        stages=stages,
        partition=partition,
        cache=CacheConfig(latent_format=fmt),
        draft=DraftConfig(drafter="dflash2", drafter_dir=DRAFTER, num_draft_tokens=DRAFTS),
        schedule=ScheduleConfig(max_seqs=SEQUENCES, max_batched_tokens=CHUNK),
    )


def plan_request(fmt):
    return PlanRequest(
        inventory=from_folder(MODEL),
        devices=parse_devices("cpu:8GB"),
        context=CONTEXT,
        sequences=SEQUENCES,
        drafter=drafter_from_folder(DRAFTER),
        max_draft=DRAFTS,
        latent_format=fmt,
        index_format="fp32",
        chunk_tokens=CHUNK,
    )


def exact_bytes(request):
    """Of the plan, what is not an estimate; on a CPU there is one device."""
    found = plan(request)
    assert found.fits
    return sum(item.num_bytes for item in found.devices[0].items if not item.is_estimate)


def planes_of(planes):
    return {
        "latent": planes.latent,
        "index_keys": planes.index_keys,
        "index_slots": planes.index_slots,
        "kda": planes.kda,
    }


@cache
def demo_model(tap_layers):
    ckpt = loading.Checkpoint.open(MODEL)
    return LOAD(ckpt, loading.parse_glm5_next(ckpt.config), tap_layers=tap_layers)


@pytest.fixture
def one_load(monkeypatch):
    """Weights are read once for all formats; everything else of a start is real."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(
        loading.Glm5Next, "load", lambda ckpt, config, *, tap_layers: demo_model(tap_layers)
    )
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("fmt", LATENT_FORMATS)
@pytest.mark.parametrize(("stages", "partition"), [(1, ""), (2, ""), (2, "2,6")])
def test_engine_holds_what_the_plan_says(one_load, monkeypatch, fmt, stages, partition):
    pools = []
    make_pool = Glm5Next.make_pool
    monkeypatch.setattr(
        Glm5Next, "make_pool", lambda self, **kw: pools.append(make_pool(self, **kw)) or pools[-1]
    )
    monkeypatch.setattr(loading, "check_row_invariance", lambda *a, **k: None)
    engine = load_engine(engine_config(fmt, stages, partition))
    request = plan_request(fmt)
    costs, first, last = layer_costs(request)
    counts = resolve_partition(partition, stages, costs, first_cost=first, last_cost=last)
    found = stages_of(request, counts)
    (pool,) = pools
    assert len(pool.stages) == stages
    for mine, planned in zip(pool.stages, found, strict=True):
        assert mine.trunk_layers == range(*planned.layers)
        assert mine.nbytes() == planes_of(planned.planes)
    exact = exact_bytes(request)
    assert sum(stage.total for stage in found) == exact
    assert resident_bytes(engine) == pytest.approx(exact, rel=0.01)


MEASURE = """
import gc, json, pathlib, sys
import psutil, torch
import twining.engine.loading as loading
from twining.config import CacheConfig, DraftConfig, EngineConfig, ScheduleConfig

def live():
    gc.collect()
    found = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}

given = json.loads(sys.argv[1])
resident = lambda: psutil.Process().memory_info().rss
before, start = live(), resident()
engine = loading.load_engine(EngineConfig(
    model_dir=pathlib.Path(given["model"]),
    max_seq_len=given["context"],
    threads=1,
    stages=given["stages"],
    cache=CacheConfig(latent_format=given["fmt"]),
    draft=DraftConfig(
        drafter="dflash2",
        drafter_dir=pathlib.Path(given["drafter"]),
        num_draft_tokens=given["drafts"],
    ),
    schedule=ScheduleConfig(
        max_seqs=given["sequences"], max_batched_tokens=given["chunk"]
    ),
))
tensors = sum(n for at, n in live().items() if at not in before)
print(json.dumps({"tensors": tensors, "grown": resident() - start, "resident": resident()}))
"""


@pytest.mark.parametrize(("fmt", "stages"), [("fp32", 1), ("q8", 2)])
def test_process_holds_what_the_plan_says(fmt, stages):
    """All live tensors of a fresh process; its resident memory stays within the whole plan."""
    given = {
        "model": str(MODEL),
        "drafter": str(DRAFTER),
        "context": CONTEXT,
        "sequences": SEQUENCES,
        "chunk": CHUNK,
        "drafts": DRAFTS,
        "fmt": fmt,
        "stages": stages,
    }
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    request = plan_request(fmt)
    exact = exact_bytes(request)
    print(f"plan {exact}, tensors {found['tensors']}, resident {found['resident']}")
    assert found["tensors"] == pytest.approx(exact, rel=0.01)
    assert exact <= found["grown"]
    assert found["resident"] <= plan(request).devices[0].used_bytes
