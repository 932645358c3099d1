"""A stream that has nothing to say yet says so now and then."""

from __future__ import annotations

import time

import httpx
import openai
import pytest

from serving.http import streaming
from tests.serving.http.fakes import EchoEngine, live_server, make_app, wait_until


COMMENT = streaming.COMMENT.decode().strip()
BODY = {"model": "gpt", "prompt": "hello", "stream": True}


@pytest.fixture
def engine():
    engine = EchoEngine()
    engine.hold = True
    return engine


@pytest.fixture
def url(engine, monkeypatch):
    monkeypatch.setattr(streaming, "KEEPALIVE_SECONDS", 0.05)
    with live_server(make_app(engine)) as url:
        yield url


def test_comments_come_while_a_stream_waits_and_none_after_its_end(engine, url):
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY) as response:
        lines = response.iter_lines()
        seen: list[str] = []
        while seen.count(COMMENT) < 3:
            seen.append(next(lines))
        engine.hold = False
        seen += lines
    assert [line for line in seen if line][-1] == "data: [DONE]"
    assert all(line == "" or line == COMMENT or line.startswith("data: ") for line in seen)


def test_a_client_does_not_see_them(engine, url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=20)
    with client.completions.create(model="gpt", prompt=list(b"hello"), stream=True) as stream:
        chunks = iter(stream)
        text = next(chunks).choices[0].text
        time.sleep(streaming.KEEPALIVE_SECONDS * 3)
        engine.hold = False
        text += "".join(chunk.choices[0].text for chunk in chunks)
    client.close()
    assert text == "hello"


def test_a_client_that_goes_while_they_are_sent_frees_its_request(engine, url):
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY) as response:
        for line in response.iter_lines():
            if line == COMMENT:
                break
    wait_until(lambda: engine.running == 0)
    assert engine.aborted == 1


def test_an_error_in_mid_stream_comes_after_them(engine, url, caplog):
    engine.fail_after = 3
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY) as response:
        lines = response.iter_lines()
        while next(lines) != COMMENT:
            pass
        engine.hold = False
        rest = [line for line in lines if line]
    assert "internal_server_error" in rest[-1]
