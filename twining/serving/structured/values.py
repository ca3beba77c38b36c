"""One argument's value as a Lark rule: raw text for strings, JSON for everything else.

The output parser turns raw text into a JSON value by the types that the schema allows
(spec/chat_format.md 8.5). The rules here produce only texts whose converted value satisfies the
schema: where a string is one of several types, texts that would be read as another type are left to
that type's branch.
"""

import re
from typing import Any

import llguidance

from twining.engine.grammar import check_source
from twining.serving.json_text import dump_json
from twining.serving.parsing.schema import (
    MAX_REFERENCES,
    STRING_ONLY,
    convert_argument,
    resolve_reference,
)
from twining.serving.structured.content import regex_terminal
from twining.serving.structured.schema import (
    Json,
    SchemaCleaner,
    bad_schema,
    check_size,
    compile_schema,
)

ROOT = "#/$defs/root"
# Of one request: bytes of JSON documents (references repeat the root), rules, and branches looked
# at (references can make a small schema branch without end). Together about two seconds of work.
MAX_BYTES = 1 << 20
MAX_RULES = 5000
MAX_STEPS = 50_000
ANY_TEXT = r"/(.|\n)*/"
_SPACE = r"[\s\x1c-\x1f]*"  # what str.strip removes
# Texts that are read as another type, per type (white space around them is dropped first).
_READ_AS = {
    "null": "null",
    "integer": r"-?[0-9]+([.][0-9]+)?([eE][+-]?[0-9]+)?",
    "number": r"-?[0-9]+([.][0-9]+)?([eE][+-]?[0-9]+)?",
    "boolean": "[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]",
    "object": r"\{(.|\n)*",
    "array": r"\[(.|\n)*",
}
_PLAIN = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})


