"""Measurements to rows to a document that our own reader accepts; V's 28 rows re-created."""

import json

import pytest

from twining.config import CacheConfig, DraftConfig, EngineConfig, ServerConfig
from twining.errors import ConfigError
from twining.recipes.document import canonical, emit, parse_document
from twining.recipes.examine import examine
from twining.recipes.points import BATTERIES
from twining.recipes.publish import CLAIMED_BY, publication_from, publish, read_results, rows_of
from twining.recipes.resolve import engine_config
from twining.recipes.settings import Capabilities
from twining.recipes.table_own import launch_of

DECODE = {
    "structured": (82.953, 122.459, 191.902, 161.143),
    "code": (76.454, 109.896, 151.441, 137.049),
    "json": (70.890, 113.168, 164.578, 156.513),
    "prose": (57.821, 92.418, 139.641, 123.009),
}
PREFILL = {
    4096: (4126, 1741.34),
    8192: (8222, 1851.54),
    16384: (16416, 1842.13),
    32768: (32798, 1835.55),
    65536: (65566, 1822.77),
    131072: (131103, 1802.66),
}
DEPTH = {
    4096: 59.058,
    8192: 59.017,
    16384: 60.758,
    32768: 58.078,
    65536: 56.085,
    131072: 58.951,
}


def results(**changes):
    data = {
        "format": "engine-results/1",
        "engine": {"name": "twining", "version": "0.1.0", "git_commit": "a" * 40},
        "prompts_sha256": "b" * 64,
        "decode": [
            {"battery": b, "concurrency": c, "aggregate_tok_s": v + 0.0001, "num_runs": 3}
            for b, row in DECODE.items()
            for c, v in zip((1, 2, 4, 8), row, strict=True)
        ],
        "prefill": [
            {"size": n, "prompt_tokens": p, "tok_s": v + 0.001} for n, (p, v) in PREFILL.items()
        ],
        "depth": [{"size": n, "decode_tok_s": v} for n, v in DEPTH.items()],
        "later_field": {"kept": "by the bench"},
    }
    return data | changes


def about(**changes):
    engine = EngineConfig(
        model_dir="m",
        max_seq_len=225280,
        cache=CacheConfig(latent_format="q8", max_pages=880),
        draft=DraftConfig(drafter="dflash2", drafter_dir="d", num_draft_tokens=3),
    )
    data = {
        "slug": "glm-5-3-flash-on-a-cpu",
        "title": "GLM-5.3-Flash on a CPU",
        "license": "CC-BY-4.0",
        "author": "somebody",
        "created_at": "2026-11-30 10:00:00+00",
        "launch": launch_of(engine, ServerConfig(port=8012), drafter_name="dflash2"),
        "hardware": [{"slug": "cpu", "vram_gb": 64, "device_count": 1}],
        "max_context_len": 225280,
    }
    return data | changes


def read(data):
    return read_results(json.dumps(data))


def test_rows_of_the_public_document_are_recreated(recipe_v):
    def key(row):
        return row.context_len, row.concurrency, row.prefill_tok_s, row.decode_tok_s, row.ttft_ms

    assert [key(row) for row in rows_of(read(results()))] == [key(p) for p in recipe_v.points]


def test_a_published_document_passes_our_reader(recipe_v):
    document = publish(
        read(results()), publication_from(about()), base=parse_document(emit(dict(recipe_v.raw)))
    )
    raw = emit(document)
    found = examine(raw, Capabilities(), file_stem="glm-5-3-flash-on-a-cpu")
    assert [f.message for f in found.findings if not f.is_ok] == []
    assert canonical(parse_document(raw)) == canonical(document)
    assert {p.claimed_by for p in found.recipe.points} == {CLAIMED_BY}
    assert found.recipe.claims[0][1].tok_s == 82.953
    assert document["speeds"] == {"decode_tok_s": 59.0, "prefill_tok_s": 1822.8}
    names = [c["name"] for c in document["credit"]]
    assert names == [c.name for c in recipe_v.credit] + ["somebody"]
    assert document["models"] == recipe_v.raw["models"]
    cells = {(m.battery, m.concurrency) for m in found.measurements if m.battery}
    assert cells == {(b, c) for b in BATTERIES for c in (1, 2, 4, 8)}


