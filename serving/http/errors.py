"""Every failure of a request as an answer in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.engine_protocol import EngineDeadError, QueueFullError
from serving.errors import (
    AuthenticationError,
    InternalServerError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    ServingError,
    TooManyRequestsError,
    UnavailableError,
    error_body,
)
from serving.http.responses import json_response


_log = logging.getLogger(__name__)


def as_serving_error(error: Exception) -> ServingError:
    """What a client is told of `error`. One that is our fault is logged, and not described."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, EngineDeadError):
        return UnavailableError("the engine has stopped")
    if isinstance(error, QueueFullError):
        kind = TooManyRequestsError if error.ever else InvalidRequestError
        return kind(str(error))
    _log.error("a request failed", exc_info=error)
    return InternalServerError("internal server error; the server's log says more")


def error_response(error: ServingError, headers: Mapping[str, str] | None = None) -> Response:
    """OpenAI's error; `headers` beside those that belong to its kind."""
    headers = dict(headers or {})
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return json_response(error_body(error), error.status, headers)


def install(app: FastAPI) -> None:
    """Answer every error of `app`'s routes, and of finding one, in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # of the router
            return error_response(_of_router(request, error), error.headers)
        return error_response(as_serving_error(error))

    for kind in (ServingError, EngineDeadError, QueueFullError, HTTPException):
        app.add_exception_handler(kind, answer)
    app.add_middleware(_Surprises)


class _Surprises:
    """Answers an exception that no handler knows, which is logged once.

    (A handler for Exception is called by Starlette's outermost layer, which raises the exception
    again after the answer, so that the server logs it a second time.)
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started:
                raise
            await error_response(as_serving_error(error))(scope, receive, send)


def _of_router(request: Request, error: HTTPException) -> ServingError:
    path = request.scope["path"]  # that of a URL made from it would lose a leading //host
    if error.status_code == 404:
        return NotFoundError(f"there is no route {request.method} {path}")
    if error.status_code == 405:
        return MethodNotAllowedError(f"{path} does not take {request.method}")
    return InvalidRequestError(str(error.detail))
