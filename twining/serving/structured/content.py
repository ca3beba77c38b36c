"""What the visible text must look like (spec/api.md 7.4): every form, exactly one per request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from twining.engine.grammar import check_source
from twining.errors import RequestError
from twining.serving.json_text import dump_json, parse_json
from twining.serving.structured.schema import Json, SchemaCleaner, bad_schema, compile_schema

MAX_GRAMMAR_CHARS = 1 << 16  # GBNF is read by a slow parser; this takes it well under a second
MAX_CHOICES = 10_000
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Further names at the top level and the kind that each stands for.
ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """entry: one member of llguidance's list of grammars, without a name."""

    entry: Json
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    kind: str
    value: Any
    param: str
    strict: bool = False


def content_grammar(data: Mapping[str, Any]) -> Content | None:
    """The grammar of a body's visible text, None for free text. Raises RequestError."""
    sources = [*_response_format(data.get("response_format")), *_structured_outputs(data)]
    for name, kind in ALIASES.items():
        if data.get(name) is not None:
            sources.append(_Source(kind=kind, value=data[name], param=name))
    if not sources:
        return None
    if len(sources) > 1:
        names = ", ".join(source.param for source in sources)
        raise RequestError(
            f"give exactly one form of structured output (got {names})",
            code="conflicting_fields",
            param=sources[0].param.partition(".")[0],
        )
    return _READERS[sources[0].kind](sources[0])


def _response_format(form: object) -> list[_Source]:
    if form is None:
        return []
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(form, dict) or kind not in RESPONSE_FORMATS:
        raise RequestError(
            "response_format.type must be text, json_object or json_schema",
            code="invalid_value",
            param="response_format",
        )
    if kind == "structural_tag":
        raise RequestError(
            "response_format: structural_tag is not offered; use tools or json_schema",
            code="unsupported_parameter",
            param="response_format",
        )
    if kind == "text":
        return []
    if kind == "json_object":
        if form.get("schema") is None:
            return [_Source(kind="json_object", value=True, param="response_format")]
        return [_Source(kind="json", value=form["schema"], param="response_format.schema")]
    inner = form.get("json_schema")
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise RequestError(
            "response_format.json_schema.schema is required with type json_schema",
            code="invalid_value",
            param="response_format.json_schema",
        )
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(
            "response_format.json_schema.strict must be true or false",
            code="wrong_type",
            param="response_format.json_schema.strict",
        )
    param = "response_format.json_schema.schema"
    return [_Source(kind="json", value=inner["schema"], param=param, strict=strict is True)]


def _structured_outputs(data: Mapping[str, Any]) -> list[_Source]:
    inner = data.get("structured_outputs")
    if inner is None:
        return []
    if not isinstance(inner, dict):
        raise _wrong("structured_outputs", "an object")
    given = [kind for kind in KINDS if inner.get(kind) is not None and inner[kind] is not False]
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs needs exactly one of {', '.join(KINDS)} (got {len(given)})",
            code="conflicting_fields",
            param="structured_outputs",
        )
    kind = given[0]
    return [_Source(kind=kind, value=inner[kind], param=f"structured_outputs.{kind}")]


def _json(source: _Source) -> Content:
    schema = source.value
    if isinstance(schema, str):  # some clients send the schema as text
        try:
            schema = parse_json(schema)
        except ValueError as err:
            raise bad_schema(source.param, f"is text that is not JSON: {err}") from err
    cleaner = SchemaCleaner(strict=source.strict)
    cleaned = cleaner.clean(schema, source.param)
    document = compile_schema(cleaned, source.param, cleaner)
    return Content(entry={"json_schema": document}, warnings=cleaner.warnings)


def _json_object(source: _Source) -> Content:
    if source.value is not True:
        raise _wrong(source.param, "true or false")
    return _json(_Source(kind="json", value={"type": "object"}, param=source.param))


def _regex(source: _Source) -> Content:
    return _checked(source, {"lark_grammar": f"start: {regex_terminal(_text(source))}"})


def _choice(source: _Source) -> Content:
    options = source.value
    if not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        raise _wrong(source.param, "a list of strings")
    if not 1 <= len(options) <= MAX_CHOICES or sum(map(len, options)) > 16 * MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"{source.param} must hold 1 to {MAX_CHOICES} strings (got {len(options)})",
            code="out_of_range",
            param=source.param,
        )
    lark = "start: " + " | ".join(lark_string(option) for option in options)
    return _checked(source, {"lark_grammar": lark})


def _grammar(source: _Source) -> Content:
    text = _text(source)
    try:
        lark = any_to_lark(text)
    except Exception as err:  # the converter raises bare Exception for bad GBNF
        reason = " ".join(str(err).split())[:200]
        raise _bad_grammar(source, reason or "not GBNF") from err
    return _checked(source, {"lark_grammar": lark})


def _checked(source: _Source, entry: Json) -> Content:
    problem = check_source(dump_json({"grammars": [entry]}))
    if problem:
        raise _bad_grammar(source, problem)
    return Content(entry=entry)


def _text(source: _Source) -> str:
    text = source.value
    if not isinstance(text, str):
        raise _wrong(source.param, "a string")
    if not 1 <= len(text) <= MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"{source.param} must have 1 to {MAX_GRAMMAR_CHARS} characters (got {len(text)})",
            code="out_of_range",
            param=source.param,
        )
    return text


def regex_terminal(regex: str) -> str:
    """A terminal of a Lark grammar that matches the regex as a whole; \\d means ASCII digits."""
    body = llguidance.regex_to_lark(regex, "d").replace("\n", "\\n")
    return f"/{body}/"


def lark_string(text: str) -> str:
    """A literal of a Lark grammar; its escapes are those of JSON."""
    return dump_json(text)


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param} must be {what}", code="wrong_type", param=param)


def _bad_grammar(source: _Source, why: str) -> RequestError:
    return RequestError(f"{source.param}: {why}", code="grammar_error", param=source.param)


_READERS = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
