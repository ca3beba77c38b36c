"""What goes into and comes out of the output parser: markers, options, events, the final message.

`tokens` are ordinals of sampled tokens (0, 1, 2 ...). Each ordinal appears in at most one event:
the one that first sends text of that token, so ids and logprobs can be cut where text is cut.
"""

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Tokens = tuple[int, ...]
Channel = Literal["reasoning", "content", "call", "none"]
StartState = Literal["reasoning", "content"]
End = Literal["eos", "length"]

ID_LETTERS = string.ascii_letters + string.digits


class Marker(StrEnum):
    """The eight markers that are structure in output (spec 8.2)."""

    THINK_OPEN = "<think>"
    THINK_CLOSE = "</think>"
    CALL_OPEN = "<tool_call>"
    CALL_CLOSE = "</tool_call>"
    KEY_OPEN = "<arg_key>"
    KEY_CLOSE = "</arg_key>"
    VALUE_OPEN = "<arg_value>"
    VALUE_CLOSE = "</arg_value>"


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True)
class CallOpened:
    index: int
    id: str
    name: str
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of one call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is complete. is_recovered: its markup needed repair (spec 8.8)."""

    index: int
    is_recovered: bool


Event = ReasoningText | ContentText | CallOpened | CallArguments | CallEnded


def new_call_id(prefix: str = "call_") -> str:
    """prefix and 24 random letters or digits."""
    return prefix + "".join(secrets.choice(ID_LETTERS) for _ in range(24))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    """tools: declarations in chat form. tool_choice: as in the request, after validation.

    unknown_tools: what happens to a call of an undeclared name in the answer.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    unknown_tools: Literal["pass", "drop"] = "pass"
    make_id: Callable[[], str] = field(default=new_call_id)

    @property
    def is_named(self) -> bool:
        """True when tool_choice forces one function."""
        return not isinstance(self.tool_choice, str) and self.tool_choice.get("type") == "function"


@dataclass(slots=True)
class ToolCall:
    """arguments: JSON text; unterminated unless is_complete."""

    id: str
    name: str
    arguments: str = ""
    is_complete: bool = False
    is_recovered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessage:
    """The whole output. None means that there was no such text.

    reasoning_only: ended normally without leaving the reasoning block, so there is no answer.
    """

    reasoning_content: str | None
    content: str | None
    tool_calls: list[ToolCall]
    finish_reason: Literal["stop", "length", "tool_calls"]
    reasoning_only: bool = False
