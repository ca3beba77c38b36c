"""The README's conversation with the bundled demo model, through the official client."""

import json
from collections.abc import Iterator

import pytest
from openai import OpenAI

from benchmarks.server import serving

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with serving("--threads", "1", "--max-seqs", "2") as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_a_question(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="twining-demo",
        temperature=0,
        messages=[{"role": "user", "content": "What is 47 + 38?"}],
    )
    assert reply.choices[0].message.content == "85"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None and reply.usage.completion_tokens > 0


def test_a_stream_equals_the_whole_reply(client: OpenAI) -> None:
    body = {
        "model": "twining-demo",
        "seed": 5,
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    }
    whole = client.chat.completions.create(**body)
    parts, reasoning = [], []
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            parts.append(choice.delta.content or "")
            reasoning.append(getattr(choice.delta, "reasoning_content", None) or "")
    assert "".join(parts) == whole.choices[0].message.content
    assert "".join(reasoning) == whole.choices[0].message.reasoning_content
    assert "fox" in "".join(parts)


def test_a_tool_is_called_and_its_result_used(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    body = {"model": "twining-demo", "temperature": 0, "tools": [WEATHER]}
    reply = client.chat.completions.create(**body, messages=messages).choices[0]
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}

    streamed: dict[str, str] = {"name": "", "arguments": ""}
    for chunk in client.chat.completions.create(**body, messages=messages, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or []:
                streamed["name"] += delta.function.name or ""
                streamed["arguments"] += delta.function.arguments or ""
    assert streamed == {"name": "get_weather", "arguments": call.function.arguments}

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "rain", "celsius": 7}'}
    history = [*messages, reply.message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**body, messages=history).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content
