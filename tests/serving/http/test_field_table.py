"""The table of fields is what the code does, what OpenAI has, and what docs/api.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from serving.http.field_rows import ROWS, Effect, Routes, rows_of
from serving.http.field_table import REQUESTS, markdown


DOCS = Path(__file__).parents[3] / "docs" / "api.md"
BEGIN, END = "<!-- table of fields -->\n", "<!-- end of the table of fields -->"
PATHS = {Routes.COMPLETIONS: "/v1/completions", Routes.CHAT: "/v1/chat/completions"}
GOOD: dict[Routes, dict[str, Any]] = {
    Routes.COMPLETIONS: {"model": "gpt", "prompt": [97]},
    Routes.CHAT: {"model": "gpt", "messages": [{"role": "user", "content": "a"}]},
}
PARAMS = {
    Routes.COMPLETIONS: (
        completion_params.CompletionCreateParamsBase,
        completion_params.CompletionCreateParamsStreaming,
    ),
    Routes.CHAT: (
        chat_params.CompletionCreateParamsBase,
        chat_params.CompletionCreateParamsStreaming,
    ),
}
each_route = pytest.mark.parametrize("routes", REQUESTS)


@each_route
def test_every_field_of_openais_schema_has_a_row(routes):
    theirs = {name for params in PARAMS[routes] for name in params.__annotations__}
    assert theirs <= {row.name for row in rows_of(routes)}


@each_route
def test_the_rows_are_the_schemas_fields_and_the_refused_ones(routes):
    rows = rows_of(routes)
    assert len({row.name for row in rows}) == len(rows)
    accepted = {row.name for row in rows if row.effect is not Effect.REFUSED}
    assert accepted == set(REQUESTS[routes].__struct_fields__)


def test_docs_hold_the_table():
    text = DOCS.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == markdown().strip()


REFUSED = [
    (routes, row) for routes in REQUESTS for row in rows_of(routes) if row.effect is Effect.REFUSED
]


@pytest.mark.parametrize(
    ("routes", "row"), REFUSED, ids=lambda value: getattr(value, "name", value)
)
def test_a_refused_field_takes_its_off_values_and_nothing_else(call, engine, routes, row):
    for value in (None, *row.off):
        response = call("POST", PATHS[routes], json=GOOD[routes] | {row.name: value})
        assert response.status_code == 200, response.text
    engine.reset()
    for value in ("a value nobody has", 17, {"a": 1}, [1], True, False, ""):
        if any(json.dumps(value) == json.dumps(off) for off in row.off):
            continue
        response = call("POST", PATHS[routes], json=GOOD[routes] | {row.name: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == row.name
    assert engine.requests == []


WITHOUT_EFFECT: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "parallel_tool_calls": True,
}


def test_a_field_without_effect_changes_nothing(call, engine):
    assert set(WITHOUT_EFFECT) == {row.name for row in ROWS if row.effect is Effect.NONE}
    for routes, good in GOOD.items():
        names = {row.name for row in rows_of(routes)}
        given = {name: value for name, value in WITHOUT_EFFECT.items() if name in names}
        engine.reset()
        assert call("POST", PATHS[routes], json=good).status_code == 200
        assert call("POST", PATHS[routes], json=good | given).status_code == 200
        first, second = engine.requests
        assert first.sampling == second.sampling
        assert first.prompt_token_ids == second.prompt_token_ids


def ranges() -> list[Any]:
    """(route, field, the values at its ends, values beyond them), from the schemas' own numbers."""
    found = []
    for routes, request in REQUESTS.items():
        _, components = msgspec.json.schema_components((request,), ref_template="{name}")
        for name, schema in components[request.__name__]["properties"].items():
            for one in schema.get("anyOf", []):
                least, most = one.get("minimum"), one.get("maximum")
                if one.get("type") not in ("integer", "number") or least is most is None:
                    continue
                step = 1 if one["type"] == "integer" else 0.001
                beyond = [
                    end + way * step for end, way in ((least, -1), (most, 1)) if end is not None
                ]
                ends = [end for end in (least, most) if end is not None]
                found.append(pytest.param(routes, name, ends, beyond, id=f"{routes}-{name}"))
    return found


@pytest.mark.parametrize(("routes", "name", "ends", "beyond"), ranges())
def test_a_number_is_taken_up_to_the_ends_of_its_range(call, routes, name, ends, beyond):
    needed: dict[str, dict[str, Any]] = {
        "top_logprobs": {"logprobs": True},
        "max_tokens": {"echo": True} if routes is Routes.COMPLETIONS else {},
    }
    body = GOOD[routes] | needed.get(name, {})
    for value in beyond:
        response = call("POST", PATHS[routes], json=body | {name: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
    for value in ends:
        more = {"n": value} if name == "best_of" else {}
        response = call("POST", PATHS[routes], json=body | more | {name: value})
        if response.status_code != 200:  # too long for the context, or for max_tokens
            assert name in ("max_tokens", "max_completion_tokens", "min_tokens")
            assert response.json()["error"]["param"] == name
            assert value > 1
