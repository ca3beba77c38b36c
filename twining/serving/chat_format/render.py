"""The prompt renderer (spec/chat_format.md 2): normalised messages to segments, byte for byte.

Plain Python instead of a template engine: markers and text never share a string, so nothing that a
client writes can become structure, and ordering of tool results is linear.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twining.serving.chat_format.shapes import Json
from twining.serving.json_text import dump_json
from twining.serving.tokenizer import Segment

TOOLS_HEAD = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
TOOLS_TAIL = """</tools>

For each function call, output the function name and arguments within the following XML format:
"""
EFFORT_WORDS = {"low": "Low", "high": "High"}  # anything else prints Max

_IMAGE = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
_VIDEO = ("<|begin_of_video|>", "<|video|>", "<|end_of_video|>")
_AUDIO = ("<|begin_of_audio|>", "<|end_of_audio|>")
PLACEHOLDERS = {
    "image": _IMAGE,
    "image_url": _IMAGE,
    "video": _VIDEO,
    "video_url": _VIDEO,
    "audio": _AUDIO,
    "audio_url": _AUDIO,
    "input_audio": _AUDIO,
}
# Keys of a function that steer the server and are never shown to the model.
HIDDEN_TOOL_KEYS = ("strict", "defer_loading")


@dataclass(slots=True)
class Rendered:
    """segments: markers and merged text. media: the parts behind the placeholders, in order."""

    segments: list[Segment] = field(default_factory=list)
    media: list[Json] = field(default_factory=list)

    def mark(self, *markers: str) -> None:
        self.segments.extend(Segment("S", marker) for marker in markers)

    def text(self, text: str) -> None:
        if not text:
            return
        if self.segments and self.segments[-1].kind == "T":
            text = self.segments.pop().text + text
        self.segments.append(Segment("T", text))


@dataclass(slots=True)
class _Visible:
    """Content with media: text holds one U+FFFC per part of `media` at the indices in `places`."""

    text: str
    places: list[int]
    media: list[Json]

    def cut(self, start: int, end: int) -> "_Visible":
        inside = [(p, m) for p, m in zip(self.places, self.media, strict=True) if start <= p < end]
        return _Visible(
            self.text[start:end], [p - start for p, _ in inside], [m for _, m in inside]
        )

    def stripped(self) -> "_Visible":
        start = len(self.text) - len(self.text.lstrip())
        return self.cut(start, max(start, len(self.text.rstrip())))


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Json] | None = None,
    *,
    reasoning_effort: str | None = None,
    clear_thinking: bool = False,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Segments of a prompt from template-level inputs. ValueError if arguments are not JSON."""
    return render_with_media(
        messages,
        tools,
        reasoning_effort=reasoning_effort,
        clear_thinking=clear_thinking,
        add_generation_prompt=add_generation_prompt,
    ).segments


def render_with_media(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Json] | None = None,
    *,
    reasoning_effort: str | None = None,
    clear_thinking: bool = False,
    add_generation_prompt: bool = True,
) -> Rendered:
    """As `render`, with the media parts in the order of their placeholders."""
    out = Rendered()
    out.mark("[gMASK]", "<sop>", "<|system|>")
    out.text("Reasoning Effort: " + EFFORT_WORDS.get(reasoning_effort or "", "Max"))
    if tools:
        _tool_block(out, tools)
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    clear_until = users[-1] if users and clear_thinking else -1
    for index, message in enumerate(messages):
        role = message.get("role")
        if role in ("system", "user"):
            out.mark(f"<|{role}|>")
            _print(out, _visible(message.get("content")))
        elif role == "assistant":
            _assistant_turn(out, message, drop_reasoning=index <= clear_until)
        elif role == "tool" and (index == 0 or messages[index - 1].get("role") != "tool"):
            _tool_turn(out, messages, index, tools or ())
    if add_generation_prompt:
        out.mark("<|assistant|>", "<think>")
    return out


def prompt_text(segments: Iterable[Segment]) -> str:
    """The prompt as one string, for people and for /apply-template."""
    return "".join(segment.text for segment in segments)


def _tool_block(out: Rendered, tools: Sequence[Json]) -> None:
    out.mark("<|system|>")
    shown = [tool for tool in tools if not _is_deferred(tool)]
    out.text(TOOLS_HEAD + "".join(map(_tool_line, shown)) + TOOLS_TAIL)
    out.mark("<tool_call>")
    out.text("{function-name}")
    for number in (1, 2):
        out.mark("<arg_key>")
        out.text(f"{{arg-key-{number}}}")
        out.mark("</arg_key>", "<arg_value>")
        out.text(f"{{arg-value-{number}}}")
        out.mark("</arg_value>")
    out.text("...")
    out.mark("</tool_call>")


def _function_of(tool: Json) -> Json:
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _is_deferred(tool: Json) -> bool:
    return bool(tool.get("defer_loading") or _function_of(tool).get("defer_loading"))


