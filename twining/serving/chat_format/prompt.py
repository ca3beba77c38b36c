"""One chat body to one prompt: normalise, resolve effort, render, set the tail (spec 2 to 4, 7)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twining.config import Effort, ThinkingOff
from twining.errors import RequestError
from twining.serving.chat_format.normalise import normalise_messages, normalise_tools
from twining.serving.chat_format.render import render_with_media
from twining.serving.chat_format.shapes import Json, as_bool, refuse
from twining.serving.chat_format.thinking import resolve_thinking
from twining.serving.tokenizer import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What the server needs of a prompt.

    media: parts behind the placeholders, in prompt order. tools: declarations in chat form.
    partial_reasoning, partial_content: the printed text that a continuation goes on from (for
    `echo`); both empty without continuation.
    """

    segments: list[Segment]
    media: list[Json] = field(default_factory=list)
    tools: list[Json] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_continuation: bool = False
    partial_reasoning: str = ""
    partial_content: str = ""


def build_prompt(
    body: Mapping[str, Any],
    *,
    default_effort: Effort = "high",
    thinking_off: ThinkingOff = "low",
) -> ChatPrompt:
    """The prompt of a chat-completions body (or one mapped to that form).

    Reads messages, tools, the effort and thinking fields, add_generation_prompt and
    continue_final_message. Raises RequestError with code and param of spec/api.md.
    """
    messages, warnings = normalise_messages(body.get("messages"))
    tools = normalise_tools(body.get("tools"))
    plan = resolve_thinking(body, default_effort=default_effort, thinking_off=thinking_off)
    add_prompt, is_continuation = _tail_fields(body)
    if is_continuation:
        last = messages[-1]
        if last["role"] != "assistant" or "tool_calls" in last:
            raise refuse(
                "invalid_value",
                "messages",
                "must end with an assistant message without tool calls to be continued",
            )
    try:
        rendered = render_with_media(
            messages,
            tools,
            reasoning_effort=plan.effort,
            clear_thinking=plan.clear_thinking,
            add_generation_prompt=add_prompt,
        )
    except ValueError as err:  # deep or non-finite call arguments that came as objects
        raise RequestError(
            f"messages hold call arguments that have no JSON form: {err}",
            code="invalid_value",
            param="messages",
        ) from err
    segments = rendered.segments
    reasoning, content = "", ""
    if is_continuation:
        reasoning, content = _continued(segments)
        if reasoning and segments[-1] == Segment("S", "</think>"):
            segments.pop()  # no answer yet: the model goes on with its thought
    elif add_prompt and plan.is_closed:
        segments.append(Segment("S", "</think>"))
    return ChatPrompt(
        segments=segments,
        media=rendered.media,
        tools=tools,
        warnings=[*warnings, *plan.warnings],
        is_continuation=is_continuation,
        partial_reasoning=reasoning,
        partial_content=content,
    )


def _tail_fields(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message), checked against each other."""
    add, go_on = body.get("add_generation_prompt"), body.get("continue_final_message")
    is_continuation = go_on is not None and as_bool(go_on, "continue_final_message")
    if add is None:
        return not is_continuation, is_continuation
    if as_bool(add, "add_generation_prompt") and is_continuation:
        raise refuse(
            "conflicting_fields", "continue_final_message", "needs add_generation_prompt false"
        )
    return add, is_continuation


def _continued(segments: list[Segment]) -> tuple[str, str]:
    """(reasoning, content) printed by the last assistant turn."""
    start = len(segments) - 1 - segments[::-1].index(Segment("S", "<|assistant|>"))
    turn = segments[start + 2 :]  # after <|assistant|><think>
    close = turn.index(Segment("S", "</think>"))
    return (
        "".join(s.text for s in turn[:close] if s.kind == "T"),
        "".join(s.text for s in turn[close + 1 :] if s.kind == "T"),
    )
