"""Request ids and the access log."""

from __future__ import annotations

import logging
import re

import httpx
import pytest

from serving.http.request_log import MAX_REQUEST_ID
from tests.serving.http.fakes import EchoEngine, live_server, make_app, wait_until
from tests.serving.http.test_bad_input import assert_error


BODY = {"model": "pirate", "prompt": "a secret"}
ID = "x-request-id"


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "serving.access")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "serving.access"]


@pytest.mark.parametrize("given", ["abc", "a b~!", "x" * MAX_REQUEST_ID])
@pytest.mark.parametrize("stream", [False, True])
def test_a_requests_own_id_is_given_back(call, given, stream):
    headers = {ID: given}
    response = call("POST", "/v1/completions", json=BODY | {"stream": stream}, headers=headers)
    assert response.status_code == 200
    assert response.headers.get_list(ID) == [given]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/nothing", 404),
        ("PUT", "/tokenize", 405),
        ("POST", "/tokenize", 400),
        ("GET", "/openapi.json", 200),
    ],
)
def test_every_answer_has_an_id_of_its_own(call, method, path, status):
    ids = set()
    for _ in range(2):
        response = call(method, path)
        assert response.status_code == status
        ids.add(response.headers[ID])
    assert len(ids) == 2


@pytest.mark.parametrize("given", [b"", b"x" * (MAX_REQUEST_ID + 1), b"caf\xe9", b"tab\there"])
def test_an_id_that_cannot_be_one_is_400(call, engine, given):
    response = call("POST", "/v1/completions", json=BODY, headers={ID: given})
    message = assert_error(response, 400, None)
    assert "X-Request-Id" in message
    assert re.fullmatch("[0-9a-f]{32}", response.headers[ID])
    assert engine.requests == []


def test_a_line_says_who_what_and_how_long_but_not_what_about(call, lines):
    call("POST", "/v1/completions?key=hidden", json=BODY, headers={ID: "me"})
    call("POST", "/v1/chat/completions", json={"model": "gpt", "messages": []}, headers={ID: "you"})
    call("POST", "/v1/completions", json=BODY | {"model": "gpt", "stream": True})
    first, second, third = lines()
    assert re.fullmatch(r"POST /v1/completions 200 \d+\.\d ms adapter=pirate id=me", first)
    assert re.fullmatch(r"POST /v1/chat/completions 400 \d+\.\d ms adapter=- id=you", second)
    assert re.fullmatch(r"POST /v1/completions 200 \d+\.\d ms adapter=- id=[0-9a-f]{32}", third)


def test_an_id_with_spaces_names_no_other_adapter(call, lines):
    call("POST", "/v1/completions", json=BODY, headers={ID: "a adapter=other"})
    (line,) = lines()
    assert line.endswith(" ms adapter=pirate id=a adapter=other")


def test_no_path_makes_a_second_line_or_a_long_one(call, lines):
    call("GET", "/a%0Ab%1b[31m" + "x" * 5000)
    (line,) = lines()
    assert line.isprintable()
    assert line.startswith("GET /a%0Ab")
    assert len(line) < 400


def test_a_failure_of_ours_has_its_line_and_its_id(call, engine, lines):
    engine.fail_after = 1
    response = call("POST", "/v1/completions", json=BODY, headers={ID: "me"})
    assert response.status_code == 500
    assert response.headers[ID] == "me"
    assert [line.split()[2] for line in lines()] == ["500"]


def test_an_answer_without_the_key_has_an_id(lines):
    with live_server(make_app(EchoEngine(), api_key="k")) as url:
        response = httpx.get(f"{url}/v1/models", headers={ID: "me"})
        assert response.status_code == 401
        assert response.headers[ID] == "me"
        wait_until(lambda: lines() != [])
    assert lines()[0].startswith("GET /v1/models 401 ")
