"""Who may talk to the server (spec/api.md 1, 2): request ids, header limits, Host, keys, CORS.

One plain ASGI layer around everything, so that no path can forget a check. It also turns any
exception of an endpoint into an error reply, and adds the headers that every reply carries.
"""

import hmac
import logging
import secrets
import string
from collections.abc import Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twining.config import ServerConfig
from twining.errors import RequestError
from twining.serving.http_errors import GENERIC_500, error_response
from twining.serving.openai.fields import valid_request_id

log = logging.getLogger(__name__)

OPEN_PATHS = ("/", "/health", "/ping")
MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 100
MAX_WARNINGS_BYTES = 4096
CORS_HEADERS = (
    "authorization",
    "content-type",
    "x-api-key",
    "anthropic-version",
    "anthropic-beta",
    "x-request-id",
)
_ALPHABET = string.ascii_letters + string.digits


def random_id(prefix: str, length: int = 24) -> str:
    """prefix and random letters or digits."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(length))


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses (a bind address or a Host name without port)."""
    if host.lower().rstrip(".") in ("localhost", "ip6-localhost") or host.lower().endswith(
        ".localhost"
    ):
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The name in a Host header, without port and brackets, lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if header.count(":") == 1 else header.lower()


def find_key(headers: Headers) -> str | None:
    """The first credential sent (spec 2.2), or None."""
    for name in ("authorization", "x-api-key", "api-key"):
        value = headers.get(name)
        if value is None:
            continue
        if name == "authorization":
            scheme, _, token = value.partition(" ")
            value = token.strip() if scheme.lower() == "bearer" else ""
        return value
    return None


def key_matches(given: str, keys: Iterable[str]) -> bool:
    """Compare the bytes that were sent with every key, in constant time."""
    sent = given.encode("latin-1")  # how header bytes were decoded
    matched = False
    for key in keys:
        matched |= hmac.compare_digest(sent, key.encode())
    return matched


class AccessLayer:
    """ASGI middleware; the state it leaves for endpoints is scope["state"] request_id, warnings."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._hosts = {name.lower() for name in config.allowed_hosts}
        self._check_host = is_loopback(config.host) and not config.api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        given = headers.get("x-request-id", "")
        state["request_id"] = given if valid_request_id(given) else random_id("req_")
        state["warnings"] = []
        origin = self._allowed_origin(headers)
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._decorate(MutableHeaders(scope=message), state, origin)
            await send(message)

        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await refusal(scope, receive, send_with_headers)
            else:
                await self._app(scope, receive, send_with_headers)
        except RequestError as err:
            if not started:
                await error_response(err)(scope, receive, send_with_headers)
        except Exception:
            log.exception("request %s failed", state["request_id"])
            if not started:
                failure = RequestError(GENERIC_500, code="internal_error", status=500)
                await error_response(failure)(scope, receive, send_with_headers)

    def _decorate(self, headers: MutableHeaders, state: dict[str, object], origin: str) -> None:
        headers["x-request-id"] = str(state["request_id"])
        warnings = state["warnings"]
        if isinstance(warnings, list) and warnings:
            text = ",".join(dict.fromkeys(map(str, warnings)))[:MAX_WARNINGS_BYTES]
            headers["x-warnings"] = text.encode("ascii", "replace").decode()
        if origin:
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = "x-request-id, x-warnings, retry-after"
            if origin != "*":
                headers.add_vary_header("origin")

    def _allowed_origin(self, headers: Headers) -> str:
        """The Access-Control-Allow-Origin value for this request, or empty."""
        if "*" in self._config.cors_origins:
            return "*"
        origin = headers.get("origin", "")
        return origin if origin and origin in self._config.cors_origins else ""

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > MAX_HEADER_BYTES or len(scope["headers"]) > MAX_HEADERS:
            return _refuse(431, "headers_too_large", "the request headers are too large; send less")
        if self._check_host:
            name = host_name(headers.get("host", ""))
            if not (is_loopback(name) or name in self._hosts):
                return _refuse(
                    403,
                    "host_not_allowed",
                    "this Host is not allowed; use a loopback name or --allowed-host",
                )
        if scope["method"] == "OPTIONS":
            return self._preflight(headers)
        path = scope["path"].rstrip("/") or "/"
        if self._config.api_keys and path not in OPEN_PATHS:
            key = find_key(headers)
            if key is None:
                return _refuse(
                    401, "missing_api_key", "an API key is required; send Authorization: Bearer KEY"
                )
            if not key_matches(key, self._config.api_keys):
                return _refuse(401, "invalid_api_key", "this API key is not valid; check it")
        return None

    def _preflight(self, headers: Headers) -> Response:
        if not self._config.cors_origins:
            return _refuse(405, "method_not_allowed", "OPTIONS is not offered", allow="GET, POST")
        if not self._allowed_origin(headers):
            return _refuse(403, "origin_not_allowed", "this origin is not in cors_origins")
        asked = headers.get("access-control-request-headers", "").lower().split(",")
        names = [name.strip() for name in asked]
        granted = [n for n in names if n in CORS_HEADERS or n.startswith("x-stainless-")]
        reply = {
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": ", ".join(granted),
            "access-control-max-age": "600",
        }
        return Response(status_code=204, headers=reply)


def _refuse(status: int, code: str, message: str, *, allow: str = "") -> Response:
    extra = {"allow": allow} if allow else None
    return error_response(RequestError(message, code=code, status=status), headers=extra)


def request_id_of(request: Request) -> str:
    """The id this request answers with."""
    return str(request.scope["state"]["request_id"])


def add_warnings(request: Request, codes: Iterable[str]) -> None:
    """Codes for the x-warnings header of the reply."""
    request.scope["state"]["warnings"].extend(codes)
