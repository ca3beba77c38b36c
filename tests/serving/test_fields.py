"""One good and one bad request for every field of spec/api.md 5.2: status, code and param."""

import httpx
import pytest
from pydantic import ValidationError
from serving_fakes import serve

from twining.serving.openai.bodies import ChatBody

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PARTIAL = [*HELLO, {"role": "assistant", "content": "Once"}]

GOOD = [
    {"model": "any/name"},
    {"model": None},
    {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, *HELLO]},
    {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": None},
            {"role": "tool", "content": "r"},
        ]
    },
    {"max_tokens": 5},
    {"max_tokens": 5.0},
    {"max_completion_tokens": -1},
    {"max_completion_tokens": 5, "max_tokens": 7},
    {"min_tokens": 3, "max_tokens": 5},
    {"temperature": 0},
    {"temperature": 2},
    {"temperature": None},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 40},
    {"min_p": 0.5},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"repetition_penalty": 10},
    {"repeat_penalty": 0.5},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"n": 2},
    {"stop": "x"},
    {"stop": ["x"] * 64},
    {"stop_token_ids": [0, 5]},
    {"include_stop_str_in_output": True},
    {"ignore_eos": True},
    {"logit_bias": {"5": -100, "6": 2.5}},
    {"logprobs": True, "top_logprobs": 20},
    {"prompt_logprobs": 0},
    {"stream": False, "stream_options": {"include_usage": True}},
    {"tools": [TOOL]},
    {"tools": []},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"parallel_tool_calls": False},
    {"response_format": {"type": "text"}},
    {"reasoning_effort": "Max"},
    {"reasoning": {"effort": "low", "max_tokens": 5, "exclude": False, "enabled": True}},
    {"thinking_token_budget": -1},
    {"thinking_budget": 0},
    {"include_reasoning": False},
    {"chat_template_kwargs": {"enable_thinking": False, "clear_thinking": True, "other": 1}},
    {"enable_thinking": False},
    {"thinking": {"type": "disabled"}},
    {"add_generation_prompt": False},
    {"messages": PARTIAL, "continue_final_message": True, "echo": True},
    {"bad_words": []},
    {"cache_prompt": False},
    {"cache_salt": "s" * 128},
    {"priority": -3},
    {"request_id": "a.b-c_1"},
    {"return_token_ids": True},
    {"return_progress": True},
    {"timings_per_token": True},
    {"modalities": ["text"]},
    {"best_of": 1},
    {"user": "u", "metadata": {}, "store": True},
    {"made_up_field": [1, 2]},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
    {"structured_outputs": {"regex": "a"}},
    {"structured_outputs": {"choice": ["a"]}, "tools": [TOOL]},
    {"guided_json": {"type": "object"}},
    {"grammar": 'root ::= "x"'},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
]

