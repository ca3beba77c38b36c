"""Raw completions (spec/api.md 8) and the token tools (section 15)."""

import json

import httpx
import openai
import pytest
from serving_fakes import CONTEXT, serve


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


def complete(http, **fields):
    return http.post("/v1/completions", json={"prompt": "hello", **fields})


def test_official_client(server, http):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
    for stream in (False, True):
        server.say("three <think>and</think> four")
        reply = client.completions.create(model="m", prompt="one two", stream=stream)
        text = "".join(c.choices[0].text for c in reply) if stream else reply.choices[0].text
        assert text == "three <think>and</think> four"
    request = server.engine.requests[0]
    assert request.prompt_ids == server.ids("one two")
    assert request.max_tokens == 16
    assert set(request.stop_ids) == set(server.tokenizer.stop_ids)


def test_special_tokens_are_dropped_unless_asked(server, http):
    for skip, text in ((True, "ab"), (False, "a<|system|>b")):
        server.say("a<|system|>b")
        reply = complete(http, skip_special_tokens=skip).json()
        assert reply["choices"][0]["text"] == text
        assert reply["object"] == "text_completion"


def test_prompt_forms_and_numbering(server, http):
    ids = server.ids("abc")
    for prompt, count in (("x", 1), (["x", "y"], 2), (ids, 1), ([ids, ids, ids], 3)):
        for i in range(2 * count):
            server.say(f"reply {i}")
        reply = complete(http, prompt=prompt, n=2).json()
        assert [c["text"] for c in reply["choices"]] == [f"reply {i}" for i in range(2 * count)]
        assert [c["index"] for c in reply["choices"]] == list(range(2 * count))
        lengths = [len(r.prompt_ids) for r in server.engine.requests[-2 * count :]]
        assert reply["usage"]["prompt_tokens"] == sum(lengths) // 2
    server.say("x")
    complete(http, prompt="a<|user|>b")
    assert server.tokenizer.markers.user in server.engine.requests[-1].prompt_ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("burst", [1, 4, 100])
def test_stop_strings_match_the_whole_text(server, http, burst, stream):
    server.say("a STOP</think> b", burst=burst)
    reply = complete(http, stop=["STOP"], max_tokens=100, logprobs=1, stream=stream)
    if stream:
        data = [json.loads(x[6:]) for x in reply.text.split("\n") if x.startswith("data: {")]
        choices = [c["choices"][0] for c in data]
        text = "".join(c["text"] for c in choices)
        tokens = [t for c in choices if c["logprobs"] for t in c["logprobs"]["tokens"]]
        offsets = [o for c in choices if c["logprobs"] for o in c["logprobs"]["text_offset"]]
        last = choices[-1]
    else:
        last = reply.json()["choices"][0]
        text, tokens = last["text"], last["logprobs"]["tokens"]
        offsets = last["logprobs"]["text_offset"]
    assert text == "a " == "".join(tokens)
    assert [text[o:][: len(t)] for o, t in zip(offsets, tokens, strict=True)] == tokens
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "STOP")


def test_echo_and_logprobs(server, http):
    server.say(" world", stop_id=-1)
    reply = complete(http, prompt="hello", echo=True, logprobs=2).json()["choices"][0]
    assert reply["text"] == "hello world"
    lists = reply["logprobs"]
    assert "".join(lists["tokens"]) == "hello world"
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert all(value < 0 for value in lists["token_logprobs"][1:])
    assert [reply["text"][o] for o in lists["text_offset"]] == [t[0] for t in lists["tokens"]]
    assert server.engine.requests[0].prompt_logprobs == 2


def test_prefill_only(server, http):
    server.say("unused")
    reply = complete(http, max_tokens=0).json()
    assert reply["choices"][0]["text"] == ""
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["timings"]["predicted_per_token_ms"] == 0


