"""CachePool and its planes: slots, pages, formats, snapshots, sizes, refusals."""

from dataclasses import replace

import pytest
import torch

from tests.models.synthetic import SMALL, config_dict
from twining.cache.latent import LatentPlane
from twining.cache.pool import CachePool
from twining.checkpoint.hf_config import parse_glm5_next
from twining.errors import ConfigError

CONFIG = parse_glm5_next(config_dict(SMALL))


def make(**kw) -> CachePool:
    sizes = {"num_pages": 4, "max_seqs": 2, "max_draft": 3, "has_mtp": True} | kw
    return CachePool(CONFIG, **sizes)


def test_slots_and_pages_come_back():
    pool = make()
    a, b = pool.open(), pool.open()
    assert a.slot != b.slot and pool.open() is None and pool.num_free_slots == 0
    assert pool.reserve(a, 257) and len(a.pages) == 2 and a.capacity == 512
    assert pool.reserve(a, 512) and len(a.pages) == 2
    assert not pool.reserve(b, 769) and b.pages == []
    assert pool.reserve(b, 512) and not pool.reserve(a, 513)
    pool.close(a)
    assert pool.pages.num_free == 2 and pool.num_free_slots == 1
    with pytest.raises(ValueError, match="closed already"):
        pool.close(a)
    pool.close(b)
    assert pool.pages.num_free == 4


def test_opening_a_slot_resets_its_planes():
    pool = make(max_seqs=1)
    pool.stages[0].recurrent.base.fill_(1)
    pool.stages[0].recurrent.conv.fill_(1)
    pool.stages[0].index.raw.fill_(1)
    state = pool.open()
    for plane in pool.snapshot(state).values():
        assert not plane.any()


def test_rows_follow_the_page_table():
    pool = make()
    state = pool.open()
    pool.reserve(state, 600)
    state.pages = [2, 0, 3]
    rows = pool.rows(state, 255, 514).tolist()
    assert rows[0] == 2 * 256 + 255
    assert rows[1:257] == list(range(256))
    assert rows[257:] == [768, 769]


@pytest.mark.parametrize(
    ("fmt", "limit"),
    [("fp32", 0), ("bf16", 0.02), ("fp16", 2e-3), ("q8", 0.05), ("q6", 0.2), ("q4", 0.8)],
)
def test_latent_formats(fmt, limit):
    plane = LatentPlane(2, 1, 64, fmt)
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([7, 0, 255, 3, 100])
    plane.write(1, rows, values)
    got = plane.read(1, rows.view(5, 1))
    assert got.shape == (5, 1, 64) and got.dtype == torch.float32
    assert (got[:, 0] - values).abs().max() <= limit
    assert not plane.read(1, torch.tensor([plane.zero_row])).any()
    assert not plane.read(0, rows).any()
    other = LatentPlane(2, 1, 64, fmt)
    moved = rows[rows < 255]
    other.import_rows(moved + 1, plane.export_rows(moved))
    assert torch.equal(other.read(1, moved + 1), plane.read(1, moved))


def test_restore_refuses_what_it_cannot_do_and_changes_nothing():
    pool = make()
    state = pool.open()
    planes = pool.snapshot(state)
    for missing in planes:
        part = {name: plane for name, plane in planes.items() if name != missing}
        with pytest.raises(ValueError, match=missing):
            pool.restore(state, part, length=0, pages=[])
    with pytest.raises(ValueError, match="1 pages for 257 tokens"):
        pool.restore(state, planes, length=257, pages=[0])
    assert state.length == 0 and state.pages == []
    state.length = 3
    with pytest.raises(ValueError, match="state of 3 tokens"):
        pool.restore(state, planes, length=0, pages=[])


def test_import_refuses_more_pages_than_held():
    pool = make()
    state, other = pool.open(), pool.open()
    pool.reserve(state, 300)
    state.length = 300
    with pytest.raises(ValueError, match="2 pages for 0 held"):
        pool.import_pages(other, pool.export_pages(state))


@pytest.mark.parametrize(
    ("kw", "words"),
    [
        ({"num_pages": 0}, "0 pages"),
        ({"max_seqs": 0}, "0 sequences"),
        ({"max_draft": -1}, "-1 drafts"),
        ({"max_draft": 16}, "16 rows"),
        ({"latent_format": "q5"}, "latent_format"),
        ({"index_format": "q8"}, "index_format"),
    ],
)
def test_settings_that_cannot_be_honoured(kw, words):
    with pytest.raises(ConfigError, match=words):
        make(**kw)


def test_sizes_that_do_not_fit_the_pages():
    kw = {"num_pages": 1, "max_seqs": 1, "max_draft": 0}
    with pytest.raises(ConfigError, match="index_kpool=5"):
        CachePool(replace(CONFIG, index_pool=5, index_topk=40), **kw)
    with pytest.raises(ConfigError, match="kv_lora_rank is 40"):
        CachePool(replace(CONFIG, kv_lora_rank=40), latent_format="q8", **kw)


def test_nbytes_is_what_is_allocated():
    """By the formulas of spec 16.4: latents, pooled keys, state, log and convolution rows."""
    pool = make(latent_format="q8", index_format="fp16")
    got = pool.nbytes()
    layers, rows = 4, 4 * 256 + 1  # three MLA layers and the MTP block
    assert got["latent"] == layers * rows * (32 + 2)
    assert got["index_keys"] == 3 * 4 * 64 * 32 * 2
    ring, window = 64 + 4 + 4, 4
    assert got["index_slots"] == 2 * 3 * (ring * 64 * 4 + 1 * 32 * 2)
    state = 2 * 2 * 3 * 32 * 32 * 4
    log = 2 * 2 * window * (3 * 96 + 3) * 4
    conv = 2 * 2 * (3 + window) * 3 * 96 * 4
    assert got["kda"] == state + log + conv
