"""A real uvicorn on a loopback port: the openai client, dropped connections, stopping."""

from __future__ import annotations

import socket
import threading
import time

import httpx
import openai
import pytest

from serving.http.body import MAX_BODY_BYTES
from tests.serving.http.fakes import EchoEngine, live_server, make_app, wait_until


PROMPT = {"model": "pirate", "prompt": "hello"}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def live():
    engine = EchoEngine()
    with live_server(make_app(engine, max_model_len=4096)) as url:
        yield engine, url


@pytest.fixture
def engine(live):
    live[0].reset()
    return live[0]


@pytest.fixture
def url(live, engine):
    return live[1]


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_client_chat(client):
    answer = client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert answer.choices[0].message.content == "<u:hi><a:"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == 18


def test_client_chat_stream(client):
    stream = client.chat.completions.create(
        model="pirate", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "<u:hi><a:"
    assert {chunk.model for chunk in chunks} == {"pirate"}
    assert chunks[-1].usage.completion_tokens == 9


def test_client_chat_stream_helper(client):
    with client.chat.completions.stream(model="gpt", messages=MESSAGES) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "<u:hi><a:"


def test_client_completions_whole_and_streamed(client):
    whole = client.completions.create(**PROMPT, extra_body={"return_token_ids": True})
    assert whole.choices[0].text == "hello"
    streamed = client.completions.create(**PROMPT, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "hello"


def test_client_picks_an_adapter_by_an_extra_field(client, engine):
    client.completions.create(model="gpt", prompt="a", extra_body={"adapter": "pirate"})
    assert engine.requests[0].adapter.name == "pirate"


def test_client_models(client):
    assert [model.id for model in client.models.list()][:2] == ["org/base-1", "gpt"]
    assert client.models.retrieve("team/formal").to_dict()["parent"] == "org/base-1"


@pytest.mark.parametrize("stream", [False, True])
def test_client_errors_have_their_classes(client, engine, stream):
    create = client.completions.create
    with pytest.raises(openai.NotFoundError) as caught:
        create(model="nobody", prompt="a", stream=stream)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        create(**PROMPT, max_tokens=-1, stream=stream)
    assert caught.value.param == "max_tokens"
    engine.alive = False
    with pytest.raises(openai.InternalServerError):
        create(**PROMPT, stream=stream)


def test_client_sees_an_error_in_mid_stream(client, engine):
    engine.abort_after = 3
    with pytest.raises(openai.APIError, match="aborted"):
        list(client.completions.create(**PROMPT, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_is_logged_once(client, engine, stream, caplog):
    engine.fail_after = 3
    with pytest.raises(openai.APIError, match="internal server error"):
        list(client.completions.create(**PROMPT, stream=stream))
    assert [record.message for record in caplog.records] == ["a request failed"]


def test_client_with_and_without_the_key():
    with live_server(make_app(EchoEngine(), api_key="k")) as url:
        openai.OpenAI(base_url=f"{url}/v1", api_key="k").models.list()
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="other").models.list()


@pytest.mark.parametrize("prompt", ["hello", ["hello", "world", "again"]])
@pytest.mark.parametrize("stream", [False, True])
def test_dropped_connection_aborts_its_requests_and_no_other(engine, url, prompt, stream):
    engine.hold = True
    number = len(prompt) if isinstance(prompt, list) else 1
    answers = []
    other = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=PROMPT).json())
    )
    other.start()
    wait_until(lambda: engine.running == 1)
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as connection:
        body = httpx.Request(
            "POST", url, json={"model": "gpt", "prompt": prompt, "stream": stream}
        ).read()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: engine.running == 1 + number)
    wait_until(lambda: engine.running == 1)
    assert engine.aborted == number
    engine.hold = False
    other.join()
    assert answers[0]["choices"][0]["text"] == "hello"
    assert engine.aborted == number
    assert engine.running == 0


def test_many_dropped_streams_leak_nothing(engine, url):
    engine.hold = True
    body = {"model": "gpt", "prompt": [104, 105], "stream": True}
    for _ in range(20):
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as got:
            assert next(got.iter_text())
    wait_until(lambda: engine.running == 0)
    assert engine.aborted == len(engine.requests) == 20


def test_pipelined_keep_alive_connection_serves_request_after_request(url):
    with httpx.Client(base_url=url) as client:
        for stream in (False, True, False, True):
            response = client.post("/v1/completions", json=PROMPT | {"stream": stream})
            assert response.status_code == 200


def test_body_over_the_limit_is_answered_and_the_server_lives(url):
    body = b'{"model": "gpt", "prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    response = httpx.post(f"{url}/v1/completions", content=body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_stopping_ends_an_open_request_with_an_error_and_frees_it(stream, caplog):
    engine = EchoEngine()
    engine.hold = True
    texts = []

    def read(url: str) -> None:
        body = PROMPT | {"stream": stream}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=20)
        assert response.status_code == (200 if stream else 503)
        texts.append(response.text)

    with live_server(make_app(engine)) as url:
        reader = threading.Thread(target=read, args=(url,))
        reader.start()
        wait_until(lambda: engine.running == 1)
        before = time.monotonic()
    assert time.monotonic() - before < 4
    reader.join()
    assert engine.running == 0
    assert engine.aborted == 1
    assert "the server is stopping" in texts[0]
    assert "Traceback" not in caplog.text
