"""Chat completions through the official client: whole replies, streams, tools, errors."""

import json

import openai
import pytest
from serving_fakes import serve

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
CALL = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zo\u00eb 你</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with serve() as served:
        yield served


@pytest.fixture
def client(server):
    server.engine.scripts.clear()
    server.engine.requests.clear()
    server.engine.cancelled.clear()
    return openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)


def chat(client, **options):
    return client.chat.completions.create(
        model="glm-5.3-flash", messages=options.pop("messages", HELLO), **options
    )


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_whole_reply(server, client, burst):
    server.say("three and four</think>The sum is seven.", burst=burst)
    reply = chat(client)
    choice = reply.choices[0]
    assert choice.message.content == "The sum is seven."
    assert choice.message.reasoning_content == "three and four"
    assert choice.message.reasoning == "three and four"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.stop_reason is None
    assert choice.message.tool_calls is None
    expected = server.ids("three and four</think>The sum is seven.")
    prompt = server.engine.requests[0].prompt_ids
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == len(expected) + 1
    assert reply.usage.total_tokens == len(prompt) + len(expected) + 1
    reasoning = len(server.ids("three and four</think>"))
    assert reply.usage.completion_tokens_details.reasoning_tokens == reasoning
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.timings["predicted_n"] == reply.usage.completion_tokens
    assert reply.timings["draft_steps"] == 4
    assert reply.timings["prompt_ms"] == 2000.0


def test_prompt_is_the_rendered_chat(server, client):
    server.say("ok</think>ok")
    chat(client, messages=[{"role": "system", "content": "be brief"}, *HELLO])
    text = server.tokenizer.decode(server.engine.requests[0].prompt_ids, skip_special=False)
    assert text == (
        "[gMASK]<sop><|system|>Reasoning Effort: High<|system|>be brief<|user|>hello"
        "<|assistant|><think>"
    )


