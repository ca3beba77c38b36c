"""Calls in the model's own format as Lark rules (spec/chat_format.md 9); markers are token ids.

Two strengths. A bound function takes its arguments in schema order, each value such that what the
output parser makes of it (8.5) satisfies the schema. A guarded function keeps the structure and
declared keys, and leaves values free.
"""

from collections.abc import Mapping

from twining.serving.parsing.schema import schema_types
from twining.serving.structured.content import lark_string
from twining.serving.structured.schema import Json, SchemaCleaner
from twining.serving.structured.values import Budget, ValueWriter
from twining.serving.tokenizer import Markers

MAX_CALLS = 32  # of one reply


class CallWriter:
    """Collects the rules of all functions; `lines` is the Lark text apart from its start rule."""

    def __init__(self, markers: Markers) -> None:
        self.lines: list[str] = [
            r"TEXT: /(.|\n)*/",
            r"SOME: /(.|\n)+/",
            rf"free_pair: {_id(markers.arg_key_open)} SOME {_id(markers.arg_key_close)}"
            rf" {_id(markers.arg_value_open)} TEXT {_id(markers.arg_value_close)}",
        ]
        self.warnings: list[str] = []
        self._markers = markers
        self._functions: list[str] = []
        self._budget = Budget()
        self._has_guard = False

    def bind(self, tool: Json, param: str) -> None:
        """A function whose arguments follow its schema. Raises RequestError."""
        function = tool["function"]
        strict = function.get("strict") is True or tool.get("strict") is True
        parameters = function.get("parameters") or {}
        where = f"{param}.parameters"
        cleaner = SchemaCleaner(strict=strict, reference_root="#/$defs/root")
        cleaned = cleaner.clean(parameters, where)
        self._check_top(cleaned, where, cleaner)
        values = ValueWriter(cleaned, cleaner, self._budget, prefix=f"v{len(self._functions)}")
        pairs: list[str] = []
        properties = cleaned.get("properties") or {}
        required = cleaned.get("required") or []
        for number, (key, schema) in enumerate(properties.items()):
            types = schema_types(parameters, key)
            path = f"{where}.properties.{key}"
            value = values.rule(schema, types, path)
            if value is None:  # no value is possible
                if key in required:
                    cleaner.ignore("required", path, "names an argument that no value satisfies")
                continue
            name = f"a{len(self._functions)}_{number}"
            self.lines.append(f"{name}: {self._pair(lark_string(key), value)}")
            pairs.append(name if key in required else f"{name}?")
        undeclared = [key for key in required if isinstance(key, str) and key not in properties]
        pairs += [self._pair(lark_string(key), "TEXT") for key in undeclared]
        if not properties and not undeclared and cleaned.get("additionalProperties") is not False:
            pairs.append("free_pair*")
        self.lines += values.lines
        self.warnings += [w for w in cleaner.warnings if w not in self.warnings]
        self._add(function["name"], pairs)

    def guard(self, tool: Json, *, has_markers: bool) -> None:
        """A function whose values are free; has_markers: they may hold markers as data.

        What a marker inside a value means is the parser's guess, so where anything has to hold for
        certain, values go without.
        """
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        extra = parameters.get("additionalProperties") if isinstance(parameters, Mapping) else None
        key = "SOME"
        if isinstance(properties, Mapping) and properties and extra in (None, False):
            key = "(" + " | ".join(lark_string(name) for name in properties) + ")"
        if has_markers and not self._has_guard:
            self._has_guard = True
            self.lines += self._free_value()
        name = f"g{len(self._functions)}"
        self.lines.append(f"{name}: {self._pair(key, 'free_value' if has_markers else 'TEXT')}")
        self._add(function["name"], [f"{name}*"])

    def body(self) -> str:
        """One call without its opening marker."""
        return f"({' | '.join(self._functions)}) {_id(self._markers.tool_call_close)}"

    def whole(self) -> str:
        """One call."""
        return f"{_id(self._markers.tool_call_open)} {self.body()}"

    def _add(self, name: str, pairs: list[str]) -> None:
        rule = f"f{len(self._functions)}"
        self.lines.append(" ".join([f"{rule}: {lark_string(name)}", *pairs]))
        self._functions.append(rule)

    def _pair(self, key: str, value: str) -> str:
        markers = self._markers
        return (
            f"{_id(markers.arg_key_open)} {key} {_id(markers.arg_key_close)}"
            f" {_id(markers.arg_value_open)} {value} {_id(markers.arg_value_close)}"
        )

    def _free_value(self) -> list[str]:
        """Any text, with markers where the parser takes them for data (8.3.3).

        A closing value marker is data when text follows it; a quoted call keeps its own marks.
        """
        m = self._markers
        inner = (m.arg_key_open, m.arg_key_close, m.arg_value_open, m.arg_value_close)
        data = (m.think_open, m.think_close, m.arg_key_close, m.arg_value_open)
        quoted = " | ".join(map(_id, inner))
        lone = " | ".join(map(_id, data))
        return [
            "free_value: TEXT free_part*",
            f"free_part: ({lone} | quoted) TEXT | {_id(m.arg_value_close)} SOME",
            f"quoted: {_id(m.tool_call_open)} TEXT (({quoted}) TEXT)* {_id(m.tool_call_close)}",
        ]

    def _check_top(self, cleaned: Json, where: str, cleaner: SchemaCleaner) -> None:
        """Arguments are written one by one, so only keywords of single arguments can be kept."""
        for key in ("anyOf", "oneOf", "allOf", "$ref", "minProperties", "maxProperties"):
            if key in cleaned:
                cleaner.ignore(key, f"{where}.{key}", "cannot be enforced across arguments")
        for key in ("properties", "required"):
            kind = dict if key == "properties" else list
            if not isinstance(cleaned.get(key) or kind(), kind):
                cleaner.ignore(key, f"{where}.{key}", f"is not a {kind.__name__}")
                del cleaned[key]


def _id(token: int) -> str:
    return f"<[{token}]>"
