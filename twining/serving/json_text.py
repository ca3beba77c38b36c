"""JSON exactly as the model sees it (spec/chat_format.md 2.2): strict in, Python spelling out.

Reading keeps integers of any size, refuses NaN, Infinity, overflow and deep nesting. Writing uses
", " and ": ", escapes nothing but what JSON itself demands, and prints numbers as Python does.
"""

import json
import math
import re
from json.encoder import encode_basestring

MAX_DEPTH = 200  # nesting of arrays and objects; keeps recursion far from Python's own limit
# Python refuses to convert longer decimal strings (quadratic time); such integers stay digits.
MAX_INT_DIGITS = 4000
JSON_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)


class BigInteger(str):
    """Digits of an integer too long to convert; printed as they came. Not text: no quotes."""

    __slots__ = ()


def parse_number(text: str) -> int | float | BigInteger | None:
    """A JSON number, else None. Fraction or exponent gives a float; overflow gives None."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    if match[1] is None and match[2] is None:
        return _integer(text)
    value = float(text)
    return value if math.isfinite(value) else None


def parse_json(text: str | bytes) -> object:
    """Strict JSON with finite numbers. Raises ValueError (one line) on anything else."""
    try:
        value: object = json.loads(
            text, parse_int=_integer, parse_float=_finite, parse_constant=_refuse_constant
        )
    except RecursionError as err:
        raise ValueError(f"JSON is nested deeper than {MAX_DEPTH} levels") from err
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"JSON is nested deeper than {MAX_DEPTH} levels")
    return value


def dump_json(value: object) -> str:
    """JSON text of plain Python values. Raises ValueError on other types or deep nesting."""
    pieces: list[str] = []
    _write(value, pieces, MAX_DEPTH)
    return "".join(pieces)


def dump_string(text: str) -> str:
    """JSON string with quotes; non-ASCII stays as it is."""
    return encode_basestring(text)


def _integer(digits: str) -> int | BigInteger:
    return int(digits) if len(digits) <= MAX_INT_DIGITS else BigInteger(digits)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("JSON number is too large for a float")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _is_deeper(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return False
        level = inner
    return any(isinstance(item, dict | list) for item in level)


def _write(value: object, out: list[str], depth: int) -> None:
    match value:
        case None:
            out.append("null")
        case bool():
            out.append("true" if value else "false")
        case BigInteger():
            out.append(value)
        case str():
            out.append(encode_basestring(value))
        case int():
            out.append(int.__repr__(value))
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{value} has no JSON form")
            out.append(float.__repr__(value))
        case dict() | list() | tuple():
            if depth == 0:
                raise ValueError(f"JSON is nested deeper than {MAX_DEPTH} levels")
            _write_container(value, out, depth - 1)
        case _:
            raise ValueError(f"{type(value).__name__} has no JSON form")


def _write_container(
    value: dict[object, object] | list[object] | tuple[object, ...], out: list[str], depth: int
) -> None:
    comma = ""
    if isinstance(value, dict):
        out.append("{")
        for key, item in value.items():
            out.append(comma + encode_basestring(str(key)) + ": ")
            _write(item, out, depth)
            comma = ", "
        out.append("}")
        return
    out.append("[")
    for item in value:
        out.append(comma)
        _write(item, out, depth)
        comma = ", "
    out.append("]")
