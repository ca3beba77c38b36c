"""One grammar for one reply: content, calls, or a choice between them (spec/chat_format.md 9)."""

from collections.abc import Sequence

from twining.engine.grammar import check_source
from twining.engine.request import GrammarSpec
from twining.errors import RequestError
from twining.serving.json_text import dump_json
from twining.serving.structured.calls import MAX_CALLS, CallWriter
from twining.serving.structured.choice import NO_CALLS, ToolChoice
from twining.serving.structured.content import Content
from twining.serving.structured.schema import Json
from twining.serving.tokenizer import Markers


def build_grammar(
    *,
    content: Content | None,
    markers: Markers,
    tools: Sequence[Json] = (),
    choice: ToolChoice = NO_CALLS,
    parallel: bool = True,
    is_thinking: bool = False,
    tool_guard: bool = True,
) -> tuple[GrammarSpec | None, list[str]]:
    """The engine's grammar, None for free text, and warning codes. Raises RequestError.

    is_thinking: the prompt ends inside the thought, so the grammar waits for its closing marker.
    parallel: more than one call is allowed. tool_guard: calls keep their structure also where
    nothing is strict.
    """
    start_id = markers.think_close if is_thinking else -1
    warnings = list(content.warnings) if content else []
    if not choice.is_calling:
        if content is None:
            return None, warnings
        source = dump_json({"grammars": [content.entry]})
        return GrammarSpec(source=source, start_id=start_id), warnings
    is_forced = choice.mode in ("required", "named")
    is_bound = choice.is_subset or any(
        _is_strict(tool) for tool in tools if tool["function"]["name"] in choice.names
    )
    writer = CallWriter(markers)
    for index, tool in enumerate(tools):
        if tool["function"]["name"] not in choice.names:
            continue
        if is_forced or _is_strict(tool):
            writer.bind(tool, f"tools[{index}].function")
        else:
            writer.guard(tool, has_markers=content is None and not is_bound)
    warnings += [w for w in writer.warnings if w not in warnings]
    if not is_forced and content is None:
        if not is_bound and not tool_guard:
            return None, warnings
        try:
            source = _source(f"start: {writer.body()}", writer.lines, None)
        except RequestError:
            if is_bound:
                raise
            return None, [*warnings, "tool_guard_off"]
        spec = GrammarSpec(
            source=source,
            # A declared function called inside the thought is a call too (8.3.2), so what must hold
            # holds there; the guard leaves the thought alone.
            start_id=-1 if is_bound else start_id,
            trigger_id=markers.tool_call_open,
            is_optional=not is_bound,
        )
        return spec, warnings
    many = parallel and choice.mode != "named"
    start = f"start: call{{1,{MAX_CALLS}}}" if many else "start: call"
    if content is not None and not is_forced:
        start += " | @content"
    entry = content.entry if content is not None and not is_forced else None
    spec = GrammarSpec(
        source=_source(start, [f"call: {writer.whole()}", *writer.lines], entry),
        start_id=start_id,
        # A call inside the thought would end it before the grammar begins.
        banned_before=(markers.tool_call_open,) if is_thinking else (),
    )
    return spec, warnings


def _is_strict(tool: Json) -> bool:
    return tool["function"].get("strict") is True or tool.get("strict") is True


def _source(start: str, lines: list[str], content: Json | None) -> str:
    """The whole in llguidance's form. Raises RequestError if it is beyond the limits."""
    grammars: list[Json] = [{"name": "main", "lark_grammar": "\n".join([start, *lines, ""])}]
    if content is not None:
        grammars.append({**content, "name": "content"})
    source = dump_json({"grammars": grammars})
    problem = check_source(source)
    if problem:
        raise RequestError(
            f"tools cannot be turned into a grammar: {problem}", code="grammar_error", param="tools"
        )
    return source
