"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter, Response

from serving.catalog import ModelCard, ModelCatalog
from serving.http.openapi import ALWAYS, operation
from serving.http.responses import Model, ModelList, json_response


def models_router(catalog: ModelCatalog) -> APIRouter:
    router = APIRouter(default_response_class=Response)

    @router.get("/v1/models", openapi_extra=operation(ModelList))
    async def list_models() -> Response:
        """The base model under each of its names, and every adapter."""
        return json_response(ModelList(data=[_model(catalog, card) for card in catalog.cards()]))

    @router.get("/v1/models/{model:path}", openapi_extra=operation(Model, errors=(*ALWAYS, 404)))
    async def retrieve_model(model: str) -> Response:
        """One of them; `base:adapter` is the adapter."""
        return json_response(_model(catalog, catalog.card(model)))

    return router


def _model(catalog: ModelCatalog, card: ModelCard) -> Model:
    return Model(
        id=card.id,
        created=catalog.created,
        root=card.root,
        parent=card.parent,
        max_model_len=catalog.max_model_len,
    )
