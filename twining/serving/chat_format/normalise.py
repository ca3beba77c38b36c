"""From what clients send to what the renderer prints (spec/chat_format.md 3). Pure and idempotent.

Messages come out with one role set (system, user, assistant, tool), string content wherever no
media or tool reference forbids it, one reasoning field, and call arguments as objects.
"""

import re
from typing import Any

from twining.errors import RequestError
from twining.serving.chat_format.shapes import Json, as_list, as_object, as_text, refuse
from twining.serving.json_text import dump_json, parse_json

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
}
MEDIA_TYPES = ("image", "image_url", "video", "video_url")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
BILLING_PREFIX = "x-anthropic-billing-header:"
MAX_TOOL_REFERENCES = 1024  # per request: each one prints a whole declaration
TOOL_NAME = re.compile(r"[A-Za-z0-9_\-.:/]{1,128}", re.ASCII)


def normalise_messages(messages: object) -> tuple[list[Json], list[str]]:
    """(messages, warning codes). Raises RequestError naming the field for anything unusable."""
    if messages is None:
        raise refuse("missing_field", "messages", "is required")
    if not as_list(messages, "messages"):
        raise refuse("invalid_value", "messages", "must not be empty")
    warnings: list[str] = []
    done = [
        _message(as_object(message, f"messages[{i}]"), f"messages[{i}]", warnings)
        for i, message in enumerate(as_list(messages, "messages"))
    ]
    references = sum(_num_references(message["content"]) for message in done)
    if references > MAX_TOOL_REFERENCES:
        raise refuse(
            "too_many_items", "messages", f"hold more than {MAX_TOOL_REFERENCES} tool references"
        )
    return done, list(dict.fromkeys(warnings))


def normalise_tools(tools: object) -> list[Json]:
    """Declarations in chat form; absent or empty gives []. Raises RequestError (invalid_tool).

    Chat form is kept as received, key order included; flat and Messages forms are rebuilt.
    """
    if tools is None:
        return []
    done: list[Json] = []
    names: set[str] = set()
    for i, tool in enumerate(as_list(tools, "tools")):
        param = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise refuse("invalid_tool", param, "must be an object")
        entry = _tool(tool, param)
        name = entry["function"]["name"]
        if name in names:
            raise refuse("invalid_tool", param, "has the name of an earlier tool")
        names.add(name)
        done.append(entry)
    return done


def join_text(parts: list[Any], separator: str) -> str:
    """Texts of text parts and bare strings, joined; other parts give nothing."""
    return separator.join(text for part in parts if (text := part_text(part)) is not None)


def part_text(part: object) -> str | None:
    """Text of a text part or bare string, else None."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in TEXT_KEYS:
        text = part.get(TEXT_KEYS[part["type"]])
        return text if isinstance(text, str) else None
    return None


def drop_billing_lines(text: str) -> str:
    """text without the client's per-request accounting lines, which would defeat prefix reuse."""
    if BILLING_PREFIX not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.startswith(BILLING_PREFIX))


def _message(message: Json, param: str, warnings: list[str]) -> Json:
    role = message.get("role")
    if role is None:
        raise refuse("missing_field", f"{param}.role", "is required")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse("invalid_value", f"{param}.role", f"must be one of {', '.join(ROLES)}")
    role = ROLES[role]
    done: Json = {"role": role, "content": _content(message.get("content"), role, param)}
    if role == "tool":
        found = message.get("tool_call_id") or message.get("id")
        if found is not None:
            done["tool_call_id"] = as_text(found, f"{param}.tool_call_id")
    if role == "assistant":
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str):
                done["reasoning_content"] = message[key]
                break
        calls = message.get("tool_calls")
        if calls is not None and as_list(calls, f"{param}.tool_calls"):
            done["tool_calls"] = [
                _call(call, f"{param}.tool_calls[{i}]", warnings) for i, call in enumerate(calls)
            ]
    return done


