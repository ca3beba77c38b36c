"""Argument conversion by schema (spec/chat_format.md 8.5)."""

import pytest

from twining.serving.json_text import BigInteger, dump_json, parse_json, parse_number
from twining.serving.parsing import convert_argument, schema_types


@pytest.mark.parametrize(
    ("schema", "want"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null", "nonsense"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"enum": [1, "a", None, 2.5, True]}, {"integer", "string", "null", "number", "boolean"}),
        ({"const": [1]}, {"array"}),
        ({"anyOf": [{"type": "string"}, {"allOf": [{"type": "integer"}]}]}, {"string", "integer"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"$ref": "#/$defs/a~1b/0"}, {"boolean"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/$defs/missing/x"}, set()),
        ({"$ref": "https://example.com/x"}, set()),
        ({"$ref": 3}, set()),
        (True, set()),
        ({"type": 5}, set()),
        ({}, set()),
    ],
)
def test_types(schema, want):
    root = {
        "properties": {"k": schema},
        "additionalProperties": {"type": "null"},
        "$defs": {"a/b": [{"type": "boolean"}], "loop": {"$ref": "#/$defs/loop"}},
    }
    assert schema_types(root, "k") == want
    assert schema_types(root, "other") == {"null"}


def test_reference_chains_and_mutual_unions_end():
    defs = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(40)} | {"40": {"type": "string"}}
    root = {"$defs": defs, "properties": {"far": defs["0"], "near": defs["30"]}}
    assert schema_types(root, "far") == set() and schema_types(root, "near") == {"string"}
    names = [f"n{i}" for i in range(30)]
    union = {"anyOf": [{"$ref": f"#/$defs/{n}"} for n in names]}
    root = {"$defs": dict.fromkeys(names, union), "properties": {"k": union}}
    assert schema_types(root, "k") == set()


def test_bad_schemas_say_nothing():
    for root in [None, 3, [], {"properties": []}, {"properties": {"k": None}}]:
        assert schema_types(root, "k") == set()


@pytest.mark.parametrize(
    ("raw", "types", "want"),
    [
        (" 5 ", "string", " 5 "),
        (" 5 ", "", 5),
        ('"q"', "", '"q"'),
        ("[1, ", "", "[1, "),
        ("NaN", "", "NaN"),
        ("None", "null", None),
        ("None", "null string", "None"),
        ("null", "null string", None),
        ("4.0", "integer", 4),
        ("4.5", "integer", 4.5),
        ("4.0", "integer number", 4.0),
        ("1e3", "integer", 1000.0),
        ("1e999", "number", "1e999"),
        ("007", "integer", "007"),
        ("1", "boolean", True),
        ("1", "boolean integer", 1),
        ("TRUE", "boolean string", True),
        ("yes", "boolean", "yes"),
        ('{"a": 1}', "object", {"a": 1}),
        ('{"a": 1}', "array string", '{"a": 1}'),
        ("[1]", "object", [1]),
        ('{"a": NaN}', "object", '{"a": NaN}'),
        (" x ", "integer", " x "),
        ("", "integer", ""),
        ("", "", ""),
        ("-0", "integer", 0),
        ("[" * 100_000, "array", "[" * 100_000),
    ],
)
def test_conversion(raw, types, want):
    got = convert_argument(raw, frozenset(types.split()))
    assert got == want and type(got) is type(want)


def test_json_text():
    text = '{"a": [1.0, 1000.0, true, null, "é<&\'\\n"], "b": {}}'
    assert dump_json(parse_json(text)) == text
    big = "-" + "7" * 6000
    assert dump_json(parse_json(f"[{big}]")) == f"[{big}]"
    assert isinstance(parse_number(big), BigInteger)
    assert parse_number("1.") is parse_number("+1") is parse_number("\u0661") is None
    for bad in ["NaN", "[Infinity]", "1e999", "{", "[" * 201 + "]" * 201, "[" * 99_999, '{"a":1,}']:
        with pytest.raises(ValueError):
            parse_json(bad)
    assert parse_json("[" * 200 + "]" * 200)
    for bad in [float("nan"), {1, 2}, b"x"]:
        with pytest.raises(ValueError):
            dump_json(bad)
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError):
        dump_json(deep)
