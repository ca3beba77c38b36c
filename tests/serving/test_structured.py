"""Structured output and forced calls: whatever is sampled under the grammar is what was asked."""

import json
import random
import time

import jsonschema
import numpy as np
import pytest
import tiny_tokenizer

from twining.engine.grammar import GrammarVocab, compile_grammar
from twining.engine.request import Delta, GrammarSpec, Request, SamplingParams
from twining.errors import RequestError
from twining.serving.output import ChoiceOutput, OutputOptions
from twining.serving.structured import build_grammar, content_grammar, parse_tool_choice
from twining.serving.tokenizer import Tokenizer

VOCAB = 360


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer.description())


@pytest.fixture(scope="module")
def vocab(tokenizer) -> GrammarVocab:
    text = json.dumps(tiny_tokenizer.description())
    return GrammarVocab.from_json(text, vocab_size=VOCAB, end_ids=tokenizer.stop_ids)


def sample(vocab, tokenizer, spec: GrammarSpec, seed: int, *, limit=3000, start=()) -> list[int]:
    """Tokens drawn at random from what is allowed; ends, quotes and markers are likely."""
    rng = random.Random(seed)
    request = Request(
        id="r",
        prompt_ids=[0],
        sampling=SamplingParams(),
        max_tokens=1,
        stop_ids=tokenizer.stop_ids,
        grammar=spec,
    )
    state = compile_grammar(vocab, request)
    enders = [
        {*tokenizer.stop_ids, *tokenizer.markers.structure_ids},
        set(tokenizer.encode_text('"')),
        {i for text in "}],0e" for i in tokenizer.encode_text(text)},
    ]
    ids = list(start)
    while len(ids) < limit:
        mask = state.allowed(ids, VOCAB)
        options = range(tokenizer.vocab_size) if mask is None else np.flatnonzero(mask).tolist()
        assert options, "a dead end"
        for likely in enders:
            wanted = [i for i in options if i in likely]
            if wanted and rng.random() < 0.3:
                options = wanted
                break
        ids.append(rng.choice(options))
        if ids[-1] in tokenizer.stop_ids:
            return ids
    pytest.fail(f"no end after {limit} tokens: {tokenizer.decode(ids[-50:])!r}")


def read(tokenizer, ids, tools, *, choice="auto", start="content", parallel=True) -> ChoiceOutput:
    options = OutputOptions(stop_ids=frozenset(tokenizer.stop_ids))
    output = ChoiceOutput.for_chat(
        tokenizer,
        options,
        start=start,
        tools=tools,
        parallel_tool_calls=parallel,
        tool_choice=choice,
    )
    output.push(Delta(request_id="r", kind="tokens", token_ids=ids))
    stop = ids[-1] if ids[-1] in tokenizer.stop_ids else -1
    reason = "stop" if stop >= 0 else "length"
    output.push(Delta(request_id="r", kind="finished", finish_reason=reason, stop_id=stop))
    return output


def content_text(vocab, tokenizer, fields, seed) -> str:
    content = content_grammar(fields)
    spec, _ = build_grammar(content=content, markers=tokenizer.markers)
    return tokenizer.decode(sample(vocab, tokenizer, spec, seed)[:-1])


# --------------------------------------------------------------------------- random schemas


def random_schema(rng: random.Random, depth: int) -> dict:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "format", "union"]
    kind = rng.choice(kinds + ["object", "array", "tuple"] * (2 if depth else 0))
    match kind:
        case "string":
            low = rng.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 9)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
        case "number":
            return {"type": "number", "exclusiveMinimum": -3.5, "maximum": rng.randint(0, 9)}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            values = ["a", "b c", "null", "3", 3, 2.5, None, True, ["x"], {"k": 1}, '"q"', "Zoë"]
            return {"enum": rng.sample(values, rng.randint(1, 4))}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice(["^[a-f]{2,4}$", "^x[0-9]", "^[ab]-\\d$", "[a-z0-9]"]),
            }
        case "format":
            return {"type": "string", "format": rng.choice(["date", "ipv4"]), "maxLength": 40}
        case "union":
            types = ["string", "integer", "null", "boolean"]
            if rng.random() < 0.5:
                return {"type": rng.sample(types, 2)}
            return {"anyOf": [{"type": "string", "maxLength": 8}, {"type": rng.choice(types[1:])}]}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 3}
        case "tuple":
            items = [random_schema(rng, depth - 1) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 1}
    return random_object(rng, depth - 1)


