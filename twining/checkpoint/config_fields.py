"""Typed, bounded reads from a parsed config.json object; every refusal names key, value and fix.

A config file is foreign input: a value of the wrong type, NaN, or a size that would make a later
allocation explode is refused here, so that parsers read like a list of rules. No torch.
"""

import math
from collections.abc import Mapping
from typing import Final

from twining.errors import CheckpointError

MAX_SIZE: Final = 1 << 24  # largest width, count or token id taken from a config
MAX_LAYERS: Final = 1024


def shown(value: object) -> str:
    """A value for a message: one line, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Fields:
    """Reader of one JSON object. `where` is its path in the file, for messages ("" = top level)."""

    __slots__ = ("data", "where")

    def __init__(self, data: Mapping[str, object], where: str = "") -> None:
        self.data = data
        self.where = where

    def __contains__(self, key: str) -> bool:
        """True when the key is present and not null."""
        return self.data.get(key) is not None

    def path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def refuse(self, key: str, fix: str) -> CheckpointError:
        """The error to raise for a key whose value cannot be used."""
        value = shown(self.data[key]) if key in self.data else "missing"
        return CheckpointError(f"config.json: {self.path(key)} is {value}; {fix}")

    def nested(self, key: str) -> "Fields | None":
        """The nested object, or None when absent or null."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, "an object is needed")
        return Fields(value, self.path(key))

    def integer(
        self, key: str, *, low: int = 1, high: int = MAX_SIZE, default: int | None = None
    ) -> int:
        """An integer in low..high; absent or null gives the default, or an error without one."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, f"a whole number in {low}..{high} is needed")
        return value

    def optional_integer(self, key: str, *, low: int = 0, high: int = MAX_SIZE) -> int | None:
        return self.integer(key, low=low, high=high) if key in self else None

    def number(
        self, key: str, *, low: float = 0.0, high: float = 1e9, default: float | None = None
    ) -> float:
        """A finite number in low..high."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # The comparison also refuses NaN, and integers too large for a float.
        if not is_number or not low <= value <= high:  # type: ignore[operator]
            raise self.refuse(key, f"a number in {low:g}..{high:g} is needed")
        number = float(value)  # type: ignore[arg-type]
        assert math.isfinite(number)
        return number

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false is needed")
        return value

    def string(self, key: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str):
            raise self.refuse(key, "a string is needed")
        return value

    def integers(self, key: str, *, low: int = 0, high: int = MAX_SIZE) -> tuple[int, ...]:
        """A non-empty list of integers in low..high; a single integer counts as a list of one."""
        value = self.data.get(key)
        items = value if isinstance(value, list) else [value]
        if not 1 <= len(items) <= MAX_LAYERS or not all(
            isinstance(v, int) and not isinstance(v, bool) and low <= v <= high for v in items
        ):
            raise self.refuse(key, f"whole numbers in {low}..{high} are needed")
        return tuple(items)

    def numbers(
        self, key: str, count: int, *, low: float = 0.0, default: tuple[float, ...]
    ) -> tuple[float, ...]:
        """A list of `count` finite numbers of at least `low`; the default when absent or null."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, list) or len(value) != count:
            raise self.refuse(key, f"a list of {count} numbers is needed")
        inner = Fields({f"{key}[{i}]": v for i, v in enumerate(value)}, self.where)
        return tuple(inner.number(name, low=low) for name in inner.data)

    def words(self, key: str, meaning: Mapping[str, str], count: int) -> tuple[str, ...]:
        """A list of `count` words, each mapped through `meaning`."""
        value = self.data.get(key)
        if not isinstance(value, list) or len(value) != count:
            have = f"a list of {len(value)}" if isinstance(value, list) else shown(value)
            need = f"{count} names are needed, one per layer (num_hidden_layers)"
            raise CheckpointError(f"config.json: {self.path(key)} is {have}; {need}")
        result = []
        for i, word in enumerate(value):
            if not isinstance(word, str) or word not in meaning:
                place, known = f"{self.path(key)}[{i}]", ", ".join(meaning)
                raise CheckpointError(
                    f"config.json: {place} is {shown(word)}; this engine knows {known}"
                )
            result.append(meaning[word])
        return tuple(result)

    def only(self, key: str, *accepted: object) -> None:
        """Refuse a present value other than the accepted ones (null and absent are accepted)."""
        value = self.data.get(key)
        if value is not None and not any(type(value) is type(a) and value == a for a in accepted):
            names = " or ".join(repr(a) for a in accepted)
            raise self.refuse(key, f"this engine runs only models with {names}")