class Budget:
    """What the schemas of one request may cost."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_rules = 0
        self.num_steps = 0

    def check(self, param: str) -> None:
        """Raises RequestError when anything is used up."""
        if self.num_bytes > MAX_BYTES or self.num_rules > MAX_RULES or self.num_steps > MAX_STEPS:
            raise bad_schema(
                param, "the schemas of all tools are too large together; simplify them"
            )


class ValueWriter:
    """Rules of one function's values. root: its cleaned parameters, references moved to ROOT."""

    def __init__(self, root: Json, cleaner: SchemaCleaner, budget: Budget, *, prefix: str) -> None:
        self.lines: list[str] = []
        self._root = root
        self._cleaner = cleaner
        self._prefix = prefix
        self._budget = budget
        self._param = ""
        self._has_references = "$ref" in dump_json(root)

    def rule(self, schema: Any, types: frozenset[str], param: str) -> str | None:
        """Lark expression for the value of an argument; None if no value is possible.

        types: what the parser converts to (schema_types). Raises RequestError.
        """
        self._param = param
        self._budget.num_rules += 1
        self._budget.check(param)
        if schema is True:
            return "TEXT"
        if schema is False:
            return None
        if not types:
            is_free = not schema.keys() - _PLAIN
            return "TEXT" if is_free else self._json(schema, param)
        if "string" not in types:
            return self._json(schema, param)
        options: list[str] = []
        for branch in self._text_branches(schema, MAX_REFERENCES):
            options.append(self._text(branch, types, param))
        rest = self._without_strings(schema, types, MAX_REFERENCES)
        if rest is not None:
            options.append(self._json(rest, param))
        options = [option for option in dict.fromkeys(options) if option]
        return "(" + " | ".join(options) + ")" if options else None

    # Strings.

    def _resolved(self, schema: Json, steps: int) -> Json:
        """Follow a reference; what is beside it is kept."""
        self._budget.num_steps += 1
        self._budget.check(self._param)
        while steps and isinstance(schema.get("$ref"), str):
            reference = schema["$ref"]
            if not reference.startswith(ROOT):
                break
            target = resolve_reference("#" + reference[len(ROOT) :], self._root)
            if not isinstance(target, dict):
                break
            schema = {**target, **{k: v for k, v in schema.items() if k != "$ref"}}
            steps -= 1
        return schema

    def _text_branches(self, schema: object, steps: int) -> list[Json]:
        """The alternatives of a schema that may be a string, each without anyOf and oneOf."""
        if schema is True:
            return [{}]
        if not isinstance(schema, dict) or steps == 0:
            return []
        schema = self._resolved(schema, steps)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                beside = {k: v for k, v in schema.items() if k not in (key, *_PLAIN)}
                inner = [b for s in schema[key] for b in self._text_branches(s, steps - 1)]
                return [{**branch, "allOf": [*branch.get("allOf", []), beside]} for branch in inner]
        given = schema.get("type")
        listed = given if isinstance(given, list) else [given]
        return [schema] if given is None or "string" in listed else []

    def _text(self, schema: Json, types: frozenset[str], param: str) -> str:
        """Raw text of one string alternative, "" if there is none."""
        members = self._members(schema)
        if members is not None:
            texts = [m for m in members if isinstance(m, str) and convert_argument(m, types) == m]
            return " | ".join(dump_json(text) for text in texts)
        parts = [ANY_TEXT, *self._limits(schema, param, MAX_REFERENCES)]
        for name in sorted(types - STRING_ONLY):
            parts.append(rf"~/{_SPACE}({_READ_AS[name]}){_SPACE}/")
        if len(parts) == 1:
            return "TEXT"
        name = f"T{self._prefix.upper()}_{len(self.lines)}"
        line = f"{name}: " + " & ".join(dict.fromkeys(parts))
        problem = check_source(llguidance.LLMatcher.grammar_from_lark(f"start: {name}\n{line}"))
        if problem:
            raise bad_schema(param, f"cannot be used: {problem}")
        self.lines.append(line)
        return name

    def _members(self, schema: Json) -> list[object] | None:
        """Values of enum or const, None without; those beside them in allOf narrow them down."""
        found: list[object] | None = None
        for part in [schema, *(p for p in schema.get("allOf", []) if isinstance(p, dict))]:
            part = self._resolved(part, MAX_REFERENCES)
            listed = part.get("enum")
            if "const" in part:
                listed = [part["const"]]
            if isinstance(listed, list):
                found = listed if found is None else [m for m in found if m in listed]
        return found

    def _limits(self, schema: Json, param: str, steps: int) -> list[str]:
        """Terminals that a plain string has to match as well."""
        parts: list[str] = []
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if low or high is not None:
            if not _is_count(low) or not (high is None or _is_count(high)):
                raise bad_schema(param, "minLength and maxLength must be integers from 0 up")
            if high is not None and high < low:
                raise bad_schema(param, f"maxLength={high} is below minLength={low}")
            parts.append(rf"/(.|\n){{{low},{'' if high is None else high}}}/")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            parts.append(_search(pattern))
        if "format" in schema:
            self._cleaner.ignore("format", f"{param}.format", "is not enforced in arguments")
        for part in schema.get("allOf", []):
            if isinstance(part, dict) and steps:
                parts += self._limits(self._resolved(part, steps), param, steps - 1)
        return parts

    # Everything else.

    def _without_strings(self, schema: object, types: frozenset[str], steps: int) -> Json | None:
        """The schema without its strings, None if nothing is left."""
        others = sorted(types - STRING_ONLY)
        if not others:
            return None
        if schema is True:
            return {"type": others}
        if not isinstance(schema, dict) or steps == 0:
            return None
        schema = self._resolved(schema, steps)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                inner = [self._without_strings(s, types, steps - 1) for s in schema[key]]
                kept = [s for s in inner if s is not None]
                return {**schema, key: kept} if kept else None
        for key, values in (("enum", schema.get("enum")), ("const", [schema.get("const")])):
            if key in schema and isinstance(values, list):
                left = [v for v in values if not isinstance(v, str)]
                rest = {k: v for k, v in schema.items() if k != "type"}
                return {**rest, key: left if key == "enum" else left[0]} if left else None
        given = schema.get("type")
        listed = given if isinstance(given, list) else [given]
        kept_types = others if given is None else [t for t in listed if t in others]
        return {**schema, "type": kept_types} if kept_types else None

    def _json(self, schema: Json, param: str) -> str:
        """A rule for the schema as JSON text."""
        document = dict(schema)
        if self._has_references:
            document["$defs"] = {"root": self._root}
        check_size(document, param)
        compiled = dump_json(compile_schema(document, param, self._cleaner))
        self._budget.num_bytes += len(compiled)
        name = f"{self._prefix}_{len(self.lines)}"
        self.lines.append(f"{name}: %json {compiled}")
        return name


def _search(pattern: str) -> str:
    """A terminal for texts in which a JSON schema pattern is found."""
    head = "" if pattern.startswith("^") else r"(.|\n)*"
    tail = "" if re.search(r"(?<!\\)(\\\\)*\$$", pattern) else r"(.|\n)*"
    core = pattern.removeprefix("^")
    core = core[:-1] if not tail else core
    if "|" in core:  # an anchor may belong to one alternative only
        core, head, tail = pattern, r"(.|\n)*", r"(.|\n)*"
    return regex_terminal(f"{head}({core}){tail}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 20
