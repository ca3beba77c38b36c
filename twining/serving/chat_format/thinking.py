"""Reasoning effort and "thinking off" (spec/chat_format.md 4): request fields to one plan."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twining.config import Effort, ThinkingOff
from twining.errors import RequestError
from twining.serving.chat_format.shapes import as_bool, as_object, as_text, member, refuse

EFFORTS: dict[str, Effort] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingPlan:
    """effort: the word for the head. is_closed: the reasoning block is closed in the prompt."""

    effort: Effort
    is_closed: bool = False
    clear_thinking: bool = False
    warnings: tuple[str, ...] = ()


def resolve_thinking(
    body: Mapping[str, Any], *, default_effort: Effort, thinking_off: ThinkingOff
) -> ThinkingPlan:
    """Effort, off policy and clear_thinking of one request.

    Raises RequestError: invalid_value or wrong_type for a field, thinking_always_on under "reject".
    """
    efforts = list(_efforts(body))
    chosen = efforts[0] if efforts else ""
    off_field = "reasoning_effort" if chosen == "none" else _off_field(body)
    kwargs = member(body, "chat_template_kwargs", "")
    clear = kwargs.get("clear_thinking")
    clear_thinking = clear is not None and as_bool(clear, "chat_template_kwargs.clear_thinking")
    if off_field is None:
        effort = EFFORTS[chosen] if chosen else default_effort
        warnings = ("effort_mapped",) if chosen and chosen != effort else ()
        return ThinkingPlan(effort=effort, clear_thinking=clear_thinking, warnings=warnings)
    if thinking_off == "reject":
        raise RequestError(
            f"{off_field} asks for no reasoning, but this model always reasons; leave the field out"
            " or use reasoning_effort low",
            code="thinking_always_on",
            param=off_field,
        )
    if thinking_off == "low":
        return ThinkingPlan(
            effort="low", clear_thinking=clear_thinking, warnings=("thinking_off_mapped",)
        )
    # The head stays as without the off request, so the off prompt shares the chat's prefix.
    named = [effort for effort in efforts if effort != "none"]
    return ThinkingPlan(
        effort=EFFORTS[named[0]] if named else default_effort,
        is_closed=True,
        clear_thinking=clear_thinking,
    )


def _efforts(body: Mapping[str, Any]) -> Iterator[str]:
    """Every effort the request names, strongest field first, all of them checked."""
    places = [
        (body, "reasoning_effort", ""),
        (member(body, "reasoning", ""), "effort", "reasoning."),
        (member(body, "output_config", ""), "effort", "output_config."),
        (
            member(body, "chat_template_kwargs", ""),
            "reasoning_effort",
            "chat_template_kwargs.",
        ),
    ]
    for holder, name, prefix in places:
        value = holder.get(name)
        if value is None:
            continue
        word = as_text(value, prefix + name).lower()
        if word not in EFFORTS:
            raise RequestError(
                f"{prefix}{name} must be one of {', '.join(EFFORTS)}",
                code="invalid_value",
                param="reasoning_effort",
            )
        yield word


def _off_field(body: Mapping[str, Any]) -> str | None:
    """First field that asks for no reasoning, all of them checked; None if none does."""
    kwargs = member(body, "chat_template_kwargs", "")
    reasoning = member(body, "reasoning", "")
    found = [
        field
        for holder, name, prefix in (
            (kwargs, "enable_thinking", "chat_template_kwargs."),
            (kwargs, "thinking", "chat_template_kwargs."),
            (body, "enable_thinking", ""),
            (reasoning, "enabled", "reasoning."),
        )
        if (field := prefix + name) and _is_false(holder.get(name), field)
    ]
    thinking = body.get("thinking")
    if isinstance(thinking, dict):
        kind = as_object(thinking, "thinking").get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise refuse("invalid_value", "thinking.type", "must be enabled, disabled or adaptive")
        if kind == "disabled":
            found.append("thinking.type")
    elif _is_false(thinking, "thinking"):
        found.append("thinking")
    return found[0] if found else None


def _is_false(value: object, param: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise refuse("invalid_value", param, "must be true or false")
    return value is False
