"""The HTTP application: routes and the layers around them (spec/api.md 1 to 3). No torch here."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from twining.errors import RequestError
from twining.serving.access import AccessLayer
from twining.serving.context import ServerContext
from twining.serving.http_errors import error_response
from twining.serving.openai.chat import ChatEndpoint
from twining.serving.openai.completions import CompletionEndpoint
from twining.serving.openai.tokens import (
    TokenTool,
    apply_template,
    decode,
    detokenize,
    encode,
    tokenize,
)
from twining.serving.status import StatusPages

Handler = Callable[[Request], Awaitable[Response]]

NOT_OFFERED = (
    "embeddings",
    "audio",
    "images",
    "files",
    "batches",
    "moderations",
    "responses",
    "messages",
)


def build_app(context: ServerContext) -> ASGIApp:
    """The whole ASGI application for one server."""
    context.metrics.watch(lambda: context.engine.stats)
    app = Starlette(
        routes=_routes(context),
        exception_handlers={HTTPException: _http_error, RequestError: _request_error},
    )
    app.router.redirect_slashes = False
    app.state.context = context
    return AccessLayer(app, context.config)


def _routes(context: ServerContext) -> list[Route]:
    pages = StatusPages(context)
    posts: dict[str, Handler] = {
        "/v1/chat/completions": ChatEndpoint(context),
        "/v1/completions": CompletionEndpoint(context),
        "/v1/token/encode": TokenTool(context, encode),
        "/v1/token/decode": TokenTool(context, decode),
        "/tokenize": TokenTool(context, tokenize),
        "/detokenize": TokenTool(context, detokenize),
        "/apply-template": TokenTool(context, apply_template),
    }
    gets: dict[str, Handler] = {
        "/v1/models": pages.models,
        "/v1/models/{model_id:path}": pages.model,
        "/health": pages.health,
        "/ping": pages.ping,
        "/version": pages.version,
        "/load": pages.load,
        "/metrics": pages.metrics,
        "/": pages.root,
    }
    routes: list[Route] = []
    for method, table in (("POST", posts), ("GET", gets)):
        for path, handler in table.items():
            names = {path, path.removeprefix("/v1")}
            names |= {f"{name}/" for name in names if name != "/" and not name.endswith("}")}
            routes += [Route(name, _endpoint(handler), methods=[method]) for name in sorted(names)]
    # A fixed path wins over the model id pattern, which takes any rest.
    return sorted(routes, key=lambda route: "{" in route.path)


def _endpoint(handler: Handler) -> Handler:
    async def call(request: Request) -> Response:
        return await handler(request)

    return call


async def _request_error(request: Request, err: Exception) -> Response:
    assert isinstance(err, RequestError)
    context: ServerContext = request.app.state.context
    stats = context.engine.stats
    # Each waiting request is taken for about a second of waiting; clients only need an order.
    return error_response(err, retry_after_s=max(stats.waiting, 1 if err.status == 429 else 5))


async def _http_error(request: Request, err: Exception) -> Response:
    assert isinstance(err, HTTPException)
    path = request.url.path
    if err.status_code == 405:
        failure = RequestError(
            f"{request.method} is not offered on this path", code="method_not_allowed", status=405
        )
        return error_response(failure, headers=dict(err.headers or {}))
    message = "no such path; the API is under /v1"
    if path.startswith("/v1/v1/"):
        message = "no such path; the base URL must end in one /v1, not two"
    elif path.removeprefix("/v1").lstrip("/").partition("/")[0] in NOT_OFFERED:
        message = "this endpoint is not offered in this version; use /v1/chat/completions"
    return error_response(RequestError(message, code="not_found", status=404))
