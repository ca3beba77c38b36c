"""Raw event streams: order, headers, heartbeat, progress, cancellation, many clients at once."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving_fakes import FakeEngine, Script, serve

from twining.config import ServerConfig

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with serve(ServerConfig(heartbeat_s=0.1)) as served:
        yield served


@pytest.fixture
def http(server):
    server.engine.scripts.clear()
    server.engine.requests.clear()
    server.engine.cancelled.clear()
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


def events(reply):
    """Data of every event; the last one must be [DONE]."""
    lines = [line for line in reply.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_headers_and_order(server, http):
    server.say("r</think>c", burst=1)
    reply = http.post(CHAT, json={**HELLO, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in reply.headers
    chunks = events(reply)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "r", "reasoning": "r", "content": None},
        {"content": "c"},
        {"content": None},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert "timings" in chunks[-1] and "usage" not in chunks[-1]
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)


def test_usage_options(server, http):
    server.say("r</think>c")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http.post(CHAT, json={**HELLO, "stream": True, "stream_options": options}))
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 4
    assert chunks[-1]["choices"] == [] and "timings" in chunks[-1]
    assert "timings" not in chunks[-2]


def test_heartbeat_while_the_engine_is_silent(server, http):
    server.say("r</think>c", burst=1, delay_s=0.25)
    reply = http.post(CHAT, json={**HELLO, "stream": True})
    assert reply.text.count(": keep-alive\n\n") >= 3
    assert events(reply)[-1]["choices"][0]["finish_reason"] == "stop"


def test_nothing_is_sent_while_queued(server, http):
    server.say("r</think>c", queued_s=0.5)
    start = time.monotonic()
    with http.stream("POST", CHAT, json={**HELLO, "stream": True}) as reply:
        headers_after = time.monotonic() - start
        assert reply.status_code == 200
        text = reply.read().decode()
    assert headers_after > 0.45
    assert text.startswith("data: ")


def test_status_comes_at_admission(server, http):
    """A long prefill does not hold back the status line."""
    server.say("r</think>c", prefill_s=0.5)
    start = time.monotonic()
    with http.stream("POST", CHAT, json={**HELLO, "stream": True}) as reply:
        assert reply.status_code == 200
        assert time.monotonic() - start < 0.4
        reply.read()
    assert time.monotonic() - start > 0.4


def test_progress_and_per_token_timings(server, http):
    server.say("r</think>c")
    body = {**HELLO, "stream": True, "return_progress": True, "timings_per_token": True}
    chunks = events(http.post(CHAT, json=body))
    progress = [c for c in chunks if "prompt_progress" in c]
    total = len(server.engine.requests[0].prompt_ids)
    assert progress[0]["choices"] == []
    assert progress[0]["prompt_progress"]["processed"] == total
    assert progress[0]["prompt_progress"]["total"] == total
    assert [c["timings"]["predicted_n"] for c in chunks if "timings" in c] == [1, 3, 4]


def test_error_event_then_done(server, http):
    server.say("r</think>abc", error=("engine_failed", "it died"), error_after=3)
    chunks = events(http.post(CHAT, json={**HELLO, "stream": True}))
    assert chunks[-1]["error"]["code"] == "engine_failed"
    assert all("error" in c or not c["choices"][0]["finish_reason"] for c in chunks)


def test_a_late_error_of_one_choice_ends_the_other(server, http):
    server.say("r</think>" + "x" * 200, delay_s=0.01)
    server.say("r</think>abc", error=("engine_failed", "it died"), error_after=3)
    reply = http.post(CHAT, json={**HELLO, "n": 2})
    assert reply.status_code == 503
    server.wait_idle()
    assert server.engine.requests[0].id in server.engine.cancelled


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "decode"])
def test_disconnect_cancels(server, http, stream, phase):
    options = {"queued_s": 30.0} if phase == "queued" else {"delay_s": 0.02}
    server.say("r</think>" + "word " * 300, burst=1, **options)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**HELLO, "stream": stream}).encode()
    sock = socket.create_connection((host, int(port)), timeout=5)
    sock.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    end = time.monotonic() + 3
    while not server.engine.open:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.1)
    assert server.engine.open
    sock.close()
    server.wait_idle(2.0)
    assert server.engine.cancelled == [server.engine.requests[-1].id]
    assert server.context.phase.active == 0


def test_many_clients_get_their_own_text(server):
    """Streams do not mix: each client reads the text made for its own prompt."""
    engine = FakeEngine()
    with serve(engine=engine) as served:

        class PerPrompt(FakeEngine):
            def submit(self, request):
                text = served.tokenizer.decode(request.prompt_ids)
                number = text.split("number ")[1].split(" ")[0]
                self.scripts.append(
                    Script(ids=served.ids(f"t</think>I am {number}."), stop_id=served.stop)
                )
                return super().submit(request)

        engine.__class__ = PerPrompt

        def ask(number):
            body = {
                "messages": [{"role": "user", "content": f"number {number} !"}],
                "stream": number % 2 == 0,
            }
            reply = httpx.post(served.url + CHAT, json=body, timeout=20)
            if number % 2:
                return reply.json()["choices"][0]["message"]["content"]
            return "".join(c["choices"][0]["delta"].get("content") or "" for c in events(reply))

        with ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(ask, range(48)))
        assert replies == [f"I am {n}." for n in range(48)]
        served.wait_idle()
        assert served.context.phase.active == 0
