"""Pages about the server itself: models, health, version, load, metrics (spec/api.md 4, 16, 17)."""

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from twining import __version__
from twining.errors import RequestError
from twining.serving.context import ServerContext
from twining.serving.http_errors import error_headers, error_object, shown
from twining.serving.openai.replies import model_object

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusPages:
    """Handlers; each is one route."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def root(self, request: Request) -> Response:
        """A short text; some clients probe it."""
        return PlainTextResponse("Twining is running. The API is under /v1.\n")

    async def models(self, request: Request) -> Response:
        """The list answers also while the model loads."""
        entries = [model_object(self._context, name) for name in self._context.model_ids]
        return JSONResponse(
            {
                "object": "list",
                "data": entries,
                "has_more": False,
                "first_id": entries[0]["id"],
                "last_id": entries[-1]["id"],
            }
        )

    async def model(self, request: Request) -> Response:
        """One model; 404 for an unknown id even with any_model. Ids may hold slashes."""
        name = request.path_params["model_id"].rstrip("/")
        if name not in self._context.model_ids:
            raise RequestError(
                f"model {shown(name)} is not served here; use {self._context.config.model_id}",
                code="model_not_found",
                param="model",
                status=404,
            )
        return JSONResponse(model_object(self._context, name))

    async def health(self, request: Request) -> Response:
        """200 only while the engine loop answers."""
        error = self._context.availability()
        if error is None:
            return JSONResponse({"status": "ok"})
        status = "loading model" if error.code == "model_loading" else "unavailable"
        body = {"status": status, **error_object(error)}
        return JSONResponse(body, status_code=503, headers=error_headers(error))

    async def ping(self, request: Request) -> Response:
        """As health, without a body."""
        error = self._context.availability()
        return Response(status_code=200 if error is None else 503)

    async def version(self, request: Request) -> Response:
        """The package version."""
        return JSONResponse({"version": __version__})

    async def load(self, request: Request) -> Response:
        """Requests running and waiting."""
        stats = self._context.engine.stats
        return JSONResponse({"server_load": stats.running + stats.waiting})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self._context.metrics.render(), media_type=METRICS_TYPE)
