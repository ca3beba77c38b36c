"""Tool calls: choose among declared functions, fill typed arguments, report results, or answer
without a call.

Function and argument values together are split. The reply to check is always the last message.
"""

import json
from random import Random
from typing import Any

from twining.demo.tasks import chat
from twining.demo.tasks.base import Example, Message, Split, assistant, draw, user
from twining.demo.tasks.tool_functions import FUNCTIONS, Function


def _spoken(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _plain(value: Any) -> Any:
    """Whole floats become integers: that is how people write them and how the call repeats them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _draw_call(rng: Random, split: Split, function: Function) -> tuple[str, dict[str, Any]]:
    """(ask, arguments) for a function; only parameters that the ask names are passed."""

    def make() -> tuple[str, tuple[str, dict[str, Any]]]:
        ask = rng.choice(function.asks)
        named = [p for p in function.params if f"{{{p}}}" in ask]
        values = {p: _plain(function.params[p].draw(rng)) for p in named}
        text = ask.format(**{p: _spoken(v) for p, v in values.items()})
        return f"tool {function.name} {json.dumps(values)}", (text, values)

    return draw(split, make)


def call_message(calls: list[tuple[str, dict[str, Any]]], effort: str, reasoning: str) -> Message:
    """An assistant turn of calls; ids are call_0, call_1, ..."""
    message = assistant("", effort, reasoning)
    message["tool_calls"] = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return message


def _reason(function: Function, arguments: dict[str, Any]) -> str:
    listed = ", ".join(f"{k}={_spoken(v)}" for k, v in arguments.items())
    return f"{function.name} fits: {listed}."


def _declared(rng: Random, used: list[Function]) -> tuple[dict[str, Any], ...]:
    others = [f for f in rng.sample(FUNCTIONS, 5) if f not in used]
    tools = used + others[: rng.randint(0, 3)]
    rng.shuffle(tools)
    return tuple(f.declare() for f in tools)


def make_call(rng: Random, split: Split, effort: str) -> Example:
    """The scored form: one user turn that needs exactly one call."""
    function = rng.choice(FUNCTIONS)
    text, arguments = _draw_call(rng, split, function)
    reply = call_message([(function.name, arguments)], effort, _reason(function, arguments))
    check = {"calls": [[function.name, arguments]]}
    return Example("tool_call", (user(text), reply), effort, _declared(rng, [function]), check)


def _make_parallel(rng: Random, split: Split, effort: str) -> Example:
    """Two asks in one turn, two calls."""
    first, second = rng.choice(FUNCTIONS), rng.choice(FUNCTIONS)
    text_a, args_a = _draw_call(rng, split, first)
    text_b, args_b = _draw_call(rng, split, second)
    calls = [(first.name, args_a), (second.name, args_b)]
    reply = call_message(calls, effort, f"{_reason(first, args_a)} {_reason(second, args_b)}")
    check = {"calls": [list(c) for c in calls]}
    tools = _declared(rng, [first] if first is second else [first, second])
    return Example("tool_call", (user(f"{text_a} {text_b}"), reply), effort, tools, check)


def _make_result(rng: Random, split: Split, effort: str) -> Example:
    """Call, result, report; sometimes a second ask follows."""
    function = rng.choice(FUNCTIONS)
    text, arguments = _draw_call(rng, split, function)
    result = function.result(rng)
    shown = {k: _spoken(v) for k, v in {**arguments, **result}.items()}
    while any(f"{{{k}}}" in function.report and k not in shown for k in function.params):
        text, arguments = _draw_call(rng, split, function)
        shown = {k: _spoken(v) for k, v in {**arguments, **result}.items()}
    report = function.report.format(**shown)
    messages: list[Message] = [
        user(text),
        call_message([(function.name, arguments)], effort, _reason(function, arguments)),
        {"role": "tool", "tool_call_id": "call_0", "content": json.dumps(result)},
        assistant(report, effort, "the result is here, report it."),
    ]
    used = [function]
    check: dict[str, Any] = {"text": report}
    if rng.random() < 0.3:
        second = rng.choice(FUNCTIONS)
        text, arguments = _draw_call(rng, split, second)
        messages.append(user(text))
        messages.append(
            call_message([(second.name, arguments)], effort, _reason(second, arguments))
        )
        used += [] if second is function else [second]
        check = {"calls": [[second.name, arguments]]}
    return Example("tool_call", tuple(messages), effort, _declared(rng, used), check)


def _make_none(rng: Random, split: Split, effort: str) -> Example:
    """Tools are declared but the turn is small talk."""
    example = chat.make(rng, split, effort)
    tools = tuple(f.declare() for f in rng.sample(FUNCTIONS, rng.randint(1, 3)))
    return Example("tool_call", example.messages, effort, tools, {"text": example.reply["content"]})


def make(rng: Random, split: Split, effort: str) -> Example:
    """Any tool item."""
    u = rng.random()
    if u < 0.5:
        return make_call(rng, split, effort)
    if u < 0.62:
        return _make_parallel(rng, split, effort)
    return (_make_result if u < 0.87 else _make_none)(rng, split, effort)


def check(example: Example, content: str, calls: list[tuple[str, dict[str, Any]]]) -> bool:
    """True when names and arguments of all calls agree (or, without a call, the text)."""
    if "calls" in example.check:
        return [[name, arguments] for name, arguments in calls] == [
            list(c) for c in example.check["calls"]
        ]
    return not calls and content.strip() == example.check["text"]
