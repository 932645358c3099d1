"""What holds for the app as a whole: health, metrics, keys, failures, its own description."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest

from tests.serving.http.fakes import EchoEngine, make_app


BODY = {"model": "gpt", "prompt": "hello"}


def test_health_is_200_only_while_the_engine_lives(call, engine):
    assert call("GET", "/health").status_code == 200
    engine.alive = False
    response = call("GET", "/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "service_unavailable"


def test_metrics_are_prometheus_text(call):
    response = call("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert 'vllm:num_requests_running{engine="0",model_name="org/base-1"} 0.0' in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_dead_engine_answers_503_before_a_stream_opens(call, engine, stream):
    engine.alive = False
    response = call("POST", "/v1/completions", json=BODY | {"stream": stream})
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"


def test_failure_in_the_engine_is_a_500_without_details(call, engine, caplog):
    engine.fail_after = 3
    response = call("POST", "/v1/completions", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_server_error"
    assert "secret" not in response.text
    assert "secret" in caplog.text
    assert engine.running == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_failure_after_the_start_of_a_stream_is_one_last_event(call, engine, path, caplog):
    engine.fail_after = 3
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else BODY
    response = call("POST", path, json={"model": "gpt", "stream": True, **prompt})
    assert response.status_code == 200
    last = response.text.rstrip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == "internal_server_error"
    assert "secret" not in response.text
    assert "[DONE]" not in response.text


def test_failure_of_one_prompt_ends_the_others(call, engine, caplog):
    engine.fail_after = 3
    caplog.set_level(logging.CRITICAL)
    response = call("POST", "/v1/completions", json=BODY | {"prompt": ["a", "bcdef", "ghijk"]})
    assert response.status_code == 500
    assert engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_part_of_an_answer_never_passes_for_the_whole(call, engine, stream):
    engine.abort_after = 3
    response = call("POST", "/v1/completions", json=BODY | {"stream": stream})
    assert '"service_unavailable"' in response.text
    assert "[DONE]" not in response.text
    assert "abort" not in response.text.replace("aborted the request", "")


@pytest.fixture(scope="module")
def guarded():
    return make_app(EchoEngine(), api_key="secret-key")


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/health", None, 200),
        ("/ready", None, 200),
        ("/ping", None, 200),
        ("/version", None, 401),
        ("/tokenizer_info", None, 401),
        ("/v1/models", None, 401),
        ("/metrics", None, 401),
        ("/docs", None, 401),
        ("/openapi.json", None, 401),
        ("/nothing", None, 401),
        ("/health/", None, 401),
        ("/v1/models", "Bearer wrong", 401),
        ("/v1/models", "Bearer secret-key2", 401),
        ("/v1/models", "Bearer", 401),
        ("/v1/models", "Basic secret-key", 401),
        ("/v1/models", "Bearer schlüssel", 401),
        ("/v1/models", "Bearer secret-key", 200),
        ("/v1/models", "bearer  secret-key", 200),
    ],
)
def test_api_key_protects_all_but_probes(guarded, path, header, status):
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(guarded)
        headers = {"authorization": header.encode("latin-1")} if header else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    response = asyncio.run(run())
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_schemas_that_the_document_refers_to_exist(call):
    document = call("GET", "/openapi.json").json()
    for reference in json.dumps(document).split('"#/components/schemas/')[1:]:
        assert reference.split('"')[0] in document["components"]["schemas"]
