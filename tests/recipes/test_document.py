"""Reading and re-emitting documents; bounds on hostile input."""

import json
import time

import pytest

from twining.errors import ConfigError
from twining.recipes.document import (
    MAX_BYTES,
    canonical,
    emit,
    parse_document,
    parse_json,
    plain,
    read_bytes,
)
from twining.recipes.schema import view


@pytest.mark.parametrize("name", ["e_bytes", "v_bytes"])
def test_round_trip_is_byte_equal_after_canonicalisation(name, request):
    raw = request.getfixturevalue(name)
    wanted = canonical(json.loads(raw))
    document = parse_document(raw)
    document["unknown_key"] = {"kept": [1, None, "é"]}
    again = parse_document(emit(document))
    assert again["unknown_key"] == {"kept": [1, None, "é"]}
    assert list(again) == list(document)
    del again["unknown_key"]
    assert canonical(again) == wanted


def test_canonical_form_changes_with_a_value(e_bytes):
    document = parse_document(e_bytes)
    before = canonical(document)
    document["perf_points"][0]["ttft_ms"] += 1
    assert canonical(document) != before


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON at line 1 column 1"),
        (b"[1]", "not an object"),
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1e999}', "too large for a double"),
        (b'{"a": 99999999999999999999}', "more than 63 bits"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number is too long"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested more than 64"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"a": "' + b"x" * (10 << 20) + b'"}', "this is not a recipe"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_damage_is_one_line(raw, words):
    began = time.monotonic()
    with pytest.raises(ConfigError) as err:
        parse_document(raw)
    assert words in str(err.value)
    assert "\n" not in str(err.value)
    assert time.monotonic() - began < 2


def test_files_that_are_no_recipe(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_bytes(tmp_path)
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="at most"):
        read_bytes(big)


def test_plain_leaves_no_control_characters():
    assert plain("a\x1b[31mb\n\u202ec\ud800") == "a?[31mb??c?"
    assert len(plain("x" * 1000, 80)) == 80


def test_metrics_are_decoded_twice(recipe_v):
    (claim,) = recipe_v.claims
    assert claim[0] == "submitter"
    assert claim[1].tok_s == pytest.approx(82.953)
    assert len(claim[1].points) == 28


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("perf_points", [{"context_len": "4096", "claimed_by": "x"}], "perf_points[0].context_len"),
        ("perf_points", {"a": 1}, "perf_points"),
        ("config", {"launch": "vllm serve"}, "config.launch"),
        ("performance", [{"claimed_by": "x", "metrics": "{"}], "performance[0].metrics"),
        ("performance", [{"claimed_by": "x", "metrics": "[[[["}], "performance[0].metrics"),
        ("hardware", [{"vram_gb": -1, "device_count": 2}], "hardware[0].vram_gb"),
        ("hardware", [{"vram_gb": 64, "device_count": True}], "hardware[0].device_count"),
        ("slug", 5, "slug"),
    ],
)
def test_a_damaged_part_is_a_finding_and_the_rest_stays(e_bytes, key, value, words):
    document = parse_document(e_bytes)
    document[key] = value
    recipe = view(document)
    assert [f.message for f in recipe.findings if words in f.message]
    assert recipe.engine is not None and recipe.engine.base_engine == "exllamav3"


def test_many_faulty_rows_stop_at_the_first():
    rows = json.dumps([{"context_len": "x"}] * 60_000)
    document = parse_json(f'{{"perf_points": {rows}}}', "many")
    began = time.monotonic()
    assert view(document).findings
    assert time.monotonic() - began < 2