def _tool_line(tool: Json) -> str:
    shown = {k: v for k, v in _function_of(tool).items() if k not in HIDDEN_TOOL_KEYS}
    return dump_json(shown) + "\n"


def _visible(content: object) -> _Visible:
    """What content prints: a string, nothing for null, or the parts back to back."""
    seen = _Visible("", [], [])
    if isinstance(content, str):
        seen.text = content
    elif isinstance(content, list):
        pieces: list[str] = []
        length = 0
        for part in content:
            piece = part if isinstance(part, str) else ""
            if isinstance(part, dict):
                if part.get("type") == "text":
                    piece = str(part.get("text") or "")
                elif part.get("type") in PLACEHOLDERS:
                    piece = "\ufffc"
                    seen.places.append(length)
                    seen.media.append(part)
            pieces.append(piece)
            length += len(piece)
        seen.text = "".join(pieces)
    return seen


def _print(out: Rendered, seen: _Visible) -> None:
    at = 0
    for place, part in zip(seen.places, seen.media, strict=True):
        out.text(seen.text[at:place])
        out.mark(*PLACEHOLDERS[part["type"]])
        out.media.append(part)
        at = place + 1
    out.text(seen.text[at:])


def _assistant_turn(out: Rendered, message: Mapping[str, Any], *, drop_reasoning: bool) -> None:
    content = _visible(message.get("content"))
    reasoning = _Visible("", [], [])
    given = message.get("reasoning_content")
    if isinstance(given, str):
        reasoning.text = given
    elif "</think>" in content.text:
        end = content.text.index("</think>")
        start = content.text.rfind("<think>", 0, end)
        reasoning = content.cut(start + len("<think>") if start >= 0 else 0, end)
        rest = content.text.rindex("</think>") + len("</think>")
        content = content.cut(rest, len(content.text))
    out.mark("<|assistant|>", "<think>")
    if not drop_reasoning:
        _print(out, reasoning)
    out.mark("</think>")
    _print(out, content.stripped())
    for call in message.get("tool_calls") or ():
        _call(out, _function_of(call))


def _call(out: Rendered, function: Json) -> None:
    out.mark("<tool_call>")
    out.text(str(function.get("name", "")))
    for key, value in (function.get("arguments") or {}).items():
        out.mark("<arg_key>")
        out.text(str(key))
        out.mark("</arg_key>", "<arg_value>")
        # A BigInteger is digits, not text; as raw text it prints the same.
        out.text(value if isinstance(value, str) else dump_json(value))
        out.mark("</arg_value>")
    out.mark("</tool_call>")


def _id_of(item: Mapping[str, Any]) -> str:
    found = item.get("tool_call_id") or item.get("id")
    return found if isinstance(found, str) else ""


def _tool_turn(
    out: Rendered, messages: Sequence[Mapping[str, Any]], start: int, tools: Sequence[Json]
) -> None:
    results: list[tuple[str, object]] = []
    for message in messages[start:]:
        if message.get("role") != "tool":
            break
        content = message.get("content")
        if _first_has(content, "output"):
            results.extend((_id_of(m), m.get("output")) for m in _objects(content))
        else:
            results.append((_id_of(message), content))
    before = messages[start - 1] if start else {}
    calls = before.get("tool_calls") if before.get("role") == "assistant" else None
    out.mark("<|observation|>")
    for _, content in _in_call_order(results, [_id_of(call) for call in calls or ()]):
        out.mark("<tool_response>")
        if _first_has(content, "type", "tool_reference"):
            _tool_references(out, _objects(content), tools)
        else:
            _print(out, _visible(content))
        out.mark("</tool_response>")


def _in_call_order(
    results: list[tuple[str, object]], call_ids: list[str]
) -> list[tuple[str, object]]:
    """Results in the order of the calls when every id is known and unique, else as received."""
    by_id = dict(results)
    known = set(call_ids)
    if not call_ids or "" in known or len(known) < len(call_ids):
        return results
    if len(by_id) < len(results) or not known.issuperset(by_id):
        return results
    return [(i, by_id[i]) for i in call_ids if i in by_id]


def _objects(content: object) -> list[Json]:
    return [m for m in content if isinstance(m, dict)] if isinstance(content, list) else []


def _first_has(content: object, key: str, value: str | None = None) -> bool:
    if not isinstance(content, list) or not content or not isinstance(content[0], dict):
        return False
    return key in content[0] if value is None else content[0].get(key) == value


def _tool_references(out: Rendered, members: Iterable[Json], tools: Sequence[Json]) -> None:
    lines: dict[str, list[Json]] = {}
    for tool in tools:
        lines.setdefault(str(_function_of(tool).get("name")), []).append(tool)
    out.text("<tools>\n")
    for member in members:
        if member.get("type") == "tool_reference":
            out.text("".join(map(_tool_line, lines.get(str(member.get("name")), ()))))
    out.text("</tools>")