def random_object(rng: random.Random, depth: int) -> dict:
    names = rng.sample(["a", "b", "name", "x y", "größe", "n1"], rng.randint(1, 4))
    properties = {name: random_schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


@pytest.mark.parametrize("seed", range(40))
def test_random_schema(vocab, tokenizer, seed):
    schema = random_schema(random.Random(seed), 2)
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    try:
        content_grammar({"response_format": form})
    except RequestError as err:
        assert err.code == "invalid_json_schema"  # for example an enum of nothing that fits
        pytest.skip(str(err))
    text = content_text(vocab, tokenizer, {"response_format": form}, seed)
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("seed", range(60))
def test_random_tool_arguments(vocab, tokenizer, seed):
    """Forced calls in the model's own format: what the parser makes of them is valid."""
    rng = random.Random(seed)
    parameters = random_object(rng, 1)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": p}}
        for name, p in (("get", parameters), ("get_all", {}), ("none", random_object(rng, 0)))
    ]
    mode = rng.choice(["required", "named"])
    asked = mode if mode == "required" else {"type": "function", "function": {"name": "get"}}
    choice = parse_tool_choice(asked, tools)
    spec, _ = build_grammar(
        content=None, markers=tokenizer.markers, tools=tools, choice=choice, parallel=seed % 3 > 0
    )
    ids = sample(vocab, tokenizer, spec, seed, limit=20_000)
    output = read(tokenizer, ids, tools, choice=mode)
    assert output.content == "" and 1 <= len(output.tool_calls) <= 32
    assert output.finish_reason == ("stop" if mode == "named" else "tool_calls")
    if mode == "named" or seed % 3 == 0:
        assert len(output.tool_calls) == 1
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for call in output.tool_calls:
        assert call.is_complete and not call.is_recovered
        assert mode == "required" or call.name == "get"
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert len({(c.name, c.arguments) for c in output.tool_calls}) == len(output.tool_calls)


PERSON = {
    "type": "object",
    "$defs": {"Color": {"enum": ["red", "green"]}, "Id": {"type": "integer", "minimum": 7}},
    "properties": {
        "color": {"$ref": "#/$defs/Color"},
        "ids": {"type": "array", "items": {"$ref": "#/$defs/Id"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "count": {"type": ["integer", "string"]},
        "parent": {"$ref": "#/properties/ids"},
        "code": {"allOf": [{"type": "string"}, {"pattern": "^[a-z]+$"}, {"maxLength": 4}]},
    },
    "required": ["color", "note", "count", "code"],
}


@pytest.mark.parametrize("seed", range(12))
def test_references_and_unions_in_arguments(vocab, tokenizer, seed):
    tools = [{"type": "function", "function": {"name": "f", "parameters": PERSON, "strict": True}}]
    choice = parse_tool_choice("required", tools)
    spec, warnings = build_grammar(
        content=None, markers=tokenizer.markers, tools=tools, choice=choice, parallel=False
    )
    assert warnings == []
    output = read(tokenizer, sample(vocab, tokenizer, spec, seed), tools, choice="required")
    jsonschema.validate(json.loads(output.tool_calls[0].arguments), PERSON)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": ["string", "integer"], "minimum": 5},
            ["7", "3 apples", "x", "null"],
            ["3", " 3 "],
        ),
        ({"anyOf": [{"type": "string"}, {"const": 5}]}, ["5", "five"], ["6", "1.5", "2e3"]),
        ({"type": ["string", "null"], "enum": ["a"]}, ["a"], ["null", "b"]),
        ({"type": ["string", "boolean"], "enum": ["a", True]}, ["a", "true"], ["false", "True"]),
        ({"type": ["string", "object"], "maxProperties": 0}, ["{}", "x{"], ['{"a":1}', "{x"]),
        ({"type": "string"}, ["3", "null", "", '"q"'], []),
        ({"type": "string", "enum": ["3", "x"]}, ["3", "x"], ["", '"x"']),
        ({"type": "string", "pattern": "b"}, ["abc"], ["ac"]),
        ({"type": "integer"}, ["3"], ["x", "1.5", '"3"']),
        ({}, ["3", "x", '{"a": 1}'], []),
    ],
    ids=lambda v: json.dumps(v)[:50],
)
def test_raw_text_is_what_the_parser_makes_of_it(vocab, tokenizer, schema, good, bad):
    """Only texts whose converted value satisfies the schema; a few of those are left out too."""
    tools = [tool("f", properties={"k": schema}, required=["k"])]
    m = tokenizer.markers
    state = compile_grammar(vocab, _request(spec_for(tokenizer, tools, "required"), tokenizer))
    head = [m.tool_call_open, *tokenizer.encode_text("f"), m.arg_key_open]
    head += [*tokenizer.encode_text("k"), m.arg_key_close, m.arg_value_open]
    for text in [*good, *bad]:
        ids = [*head, *tokenizer.encode_text(text), m.arg_value_close, m.tool_call_close]
        fits = all(state.allowed(ids[:n], VOCAB)[ids[n]] for n in range(len(ids)))
        assert fits == (text in good), text
        arguments = json.loads(read(tokenizer, ids, tools).tool_calls[0].arguments)
        if fits:
            jsonschema.validate(arguments["k"], schema)


