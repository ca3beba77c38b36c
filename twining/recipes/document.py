"""Bytes of a recipe document to plain data and back, with every size bounded before it is trusted.

Source: spec/recipes.md section 1. A recipe is untrusted input: its texts are data, never commands,
addresses or prompts. Unknown keys are kept and re-emitted. Faults of the document as a whole raise
ConfigError; faults of a part are findings (see checks.py). No torch.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, Final

from twining.errors import ConfigError

MAX_BYTES: Final = 2 << 20  # the two known documents have 14 and 32 kB
MAX_DEPTH: Final = 64
MAX_INTEGER: Final = 1 << 63

_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class _Fault(ValueError):
    """What is wrong inside the JSON, in words."""


def plain(text: object, limit: int = 200) -> str:
    """Foreign text for a terminal: one line, no control or direction characters, cut to `limit`."""
    shown = _UNPRINTABLE.sub("?", str(text)[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Fault(f"key {plain(key, 60)!r} stands twice in one object")
            seen.add(key)
    return result


def _no_constant(name: str) -> Any:
    raise _Fault(f"{name} is not a JSON number")


def _check_values(root: object) -> None:
    """Bound depth and numbers; iterative, so that depth cannot hurt."""
    level: list[object] = [root]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, float):
                if not math.isfinite(value):
                    raise _Fault("a number is too large for a double")
            elif isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise _Fault("a whole number has more than 63 bits")
        if not below:
            return
        level = below
    raise _Fault(f"values are nested more than {MAX_DEPTH} deep")


def parse_json(raw: bytes | str, what: str) -> Any:
    """Strict JSON: no duplicate keys, no NaN, bounded size, depth and numbers.

    what: name for the message. Raises ConfigError.
    """
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{what}: {len(raw)} bytes, at most {MAX_BYTES} are read; this is not a recipe"
        )
    try:
        text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        _check_values(value)
    except UnicodeDecodeError as err:
        raise ConfigError(f"{what}: byte {err.start} is not UTF-8; save it as UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{what}: values are nested too deeply; use a flatter document") from None
    except json.JSONDecodeError as err:
        raise ConfigError(
            f"{what}: not valid JSON at line {err.lineno} column {err.colno}; fetch it again"
        ) from None
    except _Fault as err:
        raise ConfigError(f"{what}: {err}; correct the document") from None
    except ValueError:  # a number with thousands of digits
        raise ConfigError(f"{what}: a number is too long; correct the document") from None
    return value


def read_bytes(path: Path) -> bytes:
    """A recipe file's bytes. Raises ConfigError when it cannot be read or is too large."""
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; give the path of a recipe's .json file")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                f"{path.name}: {size} bytes, at most {MAX_BYTES} are read; this is not a recipe"
            )
        return path.read_bytes()
    except OSError as err:
        raise ConfigError(f"{path}: {err.strerror}; check the path") from None


def parse_document(raw: bytes | str, what: str = "recipe") -> dict[str, Any]:
    """The document's object. Raises ConfigError."""
    value = parse_json(raw, what)
    if not isinstance(value, dict):
        raise ConfigError(f"{what}: the document is not an object; this is not a recipe")
    return value


def canonical(document: dict[str, Any]) -> bytes:
    """One spelling for equal documents: sorted keys, no blanks, ASCII, shortest numbers."""
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


def emit(document: dict[str, Any]) -> str:
    """The document for a file: keys in their order, two blanks of indentation, final newline."""
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n"
