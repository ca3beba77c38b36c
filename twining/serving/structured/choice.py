"""tool_choice in all its forms (spec/api.md 5.2, 7.2)."""

from dataclasses import dataclass
from typing import Any, Literal

from twining.errors import RequestError
from twining.serving.http_errors import shown
from twining.serving.structured.schema import Json

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which calls are allowed or wanted. names: functions that may be called, in declared order.

    is_subset: allowed_tools left some of the declared ones out.
    """

    mode: Mode
    names: tuple[str, ...] = ()
    is_subset: bool = False

    @property
    def is_calling(self) -> bool:
        """Calls are possible."""
        return self.mode != "none"


NO_CALLS = ToolChoice(mode="none")


def parse_tool_choice(choice: Any, tools: list[Json]) -> ToolChoice:
    """tools: declarations in chat form. Raises RequestError tool_choice_invalid."""
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice == "none" or (choice in (None, "auto") and not tools):
        return NO_CALLS
    if choice in (None, "auto"):
        return ToolChoice(mode="auto", names=names)
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("required", "function", "allowed_tools"):
        raise _bad_choice("must be auto, none, required, a function choice or allowed_tools")
    if not tools:
        raise _bad_choice("needs tools; declare them or leave tool_choice out")
    if kind == "required":
        return ToolChoice(mode="required", names=names)
    if kind == "function":
        return ToolChoice(mode="named", names=(_name_of(choice, names),))
    return _allowed_tools(choice, names)


def _allowed_tools(choice: Any, names: tuple[str, ...]) -> ToolChoice:
    if not isinstance(choice, dict):
        raise _bad_choice("allowed_tools must be an object")
    inner = choice.get("allowed_tools")
    inner = inner if isinstance(inner, dict) else choice
    mode, listed = inner.get("mode", "auto"), inner.get("tools")
    if mode not in ("auto", "required"):
        raise _bad_choice("allowed_tools.mode must be auto or required")
    if not isinstance(listed, list) or not listed:
        raise _bad_choice("allowed_tools.tools must list at least one declared function")
    wanted = {_name_of(entry, names) for entry in listed}
    kept = tuple(name for name in names if name in wanted)
    return ToolChoice(mode=mode, names=kept, is_subset=len(kept) < len(names))


def _name_of(entry: Any, names: tuple[str, ...]) -> str:
    """The declared function that {"function": {"name"}} or {"name"} names."""
    if not isinstance(entry, dict):
        raise _bad_choice("must name functions by objects")
    inner = entry.get("function")
    name = inner.get("name") if isinstance(inner, dict) else entry.get("name")
    if not isinstance(name, str) or name not in names:
        raise _bad_choice(f"names {shown(name)}, which is not declared in tools")
    return name


def _bad_choice(what: str) -> RequestError:
    return RequestError(f"tool_choice {what}", code="tool_choice_invalid", param="tool_choice")
