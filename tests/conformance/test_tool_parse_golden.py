"""Output vectors: every listed chunking, single characters, random chunkings, and token pieces."""

import json
import random

import pytest

from tests.conformance.sets import read_json
from twining.serving.parsing import (
    CallArguments,
    CallEnded,
    CallOpened,
    ContentText,
    Marker,
    OutputParser,
    ParserOptions,
    ReasoningText,
    TextParser,
)
from twining.serving.tokenizer import IncrementalDecoder


@pytest.fixture
def vectors(tool_file):
    found = read_json(tool_file)["vectors"]
    assert found
    return found


def options(vector):
    return ParserOptions(
        tools=vector["tools"],
        tool_choice=vector["tool_choice"],
        parallel_tool_calls=vector["parallel_tool_calls"],
    )


def same_json(got, want):
    return json.dumps(got, sort_keys=True) == json.dumps(want, sort_keys=True) and got == want


def check(vector, events, message, how):
    where = f"{vector['name']}, {how}"
    want = vector["expect"]
    assert message.reasoning_content == want["reasoning_content"], where
    assert message.content == want["content"], where
    assert message.finish_reason == want["finish_reason"], where
    assert len(message.tool_calls) == len(want["tool_calls"]), where
    for call, expected in zip(message.tool_calls, want["tool_calls"], strict=True):
        assert (call.name, call.is_complete) == (expected["name"], expected["complete"]), where
        if expected["complete"]:
            assert json.loads(call.arguments) == expected["arguments_json"], where
        assert call.arguments == expected["arguments"], where
    check_events(events, message, where)


def check_events(events, message, where):
    """Joined events equal the message; indices and order are as section 8.7 demands."""
    joined = {ReasoningText: "", ContentText: ""}
    arguments, ended, ids = [], [], []
    for event in events:
        match event:
            case ReasoningText() | ContentText():
                assert event.text, where
                joined[type(event)] += event.text
            case CallOpened():
                assert event.index == len(arguments), where
                arguments.append("")
                ids.append(event.id)
                assert message.tool_calls[event.index].name == event.name
            case CallArguments():
                assert event.index == len(arguments) - 1 and event.text, where
                arguments[event.index] += event.text
            case CallEnded():
                ended.append(event.index)
    assert joined[ReasoningText] == (message.reasoning_content or ""), where
    assert joined[ContentText] == (message.content or ""), where
    assert arguments == [call.arguments for call in message.tool_calls], where
    assert ids == [call.id for call in message.tool_calls] and len(set(ids)) == len(ids), where
    assert ended == [i for i, c in enumerate(message.tool_calls) if c.is_complete], where


def run_text(vector, chunks):
    parser = TextParser(options(vector), start=vector["initial_state"])
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    events += parser.finish(vector["end"])
    return events, parser.message()


def random_chunks(text, rng):
    at, chunks = 0, []
    while at < len(text):
        step = rng.randrange(1, rng.choice([2, 4, 9, 40]))
        chunks.append(text[at : at + step])
        at += step
    return chunks


def test_text_mode_all_chunkings(vectors):
    rng = random.Random(8)
    for v in vectors:
        if not v["chunkings"]:
            continue
        for name, chunks in v["chunkings"].items():
            assert "".join(chunks) == v["text"]
            check(v, *run_text(v, chunks), name)
        check(v, *run_text(v, list(v["text"])), "characters")
        for number in range(30):
            check(v, *run_text(v, random_chunks(v["text"], rng)), f"random {number}")


def test_token_pieces(vectors):
    for v in vectors:
        parser = OutputParser(options(v), start=v["initial_state"])
        decoder, events = IncrementalDecoder(), []
        for piece in v["pieces"]:
            if "m" in piece:
                decoder.reset()
                events += parser.feed_marker(Marker(piece["m"]))
            else:
                data = bytes.fromhex(piece["hex"]) if "hex" in piece else piece["t"].encode()
                events += parser.feed_text(decoder.feed(data))
        events += parser.finish(v["end"])
        check(v, events, parser.message(), "pieces")


def test_long_string_streams(vectors):
    """A declared string comes in many deltas, not in one at the end."""
    for v in vectors:
        texts = [t for call in v["expect"]["tool_calls"] for t in long_strings(call, v["tools"])]
        if len(texts) != 1 or len(texts[0]) < 0.85 * len(v["text"]):
            continue
        parser = TextParser(options(v), start=v["initial_state"])
        chunks = [v["text"][i : i + 8] for i in range(0, len(v["text"]), 8)]
        with_arguments = sum(
            any(isinstance(event, CallArguments) for event in parser.feed(chunk))
            for chunk in chunks
        )
        assert with_arguments > 0.7 * len(chunks), v["name"]


def long_strings(call, tools):
    """String arguments of 400 characters or more that the tool declares as strings."""
    declared = {}
    for tool in tools:
        function = tool.get("function", tool)
        if function["name"] == call["name"]:
            declared = function.get("parameters", {}).get("properties", {})
    values = call["arguments_json"] if call["complete"] else {}
    return [
        value
        for key, value in values.items()
        if isinstance(value, str) and len(value) >= 400 and declared.get(key) == {"type": "string"}
    ]
