"""The OpenAPI document of routes whose bodies are msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from serving.http import responses, schemas
from serving.http.field_rows import Effect, rows_of
from serving.http.field_table import REQUESTS
from serving.http.request_log import MAX_REQUEST_ID


_REF = "#/components/schemas/{name}"
_TYPES = (
    schemas.ChatRequest,
    schemas.CompletionRequest,
    schemas.TokenizeRequest,
    schemas.DetokenizeRequest,
    schemas.Message,
    schemas.StreamOptions,
    responses.ChatCompletion,
    responses.ChatChunk,
    responses.Completion,
    responses.ErrorAnswer,
    responses.Model,
    responses.ModelList,
    responses.Ready,
    responses.Text,
    responses.TokenizerInfo,
    responses.Tokens,
    responses.Version,
)
# Fields that a struct can't require, as a message of ours says what is missing.
_REQUIRED: dict[type, tuple[str, ...]] = {
    schemas.ChatRequest: ("model", "messages"),
    schemas.CompletionRequest: ("model", "prompt"),
}
_ERRORS = {
    400: "The request is malformed, contradictory or asks for what is not served",
    401: "The API key is missing or wrong",
    404: "No model or adapter has this name",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "As many requests wait as may",
    500: "A fault of the server",
    503: "The engine has ended, or the server is stopping",
}
ALWAYS = (400, 401, 500)  # 400: of a request id
WITH_BODY = (400, 401, 404, 413, 415, 500, 503)
GENERATING = (*WITH_BODY, 429)
PROBE = (400, 500, 503)

_REQUEST_ID = {
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_REQUEST_ID, "pattern": "^[ -~]+$"}
}
_SENT_BACK = {"X-Request-Id": _REQUEST_ID | {"description": "The request's own, or a new one"}}
_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}}


def operation(
    answer: type | str | None,
    body: type | None = None,
    *,
    errors: tuple[int, ...] = ALWAYS,
    events: type | None = None,
) -> dict[str, Any]:
    """The part of a route's description that FastAPI can't see: what it takes and answers.

    `answer` is a struct, a media type for text, or None for an empty body; `events` what a stream
    holds.
    """
    described: dict[str, Any] = {
        "parameters": [{"name": "X-Request-Id", "in": "header", "required": False, **_REQUEST_ID}],
        "responses": {"200": {"headers": _SENT_BACK, "content": _content(answer, events)}},
    }
    for status in errors:
        headers = _SENT_BACK | (_RETRY if status == 429 else {})
        described["responses"][str(status)] = {
            "description": _ERRORS[status],
            "headers": headers,
            "content": _json(responses.ErrorAnswer),
        }
    if body is not None:
        described["requestBody"] = {"required": True, "content": _json(body)}
    if 401 not in errors:
        described["security"] = []
    return described


def install(app: FastAPI, *, needs_key: bool) -> None:
    """Make `app` describe its routes with the schemas of this package."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            spec = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in spec["paths"].values():
                for described in path.values():
                    described["responses"].pop("422", None)  # never sent
            spec["components"] = {"schemas": _components()}
            if needs_key:
                spec["components"]["securitySchemes"] = {
                    "key": {"type": "http", "scheme": "bearer"}
                }
                spec["security"] = [{"key": []}]
            app.openapi_schema = spec
        return app.openapi_schema

    app.openapi = document


def _components() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_TYPES, ref_template=_REF)
    for routes, request in REQUESTS.items():
        properties = components[request.__name__]["properties"]
        for row in rows_of(routes):
            if row.effect is Effect.REFUSED:
                properties[row.name] = {"enum": [None, *row.off]}
            properties[row.name]["description"] = f"{row.effect}: {row.note}"
    for kind, names in _REQUIRED.items():
        schema = components[kind.__name__]
        schema["required"] = [*names]
        for name in names:
            described = schema["properties"][name]
            described["anyOf"] = [one for one in described["anyOf"] if one != {"type": "null"}]
            del described["default"]
    return components


def _content(answer: type | str | None, events: type | None) -> dict[str, Any]:
    if answer is None:
        return {}
    if isinstance(answer, str):
        return {answer: {"schema": {"type": "string"}}}
    content = _json(answer)
    if events is not None:
        kinds = [{"$ref": _REF.format(name=k.__name__)} for k in (events, responses.ErrorAnswer)]
        chunk = {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
        data = {"type": "string", "anyOf": [{"const": "[DONE]"}, chunk]}
        event = {"type": "object", "required": ["data"], "properties": {"data": data}}
        content["text/event-stream"] = {"itemSchema": event}  # OpenAPI 3.2's word
    return content


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
