"""Responses bodies (`/v1/responses`) in chat form (spec/api.md 13.1)."""

from collections.abc import Mapping
from typing import Any

from twining.errors import RequestError
from twining.serving.chat_format.shapes import (
    Json,
    MappedBody,
    ToolOrigin,
    as_list,
    as_object,
    as_text,
    refuse,
)

REFUSED_FIELDS = ("conversation", "prompt")
PASSED_FIELDS = ("reasoning", "parallel_tool_calls")
SERVER_TOOLS = (
    "web_search",
    "file_search",
    "image_generation",
    "code_interpreter",
    "mcp",
    "computer",
)
OUTPUT_TYPES = (
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
)
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
SHELL_PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
    "required": ["command"],
}


def from_responses_body(body: Mapping[str, Any]) -> MappedBody:
    """Chat form of a Responses body. Raises RequestError naming the field."""
    _refuse_stored_state(body)
    warnings: list[str] = []
    messages: list[Json] = []
    if body.get("instructions") is not None:
        text = as_text(body["instructions"], "instructions")
        messages.append({"role": "system", "content": text})
    given = body.get("input")
    if given is None:
        raise refuse("missing_field", "input", "is required")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        messages.extend(_Turns(warnings).build(as_list(given, "input")))
    chat: Json = {"messages": messages}
    tools: list[Json] = []
    origins: dict[str, ToolOrigin] = {}
    if body.get("tools") is not None:
        for i, tool in enumerate(as_list(body["tools"], "tools")):
            _add_tool(as_object(tool, f"tools[{i}]"), f"tools[{i}]", tools, origins, warnings)
    if tools:
        chat["tools"] = tools
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"], origins)
    chat |= {name: body[name] for name in PASSED_FIELDS if body.get(name) is not None}
    return MappedBody(body=chat, warnings=list(dict.fromkeys(warnings)), tool_origins=origins)


class _Turns:
    """Builds turns from items: adjacent reasoning, assistant message and calls form one turn."""

    def __init__(self, warnings: list[str]) -> None:
        self.warnings = warnings
        self.turns: list[Json] = []
        self.is_open = False  # the last turn is an assistant turn still being built

    def build(self, items: list[Any]) -> list[Json]:
        for i, item in enumerate(items):
            self._add(as_object(item, f"input[{i}]"), f"input[{i}]")
        return self.turns

    def _assistant(self) -> Json:
        if not self.is_open:
            self.turns.append({"role": "assistant", "content": ""})
            self.is_open = True
        return self.turns[-1]

    def _close(self, turn: Json) -> None:
        self.turns.append(turn)
        self.is_open = False

    def _add(self, item: Json, param: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, param)
        elif kind == "reasoning":
            turn = self._assistant()
            text = _texts(item.get("content"), f"{param}.content") or _texts(
                item.get("summary"), f"{param}.summary"
            )
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        elif kind in OUTPUT_TYPES:
            turn = {"role": "tool", "content": item.get("output")}
            found = item.get("call_id") or item.get("id")
            if found is not None:
                turn["tool_call_id"] = found
            self._close(turn)
        elif (function := _call_function(kind, item, param)) is not None:
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            self._assistant().setdefault("tool_calls", []).append(call)
        else:
            self.warnings.append(f"ignored:{kind}"[:80])

    def _message(self, item: Json, param: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ("system", "developer", "user", "assistant"):
            raise refuse(
                "invalid_value", f"{param}.role", "must be system, developer, user or assistant"
            )
        if role != "assistant":
            self._close({"role": role, "content": content})
            return
        turn = self._assistant()
        turn["content"] += _texts(content, f"{param}.content")


def _texts(content: object, param: str) -> str:
    """Joined texts of a string or a part list (output_text, refusal, reasoning_text ...)."""
    if content is None or isinstance(content, str):
        return content or ""
    pieces: list[str] = []
    for i, item in enumerate(as_list(content, param)):
        part = as_object(item, f"{param}[{i}]")
        key = "refusal" if part.get("type") == "refusal" else "text"
        pieces.append(as_text(part.get(key), f"{param}[{i}].{key}"))
    return "".join(pieces)


def _call_function(kind: object, item: Json, param: str) -> Json | None:
    """name and arguments of a call item; None for other items."""
    if kind == "local_shell_call":
        action = as_object(item.get("action"), f"{param}.action")
        return {"name": "local_shell", "arguments": {"command": action.get("command")}}
    if kind not in ("function_call", "custom_tool_call"):
        return None
    name = as_text(item.get("name"), f"{param}.name")
    if item.get("namespace") is not None:
        name = as_text(item["namespace"], f"{param}.namespace") + "__" + name
    if kind == "custom_tool_call":
        return {"name": name, "arguments": {"input": as_text(item.get("input"), f"{param}.input")}}
    return {"name": name, "arguments": item.get("arguments")}


def _add_tool(
    tool: Json,
    param: str,
    tools: list[Json],
    origins: dict[str, ToolOrigin],
    warnings: list[str],
    namespace: str | None = None,
) -> None:
    kind = tool.get("type")
    if kind == "namespace" and namespace is None:
        space = as_text(tool.get("name"), f"{param}.name")
        for i, inner in enumerate(as_list(tool.get("tools"), f"{param}.tools")):
            place = f"{param}.tools[{i}]"
            _add_tool(as_object(inner, place), place, tools, origins, warnings, space)
        return
    if kind not in ("function", "custom", "local_shell"):
        if isinstance(kind, str) and kind.startswith(SERVER_TOOLS):
            warnings.append(f"ignored:{kind}"[:80])
            return
        raise refuse("invalid_tool", f"{param}.type", "is not a tool type this server knows")
    name = "local_shell" if kind == "local_shell" else as_text(tool.get("name"), f"{param}.name")
    printed = name if namespace is None else f"{namespace}__{name}"
    origins[printed] = ToolOrigin(kind, name, namespace)
    function: Json = {"name": printed}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    parameters = {"custom": CUSTOM_PARAMETERS, "local_shell": SHELL_PARAMETERS}.get(
        kind, tool.get("parameters")
    )
    if parameters is not None:
        function["parameters"] = parameters
    function |= {k: True for k in ("strict", "defer_loading") if tool.get(k) is True}
    tools.append({"type": "function", "function": function})


def _tool_choice(choice: object, origins: Mapping[str, ToolOrigin]) -> object:
    """The chat form of a choice; allowed_tools is passed on for the endpoint to apply."""
    if isinstance(choice, str):
        return choice
    entry = as_object(choice, "tool_choice")
    kind = entry.get("type")
    if kind == "allowed_tools":
        return entry
    name = "local_shell" if kind == "local_shell" else entry.get("name")
    if kind not in ("function", "custom", "local_shell") or name not in origins:
        raise RequestError(
            "tool_choice must name a declared function or custom tool",
            code="tool_choice_invalid",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": name}}


def _refuse_stored_state(body: Mapping[str, Any]) -> None:
    if body.get("previous_response_id") is not None:
        raise RequestError(
            "previous_response_id names a response that is not stored; send the whole input",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    for name in REFUSED_FIELDS:
        if body.get(name) is not None:
            raise refuse("unsupported_parameter", name, "is not supported; nothing is stored here")
    if body.get("background") is True:
        raise refuse("unsupported_parameter", "background", "must be false")