# --------------------------------------------------------------------------- forms of content


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fields", "is_good"),
    [
        (
            {"structured_outputs": {"regex": "^[ab]{2,4}-\\d+$"}},
            lambda t: set(t) <= set("ab-0123456789"),
        ),
        ({"guided_regex": "(yes|no)!"}, lambda t: t in ("yes!", "no!")),
        (
            {"structured_outputs": {"choice": ["a", 'b"c\n', "ü"]}},
            lambda t: t in ("a", 'b"c\n', "ü"),
        ),
        ({"guided_choice": ["one"]}, lambda t: t == "one"),
        ({"guided_grammar": 'start: "x" NUM\nNUM: /[0-9]{2}/'}, lambda t: len(t) == 3),
        ({"grammar": 'root ::= "n=" [0-9] [0-9]?'}, lambda t: t[:2] == "n=" and t[2:].isdigit()),
        ({"guided_json": {"type": "boolean"}}, lambda t: t in ("true", "false")),
        ({"json_schema": '{"const": [1]}'}, lambda t: json.loads(t) == [1]),
        ({"structured_outputs": {"json": {"type": "null"}, "regex": None}}, lambda t: t == "null"),
        (
            {"response_format": {"type": "json_object", "schema": {"maxProperties": 0}}},
            lambda t: not isinstance(json.loads(t), dict) or json.loads(t) == {},
        ),
    ],
    ids=lambda v: str(v)[:50] if isinstance(v, dict) else "check",
)
def test_forms(vocab, tokenizer, fields, is_good, seed):
    text = content_text(vocab, tokenizer, fields, seed)
    assert is_good(text), text


def test_json_object_and_white_space(vocab, tokenizer):
    content = content_grammar({"response_format": {"type": "json_object"}})
    spec, _ = build_grammar(content=content, markers=tokenizer.markers)
    request = Request(id="r", prompt_ids=[0], sampling=SamplingParams(), max_tokens=1, grammar=spec)
    state = compile_grammar(vocab, request)
    blank, feed = tokenizer.encode_text(" ")[0], tokenizer.encode_text("\n")[0]
    opening = tokenizer.encode_text("{")
    assert state.allowed([], VOCAB)[opening].all()
    assert not state.allowed([], VOCAB)[tokenizer.encode_text("[")].any()
    assert state.allowed(opening, VOCAB)[[blank, feed]].all()
    assert not state.allowed([*opening, blank], VOCAB)[[blank, feed]].any()
    assert state.allowed([*opening, feed], VOCAB)[blank]
    assert not state.allowed([*opening, feed, blank], VOCAB)[feed]


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"grammar": None}])
def test_free_text(fields, tokenizer):
    assert content_grammar(fields) is None
    assert build_grammar(content=None, markers=tokenizer.markers) == (None, [])


def strict_schema(schema) -> dict:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": schema, "strict": True},
        }
    }


deep: dict = {}
for _ in range(40):
    deep = {"properties": {"a": deep}}
