"""Prompt vectors: exact text and segments on all layers (template, wire, Messages, Responses)."""

import json

import pytest

from tests.conformance.sets import read_json
from twining.serving.chat_format import (
    build_prompt,
    from_messages_body,
    from_responses_body,
    prompt_text,
    render,
)


def layer(path, name):
    """Vectors of one layer; a file may lack a layer."""
    return [v for v in read_json(path)["vectors"] if v["layer"] == name]


def test_every_layer_is_known(chat_file):
    known = {"template", "wire", "messages_api", "responses_api"}
    layers = {v["layer"] for v in read_json(chat_file)["vectors"]}
    assert layers and layers <= known


def has_bad_arguments(vector):
    """Whether some call in the history has arguments that are no JSON object."""
    for message in vector["messages"]:
        for call in message.get("tool_calls") or ():
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, str) and arguments.strip():
                try:
                    arguments = json.loads(arguments)
                except ValueError:
                    return True
            if not isinstance(arguments, dict | None) and arguments != "":
                return True
    return False


def check(vector, segments):
    assert prompt_text(segments) == vector["prompt"], vector["name"]
    assert [list(s) for s in segments] == vector["segments"], vector["name"]


def test_template_layer(chat_file):
    for v in layer(chat_file, "template"):
        check(v, render(v["messages"], v["tools"], **v["kwargs"]))


def prompt_of(vector, body):
    kwargs = dict(vector["kwargs"])
    server = kwargs.pop("server")
    return build_prompt(kwargs | body, **server)


def test_wire_layer(chat_file):
    for v in layer(chat_file, "wire"):
        prompt = prompt_of(v, {"messages": v["messages"], "tools": v["tools"]})
        check(v, prompt.segments)
        assert ("history_arguments_unparsed" in prompt.warnings) == has_bad_arguments(v), v["name"]


@pytest.mark.parametrize(
    ("name", "mapping"),
    [("messages_api", from_messages_body), ("responses_api", from_responses_body)],
)
def test_other_apis(chat_file, name, mapping):
    for v in layer(chat_file, name):
        mapped = mapping(v["request"])
        want = json.dumps(v["messages"]).replace("data:\\u2026", "data:image/png;base64,AA==")
        assert mapped.body["messages"] == json.loads(want), v["name"]
        assert mapped.body.get("tools") == v["tools"], v["name"]
        server = v["kwargs"]["server"]
        check(v, build_prompt(mapped.body, **server).segments)
        # the vector's own chat form gives the same prompt
        check(v, prompt_of(v, {"messages": v["messages"], "tools": v["tools"]}).segments)
