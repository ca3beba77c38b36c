"""Rules R1 … R14 on the two documents and on documents that break one rule each; markers."""

import json
from dataclasses import replace

import pytest

from tests.recipes.conftest import E_SLUG, V_SLUG
from twining.recipes.checks import bits_of, check, commit_of
from twining.recipes.document import parse_document
from twining.recipes.points import BATTERIES, by_context, headline, marker_battery, measurements
from twining.recipes.resolve import resolve
from twining.recipes.schema import view
from twining.recipes.settings import Capabilities

CAN = Capabilities()
RULES = {f"R{i}" for i in range(1, 15)}


def answers(recipe, stem=None, **options):
    return check(recipe, resolve(recipe, CAN), file_stem=stem, **options)


def test_both_documents_pass_every_rule(recipe_e, recipe_v):
    assert (len(recipe_e.points), len(recipe_v.points)) == (4, 28)
    for recipe, slug in ((recipe_e, E_SLUG), (recipe_v, V_SLUG)):
        found = answers(recipe, slug)
        assert [f for f in found if not f.is_ok] == []
        named = {f.rule for f in found if f.rule.startswith("R")}
        # R6 needs metrics.points, R11 a layer split: only the second document has them.
        assert named == RULES - ({"R6", "R11"} if slug == E_SLUG else set())


def test_only_listed_traps_are_noted(recipe_e, recipe_v):
    def traps(recipe):
        return {f.rule for f in answers(recipe) if f.level == "note"}

    assert traps(recipe_e) == {"X2", "X3", "X4", "X5", "X8", "X9", "X10"}
    assert traps(recipe_v) == {"X6", "X7", "X8", "X11", "X12"}


def broken(raw, change):
    document = parse_document(raw)
    change(document)
    return view(document)


def _set_point(index, **values):
    return lambda d: d["perf_points"][index].update(values)


BREAKS = [
    ("R1", lambda d: d.update(slug="Other")),
    ("R1", lambda d: d["links"].update(alternate="/r/other")),
    ("R2", lambda d: d["perf_points"].append(dict(d["perf_points"][0]))),
    ("R3", _set_point(0, decode_tok_s=None)),
    ("R3", _set_point(0, decode_tok_s=0.0)),
    ("R3", _set_point(0, decode_tok_s=-3.5)),
    ("R4", _set_point(0, concurrency=None)),
    ("R5", _set_point(0, prefill_tok_s=5.0)),
    ("R6", _set_point(0, decode_tok_s=1.0)),
    ("R7", lambda d: d["perf_points"].reverse()),
    ("R8", lambda d: d["speeds"].update(decode_tok_s=61)),
    ("R9", lambda d: d["config"]["launch"].extend(["--frobnicate", "3"])),
    ("R9", lambda d: d["config"].pop("launch")),
    ("R11", lambda d: _partition(d, "23,21")),
    ("R11", lambda d: _partition(d, "15,15,15")),
    ("R12", lambda d: d["hardware"][0].update(device_count=1)),
]


def _partition(document, value):
    runtime = document["config"]["runtime"]
    runtime["env"] = runtime["env"].replace("PARTITION=23,22", f"PARTITION={value}")


@pytest.mark.parametrize(("rule", "change"), BREAKS)
def test_a_broken_rule_is_named(v_bytes, rule, change):
    found = answers(broken(v_bytes, change), V_SLUG)
    assert rule in {f.rule for f in found if not f.is_ok}


def test_two_ways_of_drafting(e_bytes):
    def both(document):
        document["config"]["launch"][1] += " --mtp"

    assert "R10" in {f.rule for f in answers(broken(e_bytes, both)) if not f.is_ok}


@pytest.mark.parametrize(("bits", "is_ok"), [(3.05, True), (2.6, False), (3.06, False)])
def test_bits_of_a_local_checkpoint(recipe_e, bits, is_ok):
    (finding,) = [f for f in answers(recipe_e, checkpoint_bits=bits) if f.rule == "R13"]
    assert finding.is_ok is is_ok


def test_quant_names_and_pins(recipe_e):
    assert [bits_of(q) for q in ("exl3-3-05bpw", "exl3-2-60bpw", "gguf", None)] == [
        3.05,
        2.6,
        None,
        None,
    ]
    pins = [commit_of(a.pin) for a in recipe_e.artifacts]
    assert [p and p[:7] for p in pins] == ["332ab45", "bf582e4", "5933112", None]


def test_markers_become_batteries_and_never_lengths(recipe_v):
    rows = measurements(recipe_v.points, limits=[225280])
    cells = {(r.battery, r.concurrency) for r in rows if r.battery}
    assert cells == {(b, c) for b in BATTERIES for c in (1, 2, 4, 8)}
    assert all(r.context_tokens is None for r in rows if r.battery)
    depths = [4096, 8192, 16384, 32768, 65536, 131072]
    assert [n for n, _ in by_context(rows, "decode")] == depths
    assert [n for n, _ in by_context(rows, "prefill")] == depths


def test_claims_at_the_limit_and_warm_times_stay_off_the_chart(recipe_e):
    rows = measurements(recipe_e.points, limits=[393216])
    assert by_context(rows, "decode") == [] and by_context(rows, "ttft") == []
    assert sum(r.is_warm for r in rows) == 3 and sum(r.is_limit for r in rows) == 1


def test_a_first_token_row_at_1024_is_a_length(recipe_e):
    assert marker_battery(recipe_e.points[0]) is None


def test_headline_is_the_lower_median(recipe_v):
    assert headline(recipe_v.points) == (59.0, 1822.8)
    assert headline([]) == (0.0, 0.0)
    four = [replace_rate(recipe_v.points[0], v) for v in (4.0, 1.0, 3.0, 2.0)]
    assert headline(four)[0] == 2.0


def replace_rate(point, value):
    return point.model_copy(update={"decode_tok_s": value})


def test_notes_hold_the_published_fingerprints(recipe_v):
    found = [f.message for f in answers(recipe_v) if f.rule == "X7"]
    assert [m.split()[1][:8] for m in found] == ["fb920d8c", "316dccf1", "ee218f38"]


def test_a_document_with_nothing_still_gets_answers():
    found = answers(view({}))
    assert {f.rule for f in found if not f.is_ok} >= {"R1", "R9"}
    json.dumps([f.message for f in found])
    assert replace(found[0], is_ok=True).is_ok
