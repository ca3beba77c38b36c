"""Access rules, bodies, paths and limits over raw HTTP (spec/api.md 1, 2, 3, 9)."""

import json
import socket

import httpx
import pytest
from serving_fakes import CONTEXT, FakeEngine, serve

from twining.config import ServerConfig

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with serve(ServerConfig(max_body_mib=1)) as served:
        served.engine.default.ids = served.ids("t</think>ok")
        served.engine.default.stop_id = served.stop
        yield served


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


def post(http, content, kind="application/json", path=CHAT, **headers):
    return http.post(path, content=content, headers={"content-type": kind, **headers})


def check(reply, status, code, param=None):
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param), error
    assert error["status"] == status and "\n" not in error["message"]
    assert set(error) >= {"message", "type", "param", "code", "status"}


# ------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"messages": [NaN]}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 1000 + b"}",
        b'{"a": "\xff"}',
        b'{"a":' + b"[" * 200 + b"]" * 200 + b"}",
        b"[" * 100_000,
        b'{"a": "' + b'\\"' * 100_000,
        b'{"a": 1}}',
    ],
)
def test_malformed_json(http, content):
    check(post(http, content), 400, "invalid_json")


def test_lone_surrogates_are_replaced(server, http):
    body = b'{"messages": [{"role": "user", "content": "a\\ud83d b"}]}'
    assert post(http, body).status_code == 200
    text = server.tokenizer.decode(server.engine.requests[-1].prompt_ids)
    assert "a\ufffd b" in text


def test_duplicate_keys_last_wins(server, http):
    body = json.dumps(HELLO)[:-1] + ', "max_tokens": 0, "max_tokens": 5}'
    assert post(http, body).status_code == 200
    assert server.engine.requests[-1].max_tokens == 5


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_other_media_types(http, kind):
    check(post(http, json.dumps(HELLO), kind), 415, "unsupported_media_type")


def test_charset_and_compression(http):
    assert post(http, json.dumps(HELLO), "application/json; charset=UTF-8").status_code == 200
    check(
        post(http, b"x", **{"content-encoding": "gzip"}),
        415,
        "unsupported_media_type",
    )
    check(
        post(http, json.dumps(HELLO), "application/json; charset=latin-1"),
        415,
        "unsupported_media_type",
    )


def test_body_too_large(server, http):
    check(post(http, b"x" * ((1 << 20) + 1)), 413, "body_too_large")

    def chunks():
        for _ in range(20):
            yield b"x" * (1 << 16)

    check(post(http, chunks()), 413, "body_too_large")
    # The announced length alone is enough; no body needs to be sent.
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=5) as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 99999999999999999999999\r\n\r\n"
        )
        assert sock.recv(4096).split()[1] in (b"413", b"400")


def test_headers_too_large(http):
    check(post(http, b"{}", **{"x-pad": "a" * (65 << 10)}), 431, "headers_too_large")
    many = {f"x-h{i}": "1" for i in range(101)}
    check(post(http, b"{}", **many), 431, "headers_too_large")


# ------------------------------------------------------------------------------- paths


def test_paths(http):
    for path in (CHAT, "/chat/completions", CHAT + "/", CHAT + "?beta=true"):
        assert post(http, json.dumps(HELLO), path=path).status_code == 200, path
    for path in ("/v1/models", "/models", "/models/", "/v1/models/glm-5.3-flash"):
        assert http.get(path).status_code == 200, path
    check(http.get("/v1/nothing"), 404, "not_found")
    reply = http.get("/v1/v1/models")
    check(reply, 404, "not_found")
    assert "one /v1" in reply.json()["error"]["message"]
    reply = http.post("/v1/embeddings", json={})
    check(reply, 404, "not_found")
    assert "not offered" in reply.json()["error"]["message"]
    reply = http.get(CHAT)
    check(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    check(http.post("/health", json={}), 405, "method_not_allowed")
    assert http.get("/").status_code == 200 and http.head("/").status_code == 200
    check(http.get("/v1/models/unknown/name"), 404, "model_not_found", "model")


def test_request_ids(http):
    reply = post(http, json.dumps(HELLO), **{"x-request-id": "mine-1.2_3"})
    assert reply.headers["x-request-id"] == "mine-1.2_3"
    reply = post(http, b"{", **{"x-request-id": "not valid"})
    assert reply.headers["x-request-id"].startswith("req_")
    reply = post(http, json.dumps({**HELLO, "request_id": "body-id"}))
    assert reply.headers["x-request-id"] == "body-id"
    assert reply.json()["id"] == "chatcmpl-body-id"


def test_status_pages(server, http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ping").content == b""
    assert http.get("/version").json()["version"]
    assert http.get("/load").json() == {"server_load": 0}
    post(http, json.dumps(HELLO))
    metrics = http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'vllm:request_success_total{engine="0",finished_reason="stop"' in metrics.text
    assert "vllm:num_requests_running" in metrics.text
    data = http.get("/v1/models").json()
    assert data["first_id"] == data["last_id"] == "glm-5.3-flash"
    assert data["data"][0]["max_model_len"] == CONTEXT
    assert data["data"][0]["architecture"]["input_modalities"] == ["text"]


# ------------------------------------------------------------------------------- context


def raw(http, **fields):
    return http.post("/v1/completions", json={"max_tokens": -1, **fields})


def test_context_limits(server, http):
    server.engine.scripts.clear()
    ids = [7] * (CONTEXT - 1)
    reply = raw(http, prompt=ids)
    assert reply.status_code == 200
    assert server.engine.requests[-1].max_tokens == 1
    assert "x-warnings" not in reply.headers
    reply = raw(http, prompt=ids, max_tokens=100)
    assert server.engine.requests[-1].max_tokens == 1
    assert reply.headers["x-warnings"] == "max_tokens_clamped"
    reply = raw(http, prompt=[7] * CONTEXT)
    check(reply, 400, "context_length_exceeded")
    error = reply.json()["error"]
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens.")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (CONTEXT, CONTEXT)
    reply = http.post(CHAT, json={"messages": [{"role": "user", "content": "word " * 5000}]})
    check(reply, 400, "context_length_exceeded")
    reply = http.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 900_000}]})
    check(reply, 400, "context_length_exceeded")
    assert "at least" in reply.json()["error"]["message"]


