"""Typed request fields (spec/api.md 5.1): pydantic types whose errors carry the API's own codes.

A JSON number is not a string, a boolean is not a number, null means absent, a float with zero
fraction is an integer. Pydantic's own coercions differ from all of that, so each type here is a
plain check, and its error type *is* the code of the reply.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from twining.errors import RequestError
from twining.serving.http_errors import shown

MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_BIAS_ENTRIES = 1024

_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def bad(code: str, message: str) -> PydanticCustomError:
    """The error of one field; `message` goes on after the field's name."""
    # Braces would be read as a template by pydantic's error type.
    return PydanticCustomError(code, message.replace("{", "(").replace("}", ")"))


def literal(value: Any) -> str:
    """A short value as JSON writes it, so that "1" and 1 look different; others as `shown`."""
    text = shown(value)
    if isinstance(value, bool):
        return text.lower()
    return f'"{text}"' if isinstance(value, str) and text == value else text


def kind(value: Any) -> str:
    """The JSON word for a value's type."""
    return _KINDS.get(type(value), "null")


def as_integer(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad("wrong_type", f"must be an integer (got {literal(value)})")
    return value


def as_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad("wrong_type", f"must be a number (got {literal(value)})")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise bad("out_of_range", "must be a finite number")
    return number


def as_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise bad("wrong_type", f"must be true or false (got {literal(value)})")
    return value


def as_string(value: Any) -> str:
    if not isinstance(value, str):
        raise bad("wrong_type", f"must be a string (got {kind(value)})")
    return value


def as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad("wrong_type", f"must be an object (got {kind(value)})")
    return value


def as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise bad("wrong_type", f"must be a list (got {kind(value)})")
    return value


def integer_in(low: int, high: int, hint: str = "") -> Callable[[Any], int]:
    """Check for low..high; `hint` replaces the words of the range in the message."""

    def check(value: Any) -> int:
        number = as_integer(value)
        if not low <= number <= high:
            words = hint or f"between {low} and {high}"
            raise bad("out_of_range", f"must be {words} (got {shown(value)})")
        return number

    return check


def number_in(low: float, high: float, *, above_low: bool = False) -> Callable[[Any], float]:
    """Check for low..high, or (low, high] with above_low."""

    def check(value: Any) -> float:
        number = as_number(value)
        if not low <= number <= high or (above_low and number == low):
            words = (
                f"above {low:g} and at most {high:g}"
                if above_low
                else (f"between {low:g} and {high:g}")
            )
            raise bad("out_of_range", f"must be {words} (got {shown(value)})")
        return number

    return check


def _max_tokens(value: Any) -> int:
    number = as_integer(value)
    if number != -1 and number < 1:
        raise bad("out_of_range", f"must be at least 1, or -1 for no limit (got {shown(value)})")
    return number


def _max_tokens_raw(value: Any) -> int:
    number = as_integer(value)
    if number < -1:
        raise bad("out_of_range", f"must be at least 0, or -1 for no limit (got {shown(value)})")
    return number


def _stop(value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise bad("wrong_type", "must be a string or a list of strings")
    if len(items) > MAX_STOPS:
        raise bad("too_many_items", f"has {len(items)} strings; at most {MAX_STOPS} are allowed")
    if any(len(item) > MAX_STOP_CHARS for item in items):
        raise bad("out_of_range", f"has a string longer than {MAX_STOP_CHARS} characters")
    return items


def _token_ids(value: Any) -> list[int]:
    items = as_list(value)
    if len(items) > MAX_STOPS:
        raise bad("out_of_range", f"has {len(items)} ids; at most {MAX_STOPS} are allowed")
    return [as_integer(item) for item in items]


def _logit_bias(value: Any) -> dict[int, float]:
    entries = as_object(value)
    if len(entries) > MAX_BIAS_ENTRIES:
        raise bad("invalid_value", f"has {len(entries)} entries; at most {MAX_BIAS_ENTRIES}")
    bias: dict[int, float] = {}
    for key, number in entries.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise bad("invalid_value", f"has a key that is not a token id ({shown(key)})")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise bad("invalid_value", f"has a value that is not a number (token {key})")
        bias[int(key)] = max(-100.0, min(100.0, float(max(-1e9, min(1e9, number)))))
    return bias


def _bad_words(value: Any) -> list[str]:
    items = as_list(value)
    if len(items) > 128:
        raise bad("too_many_items", f"has {len(items)} strings; at most 128 are allowed")
    return [as_string(item) for item in items]


def _cache_salt(value: Any) -> str:
    text = as_string(value)
    if not 1 <= len(text) <= 128:
        raise bad("out_of_range", f"must have 1 to 128 characters (got {len(text)})")
    return text


def _request_id(value: Any) -> str:
    text = as_string(value)
    if not valid_request_id(text):
        raise bad("invalid_value", "must be 1 to 128 letters, digits, dots, dashes, underscores")
    return text


def valid_request_id(text: str) -> bool:
    """The rule of spec 1 for x-request-id."""
    allowed = text.isascii() and text.replace(".", "").replace("_", "").replace("-", "").isalnum()
    return 1 <= len(text) <= 128 and (allowed or set(text) <= set("._-"))


INT64 = 2**63
T = TypeVar("T")
Bool = Annotated[bool, BeforeValidator(as_bool)]
Str = Annotated[str, BeforeValidator(as_string)]
Int = Annotated[int, BeforeValidator(integer_in(-INT64, INT64 - 1))]
Object = Annotated[dict[str, Any], BeforeValidator(as_object)]
List = Annotated[list[Any], BeforeValidator(as_list)]
Temperature = Annotated[float, BeforeValidator(number_in(0, 2))]
TopP = Annotated[float, BeforeValidator(number_in(0, 1))]
TopK = Annotated[int, BeforeValidator(integer_in(-1, 2**31 - 1, "-1 or 0 for off, or at least 1"))]
MinP = Annotated[float, BeforeValidator(number_in(0, 1))]
Penalty = Annotated[float, BeforeValidator(number_in(-2, 2))]
Repetition = Annotated[float, BeforeValidator(number_in(0, 10, above_low=True))]
Seed = Annotated[int, BeforeValidator(integer_in(-INT64, INT64 - 1, "a signed 64-bit integer"))]
Count = Annotated[int, BeforeValidator(integer_in(0, 2**31 - 1, "at least 0"))]
Choices = Annotated[int, BeforeValidator(integer_in(1, 2**31 - 1, "at least 1"))]
Top20 = Annotated[int, BeforeValidator(integer_in(0, 20))]
Budget = Annotated[int, BeforeValidator(integer_in(-1, 2**31 - 1, "-1 for none, or at least 0"))]
MaxTokens = Annotated[int, BeforeValidator(_max_tokens)]
MaxTokensRaw = Annotated[int, BeforeValidator(_max_tokens_raw)]
Stop = Annotated[list[str], BeforeValidator(_stop)]
TokenIds = Annotated[list[int], BeforeValidator(_token_ids)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_logit_bias)]
BadWords = Annotated[list[str], BeforeValidator(_bad_words)]
CacheSalt = Annotated[str, BeforeValidator(_cache_salt)]
RequestId = Annotated[str, BeforeValidator(_request_id)]


class Body(BaseModel):
    """Base of request bodies: unknown members are ignored, null members count as absent."""

    model_config = ConfigDict(extra="ignore", frozen=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise bad("wrong_type", f"must be an object (got {kind(data)})")
        return {key: value for key, value in data.items() if value is not None}


class StreamOptions(Body):
    """spec 5.2, stream_options."""

    include_usage: Bool = False
    continuous_usage_stats: Bool = False


B = TypeVar("B", bound=Body)


def field_path(location: tuple[int | str, ...]) -> str:
    """("messages", 3, "content") -> messages[3].content"""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path


def parse_body(kind: type[B], data: dict[str, Any]) -> B:
    """Validate a body. Raises RequestError with the first problem's code and param."""
    try:
        return kind.model_validate(data)
    except ValidationError as err:
        first = err.errors(include_url=False, include_input=False, include_context=False)[0]
    path = field_path(first["loc"])
    if first["type"] == "missing":
        raise RequestError(f"{path} is required; add it", code="missing_field", param=path)
    raise RequestError(f"{path} {first['msg']}", code=first["type"], param=path)
