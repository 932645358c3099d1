"""A queue that is full: 429 before anything runs."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serving.http.fakes import EchoEngine, live_server, make_app


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "pirate", "prompt": ["a", "b"], "n": 2},
    CHAT: {"model": "pirate", "messages": [{"role": "user", "content": "a"}], "n": 4},
}


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("stream", [False, True])
def test_choices_that_do_not_all_fit_are_429_and_none_runs(call, engine, path, stream):
    engine.places_left = 3
    response = call("POST", path, json=GOOD[path] | {"stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert engine.requests == [] and not engine.placed
    engine.places_left = 4
    assert call("POST", path, json=GOOD[path] | {"stream": stream}).status_code == 200
    assert len(engine.requests) == 4 and not engine.placed


def test_more_than_ever_fit_is_400_as_trying_again_is_no_use(call, engine):
    engine.places_left = 3
    response = call("POST", COMPLETIONS, json=GOOD[COMPLETIONS] | {"n": 5})
    assert response.status_code == 400
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_sees_a_rate_limit(stream):
    engine = EchoEngine()
    engine.places_left = 0
    with live_server(make_app(engine)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="gpt", prompt="a", stream=stream)
        client.close()