# ------------------------------------------------------------------------------- availability


def test_engine_down_or_loading():
    engine = FakeEngine()
    with serve(engine=engine) as served, httpx.Client(base_url=served.url) as http:
        engine.healthy = False
        check(http.post(CHAT, json=HELLO), 503, "engine_failed")
        assert http.get("/health").status_code == 503
        engine.ready = None
        reply = http.post(CHAT, json=HELLO)
        check(reply, 503, "model_loading")
        assert reply.headers["retry-after"] == "5"
        assert http.get("/health").json()["status"] == "loading model"
        assert http.get("/ping").status_code == 503
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
        served.context.phase.is_draining = True
        check(http.post("/v1/completions", json={"prompt": "x"}), 503, "shutting_down")


def test_one_model_only():
    with (
        serve(ServerConfig(any_model=False, aliases=("other",))) as served,
        httpx.Client(base_url=served.url) as http,
    ):
        for name in ("glm-5.3-flash", "other", "other:low"):
            served.say("t</think>x")
            assert http.post(CHAT, json={**HELLO, "model": name}).json()["model"] == name
        check(http.post(CHAT, json={**HELLO, "model": "gpt"}), 404, "model_not_found", "model")


# ------------------------------------------------------------------------------- access


def test_keys():
    config = ServerConfig(api_keys=("secret", "zw\u00f6lf"))
    with serve(config) as served, httpx.Client(base_url=served.url) as http:
        for path in ("/health", "/ping", "/", "/health/"):
            assert http.get(path).status_code == 200
        paths = ["/v1/models", "/models", "/metrics", "/version", "/load", "/nothing"]
        for path in paths:
            reply = http.get(path)
            check(reply, 401, "missing_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
        for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize", "/apply-template"):
            check(http.post(path, json=HELLO), 401, "missing_api_key")
        for headers in (
            {"authorization": "Bearer secret"},
            {"authorization": "bearer  secret"},
            {"x-api-key": "secret"},
            {"api-key": "secret"},
            {"x-api-key": "zw\u00f6lf".encode()},
        ):
            assert http.get("/v1/models", headers=headers).status_code == 200, headers
        for headers in (
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic secret"},
            {"authorization": "Bearer wrong", "x-api-key": "secret"},
            {"x-api-key": ""},
        ):
            check(http.get("/v1/models", headers=headers), 401, "invalid_api_key")


def test_host_check(server, http):
    for host in ("localhost", "127.0.0.1:99", "[::1]:80", "a.localhost"):
        assert http.get("/version", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80"):
        check(http.get("/version", headers={"host": host}), 403, "host_not_allowed")
    with (
        serve(ServerConfig(allowed_hosts=("my.box",))) as served,
        httpx.Client(base_url=served.url) as other,
    ):
        assert other.get("/version", headers={"host": "my.box:80"}).status_code == 200


def test_cors_off(http):
    reply = http.get("/version", headers={"origin": "https://a.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]
    check(http.options(CHAT), 405, "method_not_allowed")


def test_cors_on():
    config = ServerConfig(cors_origins=("https://a.example",), api_keys=("k",))
    asked = {"access-control-request-headers": "X-Stainless-Arch, content-type, x-evil"}
    with serve(config) as served, httpx.Client(base_url=served.url) as http:
        reply = http.options(CHAT, headers={"origin": "https://a.example", **asked})
        assert reply.status_code == 204
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert reply.headers["access-control-allow-headers"] == "x-stainless-arch, content-type"
        assert reply.headers["access-control-max-age"] == "600"
        assert "access-control-allow-credentials" not in reply.headers
        check(http.options(CHAT, headers={"origin": "https://b"}), 403, "origin_not_allowed")
        reply = http.get("/version", headers={"origin": "https://a.example", "x-api-key": "k"})
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
