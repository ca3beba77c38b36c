"""Error replies of the HTTP layer (spec/api.md section 3): one shape, one table of types.

Every refusal travels as a RequestError and becomes a reply here, so that status, type, code and
`Retry-After` can never disagree between endpoints.
"""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from twining.errors import RequestError

# HTTP status -> error type (spec 3.2). Anything else is a server error.
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "unavailable_error",
}
# Codes that an engine delta of kind "error" may carry -> status. Unknown codes are 500.
ENGINE_STATUS = {
    "queue_full": 429,
    "queue_timeout": 503,
    "engine_failed": 503,
    "shutting_down": 503,
    "model_loading": 503,
    "out_of_memory": 500,
    "context_length_exceeded": 400,
    "grammar_error": 400,
}
GENERIC_500 = "the server failed on this request; the log has details under this request id"
SHOWN_VALUE_CHARS = 64  # values from a request are echoed only when this short


def shown(value: object) -> str:
    """A request value for an error message: short ones as they are, others only by kind."""
    text = str(value)
    if len(text) <= SHOWN_VALUE_CHARS and text.isprintable():
        return text
    return f"a {type(value).__name__} of {len(text)} characters"


def error_object(error: RequestError) -> dict[str, Any]:
    """The body of spec 3.1."""
    return {
        "error": {
            "message": str(error),
            "type": ERROR_TYPES.get(error.status, "server_error"),
            "param": error.param,
            "code": error.code,
            "status": error.status,
            **error.extra,
        }
    }


def error_headers(error: RequestError, retry_after_s: int = 5) -> dict[str, str]:
    """Headers that go with a status: Retry-After (1 to 120 s), WWW-Authenticate."""
    if error.status in (429, 503):
        return {"retry-after": str(min(max(retry_after_s, 1), 120))}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    return {}


def error_response(
    error: RequestError, *, headers: Mapping[str, str] | None = None, retry_after_s: int = 5
) -> JSONResponse:
    """The whole reply for one refusal."""
    merged = error_headers(error, retry_after_s) | dict(headers or {})
    return JSONResponse(error_object(error), status_code=error.status, headers=merged)


def engine_error(code: str, message: str) -> RequestError:
    """The RequestError for an engine delta of kind "error"; unknown codes are a generic 500."""
    status = ENGINE_STATUS.get(code, 500)
    if status == 500 and code != "out_of_memory":
        return RequestError(GENERIC_500, code="internal_error", status=500)
    return RequestError(message or code.replace("_", " "), code=code, status=status)