BASE = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        (strict_schema({"not": {}}), "invalid_json_schema", f"{BASE}.not"),
        (
            strict_schema({"properties": {"a": {"items": {"uniqueItems": True}}}}),
            "invalid_json_schema",
            f"{BASE}.properties.a.items.uniqueItems",
        ),
        (
            strict_schema({"anyOf": [{}, {"format": "iri"}]}),
            "invalid_json_schema",
            f"{BASE}.anyOf[1].format",
        ),
        (
            strict_schema({"items": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}),
            "invalid_json_schema",
            f"{BASE}.items.oneOf",
        ),
        (strict_schema({"type": "strin"}), "invalid_json_schema", BASE),
        (strict_schema({"enum": []}), "invalid_json_schema", BASE),
        (strict_schema({"pattern": "(?=a)"}), "invalid_json_schema", BASE),
        (strict_schema({"$ref": "http://host/x"}), "invalid_json_schema", BASE),
        (strict_schema({"items": 5}), "invalid_json_schema", BASE),
        (strict_schema({"properties": {"a": 5}}), "invalid_json_schema", f"{BASE}.properties.a"),
        (strict_schema(False), "invalid_json_schema", BASE),
        (strict_schema("not json"), "invalid_json_schema", BASE),
        (strict_schema(7), "invalid_json_schema", BASE),
        (strict_schema(deep), "invalid_json_schema", BASE),
        ({"guided_json": {"description": "x" * (1 << 20)}}, "invalid_json_schema", "guided_json"),
        ({"guided_regex": "(a"}, "grammar_error", "guided_regex"),
        ({"guided_regex": ""}, "out_of_range", "guided_regex"),
        ({"guided_regex": 5}, "wrong_type", "guided_regex"),
        ({"guided_choice": []}, "out_of_range", "guided_choice"),
        ({"guided_choice": "a"}, "wrong_type", "guided_choice"),
        ({"grammar": "start: missing"}, "grammar_error", "grammar"),
        ({"grammar": "root ::= ("}, "grammar_error", "grammar"),
        ({"grammar": "root ::= " + "(" * 20_000}, "grammar_error", "grammar"),
        ({"structured_outputs": {}}, "conflicting_fields", "structured_outputs"),
        (
            {"structured_outputs": {"json_object": False}},
            "conflicting_fields",
            "structured_outputs",
        ),
        ({"structured_outputs": []}, "wrong_type", "structured_outputs"),
        (
            {"structured_outputs": {"json_object": 1}},
            "wrong_type",
            "structured_outputs.json_object",
        ),
        ({"guided_json": {}, "grammar": "x"}, "conflicting_fields", "guided_json"),
        (
            {"response_format": {"type": "json_object"}, "guided_json": {}},
            "conflicting_fields",
            "response_format",
        ),
        (
            {"response_format": {"type": "structural_tag"}},
            "unsupported_parameter",
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": 1},
                }
            },
            "wrong_type",
            "response_format.json_schema.strict",
        ),
    ],
    ids=lambda v: str(v)[:60],
)
def test_refused_content(fields, code, param):
    with pytest.raises(RequestError) as caught:
        content_grammar(fields)
    error = caught.value
    assert (error.code, error.param) == (code, param), error
    assert "\n" not in str(error) and len(str(error)) < 700


@pytest.mark.parametrize(
    ("schema", "warning"),
    [
        ({"type": "array", "uniqueItems": True, "maxItems": 2}, "ignored:uniqueItems"),
        ({"type": "string", "format": "iri"}, "ignored:format"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "ignored:oneOf"),
    ],
)
def test_what_is_not_strict_is_dropped_with_a_warning(schema, warning):
    content = content_grammar({"guided_json": schema})
    assert content.warnings == [warning]


def test_unknown_keywords_mean_nothing():
    schema = {"type": "string", "x-order": 1, "x-guidance": {"lenient": True}, "$comment": "c"}
    content = content_grammar(strict_schema(schema))
    assert content.warnings == [] and "lenient" not in json.dumps(content.entry)


def test_nullable_and_old_tuples(vocab, tokenizer):
    schema = {"items": [{"type": "integer", "nullable": True}], "additionalItems": False}
    fields = strict_schema({"type": "array", "minItems": 1, **schema})
    seen = {content_text(vocab, tokenizer, fields, seed).strip() for seed in range(60)}
    values = [json.loads(text) for text in seen]
    assert all(len(v) == 1 and (v[0] is None or isinstance(v[0], int)) for v in values)
    assert [None] in values and len(values) > 2


# --------------------------------------------------------------------------- calls


def tool(name="f", strict=None, **parameters) -> dict:
    function = {"name": name, "parameters": parameters}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}


def spec_for(tokenizer, tools, asked, **options) -> GrammarSpec | None:
    choice = parse_tool_choice(asked, tools)
    options = {"content": None} | options
    return build_grammar(markers=tokenizer.markers, tools=tools, choice=choice, **options)[0]


