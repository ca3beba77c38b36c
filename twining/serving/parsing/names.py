"""Function names as the model writes them (spec/chat_format.md 8.3.2)."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from twining.serving.json_text import parse_json
from twining.serving.parsing.schema import declared_arguments

MAX_NAME = 256  # characters
FORBIDDEN = frozenset('<>{}"')


class NameStep(Enum):
    """What the character just collected means."""

    WAIT = auto()
    JSON_BODY = auto()
    ABORT = auto()


class ToolTable:
    """Declared functions by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, object] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._parameters.setdefault(function["name"], function.get("parameters"))

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def parameters(self, name: str) -> object:
        """The function's schema, or None."""
        return self._parameters.get(name)

    def judge(self, text: str) -> NameStep:
        """Decide on `text`, collected after leading white space, given its last character."""
        last, head = text[-1], text[:-1].rstrip()
        if last.isspace():
            return NameStep.WAIT
        if last == "{":
            name = head.removesuffix(">").rstrip()
            return NameStep.JSON_BODY if not head or name in self else NameStep.ABORT
        if last == ">":
            return NameStep.WAIT if head in self else NameStep.ABORT
        if is_forbidden(last) or len(text) > MAX_NAME or head.endswith(">"):
            return NameStep.ABORT
        words = text.split()
        is_bad = len(words) > 2 or (len(words) == 2 and words[0] not in self)
        return NameStep.ABORT if is_bad else NameStep.WAIT

    def json_call(self, body: str) -> tuple[str, dict[str, object]] | None:
        """(name, arguments) of a call written as JSON, `name {...}` or an envelope; else None."""
        name, brace, rest = body.strip().partition("{")
        name = name.strip().removesuffix(">").rstrip()
        try:
            value = parse_json(brace + rest)
            if not name and isinstance(value, dict):
                found = value.get("name")
                name = found if isinstance(found, str) else ""
                value = value.get("arguments", value.get("parameters"))
                if isinstance(value, str):
                    value = parse_json(value)
        except ValueError:
            return None
        return (name, value) if name in self and isinstance(value, dict) else None

    def split_key(self, text: str) -> tuple[str, str] | None:
        """(name, key) of a name and key run together; None if no declared name starts `text`.

        The longest name wins, but one whose rest is a declared argument goes first.
        """
        found = [
            (name, rest)
            for end in range(len(text) - 1, 0, -1)
            if (name := text[:end]) in self and (rest := text[end:].strip())
        ]
        for name, rest in found:
            if rest in declared_arguments(self.parameters(name)):
                return name, rest
        return found[0] if found else None


def is_forbidden(char: str) -> bool:
    """A character no name holds (white space is judged separately)."""
    return char in FORBIDDEN or char < " " or "\x7f" <= char <= "\x9f"


def is_plain_name(text: str) -> bool:
    """True for a well-formed name of an undeclared function."""
    return 1 <= len(text) <= MAX_NAME and not any(c.isspace() or is_forbidden(c) for c in text)
