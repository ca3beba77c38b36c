"""Layers divided over stages: the same bits at every partition, and states that move between them.

The pool holds the partition; here one thread runs the stages one after the other. The model has
layers KDA, MLA, KDA, MLA (shares the selection of the first), MLA, so some borders lie between a
layer and the one whose selection it uses.
"""

import random
from itertools import pairwise

import pytest
import torch

from tests.models.test_exactness import Stream, poisoned_pool, random_ids, run_together
from twining.errors import ConfigError

PARTITIONS = [(1, 4), (2, 3), (3, 2), (4, 1), (1, 1, 3), (2, 1, 2), (1, 3, 1), (1, 1, 1, 1, 1)]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_every_partition_gives_the_same_bits(small_model, partition):
    rng = random.Random(str(partition))
    pool = poisoned_pool(small_model, rng, partition=partition)
    streams = [Stream(small_model, pool, rng, n, n + 7) for n in (66, 3)]
    run_together(small_model, streams, rng)
    for stream in streams:
        stream.check()  # against one stage, one token per step


def test_planes_of_the_stages_are_those_of_the_whole(small_model):
    sizes = {"num_pages": 3, "max_seqs": 2, "max_draft": 3, "latent_format": "q8"}
    whole = small_model.make_pool(**sizes)
    for partition in PARTITIONS:
        pool = small_model.make_pool(**sizes, partition=partition)
        assert pool.nbytes() == whole.nbytes()
        assert [len(p.trunk_layers) for p in pool.stages] == list(partition)
        for before, after in pairwise(pool.stages):
            for kind in ("latent", "index", "recurrent"):
                assert getattr(before, kind).layers.stop == getattr(after, kind).first


@pytest.mark.parametrize("fmt", ["fp32", "q8"])
def test_a_state_moves_to_another_partition(small_model, fmt):
    rng = random.Random(3)
    ids = random_ids(rng, 380)
    results = []
    for here, there in (((), ()), ((2, 3), (1, 1, 3)), ((1, 3, 1), ())):
        pool = poisoned_pool(small_model, rng, partition=here, latent_format=fmt)
        state = pool.open()
        assert pool.reserve(state, 400)
        small_model.prefill(state, ids[:256])
        fixed, paged = pool.snapshot(state), pool.export_pages(state)
        other = poisoned_pool(small_model, rng, partition=there, latent_format=fmt)
        moved = other.open()
        other.restore(moved, fixed, length=256, pages=other.pages.alloc(2))
        other.import_pages(moved, paged)
        rows = [small_model.prefill(moved, ids[256:])]
        rows.append(small_model.verify([(moved, ids[:5])]))
        results.append((fixed, paged, torch.cat([r.hidden for r in rows])))
    for fixed, paged, hidden in results[1:]:
        assert torch.equal(hidden, results[0][2])
        assert all(torch.equal(fixed[name], results[0][0][name]) for name in fixed)
        assert paged.keys() == results[0][1].keys()


def test_mtp_rows_live_on_the_last_stage(small_model):
    hidden = torch.randn(9, 96, generator=torch.Generator().manual_seed(1))
    rows = []
    for partition in ((), (2, 3), (4, 1)):
        pool = small_model.make_pool(num_pages=1, max_seqs=1, max_draft=3, partition=partition)
        state = pool.open()
        assert pool.reserve(state, 9)
        rows.append(small_model.mtp.rows(state, list(range(9)), hidden, 0))
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("partition", [(5, 1), (4,), (0, 5), (6, -1)])
def test_partitions_that_do_not_fit(small_model, partition):
    with pytest.raises(ConfigError, match="5 layers"):
        small_model.make_pool(num_pages=1, max_seqs=1, max_draft=0, partition=partition)


def test_bytes_of_each_layer(small_model):
    KDA, MLA = small_model.layers[0], small_model.layers[1]
    assert len(small_model.layer_bytes) == 5
    assert small_model.layer_bytes[0] >= KDA.mixer.in_proj.nbytes + KDA.mixer.o_proj.nbytes
    assert small_model.layer_bytes[1] >= MLA.mixer.in_proj.nbytes + MLA.mixer.o_proj.nbytes
