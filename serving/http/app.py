"""`create_app`: the HTTP server of one engine, as an ASGI app."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from jaxlora import __version__
from serving.catalog import ModelCatalog
from serving.engine_protocol import Engine
from serving.http import errors, openapi
from serving.http.auth import ApiKeyMiddleware
from serving.http.chat import chat_router
from serving.http.completions import completions_router
from serving.http.health import health_router
from serving.http.models import models_router
from serving.http.request_log import RequestLogMiddleware
from serving.http.services import Services, Tokenizer, TokenSpelling
from serving.http.streaming import ClientDisconnectedError
from serving.http.tokenize import tokenize_router
from serving.metrics import Metrics


def create_app(
    engine: Engine,
    catalog: ModelCatalog,
    tokenizer: Tokenizer,
    metrics: Metrics,
    *,
    api_key: str | None = None,
) -> FastAPI:
    """OpenAI's routes over a running engine. The caller starts and stops the engine.

    With an `api_key`, everything but the probes (/health, /ready, /ping) needs it.
    """
    services = Services(engine, catalog, tokenizer, metrics, TokenSpelling(tokenizer))
    app = FastAPI(title="jaxlora", version=__version__, redirect_slashes=False)
    for router in (
        chat_router(services),
        completions_router(services),
        models_router(catalog),
        tokenize_router(services),
        health_router(services),
    ):
        app.include_router(router)
    errors.install(app)
    openapi.install(app, needs_key=api_key is not None)
    for gone in (ClientDisconnect, ClientDisconnectedError):
        app.add_exception_handler(gone, _no_answer)
    if api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key)
    app.add_middleware(RequestLogMiddleware)  # the last one added is the first to be asked
    return app


async def _no_answer(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's "client closed request"; nobody reads it