def test_forced_calls_wait_for_the_thought(vocab, tokenizer):
    markers = tokenizer.markers
    spec = spec_for(tokenizer, [tool(**CITY)], "required", is_thinking=True)
    assert (spec.start_id, spec.trigger_id) == (markers.think_close, -1)
    ids = sample(
        vocab, tokenizer, spec, 3, start=[*tokenizer.encode_text("hm"), markers.think_close]
    )
    output = read(tokenizer, ids, [tool(**CITY)], choice="required", start="reasoning")
    assert output.reasoning == "hm" and output.tool_calls
    assert spec.banned_before == (markers.tool_call_open,)


def test_strict_functions_bind_in_auto(vocab, tokenizer):
    """Nothing is forced until a call opens; then its arguments are valid."""
    tools = [tool("get", True, **CITY), tool("other", properties={"a": {}})]
    spec = spec_for(tokenizer, tools, "auto", is_thinking=True)
    markers = tokenizer.markers
    assert (spec.start_id, spec.trigger_id) == (-1, markers.tool_call_open)
    names = set()
    for seed in range(20):
        start = [*tokenizer.encode_text("x"), markers.think_close, markers.tool_call_open]
        ids = sample(vocab, tokenizer, spec, seed, start=start, limit=50_000)
        output = read(tokenizer, ids, tools, start="reasoning")
        for call in output.tool_calls:
            names.add(call.name)
            if call.name == "get":
                jsonschema.validate(json.loads(call.arguments), CITY)
    assert names == {"get", "other"}


def test_allowed_tools(vocab, tokenizer):
    tools = [tool("a"), tool("b"), tool("c")]
    listed = [{"type": "function", "function": {"name": "b"}}, {"type": "function", "name": "c"}]
    for asked in (
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}},
        {"type": "allowed_tools", "mode": "required", "tools": listed},
    ):
        spec = spec_for(tokenizer, tools, asked)
        calls = [
            call.name
            for seed in range(10)
            for call in read(
                tokenizer, sample(vocab, tokenizer, spec, seed), tools, choice="required"
            ).tool_calls
        ]
        assert set(calls) == {"b", "c"}
    asked = {"type": "allowed_tools", "mode": "auto", "tools": listed[:1]}
    spec = spec_for(tokenizer, tools, asked, tool_guard=False)
    assert spec.trigger_id == tokenizer.markers.tool_call_open and not spec.is_optional


def test_calls_or_content(vocab, tokenizer):
    content = content_grammar({"guided_choice": ["yes", "no"]})
    tools = [tool(**CITY)]
    spec = spec_for(tokenizer, tools, "auto", content=content)
    kinds = set()
    for seed in range(20):
        output = read(tokenizer, sample(vocab, tokenizer, spec, seed), tools)
        assert output.content in (("",) if output.tool_calls else ("yes", "no"))
        kinds.add(bool(output.tool_calls))
    assert kinds == {True, False}


def test_guard_keeps_structure_and_leaves_values_free(vocab, tokenizer):
    tools = [tool("get", properties={"city": {"type": "integer"}, "day": {}}), tool("go")]
    spec = spec_for(tokenizer, tools, "auto")
    assert spec.is_optional
    m = tokenizer.markers
    state = compile_grammar(vocab, _request(spec, tokenizer))
    text = tokenizer.encode_text
    before = [*text("ok"), m.tool_call_open]
    assert state.allowed(before[:-1], VOCAB) is None
    assert not state.allowed(before, VOCAB)[text("x")].any()
    ids = [*before, *text("get")]
    assert set(np.flatnonzero(state.allowed(ids, VOCAB))) == {m.arg_key_open, m.tool_call_close}
    ids += [m.arg_key_open]
    assert not state.allowed(ids, VOCAB)[text("x")].any()
    ids += [*text("day"), m.arg_key_close, m.arg_value_open, *text("any <text> at all")]
    inside = state.allowed(ids, VOCAB)
    assert inside[[m.arg_value_close, m.think_open, m.tool_call_open, *text("{")]].all()
    assert not inside[list(tokenizer.stop_ids)].any()
    ids += [m.arg_value_close]
    after = state.allowed(ids, VOCAB)
    assert after[[m.arg_key_open, m.tool_call_close, *text("x")]].all()
    ids += [m.arg_key_open]
    assert not state.allowed(ids, VOCAB)[text("x")].any()  # again a declared key
    assert state.allowed([*before, *text("go"), m.tool_call_close], VOCAB) is None
    assert spec_for(tokenizer, tools, "auto", tool_guard=False) is None


def _request(spec, tokenizer) -> Request:
    return Request(
        id="r",
        prompt_ids=[0],
        sampling=SamplingParams(),
        max_tokens=1,
        stop_ids=tokenizer.stop_ids,
        grammar=spec,
    )