def test_output_limit_names(server, http):
    for fields, limit in (
        ({"max_completion_tokens": 3}, 3),
        ({"n_predict": 4}, 4),
        ({"max_tokens": 5, "n_predict": 4}, 5),
        ({"max_tokens": -1}, CONTEXT - len(server.ids("hello"))),
    ):
        server.say("x")
        complete(http, **fields)
        assert server.engine.requests[-1].max_tokens == limit


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": None}, "missing_field", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": []}, "wrong_type", "prompt"),
        ({"prompt": [[]]}, "wrong_type", "prompt"),
        ({"prompt": 5}, "wrong_type", "prompt"),
        ({"prompt": ["a", 5]}, "wrong_type", "prompt"),
        ({"prompt": [True]}, "wrong_type", "prompt"),
        ({"prompt": [100_000]}, "out_of_range", "prompt"),
        ({"prompt": [-1]}, "out_of_range", "prompt"),
        ({"prompt": ["x"] * 33}, "too_many_items", "prompt"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"max_tokens": -2}, "out_of_range", "max_tokens"),
        ({"logprobs": 21}, "out_of_range", "logprobs"),
        ({"logprobs": True}, "wrong_type", "logprobs"),
        ({"response_format": {"type": "json"}}, "invalid_value", "response_format"),
        ({"guided_regex": "(a"}, "grammar_error", "guided_regex"),
        ({"echo": True, "logprobs": 1, "stream": True}, "conflicting_fields", "echo"),
        ({"temperature": -1}, "out_of_range", "temperature"),
    ],
)
def test_bad_fields(server, http, fields, code, param):
    reply = complete(http, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, code, param), error
    assert not server.engine.requests


# ------------------------------------------------------------------------------- token tools


def test_tokenize_forms(server, http):
    text = "hello <|user|> \u00e9你"
    ids = server.ids(text)
    reply = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert reply["tokens"] == ids and reply["count"] == len(ids)
    assert reply["max_model_len"] == CONTEXT and len(reply["token_strs"]) == len(ids)
    assert http.post("/tokenize", json={"prompt": text}).json()["token_strs"] is None
    plain = http.post("/tokenize", json={"content": text, "parse_special": False}).json()
    assert plain == {"tokens": server.tokenizer.encode_text(text)}
    pieces = http.post("/tokenize", json={"content": "\u20ac", "with_pieces": True}).json()
    assert all(isinstance(p["piece"], str | list) for p in pieces["tokens"])
    data = b"".join(
        p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"])
        for p in pieces["tokens"]
    )
    assert data.decode() == "\u20ac"
    encoded = http.post("/v1/token/encode", json={"text": text}).json()
    assert encoded == {"tokens": ids, "length": len(ids)}


def test_messages_and_template(server, http):
    body = {"messages": [{"role": "user", "content": "hi <|user|>"}], "reasoning_effort": "low"}
    text = http.post("/apply-template", json=body).json()["prompt"]
    assert text == (
        "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|>hi <|user|><|assistant|><think>"
    )
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert tokens.count(server.tokenizer.markers.user) == 1
    listed = http.post("/v1/token/encode", json={"text": body["messages"]}).json()["tokens"]
    assert len(listed) == len(tokens) or listed


def test_detokenize_is_the_inverse(server, http):
    text = "hello <|user|> \u00e9你"
    ids = server.ids(text)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {
        "prompt": text,
        "content": text,
    }
    assert http.post("/v1/token/decode", json={"tokens": ids}).json() == {"text": text}
    half = server.tokenizer.encode_text("\u20ac")[:-1]
    assert http.post("/detokenize", json={"tokens": half}).json()["content"] == "\ufffd"


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/tokenize", {}, "missing_field"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "conflicting_fields"),
        ("/tokenize", {"prompt": 5}, "wrong_type"),
        ("/detokenize", {}, "missing_field"),
        ("/detokenize", {"tokens": [1.5]}, "wrong_type"),
        ("/detokenize", {"tokens": [-1]}, "out_of_range"),
        ("/detokenize", {"tokens": [154_880]}, "out_of_range"),
        ("/apply-template", {"messages": []}, "invalid_value"),
        ("/tokenize", {"prompt": "x" * (64 * CONTEXT)}, "context_length_exceeded"),
    ],
)
def test_bad_token_requests(http, path, body, code):
    reply = http.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code), reply.text


def test_token_tools_need_no_engine(server, http):
    server.engine.healthy = False
    try:
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
    finally:
        server.engine.healthy = True