def _content(content: object, role: str, param: str) -> str | list[Any]:
    if content is None:
        return ""
    if isinstance(content, str):
        return drop_billing_lines(content) if role == "system" else content
    if not isinstance(content, list):
        raise refuse("wrong_type", f"{param}.content", "must be a string or a list of parts")
    if role == "tool" and content and isinstance(content[0], dict) and "output" in content[0]:
        return [_bundled(m, f"{param}.content[{i}]") for i, m in enumerate(content)]
    parts = [_part(part, role, f"{param}.content[{i}]") for i, part in enumerate(content)]
    if any(part["type"] != "text" for part in parts):
        if role == "tool":
            # The renderer looks at the first part to tell a list of references from content.
            parts.sort(key=lambda part: part["type"] != "tool_reference")
        return parts
    text = join_text(parts, "\n" if role == "tool" else "")
    return drop_billing_lines(text) if role == "system" else text


def _bundled(entry: object, param: str) -> Json:
    """One result of a tool message that carries several."""
    result = as_object(entry, param)
    found = result.get("tool_call_id") or result.get("id")
    done: Json = {} if found is None else {"tool_call_id": as_text(found, f"{param}.tool_call_id")}
    output = result.get("output")
    if (
        isinstance(output, list)
        and output
        and isinstance(output[0], dict)
        and "output" in output[0]
    ):
        raise refuse("invalid_value", f"{param}.output", "must not hold further results")
    return {**done, "output": _content(output, "tool", param)}


def _part(part: object, role: str, param: str) -> Json:
    if isinstance(part, str):
        text = part
    else:
        entry = as_object(part, param)
        kind = entry.get("type")
        if kind == "tool_reference" and role == "tool":
            name = entry.get("name") or entry.get("tool_name")
            return {"type": kind, "name": as_text(name, f"{param}.name")}
        if kind == "input_image":
            return _input_image(entry, param)
        if kind in MEDIA_TYPES:
            return entry
        if kind not in TEXT_KEYS:
            raise RequestError(
                f"{param}.type is not supported; use text, image_url or video_url",
                code="unsupported_content",
                param=f"{param}.type",
            )
        key = TEXT_KEYS[kind]
        text = as_text(entry.get(key), f"{param}.{key}")
    return {"type": "text", "text": drop_billing_lines(text) if role == "system" else text}


def _input_image(entry: Json, param: str) -> Json:
    url = entry.get("image_url")
    if not isinstance(url, str):
        raise refuse("unsupported_content", f"{param}.image_url", "must be a string (no file ids)")
    return {"type": "image_url", "image_url": {"url": url}}


def _num_references(content: object) -> int:
    parts = content if isinstance(content, list) else []
    return sum(
        _num_references(part["output"]) if "output" in part else part["type"] == "tool_reference"
        for part in parts
    )


def _call(call: object, param: str, warnings: list[str]) -> Json:
    entry = as_object(call, param)
    function = as_object(entry.get("function"), f"{param}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise refuse("invalid_value", f"{param}.function.name", "must be a non-empty string")
    done: Json = {}
    found = entry.get("tool_call_id") or entry.get("id")
    if found is not None:
        done["id"] = as_text(found, f"{param}.id")
    arguments = _arguments(function.get("arguments"), warnings)
    return {**done, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(value: object, warnings: list[str]) -> Json:
    """Never an error: a client cannot repair its own history."""
    if isinstance(value, dict):
        return value
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            parsed = parse_json(value)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            return parsed
    warnings.append("history_arguments_unparsed")
    return {}


def _tool(tool: Json, param: str) -> Json:
    function = tool.get("function")
    is_flat = function is None and "name" in tool
    if tool.get("type") not in (None, "function"):
        raise refuse("invalid_tool", f"{param}.type", "must be function")
    if is_flat:
        parameters = "input_schema" if "input_schema" in tool else "parameters"
        names = (("name", "name"), ("description", "description"), ("parameters", parameters))
        built = {to: tool[key] for to, key in names if tool.get(key) is not None}
        built |= {k: True for k in ("strict", "defer_loading") if tool.get(k) is True}
        tool, function = {"type": "function", "function": built}, built
    if not isinstance(function, dict):
        raise refuse("invalid_tool", f"{param}.function", "must be an object")
    where = f"{param}.function"
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise refuse(
            "invalid_tool", f"{where}.name", "must be 1 to 128 letters, digits or any of _ - . : /"
        )
    if not isinstance(function.get("description", ""), str | None):
        raise refuse("invalid_tool", f"{where}.description", "must be a string")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise refuse("invalid_tool", f"{where}.parameters", "must be an object")
    try:
        dump_json(function)
    except ValueError as err:
        raise refuse("invalid_tool", where, f"cannot be printed: {err}") from err
    return tool