BAD = [
    ({"model": 5}, "wrong_type", "model"),
    ({"messages": None}, "missing_field", "messages"),
    ({"messages": "hi"}, "wrong_type", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": ["hi"]}, "wrong_type", "messages[0]"),
    ({"messages": [{"content": "x"}]}, "missing_field", "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "wrong_type", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "unsupported_content",
        "messages[0].content[0].type",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
            ]
        },
        "unsupported_content",
        "messages",
    ),
    ({"max_tokens": 0}, "out_of_range", "max_tokens"),
    ({"max_tokens": "5"}, "wrong_type", "max_tokens"),
    ({"max_completion_tokens": -2}, "out_of_range", "max_completion_tokens"),
    ({"max_completion_tokens": 1.5}, "wrong_type", "max_completion_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "out_of_range", "min_tokens"),
    ({"min_tokens": -1}, "out_of_range", "min_tokens"),
    ({"temperature": 3.5}, "out_of_range", "temperature"),
    ({"temperature": "1"}, "wrong_type", "temperature"),
    ({"temperature": True}, "wrong_type", "temperature"),
    ({"top_p": 1.5}, "out_of_range", "top_p"),
    ({"top_k": -2}, "out_of_range", "top_k"),
    ({"top_k": 1.5}, "wrong_type", "top_k"),
    ({"min_p": -0.1}, "out_of_range", "min_p"),
    ({"presence_penalty": 2.5}, "out_of_range", "presence_penalty"),
    ({"frequency_penalty": -2.5}, "out_of_range", "frequency_penalty"),
    ({"repetition_penalty": 0}, "out_of_range", "repetition_penalty"),
    ({"repeat_penalty": 11}, "out_of_range", "repeat_penalty"),
    ({"seed": 2**63}, "out_of_range", "seed"),
    ({"seed": "1"}, "wrong_type", "seed"),
    ({"n": 0}, "out_of_range", "n"),
    ({"n": 9}, "out_of_range", "n"),
    ({"stop": ["x"] * 65}, "too_many_items", "stop"),
    ({"stop": [5]}, "wrong_type", "stop"),
    ({"stop": "x" * 257}, "out_of_range", "stop"),
    ({"stop_token_ids": [100_000]}, "out_of_range", "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "out_of_range", "stop_token_ids"),
    ({"stop_token_ids": list(range(65))}, "out_of_range", "stop_token_ids"),
    ({"include_stop_str_in_output": 1}, "wrong_type", "include_stop_str_in_output"),
    ({"ignore_eos": "no"}, "wrong_type", "ignore_eos"),
    ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "invalid_value", "logit_bias"),
    ({"logprobs": 5}, "wrong_type", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "out_of_range", "top_logprobs"),
    ({"top_logprobs": 3}, "conflicting_fields", "top_logprobs"),
    ({"prompt_logprobs": 21}, "out_of_range", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "conflicting_fields", "prompt_logprobs"),
    ({"stream": "yes"}, "wrong_type", "stream"),
    ({"stream_options": []}, "wrong_type", "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "wrong_type", "stream_options.include_usage"),
    ({"tools": [{"type": "function"}]}, "invalid_tool", "tools[0].function"),
    ({"tools": [TOOL, TOOL]}, "invalid_tool", "tools[1]"),
    ({"tools": [TOOL] * 1025}, "too_many_items", "tools"),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "strict": True, "parameters": {"anyOf": [{}]}},
                }
            ]
        },
        "invalid_json_schema",
        "tools[0].function.parameters.anyOf",
    ),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice_invalid", "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice_invalid", "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
        "tool_choice_invalid",
        "tool_choice",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice_invalid",
        "tool_choice",
    ),
    ({"parallel_tool_calls": 0}, "wrong_type", "parallel_tool_calls"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format"),
    ({"response_format": "json"}, "invalid_value", "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "unsupported_parameter", "response_format"),
    (
        {"response_format": {"type": "json_schema"}},
        "invalid_value",
        "response_format.json_schema",
    ),
    (
        {"structured_outputs": {"regex": "a", "json": {}}},
        "conflicting_fields",
        "structured_outputs",
    ),
    ({"structured_outputs": {"regex": "(a"}}, "grammar_error", "structured_outputs.regex"),
    ({"guided_json": {"type": "x"}}, "invalid_json_schema", "guided_json"),
    ({"grammar": "root ::= x"}, "grammar_error", "grammar"),
    ({"guided_json": {}, "grammar": "x"}, "conflicting_fields", "guided_json"),
    ({"reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
    ({"reasoning": "low"}, "wrong_type", "reasoning"),
    ({"thinking_token_budget": -2}, "out_of_range", "thinking_token_budget"),
    ({"reasoning": {"max_tokens": -5}}, "out_of_range", "reasoning.max_tokens"),
    ({"include_reasoning": "x"}, "wrong_type", "include_reasoning"),
    ({"chat_template_kwargs": []}, "wrong_type", "chat_template_kwargs"),
    ({"enable_thinking": "no"}, "invalid_value", "enable_thinking"),
    ({"thinking": {"type": "off"}}, "invalid_value", "thinking.type"),
    ({"add_generation_prompt": 1}, "wrong_type", "add_generation_prompt"),
    (
        {"messages": PARTIAL, "continue_final_message": True, "add_generation_prompt": True},
        "conflicting_fields",
        "continue_final_message",
    ),
    ({"continue_final_message": True}, "invalid_value", "messages"),
    ({"echo": True}, "conflicting_fields", "echo"),
    ({"echo": "x"}, "wrong_type", "echo"),
    ({"bad_words": ["x"] * 129}, "too_many_items", "bad_words"),
    ({"bad_words": ["x"]}, "unsupported_parameter", "bad_words"),
    ({"cache_prompt": "x"}, "wrong_type", "cache_prompt"),
    ({"cache_salt": ""}, "out_of_range", "cache_salt"),
    ({"priority": "high"}, "wrong_type", "priority"),
    ({"request_id": "a b"}, "invalid_value", "request_id"),
    ({"return_token_ids": 1}, "wrong_type", "return_token_ids"),
    ({"return_progress": 1}, "wrong_type", "return_progress"),
    ({"timings_per_token": 1}, "wrong_type", "timings_per_token"),
    ({"mm_processor_kwargs": {}}, "unsupported_parameter", "mm_processor_kwargs"),
    ({"functions": []}, "unsupported_parameter", "functions"),
    ({"function_call": "auto"}, "unsupported_parameter", "function_call"),
    ({"audio": {}}, "unsupported_parameter", "audio"),
    ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
    ({"truncate_prompt_tokens": 5}, "unsupported_parameter", "truncate_prompt_tokens"),
    ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
    ({"best_of": 3}, "unsupported_parameter", "best_of"),
    ({"prompt_embeds": "x"}, "unsupported_parameter", "prompt_embeds"),
    ({"lora_request": {}}, "unsupported_parameter", "lora_request"),
]


@pytest.fixture(scope="module")
def server():
    with serve() as served:
        served.engine.default.ids = served.ids("t</think>ok")
        served.engine.default.stop_id = served.stop
        yield served


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


@pytest.mark.parametrize("fields", GOOD, ids=lambda f: ",".join(f) + str(f)[:40])
def test_good_field(http, fields):
    reply = http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(("fields", "code", "param"), BAD, ids=lambda v: str(v)[:50])
def test_bad_field(server, http, fields, code, param):
    before = len(server.engine.requests)
    # Streaming or not, a bad field is a real status before the first byte.
    body = {"messages": HELLO, "stream": True, **fields}
    if "stream" in fields or "stream_options" in fields:
        body = {"messages": HELLO, **fields}
    reply = http.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, code, param), error
    assert error["type"] == "invalid_request_error" and error["status"] == 400
    assert "\n" not in error["message"]
    assert len(server.engine.requests) == before


def test_message_of_the_spec(http):
    reply = http.post("/v1/chat/completions", json={"messages": HELLO, "temperature": 3.5})
    assert reply.json()["error"]["message"] == "temperature must be between 0 and 2 (got 3.5)"


@pytest.mark.parametrize(
    ("fields", "codes"),
    [
        ({"verbosity": "low", "dry_base": 1, "mirostat": 2}, "ignored:verbosity"),
        ({"stop": ["", "x"]}, "stop_empty_dropped"),
        ({"top_p": 0}, "top_p_zero"),
        ({"max_tokens": 10**7}, "max_tokens_clamped"),
        ({"reasoning_effort": "medium"}, "effort_mapped"),
        ({"enable_thinking": False}, "thinking_off_mapped"),
        ({"stream_options": {}}, "stream_options_ignored"),
    ],
)
def test_warning_codes(http, fields, codes):
    reply = http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert reply.status_code == 200
    assert codes in reply.headers["x-warnings"].split(",")


def test_silent_fields_give_no_warning(http):
    fields = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    reply = http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert "x-warnings" not in reply.headers


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "1", 'must be a number (got "1")'),
        ("temperature", True, "must be a number (got true)"),
        ("n", [2], "must be an integer (got [2])"),
        ("stream", "true", 'must be true or false (got "true")'),
        ("model", 5, "must be a string (got a number)"),
        ("stream_options", "x", "must be an object (got a string)"),
        ("tools", {}, "must be a list (got an object)"),
    ],
)
def test_wrong_types_are_named_as_json_names_them(field, value, words):
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"messages": HELLO, field: value})
    assert [error["msg"] for error in caught.value.errors()] == [words]