def test_our_launch_resolves_to_the_configuration_it_came_from():
    document = publish(read(results()), publication_from(about()))
    found = examine(json.dumps(document), Capabilities()).resolution
    assert found.can_start
    config = engine_config(found, "m", drafter_dir="d")
    assert config.max_seq_len == 225280 and config.cache == CacheConfig(
        latent_format="q8", max_pages=880
    )
    assert config.draft.num_draft_tokens == 3 and config.schedule.max_seqs == 8


@pytest.mark.parametrize("reuse", ["exact", "fast", "off"])
def test_stages_and_reuse_of_our_launch_resolve_back(reuse):
    engine = EngineConfig(
        model_dir="m", stages=2, partition="23,22", cache=CacheConfig(max_pages=880, reuse=reuse)
    )
    launch = launch_of(engine, ServerConfig(port=8012), drafter_name="none")
    document = publish(read(results()), publication_from(about(launch=launch)))
    config = engine_config(examine(json.dumps(document), Capabilities()).resolution, "m")
    assert (config.stages, config.partition, config.cache.reuse) == (2, "23,22", reuse)


def test_the_content_hash_follows_the_content():
    first = publish(read(results()), publication_from(about()))
    again = publish(read(results()), publication_from(about()))
    other = publish(read(results()), publication_from(about(title="Other")))
    assert first == again
    assert first["revision"]["content_hash"] != other["revision"]["content_hash"]


def test_reuse_rows_are_warm_and_only_without_depth():
    reuse = [{"size": 8192, "ttft_ms": 1110.4, "cold_ttft_ms": 7860, "cached_share": 0.9398}]
    assert len(rows_of(read(results(reuse=reuse)))) == 28
    rows = rows_of(read(results(reuse=reuse, depth=[])))
    (warm,) = [row for row in rows if row.ttft_ms is not None]
    assert (warm.context_len, warm.ttft_ms) == (8192, 1110)
    assert "warm" in warm.notes and "7860 ms" in warm.notes and "93.98%" in warm.notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depth": [{"size": 11264, "decode_tok_s": 5.0}]}, "is a marker"),
        ({"depth": [{"size": 1024, "decode_tok_s": 5.0}]}, "is a marker"),
        ({"prefill": [{"size": 31744, "prompt_tokens": 5, "tok_s": 5.0}]}, "is a marker"),
        ({"depth": [{"size": 9, "decode_tok_s": 5.0}] * 2}, "two rows for context 9"),
        ({"format": "other"}, "format"),
        ({"decode": [{"battery": "poems", "concurrency": 1, "aggregate_tok_s": 1.0}]}, "battery"),
        ({"decode": [{"battery": "code", "concurrency": 1, "aggregate_tok_s": -1}]}, "aggregate"),
        ({"depth": [{"size": 9, "decode_tok_s": {"unknown": "no device"}}]}, "decode_tok_s"),
    ],
)
def test_results_that_cannot_be_published(changes, words):
    with pytest.raises(ConfigError, match=words) as err:
        rows_of(read(results(**changes)))
    assert "\n" not in str(err.value)


@pytest.mark.parametrize(
    "changes", [{"slug": "Has Blanks"}, {"hardware": []}, {"max_context_len": 0}, {"launch": []}]
)
def test_descriptions_that_cannot_be_published(changes):
    with pytest.raises(ConfigError, match="about: "):
        publication_from(about(**changes))


def test_a_hostile_base_only_loses_its_credits():
    base = {"credit": "x", "tags": [1, "b", "a", None], "tasks": {"a": 1}, "models": None}
    document = publish(read(results()), publication_from(about()), base=base)
    assert document["credit"] == [{"name": "somebody", "url": None}]
    assert document["tags"] == ["a", "b"] and document["tasks"] == [] and document["models"] == []
