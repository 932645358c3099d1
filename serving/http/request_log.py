"""Request ids, and one line in the log for every request: never what was asked or answered."""

from __future__ import annotations

import logging
import time
import uuid
from urllib.parse import quote

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.core import AdapterReference
from serving.errors import InvalidRequestError
from serving.http.errors import error_response


MAX_REQUEST_ID = 128  # characters
MAX_PATH = 200  # characters of a path in the log
CLIENT_GONE = 499  # the status in the log where nothing could be sent

_log = logging.getLogger("serving.access")


class RequestLogMiddleware:
    """Stands before everything else, so that every answer has an X-Request-Id and a line.

    The id is the request's own, which must be printable ASCII, or a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), CLIENT_GONE
        given = Headers(scope=scope).get("x-request-id")
        valid = given is None or _is_id(given)
        request_id = given if given is not None and valid else uuid.uuid4().hex
        stamp = (b"x-request-id", request_id.encode())
        state = scope.setdefault("state", {})

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), stamp]}
            await send(message)

        try:
            if valid:
                await self._app(scope, receive, stamped)
            else:
                await _refuse(scope, receive, stamped)
        finally:
            milliseconds = (time.perf_counter() - started) * 1000
            adapter = state.get("adapter") or "-"
            _log.info(
                "%s %s %d %.1f ms adapter=%s id=%s",  # an id may hold spaces
                scope["method"],
                _path(scope),
                status,
                milliseconds,
                adapter,
                request_id,
            )


def note_adapter(request: Request, adapter: AdapterReference | None) -> None:
    """Tell the log which adapter a request uses."""
    request.state.adapter = None if adapter is None else adapter.name


def _is_id(text: str) -> bool:
    return 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = InvalidRequestError(
        f"the header X-Request-Id must be 1 to {MAX_REQUEST_ID} printable ASCII characters"
    )
    await error_response(error)(scope, receive, send)


def _path(scope: Scope) -> str:
    """The path as it was sent, without the query: escapes stay, so a line stays a line."""
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    path = raw.decode("ascii", "backslashreplace")
    return path if len(path) <= MAX_PATH else path[:MAX_PATH] + "..."
