"""Argument values by declared type (spec/chat_format.md 8.5): raw text in, JSON value out."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from twining.serving.json_text import BigInteger, parse_json, parse_number

TYPE_NAMES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_REFERENCES = 16  # steps along local references
STRING_ONLY = frozenset({"string"})


def schema_types(parameters: object, key: str) -> frozenset[str]:
    """Types that the schema `parameters` allows for argument `key`; empty when it says nothing."""
    if not isinstance(parameters, Mapping):
        return frozenset()
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = parameters.get("additionalProperties")
    return frozenset(_types(schema, parameters, MAX_REFERENCES, set()))


def declared_arguments(parameters: object) -> frozenset[str]:
    """Names in `properties`."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return frozenset(properties) if isinstance(properties, Mapping) else frozenset()


def convert_argument(raw: str, types: frozenset[str]) -> object:
    """The JSON value of one argument. Never fails and never loses text: the worst case is `raw`."""
    if types == STRING_ONLY:
        return raw
    text = raw.strip()
    if not types:
        return _untyped(raw, text)
    if "null" in types and (text == "null" or (text == "None" and "string" not in types)):
        return None
    if types & {"integer", "number"}:
        number = _number(text, types)
        if number is not None:
            return number
    if "boolean" in types:
        known = {"true": True, "false": False}
        if not types & {"string", "integer", "number"}:
            known |= {"1": True, "0": False}
        if text.lower() in known:
            return known[text.lower()]
    for name, opening in (("object", "{"), ("array", "[")):
        if name in types and text.startswith(opening):
            try:
                return parse_json(text)
            except ValueError:
                pass
    return raw if "string" in types else _untyped(raw, text)


def _untyped(raw: str, text: str) -> object:
    """Strict JSON except a quoted string, else the raw text."""
    if not text or text[0] == '"':
        return raw
    try:
        return parse_json(text)
    except ValueError:
        return raw


def _number(text: str, types: frozenset[str]) -> int | float | BigInteger | None:
    value = parse_number(text)
    if not isinstance(value, float) or "number" in types:
        return value
    whole, _, fraction = text.partition(".")
    is_whole = fraction and not fraction.strip("0") and "e" not in text.lower()
    return parse_number(whole) if is_whole else None


def _types(schema: object, root: Mapping[str, Any], steps: int, seen: set[int]) -> set[str]:
    # `seen` keeps the walk linear: unions of mutual references would otherwise grow exponentially.
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return set()
    seen.add(id(schema))
    given = schema.get("type")
    if given is None and "$ref" in schema:
        return (
            _types(resolve_reference(schema["$ref"], root), root, steps - 1, seen)
            if steps
            else set()
        )
    found: set[str] = set()
    if given is not None:
        listed = given if isinstance(given, list) else [given]
        found = {name for name in listed if isinstance(name, str) and name in TYPE_NAMES}
    else:
        members = schema.get("enum")
        found.update(map(_type_of, members if isinstance(members, list) else ()))
        if "const" in schema:
            found.add(_type_of(schema["const"]))
        for key in ("anyOf", "oneOf", "allOf"):
            options = schema.get(key)
            for option in options if isinstance(options, list) else ():
                found |= _types(option, root, steps, seen)
        if not found:
            found.update(
                name
                for name, key in (("object", "properties"), ("array", "items"))
                if key in schema
            )
    if schema.get("nullable") is True:
        found.add("null")
    return found


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | BigInteger():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def resolve_reference(reference: object, root: Mapping[str, Any]) -> object:
    """Target of a local reference `#/a/b`, or None."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    node: object = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and name.isascii() and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node