def test_stream_joins_to_the_whole_reply(server, client):
    text = "think a\n\nb</think>  Answer: <b>你好</b>, said Zo\u00eb.\n" + "x" * 50
    server.say(text, burst=3)
    whole = chat(client)
    server.say(text, burst=2)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    first = chunks[0].choices[0]
    assert first.delta.role == "assistant" and first.delta.content == ""
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    reasoning = "".join(
        getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks if c.choices
    )
    assert content == whole.choices[0].message.content
    assert reasoning == whole.choices[0].message.reasoning_content
    assert len({c.id for c in chunks}) == 1
    assert all("content" in c.choices[0].delta.model_fields_set for c in chunks if c.choices)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].timings["predicted_n"] == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_two_parallel_tool_calls(server, client):
    server.say("look</think>Let me see.\n\n" + CALL + CALL.replace("3", "12"), burst=4)
    whole = chat(client, tools=TOOLS)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    arguments = [json.loads(c.function.arguments) for c in message.tool_calls]
    assert arguments == [{"city": "Zo\u00eb 你", "days": 3}, {"city": "Zo\u00eb 你", "days": 12}]
    assert len({c.id for c in message.tool_calls}) == 2

    server.say("look</think>Let me see.\n\n" + CALL + CALL.replace("3", "12"), burst=1)
    parts: dict[int, str] = {}
    names = {}
    for chunk in chat(client, tools=TOOLS, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index not in parts:
                assert call.id and call.type == "function" and call.function.name
                assert call.function.arguments == ""
                names[call.index] = call.function.name
                parts[call.index] = ""
            else:
                assert call.function.name is None and call.id is None
                parts[call.index] += call.function.arguments
    assert names == {0: "get_weather", 1: "get_weather"}
    assert [parts[0], parts[1]] == [c.function.arguments for c in message.tool_calls]


def test_conversation_with_tools(server, client):
    """Call, result, answer: the result turn is in the second prompt."""
    server.say("look</think>" + CALL)
    first = chat(client, tools=TOOLS)
    call = first.choices[0].message.tool_calls[0]
    history = [
        *HELLO,
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    server.say("sunny</think>It is sunny.")
    second = chat(client, messages=history, tools=TOOLS)
    assert second.choices[0].message.content == "It is sunny."
    prompt = server.tokenizer.decode(server.engine.requests[1].prompt_ids, skip_special=False)
    assert "<|observation|><tool_response>sunny</tool_response>" in prompt
    assert "<think>look</think><tool_call>get_weather" in prompt


def test_cut_call_stays_open(server, client):
    server.say("t</think>" + CALL[: CALL.index("</arg_value>")], stop_id=-1)
    whole = chat(client, tools=TOOLS)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.tool_calls[0].function.arguments.startswith('{"city": "Zo')
    assert not whole.choices[0].message.tool_calls[0].function.arguments.endswith("}")


def test_tool_choice_none_bans_the_marker(server, client):
    server.say("t</think>plain")
    chat(client, tools=TOOLS, tool_choice="none")
    request = server.engine.requests[0]
    assert request.sampling.banned_ids == (server.tokenizer.markers.tool_call_open,)
    assert "get_weather" in server.tokenizer.decode(request.prompt_ids)


def test_no_parallel_calls_ends_after_the_first(server, client):
    server.say("t</think>" + CALL + CALL, burst=100)
    reply = chat(client, tools=TOOLS, parallel_tool_calls=False)
    assert len(reply.choices[0].message.tool_calls) == 1
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.usage.completion_tokens == len(server.ids("t</think>" + CALL))
    assert server.engine.cancelled == [server.engine.requests[0].id]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("burst", [1, 2, 5, 100])
def test_stop_string_cuts_text_ids_logprobs_and_usage(server, client, burst, stream):
    """Everything is the same whatever the burst; the reasoning is never searched."""
    text = "has STOP inside</think>one two ST\u00d6P three STOP four STOP"
    server.say(text, burst=burst)
    options = {"stop": ["STOP", "never"], "logprobs": True, "top_logprobs": 2}
    extra = {"return_token_ids": True}
    if stream:
        content, ids, entries, last = "", [], [], None
        for chunk in chat(client, stream=True, extra_body=extra, **options):
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            ids += choice.token_ids
            entries += choice.logprobs.content if choice.logprobs else []
            last = choice
        finish, stop_reason = last.finish_reason, last.stop_reason
    else:
        reply = chat(client, extra_body=extra, **options)
        choice = reply.choices[0]
        content, ids, entries = choice.message.content, choice.token_ids, choice.logprobs.content
        finish, stop_reason = choice.finish_reason, choice.stop_reason
        assert reply.usage.completion_tokens == len(ids)
        joined = "".join(e["token"] for e in choice.logprobs.reasoning)
        assert joined == "has STOP inside"
    assert content == "one two ST\u00d6P three "
    assert (finish, stop_reason) == ("stop", "STOP")
    assert b"".join(bytes(e.bytes) for e in entries).decode() == content
    assert all(len(e.top_logprobs) == 2 for e in entries)
    every = server.ids(text)
    assert ids == every[: len(ids)]
    assert server.tokenizer.decode(ids[:-1]).count("STOP") == 1
    assert server.tokenizer.decode(ids).count("STOP") == 2
    server.wait_idle()
    assert server.engine.cancelled == [server.engine.requests[0].id]


def test_include_stop_string(server, client):
    server.say("t</think>one STOP two")
    reply = chat(client, stop="STOP", extra_body={"include_stop_str_in_output": True})
    assert reply.choices[0].message.content == "one STOP"


def test_stop_string_waits_for_min_tokens(server, client):
    server.say("t</think>a STOP b STOP c")
    count = len(server.ids("t</think>a STOP"))
    reply = chat(client, stop="STOP", extra_body={"min_tokens": count})
    assert reply.choices[0].message.content == "a STOP b "


def test_user_stop_token(server, client):
    token = server.ids("!")[0]
    server.say("t</think>a b", stop_id=token)
    reply = chat(client, extra_body={"stop_token_ids": [token]})
    assert reply.choices[0].message.content == "a b"
    assert reply.choices[0].stop_reason == token
    stops = set(server.engine.requests[0].stop_ids)
    assert stops == {token, *server.tokenizer.stop_ids}


def test_ignore_eos(server, client):
    server.say("t</think>a<|user|>b", stop_id=-1)
    reply = chat(client, extra_body={"ignore_eos": True})
    assert server.engine.requests[0].stop_ids == ()
    assert reply.choices[0].message.content == "ab"
    assert reply.choices[0].finish_reason == "length"


def test_choices_share_a_prompt_and_have_seeds(server, client):
    for text in ("a</think>one", "b</think>two", "c</think>three"):
        server.say(text)
    reply = chat(client, n=3, seed=7)
    assert [c.message.content for c in reply.choices] == ["one", "two", "three"]
    assert [r.sampling.seed for r in server.engine.requests] == [7, 8, 9]
    total = sum(len(server.ids(t)) + 1 for t in ("a</think>one", "b</think>two", "c</think>three"))
    assert reply.usage.completion_tokens == total
    for text in ("a</think>one", "b</think>two"):
        server.say(text, delay_s=0.01)
    content = {0: "", 1: ""}
    for chunk in chat(client, n=2, stream=True):
        content[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert content == {0: "one", 1: "two"}


def test_reasoning_budget_forces_the_marker(server, client):
    server.say("t</think>x")
    chat(client, extra_body={"thinking_token_budget": 5})
    request = server.engine.requests[0]
    assert (request.force_after, request.force_id) == (5, server.tokenizer.markers.think_close)


def test_hidden_reasoning(server, client):
    server.say("secret</think>x")
    reply = chat(client, extra_body={"include_reasoning": False})
    assert reply.choices[0].message.reasoning_content is None
    server.say("secret</think>x")
    chunks = list(chat(client, stream=True, extra_body={"reasoning": {"exclude": True}}))
    assert "secret" not in "".join(c.to_json() for c in chunks)


def test_reasoning_only_is_flagged(server, client):
    server.say("all thought")
    reply = chat(client)
    assert reply.choices[0].message.content == ""
    assert reply.choices[0].reasoning_only is True


def test_continuation_echoes_the_partial_text(server, client):
    messages = [*HELLO, {"role": "assistant", "reasoning_content": "r", "content": "Once upon"}]
    for stream in (False, True):
        server.say(" a time")
        extra = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
        reply = chat(client, messages=messages, stream=stream, extra_body=extra)
        if stream:
            content = "".join(c.choices[0].delta.content or "" for c in reply)
        else:
            content = reply.choices[0].message.content
        assert content == "Once upon a time"


def test_prompt_logprobs(server, client):
    server.say("t</think>x")
    reply = chat(client, extra_body={"prompt_logprobs": 1})
    prompt = server.engine.requests[0].prompt_ids
    assert len(reply.prompt_logprobs) == len(prompt)
    assert reply.prompt_logprobs[0] is None
    assert reply.prompt_logprobs[1][str(prompt[1])]["rank"] == 1


def test_sampling_values_reach_the_engine(server, client):
    server.say("t</think>x")
    chat(
        client,
        temperature=0.5,
        top_p=0.25,
        seed=-5,
        presence_penalty=1.5,
        frequency_penalty=-1,
        logit_bias={"7": 300},
        max_completion_tokens=9,
        extra_body={"top_k": 3, "min_p": 0.1, "repeat_penalty": 1.5, "cache_salt": "s"},
    )
    request = server.engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (sampling.seed, sampling.min_p, sampling.repetition_penalty) == (-5, 0.1, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.0)
    assert sampling.logit_bias == {7: 100.0}
    assert (request.max_tokens, request.cache_salt) == (9, "s")
    assert set(sampling.penalty_exempt_ids) == set(server.tokenizer.markers.structure_ids)


def test_defaults(server, client):
    server.say("t</think>x")
    chat(client)
    request = server.engine.requests[0]
    assert request.max_tokens == 2048 - len(request.prompt_ids)
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 0.95)
    server.say("t</think>x")
    chat(client, top_p=0)
    assert server.engine.requests[1].sampling.temperature == 0.0


def test_engine_errors_before_the_first_byte(server, client):
    cases = [
        ("queue_full", 429, openai.RateLimitError),
        ("queue_timeout", 503, openai.InternalServerError),
        ("engine_failed", 503, openai.InternalServerError),
        ("nan_logits", 500, openai.InternalServerError),
    ]
    for stream in (False, True):
        for code, status, kind in cases:
            server.say("x", error=(code, "engine says no"))
            with pytest.raises(kind) as caught:
                chat(client, stream=stream)
            assert caught.value.status_code == status
            assert caught.value.code == (code if status != 500 else "internal_error")
            assert (status in (429, 503)) == ("retry-after" in caught.value.response.headers)
            if status == 500:
                assert "engine says no" not in str(caught.value)


def test_engine_error_inside_a_stream(server, client):
    server.say("t</think>abc", error=("engine_failed", "it died"), error_after=4)
    with pytest.raises(openai.APIError, match="it died"):
        list(chat(client, stream=True))


def test_model_effort_suffix(server, client):
    server.say("t</think>x")
    reply = client.chat.completions.create(model="gpt-4o:low", messages=HELLO)
    assert reply.model == "gpt-4o:low"
    prompt = server.tokenizer.decode(server.engine.requests[0].prompt_ids)
    assert "Reasoning Effort: Low" in prompt


def test_models(server, client):
    assert [m.id for m in client.models.list()] == ["glm-5.3-flash"]
    assert client.models.retrieve("glm-5.3-flash").max_model_len == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_calls_are_counted_by_outcome(server, client):
    before = server.context.metrics.render().decode()
    server.say("t</think>" + CALL + CALL.replace("get_weather", "made_up"))
    reply = chat(client, tools=TOOLS)
    assert [c.function.name for c in reply.choices[0].message.tool_calls] == [
        "get_weather",
        "made_up",
    ]
    after = server.context.metrics.render().decode()

    def count(text, outcome):
        lines = [x for x in text.splitlines() if x.startswith("glm:tool_calls_total")]
        return sum(float(x.split()[-1]) for x in lines if f'outcome="{outcome}"' in x)

    assert count(after, "ok") == count(before, "ok") + 1
    assert count(after, "unknown") == count(before, "unknown") + 1
