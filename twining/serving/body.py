"""Request bodies: read within limits, then parse as one JSON object (spec/api.md 2.3, 2.4, 5.1).

Own checks around the standard parser: nesting is bounded before parsing, NaN and Infinity are
refused, and lone surrogates become U+FFFD because some editors cut emoji in half.
"""

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from twining.errors import RequestError

MAX_NESTING = 128
SLOW_AFTER_S = 10.0  # from here on a body must average MIN_BYTES_PER_S
MIN_BYTES_PER_S = 1024
MAX_READ_S = 60.0
MAX_INT_DIGITS = 400  # longer integers are only ever an attack on the number parser
_SURROGATE = re.compile("[\ud800-\udfff]")
# Possessive, and an unclosed string runs to the end: linear in the body whatever it holds.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def _invalid(why: str) -> RequestError:
    return RequestError(
        f"the body is not valid JSON ({why}); send one UTF-8 JSON object", code="invalid_json"
    )


def check_content_type(request: Request) -> None:
    """Raises RequestError 415 unless the body is plain application/json."""
    kind, _, rest = request.headers.get("content-type", "").partition(";")
    charset = rest.strip().lower().replace('"', "").replace(" ", "")
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise RequestError(
            "send the body as content-type application/json",
            code="unsupported_media_type",
            status=415,
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError(
            "compressed bodies are not accepted; send the JSON uncompressed",
            code="unsupported_media_type",
            status=415,
        )


async def read_body(request: Request, limit: int) -> bytes:
    """The raw body, at most `limit` bytes. Raises RequestError 413 or 408."""
    too_large = RequestError(
        f"the body is larger than {limit >> 20} MiB; send less or raise --max-body-mib",
        code="body_too_large",
        status=413,
    )
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:19]) > limit:
        raise too_large
    loop = asyncio.get_running_loop()
    start = loop.time()
    chunks: list[bytes] = []
    size = 0
    stream = request.stream()
    while True:
        # The time by which the next bytes must be here keeps the average above the minimum.
        deadline = min(MAX_READ_S, SLOW_AFTER_S + size / MIN_BYTES_PER_S)
        try:
            async with asyncio.timeout_at(start + deadline):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return b"".join(chunks)
        except TimeoutError:
            raise RequestError(
                "the body arrived too slowly; send it faster", code="body_timeout", status=408
            ) from None
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)


def _check_nesting(data: bytes) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        byte = match.group()
        if byte in (b"[", b"{"):
            depth += 1
            if depth > MAX_NESTING:
                raise _invalid(f"nested deeper than {MAX_NESTING}")
        elif byte in (b"]", b"}"):
            depth -= 1


def _no_constant(name: str) -> NoReturn:
    raise _invalid(f"{name} is not a JSON number")


def _integer(digits: str) -> int:
    if len(digits) > MAX_INT_DIGITS:
        raise _invalid("a number has too many digits")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _invalid("a number is too large")
    return value


def _clean(value: Any) -> Any:
    """The same value with lone surrogates in strings and keys replaced by U+FFFD."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def parse_object(data: bytes) -> dict[str, Any]:
    """One JSON object, keys in order, last duplicate wins. Raises RequestError invalid_json."""
    _check_nesting(data)
    try:
        value = json.loads(
            data.decode(), parse_constant=_no_constant, parse_int=_integer, parse_float=_float
        )
    except UnicodeDecodeError:
        raise _invalid("not UTF-8") from None
    except json.JSONDecodeError as err:
        raise _invalid(f"{err.msg} at line {err.lineno} column {err.colno}") from None
    except RecursionError:
        raise _invalid(f"nested deeper than {MAX_NESTING}") from None
    if not isinstance(value, dict):
        raise _invalid(f"a {type(value).__name__} instead of an object")
    cleaned: dict[str, Any] = _clean(value) if b"\\u" in data else value
    return cleaned


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """Check, read and parse a POST body. Raises RequestError; large bodies parse on a thread."""
    check_content_type(request)
    try:
        data = await read_body(request, limit)
    except ClientDisconnect:
        raise RequestError("the client went away", code="body_timeout", status=408) from None
    if len(data) > 1 << 20:
        return await asyncio.to_thread(parse_object, data)
    return parse_object(data)
