"""Every route with every method, body and content type: what is wrong is OpenAI's error."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import pytest

import serving.errors
from jaxlora import __version__
from serving.http.openapi import _ERRORS, ALWAYS
from tests.serving.http.fakes import BOS, EchoEngine, make_app
from tests.serving.http.test_bad_input import assert_error


POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
GETS = (
    *("/health", "/ready", "/ping", "/version", "/metrics"),
    *("/v1/models", "/v1/models/gpt", "/tokenizer_info"),
)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "BREW")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", GETS)
def test_a_get_is_answered(call, path):
    assert call("GET", path).status_code == 200


@pytest.mark.parametrize(("path", "method"), list(itertools.product(POSTS + GETS, METHODS)))
def test_a_wrong_method_is_405(call, path, method):
    if method == ("POST" if path in POSTS else "GET"):
        return
    response = call(method, path)
    assert response.headers["allow"] == ("POST" if path in POSTS else "GET")
    if method == "HEAD":
        assert response.status_code == 405
    else:
        assert_error(response, 405, None, "method_not_allowed")


def test_a_404_names_the_path_as_it_was_asked_for(call):
    response = call("GET", "http://test//v1/models")
    assert response.json()["error"]["message"] == "there is no route GET //v1/models"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "", "json"]
)
def test_a_body_that_says_it_is_no_json_is_415(call, engine, path, kind):
    response = call("POST", path, content=b"{}", headers={"content-type": kind})
    assert_error(response, 415, None, "unsupported_media_type")
    assert engine.requests == []


@pytest.mark.parametrize("kind", [None, "application/json", "Application/JSON; charset=utf-8"])
def test_a_body_that_says_json_or_nothing_is_read(call, kind):
    headers = {} if kind is None else {"content-type": kind}
    response = call("POST", "/tokenize", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v1/embeddings", "//", "/v1/models/", "/%ff"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unknown_path_is_404(call, path, method):
    response = call(method, path)
    assert response.status_code in (404, 405)
    assert set(response.json()) == {"error"}
    assert "detail" not in response.json()


def test_the_document_has_every_route_with_its_errors(call):
    document = call("GET", "/openapi.json").json()
    described = {path.replace("{model}", "gpt") for path in document["paths"]}
    assert described == set(POSTS + GETS)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["description"], path
            statuses = set(operation["responses"])
            assert {"200", "400", "500"} <= statuses
            assert "422" not in statuses
            assert all("X-Request-Id" in r["headers"] for r in operation["responses"].values())
            if method == "post":
                assert {"404", "413", "415", "503"} <= statuses
                assert "requestBody" in operation
            if path.startswith("/v1/") and method == "post":
                assert "Retry-After" in operation["responses"]["429"]["headers"]
                assert "text/event-stream" in operation["responses"]["200"]["content"]


def test_the_document_has_types_ranges_and_what_is_refused(call):
    schemas = call("GET", "/openapi.json").json()["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    number, null = fields["logprobs"]["anyOf"]
    assert number == {"type": "integer", "minimum": 0, "maximum": 20}
    assert null == {"type": "null"}
    assert fields["suffix"]["enum"] == [None, ""]
    assert schemas["CompletionRequest"]["required"] == ["model", "prompt"]
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    assert schemas["Message"]["properties"]["role"]["enum"] == ["system", "user", "assistant"]
    assert schemas["ErrorAnswer"]["properties"]["error"]["$ref"].endswith("/ErrorDetail")


def test_the_document_says_whether_a_key_is_needed():
    guarded = make_app(EchoEngine(), api_key="k").openapi()
    assert guarded["security"] == [{"key": []}]
    for path in ("/health", "/ready", "/ping"):
        assert guarded["paths"][path]["get"]["security"] == []
    assert "security" not in make_app(EchoEngine()).openapi()


def test_described_statuses_are_those_of_the_error_classes():
    kinds = [k for k in vars(serving.errors).values() if isinstance(k, type)]
    statuses = {k.status for k in kinds if issubclass(k, serving.errors.ServingError)}
    assert statuses - {405} == set(_ERRORS)
    assert set(ALWAYS) <= statuses
    assert set(serving.errors.error_body(serving.errors.ServingError("x"))["error"]) == {
        *("message", "type", "param", "code")
    }


def test_probes_say_503_once_the_engine_has_ended(call, engine):
    engine.alive = False
    for path in ("/health", "/ready", "/ping"):
        response = call("GET", path)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "service_unavailable"


def test_ready_names_the_model(call):
    assert call("GET", "/ready").json() == {"status": "ready", "model": "org/base-1"}


def test_version_is_the_packages(call):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert call("GET", "/version").json() == {"version": project["version"]}
    assert __version__ == project["version"]


def test_tokenizer_info_has_what_evaluation_tools_look_for(call):
    assert call("GET", "/tokenizer_info").json() == {
        "bos_token": "[BOS]",
        "eos_token": "\x00",
        "unk_token": None,
        "pad_token": None,
        "eos_token_ids": [0],
        "vocab_size": BOS + 1,
        "model_max_length": 64,
        "chat_template": "a template",
    }
