"""Render an example in the GLM prompt format with a loss class per piece.

The text is exactly that of the chat template; the class says who wrote it: PROMPT text is only
language modelling, TARGET is what the assistant must produce: reasoning, markers, answer, calls and
the role marker that ends its turn.
"""

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from twining.demo.tasks.base import Example, Message


class Loss(IntEnum):
    """Loss class of a piece."""

    NONE = 0
    PROMPT = 1
    TARGET = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """A marker (one token) or a run of ordinary text."""

    text: str
    is_marker: bool
    loss: Loss


_EFFORT = {"low": "Low", "high": "High", "max": "Max"}
_TOOLS_HEAD = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_TAIL = (
    "</tools>\n\n"
    "For each function call, output the function name and arguments within the following XML"
    " format:\n"
)
_SAMPLE_CALL = (
    "<tool_call>", "{function-name}", "<arg_key>", "{arg-key-1}", "</arg_key>", "<arg_value>",
    "{arg-value-1}",
    "</arg_value>", "<arg_key>", "{arg-key-2}", "</arg_key>", "<arg_value>", "{arg-value-2}",
    "</arg_value>", "...",
    "</tool_call>",
)  # fmt: skip


def marker(text: str, loss: Loss = Loss.PROMPT) -> Piece:
    """A marker piece."""
    return Piece(text, True, loss)


def plain(text: str, loss: Loss = Loss.PROMPT) -> Piece:
    """A text piece."""
    return Piece(text, False, loss)


def dumps(value: Any) -> str:
    """JSON as the template prints it."""
    return json.dumps(value, ensure_ascii=False)


def _tool_block(tools: tuple[dict[str, Any], ...]) -> list[Piece]:
    lines = "".join(dumps(t.get("function", t)) + "\n" for t in tools)
    pieces = [marker("<|system|>"), plain(_TOOLS_HEAD + lines + _TOOLS_TAIL)]
    for text in _SAMPLE_CALL:
        is_marker = text.startswith("<")
        pieces.append(marker(text) if is_marker else plain(text))
    return pieces


def _assistant(message: Message, think_closed: bool) -> list[Piece]:
    pieces = [marker("<|assistant|>"), marker("<think>")]
    if reasoning := message.get("reasoning_content", ""):
        pieces.append(plain(reasoning, Loss.TARGET))
    pieces.append(marker("</think>", Loss.NONE if think_closed else Loss.TARGET))
    if content := message["content"].strip():
        pieces.append(plain(content, Loss.TARGET))
    for call in message.get("tool_calls", ()):
        function = call["function"]
        pieces += [marker("<tool_call>", Loss.TARGET), plain(function["name"], Loss.TARGET)]
        for key, value in function["arguments"].items():
            shown = value if isinstance(value, str) else dumps(value)
            pieces += [
                marker("<arg_key>", Loss.TARGET),
                plain(key, Loss.TARGET),
                marker("</arg_key>", Loss.TARGET),
            ]
            pieces.append(marker("<arg_value>", Loss.TARGET))
            pieces += [plain(shown, Loss.TARGET)] if shown else []
            pieces.append(marker("</arg_value>", Loss.TARGET))
        pieces.append(marker("</tool_call>", Loss.TARGET))
    return pieces


def segments(example: Example) -> list[Piece]:
    """All pieces of the conversation, ending with the role marker that closes the last reply."""
    pieces = [
        marker("[gMASK]", Loss.NONE),
        marker("<sop>", Loss.NONE),
        marker("<|system|>", Loss.NONE),
    ]
    pieces.append(plain(f"Reasoning Effort: {_EFFORT[example.effort]}", Loss.NONE))
    if example.tools:
        pieces += _tool_block(example.tools)
    after_reply = Loss.PROMPT  # a role marker after a reply is the model's stop token
    previous = ""
    for message in example.messages:
        role = message["role"]
        if role == "assistant":
            pieces += _assistant(message, example.think_closed)
            after_reply = Loss.TARGET
        elif role == "tool":
            if previous != "tool":
                pieces.append(marker("<|observation|>", after_reply))
            pieces += [
                marker("<tool_response>"),
                plain(message["content"]),
                marker("</tool_response>"),
            ]
            after_reply = Loss.PROMPT
        else:
            pieces += [marker(f"<|{role}|>", after_reply), plain(message["content"])]
            after_reply = Loss.PROMPT
        previous = role
    if previous == "assistant":
        last = "<|observation|>" if example.reply.get("tool_calls") else "<|user|>"
        pieces.append(marker(last, Loss.TARGET))
    return pieces


def prompt_text(example: Example) -> str:
    """Text of the rendered conversation up to the generation prompt."""
    shown = Example(example.kind, example.prompt, example.effort, example.tools)
    return "".join(p.text for p in segments(shown)) + "<|assistant|><think>"
