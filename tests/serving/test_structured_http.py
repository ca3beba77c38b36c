"""Structured output and forced calls over HTTP: what the engine is asked for, what comes back."""

import httpx
import pytest
from serving_fakes import serve

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with serve() as served:
        yield served


@pytest.fixture
def http(server):
    server.engine.scripts.clear()
    server.engine.requests.clear()
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


def test_grammar_reaches_the_engine(server, http):
    """It starts after the thought, in a raw completion at once."""
    markers = server.tokenizer.markers
    server.say("t</think>{}")
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    body = {"messages": HELLO, "response_format": form, "n": 2}
    server.say("t</think>{}")
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    for request in server.engine.requests[-2:]:
        assert request.grammar.start_id == markers.think_close and request.grammar.trigger_id == -1
        assert '"json_schema"' in request.grammar.source
    server.say("yes")
    reply = http.post("/v1/completions", json={"prompt": "a", "guided_choice": ["yes"]})
    assert reply.json()["choices"][0]["text"] == "yes"
    assert server.engine.requests[-1].grammar.start_id == -1


def test_forced_calls(server, http):
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    call = "<tool_call>f</tool_call>"
    body = {"messages": HELLO, "tools": tools}
    server.say(f"t</think>{call}{call}<tool_call>g</tool_call>")
    choice = http.post("/v1/chat/completions", json={**body, "tool_choice": "required"}).json()[
        "choices"
    ][0]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["f"]
    assert choice["finish_reason"] == "tool_calls"
    grammar = server.engine.requests[-1].grammar
    assert grammar.banned_before == (server.tokenizer.markers.tool_call_open,)
    server.say(f"t</think>{call}")
    named = {"type": "function", "function": {"name": "f"}}
    choice = http.post("/v1/chat/completions", json={**body, "tool_choice": named}).json()[
        "choices"
    ][0]
    assert choice["finish_reason"] == "stop" and len(choice["message"]["tool_calls"]) == 1
    server.say("t</think>ok")
    reply = http.post("/v1/chat/completions", json={**body, "tool_choice": "none"})
    request = server.engine.requests[-1]
    assert reply.status_code == 200 and request.grammar is None
    assert request.sampling.banned_ids == (server.tokenizer.markers.tool_call_open,)
