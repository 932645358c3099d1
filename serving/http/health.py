"""What says how the server is: /health, /ready, /ping, /metrics, /version."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from jaxlora import __version__
from serving.http.openapi import ALWAYS, PROBE, operation
from serving.http.responses import Ready, Version, json_response
from serving.http.services import Services


def health_router(services: Services) -> APIRouter:
    router = APIRouter(default_response_class=Response)

    @router.get("/health", openapi_extra=operation(None, errors=PROBE))
    async def health() -> Response:
        """200 with an empty body while the engine's step loop runs."""
        services.check_alive()
        return Response()

    @router.get("/ping", openapi_extra=operation(None, errors=PROBE))
    async def ping() -> Response:
        """The same as /health, for platforms that ask here."""
        services.check_alive()
        return Response()

    @router.get("/ready", openapi_extra=operation(Ready, errors=PROBE))
    async def ready() -> Response:
        """200 where a request would be answered: the model is loaded and the step loop runs.

        The server does not listen before the model is loaded, nor while it stops.
        """
        services.check_alive()
        return json_response(Ready(model=services.catalog.base))

    @router.get("/metrics", openapi_extra=operation("text/plain", errors=ALWAYS))
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(services.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", openapi_extra=operation(Version, errors=ALWAYS))
    async def version() -> Response:
        """The version of jaxlora."""
        return json_response(Version(version=__version__))

    return router
