"""Shapes and checks shared by the modules of this package."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from twining.errors import RequestError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """Where a declared function came from, so that a call can be returned in its own item type."""

    kind: Literal["function", "custom", "local_shell"]
    name: str  # without the namespace
    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedBody:
    """A Messages or Responses body in chat-completions form.

    body: chat fields (messages, tools, tool_choice, thinking fields, continuation fields); sampling
    and output fields are left to the endpoint. tool_origins: by printed name.
    """

    body: Json
    warnings: list[str] = field(default_factory=list)
    tool_origins: dict[str, ToolOrigin] = field(default_factory=dict)


def refuse(code: str, param: str, what: str) -> RequestError:
    """The error for one field; `what` follows the field's name."""
    return RequestError(f"{param} {what}", code=code, param=param)


def as_object(value: object, param: str) -> Json:
    """value if it is an object. Raises RequestError (wrong_type)."""
    if not isinstance(value, dict):
        raise refuse("wrong_type", param, "must be an object")
    return value


def as_list(value: object, param: str) -> list[Any]:
    """value if it is a list. Raises RequestError (wrong_type)."""
    if not isinstance(value, list):
        raise refuse("wrong_type", param, "must be a list")
    return value


def as_text(value: object, param: str) -> str:
    """value if it is a string. Raises RequestError (wrong_type)."""
    if not isinstance(value, str):
        raise refuse("wrong_type", param, "must be a string")
    return value


def as_bool(value: object, param: str) -> bool:
    """value if it is a bool. Raises RequestError (wrong_type)."""
    if not isinstance(value, bool):
        raise refuse("wrong_type", param, "must be true or false")
    return value


def member(value: Mapping[str, Any], name: str, param: str) -> Json:
    """An optional object member; absent or null is an empty object. Raises RequestError."""
    found = value.get(name)
    return {} if found is None else as_object(found, f"{param}{name}")
