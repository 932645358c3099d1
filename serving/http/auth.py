"""API key check, as ASGI middleware: it stands before routing, so that no route can be left out."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.errors import AuthenticationError
from serving.http.errors import error_response


OPEN_PATHS = ("/health", "/ready", "/ping")  # probes carry no key


class ApiKeyMiddleware:
    """Lets through what carries `Authorization: Bearer <key>`, and the paths that need none."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._authorized(scope):
            await self._app(scope, receive, send)
            return
        response = error_response(AuthenticationError("the API key is missing or wrong"))
        await response(scope, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # as headers are decoded
        return scheme.lower() == "bearer" and hmac.compare_digest(given, self._key)
