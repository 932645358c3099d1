"""GET /health and /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from serving.http.services import Services


def health_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """200 with an empty body while the engine's step loop runs."""
        services.check_alive()
        return Response()

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(services.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return router
