"""Messages bodies (`/v1/messages`) in chat form (spec/api.md 14.1, 14.2)."""

from collections.abc import Mapping
from typing import Any

from twining.errors import RequestError
from twining.serving.chat_format.normalise import drop_billing_lines
from twining.serving.chat_format.shapes import Json, MappedBody, as_list, as_object, as_text, refuse

PASSED_FIELDS = ("thinking", "output_config")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def from_messages_body(body: Mapping[str, Any]) -> MappedBody:
    """Chat form of a Messages body; a final assistant message becomes a continuation.

    Raises RequestError naming the field. Server tools are left out with a warning.
    """
    warnings: list[str] = []
    messages = _system(body.get("system"))
    given = body.get("messages")
    if given is None:
        raise refuse("missing_field", "messages", "is required")
    if not as_list(given, "messages"):
        raise refuse("invalid_value", "messages", "must not be empty")
    for i, item in enumerate(given):
        messages.extend(_message(as_object(item, f"messages[{i}]"), f"messages[{i}]"))
    chat: Json = {"messages": messages}
    if body.get("tools") is not None:
        tools = _tools(as_list(body["tools"], "tools"), warnings)
        if tools:
            chat["tools"] = tools
    if body.get("tool_choice") is not None:
        chat |= _tool_choice(as_object(body["tool_choice"], "tool_choice"))
    chat |= {name: body[name] for name in PASSED_FIELDS if body.get(name) is not None}
    if messages[-1]["role"] == "assistant":
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    return MappedBody(body=chat, warnings=warnings)


def _system(system: object) -> list[Json]:
    if system is None:
        return []
    if isinstance(system, list):
        blocks = [as_object(block, f"system[{i}]") for i, block in enumerate(system)]
        system = "\n".join(
            as_text(b.get("text"), f"system[{i}].text") for i, b in enumerate(blocks)
        )
    text = drop_billing_lines(as_text(system, "system"))
    return [{"role": "system", "content": text}] if text else []


def _message(message: Json, param: str) -> list[Json]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refuse("invalid_value", f"{param}.role", "must be user, assistant or system")
    if content is None or isinstance(content, str):
        return [{"role": role, "content": content or ""}]
    blocks = as_list(content, f"{param}.content")
    places = [f"{param}.content[{i}]" for i in range(len(blocks))]
    pairs = [(as_object(b, p), p) for b, p in zip(blocks, places, strict=True)]
    if role == "assistant":
        return [_assistant(pairs)]
    if role == "system":
        return [{"role": role, "content": [part for b, p in pairs for part in _part(b, p)]}]
    return _user(pairs)


def _assistant(blocks: list[tuple[Json, str]]) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block, param in blocks:
        match block.get("type"):
            case "text":
                texts.append(as_text(block.get("text"), f"{param}.text"))
            case "thinking":
                thoughts.append(as_text(block.get("thinking"), f"{param}.thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                raise _unsupported(param)
    turn: Json = {"role": "assistant", "content": "".join(texts)}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    return turn


def _user(blocks: list[tuple[Json, str]]) -> list[Json]:
    """Tool turns first, then one user turn of the results' pictures and the other blocks."""
    results: list[Json] = []
    pictures: list[Json] = []
    others: list[Json] = []
    for block, param in blocks:
        if block.get("type") == "tool_result":
            content = _result_content(block.get("content"), param, pictures)
            turn: Json = {"role": "tool", "content": content}
            if block.get("tool_use_id") is not None:
                turn["tool_call_id"] = block["tool_use_id"]
            results.append(turn)
        else:
            others.extend(_part(block, param))
    parts = pictures + others
    if parts or not results:
        results.append({"role": "user", "content": parts})
    return results


def _result_content(content: object, param: str, pictures: list[Json]) -> str | list[Json]:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    references: list[Json] = []
    for i, item in enumerate(as_list(content, f"{param}.content")):
        place = f"{param}.content[{i}]"
        block = as_object(item, place)
        if block.get("type") == "tool_reference":
            name = block.get("tool_name") or block.get("name")
            references.append({"type": "tool_reference", "name": name})
            continue
        for part in _part(block, place):
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                pictures.append(part)
    return references or "\n".join(texts)


def _part(block: Json, param: str) -> list[Json]:
    """Chat parts of a text, image or plain-text document block."""
    source = block.get("source")
    match block.get("type"):
        case "text":
            return [{"type": "text", "text": as_text(block.get("text"), f"{param}.text")}]
        case "image":
            source = as_object(source, f"{param}.source")
            if source.get("type") == "url":
                url = as_text(source.get("url"), f"{param}.source.url")
            elif source.get("type") == "base64":
                kind = as_text(source.get("media_type"), f"{param}.source.media_type")
                url = f"data:{kind};base64," + as_text(source.get("data"), f"{param}.source.data")
            else:
                raise _unsupported(f"{param}.source")
            return [{"type": "image_url", "image_url": {"url": url}}]
        case "document" if isinstance(source, dict) and source.get("type") == "text":
            return [{"type": "text", "text": as_text(source.get("data"), f"{param}.source.data")}]
        case _:
            raise _unsupported(param)


def _unsupported(param: str) -> RequestError:
    return RequestError(
        f"{param}.type is not supported here; use text or image blocks",
        code="unsupported_content",
        param=f"{param}.type",
    )


def _tools(tools: list[Any], warnings: list[str]) -> list[Json]:
    done: list[Json] = []
    for i, item in enumerate(tools):
        tool = as_object(item, f"tools[{i}]")
        kind = tool.get("type")
        if kind not in (None, "custom"):  # server tools carry a dated type
            warnings.append(f"ignored:{kind}"[:80])
            continue
        names = (("name", "name"), ("description", "description"), ("parameters", "input_schema"))
        function = {to: tool[key] for to, key in names if tool.get(key) is not None}
        function |= {k: True for k in ("strict", "defer_loading") if tool.get(k) is True}
        done.append({"type": "function", "function": function})
    return done


def _tool_choice(choice: Json) -> Json:
    kind = choice.get("type")
    fields: Json = {}
    if choice.get("disable_parallel_tool_use") is True:
        fields["parallel_tool_calls"] = False
    if kind == "tool":
        name = as_text(choice.get("name"), "tool_choice.name")
        return {**fields, "tool_choice": {"type": "function", "function": {"name": name}}}
    if kind not in CHOICES:
        raise refuse("tool_choice_invalid", "tool_choice.type", "must be auto, any, tool or none")
    return {**fields, "tool_choice": CHOICES[kind]}
