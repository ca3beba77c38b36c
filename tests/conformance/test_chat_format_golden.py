"""Prompt vectors: exact text and segments on all layers (template, wire, Messages, Responses)."""

import json

import pytest

from twining.serving.chat_format import (
    build_prompt,
    from_messages_body,
    from_responses_body,
    prompt_text,
    render,
)


@pytest.fixture(scope="module")
def vectors(golden):
    path = golden / "chat_format.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    found = json.loads(path.read_text(encoding="utf-8"))["vectors"]
    assert len(found) == 68
    return found


def layer(vectors, name):
    found = [v for v in vectors if v["layer"] == name]
    assert found
    return found


def check(vector, segments):
    assert prompt_text(segments) == vector["prompt"], vector["name"]
    assert [list(s) for s in segments] == vector["segments"], vector["name"]


def test_template_layer(vectors):
    for v in layer(vectors, "template"):
        check(v, render(v["messages"], v["tools"], **v["kwargs"]))


def prompt_of(vector, body):
    kwargs = dict(vector["kwargs"])
    server = kwargs.pop("server")
    return build_prompt(kwargs | body, **server)


def test_wire_layer(vectors):
    for v in layer(vectors, "wire"):
        prompt = prompt_of(v, {"messages": v["messages"], "tools": v["tools"]})
        check(v, prompt.segments)
        assert ("history_arguments_unparsed" in prompt.warnings) == (
            v["name"] == "wire_bad_arguments"
        )


@pytest.mark.parametrize(
    ("name", "mapping"),
    [("messages_api", from_messages_body), ("responses_api", from_responses_body)],
)
def test_other_apis(vectors, name, mapping):
    for v in layer(vectors, name):
        mapped = mapping(v["request"])
        want = json.dumps(v["messages"]).replace("data:\\u2026", "data:image/png;base64,AA==")
        assert mapped.body["messages"] == json.loads(want), v["name"]
        assert mapped.body.get("tools") == v["tools"], v["name"]
        server = v["kwargs"]["server"]
        check(v, build_prompt(mapped.body, **server).segments)
        # the vector's own chat form gives the same prompt
        check(v, prompt_of(v, {"messages": v["messages"], "tools": v["tools"]}).segments)
