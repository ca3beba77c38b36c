"""The planner's formulas against what the caches and loaders really allocate, to the byte."""

from pathlib import Path

import pytest
import torch

from tests.drafters.dflash2_tools import golden_drafter
from twining.cache.pool import CachePool
from twining.cache.ring import RingCache
from twining.checkpoint.hf_config import load_config, parse_dflash2, parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.models.glm5_next.model import Glm5Next
from twining.planner import params
from twining.planner.inventory import drafter_from_folder, from_folder
from twining.planner.placing import slack_of
from twining.planner.plan import plan
from twining.planner.planes import (
    LATENT_FORMATS,
    CacheShape,
    PlaneBytes,
    all_planes,
    attention_layer,
    latent_row_bytes,
    ring_bytes,
    ring_rows,
    state_bytes,
    trunk_layer,
)
from twining.planner.sizes import PlanRequest
from twining.planner.units import parse_devices

DEMO = Path(__file__).resolve().parents[2] / "twining" / "demo" / "model"


@pytest.fixture(params=["tiny", "tiny_shared_indexer", "demo"])
def model_dir(request, golden):
    if request.param == "demo":
        if not (DEMO / "config.json").is_file():
            pytest.skip("the demo model's config is not packaged yet")
        return DEMO
    return golden / "glm5_next" / request.param


@pytest.mark.parametrize("fmt", LATENT_FORMATS)
@pytest.mark.parametrize(
    ("pages", "seqs", "drafts", "mtp"), [(1, 1, 0, False), (7, 3, 7, True), (5, 2, 15, False)]
)
def test_cache_planes_to_the_byte(model_dir, fmt, pages, seqs, drafts, mtp):
    config = parse_glm5_next(load_config(model_dir))
    if config.kv_lora_rank % 32 and fmt.startswith("q"):
        pytest.skip("the width has no groups of 32")
    for index_format in ("fp32", "fp16"):
        shape = CacheShape(
            num_pages=pages,
            max_seqs=seqs,
            max_draft=drafts,
            latent_format=fmt,
            index_format=index_format,
        )
        pool = CachePool(
            config,
            num_pages=pages,
            max_seqs=seqs,
            max_draft=drafts,
            latent_format=fmt,
            index_format=index_format,
            has_mtp=mtp,
        )
        found = all_planes(config, shape, has_mtp=mtp)
        assert pool.nbytes() == {
            "latent": found.latent,
            "index_keys": found.index_keys,
            "index_slots": found.index_slots,
            "kda": found.kda,
        }
        state = pool.open()
        assert state is not None
        snapshot = sum(t.nbytes for t in pool.snapshot(state).values())
        mtp_tail = 0
        if mtp:
            mtp_tail = (64 + config.index_pool + drafts + 1) * 2 * config.index_head_dim * 4
        assert snapshot == state_bytes(config, shape) + mtp_tail


def test_two_stages_hold_what_one_holds(model_dir):
    """Any split of the layers adds up to the whole: planes belong to single layers."""
    config = parse_glm5_next(load_config(model_dir))
    shape = CacheShape(num_pages=3, max_seqs=2, max_draft=4, latent_format="fp32")
    whole = all_planes(config, shape, has_mtp=True)
    for first_stage in (1, config.num_layers // 2):
        stages = [PlaneBytes(), attention_layer(config, shape, has_index=True)]
        for index in range(config.num_layers):
            stages[index >= first_stage] += trunk_layer(config, shape, index)
        assert stages[0] + stages[1] == whole


def test_drafter_ring_to_the_byte(golden):
    config = parse_dflash2(load_config(golden / "dflash2"))
    for seqs, chunk in ((1, 64), (3, 2048)):
        ring = RingCache(
            num_layers=config.num_layers,
            num_slots=seqs,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_rows=ring_rows(config, chunk),
        )
        assert ring.nbytes() == ring_bytes(config, max_seqs=seqs, max_chunk=chunk)
        assert ring.num_rows == RingCache.rows_needed(
            window=config.sliding_window, chunk=chunk, block=config.block_size
        )


def resident_bytes(root: object) -> int:
    """Bytes of all tensor storages reachable from an object, each counted once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, str | int | float | type | None):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        else:
            waiting += vars(value).values() if hasattr(value, "__dict__") else ()
            names = [n for k in type(value).__mro__ for n in getattr(k, "__slots__", ())]
            waiting += [getattr(value, n) for n in names if hasattr(value, n)]
    return sum(storages.values())


def test_resident_weights_on_a_cpu(model_dir):
    folder = model_dir
    if not list(folder.glob("*.safetensors")):
        pytest.skip("the demo model's weights are not packaged yet")
    inventory = from_folder(folder)
    ckpt = Checkpoint.open(folder)
    model = Glm5Next.load(ckpt, parse_glm5_next(ckpt.config))
    parts = (*inventory.layers, inventory.embed, inventory.final, inventory.head, inventory.mtp)
    planned = sum(part.values for part in parts if part is not None) * 4
    assert resident_bytes(model) == pytest.approx(planned, rel=0.01)


def test_resident_drafter_on_a_cpu(golden, tmp_path):
    drafter = golden_drafter(golden, tmp_path, max_seqs=2, max_chunk=64)
    config = parse_dflash2(load_config(golden / "dflash2"))
    planned = params.drafter(config).total * 4
    planned += ring_bytes(config, max_seqs=2, max_chunk=64)
    borrowed = 2 * 512 * 128 * 4  # the target's embedding and head, which the drafter points to
    assert resident_bytes(drafter) == pytest.approx(planned + borrowed, rel=0.01)


def data_bytes(path: Path) -> int:
    raw = path.read_bytes()
    return len(raw) - 8 - int.from_bytes(raw[:8], "little")


def test_file_bytes_are_those_of_the_headers(golden, tmp_path):
    folder = golden / "glm5_next" / "tiny"
    found = from_folder(folder).file_bytes
    assert found == sum(data_bytes(f) for f in folder.glob("*.safetensors"))
    for name in ("config.json", "weights.safetensors"):
        (tmp_path / name).write_bytes((golden / "dflash2" / name).read_bytes())
    drafter = drafter_from_folder(tmp_path)
    assert drafter.part.packed_bytes == data_bytes(tmp_path / "weights.safetensors")
    target = 2 * 512 * 128  # the fixture adds a target's embedding and head
    assert (drafter.part.values + target) * 2 == drafter.part.packed_bytes


def test_plan_of_a_cpu_run_adds_up(golden):
    """Weights and planes of the plan are those of the engine; the rest is marked as an estimate."""
    folder = golden / "glm5_next" / "tiny"
    inventory = from_folder(folder)
    config = inventory.config
    request = PlanRequest(
        inventory=inventory,
        devices=parse_devices("cpu:4GB"),
        context=1024,
        sequences=2,
        max_draft=3,
        latent_format="fp32",
        index_format="fp32",
        chunk_tokens=256,
    )
    found = plan(request)
    assert found.fits and slack_of(request) == pytest.approx(found.margin_bytes)
    exact = sum(i.num_bytes for i in found.devices[0].items if not i.is_estimate)
    ckpt = Checkpoint.open(folder)
    model = Glm5Next.load(ckpt, config)
    pool = model.make_pool(num_pages=8, max_seqs=2, max_draft=3)
    engine = resident_bytes(model) + sum(pool.nbytes().values())
    assert engine == pytest.approx(exact, rel=0.01)
    assert latent_row_bytes(config.kv_lora_rank, "fp32") == config.kv_lora_rank * 4