def test_repeats_end_forced_calls(tokenizer):
    tools = [tool("f"), tool("g")]
    m = tokenizer.markers

    def call(name):
        return [m.tool_call_open, *tokenizer.encode_text(name), m.tool_call_close]

    ids = [*call("f"), *call("g"), *call("f"), *call("g")]
    output = read(tokenizer, ids, tools, choice="required")
    assert [c.name for c in output.tool_calls] == ["f", "g"]
    assert output.finish_reason == "tool_calls" and output.done
    assert len(output.ids) == len([*call("f"), *call("g"), *call("f")])
    cut = read(tokenizer, [*call("f"), *call("g")[:-1]], tools, choice="required")
    assert [c.name for c in cut.tool_calls] == ["f"] and cut.finish_reason == "length"
    free = read(tokenizer, ids, tools, choice="auto")
    assert [c.name for c in free.tool_calls] == ["f", "g", "f", "g"]


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"properties": {"a": {"not": {}}}}, "tools[0].function.parameters.properties.a.not"),
        ({"anyOf": [{}]}, "tools[0].function.parameters.anyOf"),
        ({"properties": {"a": {"type": "intger", "minimum": 1}}}, None),
        (
            {"properties": {"a": {"type": "string", "pattern": "(?=b)"}}},
            "tools[0].function.parameters.properties.a",
        ),
        (
            {"properties": {"a": {"type": "string", "minLength": 5, "maxLength": 1}}},
            "tools[0].function.parameters.properties.a",
        ),
        ({"properties": {"a": False}, "required": ["a"]}, None),
        ({"properties": 5}, None),
    ],
)
def test_strict_parameters_that_cannot_be_kept(tokenizer, parameters, param):
    with pytest.raises(RequestError) as caught:
        spec_for(tokenizer, [tool("f", True, **parameters)], "auto")
    assert caught.value.code == "invalid_json_schema"
    assert param in (None, caught.value.param)


def test_parameters_of_any_kind_do_not_crash(tokenizer):
    """Not strict: odd schemas lose keywords or are refused, in one way only."""
    rng = random.Random(1)
    values = [5, None, "x", [], {}, True, False, ["string"], {"type": "string"}, -1, 2.5, [{}]]
    keys = [
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "items",
        "properties",
        "required",
        "minLength",
        "maxLength",
        "pattern",
        "$ref",
        "$defs",
        "minimum",
        "additionalProperties",
        "prefixItems",
        "nullable",
        "format",
    ]
    for _ in range(400):
        inner = {k: rng.choice(values) for k in rng.sample(keys, rng.randint(0, 4))}
        outer = {k: rng.choice(values) for k in rng.sample(keys, rng.randint(0, 2))}
        outer.setdefault("properties", {"a": inner})
        for asked in ("required", "auto"):
            try:
                spec_for(tokenizer, [tool("f", **outer)], asked)
            except RequestError as err:
                assert err.code in ("invalid_json_schema", "grammar_error") and asked == "required"
        try:
            content_grammar({"guided_json": inner})
        except RequestError as err:
            assert err.code == "invalid_json_schema"


def endless() -> list[dict]:
    """Small or large schemas that would take for ever without a bound."""
    many = {f"k{i}": {"$ref": "#/$defs/x"} for i in range(300)}
    branch = {"anyOf": [{"$ref": "#/$defs/x"}] * 3}
    chain: dict = {
        f"d{i}": {"properties": {k: {"$ref": f"#/$defs/d{i + 1}"} for k in "ab"}}
        for i in range(300)
    }
    chain |= {"d300": {"type": "string"}, "x": {"$ref": "#/$defs/d0"}}
    text = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]}
    allof = {"type": "string", "allOf": [{"$ref": "#/$defs/x"}] * 3}
    return [
        {"properties": {"a": text}, "$defs": {"x": branch}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": allof}},
        {"properties": many, "$defs": chain},
        {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}},
    ]


@pytest.mark.parametrize("number", range(4))
def test_work_on_schemas_is_bounded(tokenizer, number):
    parameters = endless()[number]
    began = time.process_time()
    with pytest.raises(RequestError) as caught:
        spec_for(tokenizer, [tool("f", True, **parameters)], "required")
    assert caught.value.code == "invalid_json_schema"
    if number == 3:
        with pytest.raises(RequestError):
            content_grammar({"guided_json": parameters})
    assert time.process_time() - began < 10
