"""The OpenAPI document of routes whose bodies are msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from serving.http import responses, schemas


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
    responses.Model,
    responses.ModelList,
    responses.Tokens,
    responses.Text,
)


def operation(answer: type, body: type | None = None) -> dict[str, Any]:
    """The part of a route's description that FastAPI can't see: what it takes and answers."""
    described: dict[str, Any] = {"responses": {"200": {"content": _json(answer)}}}
    if body is not None:
        described["requestBody"] = {"required": True, "content": _json(body)}
    return described


def install(app: FastAPI) -> None:
    """Make `app` describe its routes with the schemas of this package."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            spec = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in spec["paths"].values():
                for described in path.values():
                    described["responses"].pop("422", None)  # never sent
            _, components = msgspec.json.schema_components(_TYPES, ref_template=_REF)
            spec["components"] = {"schemas": components}
            app.openapi_schema = spec
        return app.openapi_schema

    app.openapi = document


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
