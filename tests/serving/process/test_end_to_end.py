"""One real server process over a tiny model and two adapters: what clients see, and what is left.

The module's tests share the process; each waits until it is idle again.
"""

from __future__ import annotations

import concurrent.futures
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.serving.http.fakes import wait_until
from tests.support.server_process import (
    CONTEXT,
    IDS,
    MODELS,
    PATIENCE,
    at_once,
)


def test_it_says_what_it_serves_and_warns_of_another_bases_name(server):
    assert server.greeting.startswith("serving tiny, default, attention, all on http://127.0.0.1:")
    warnings = [line for line in server.errors if "org/another" in line]
    assert len(warnings) == 1 and warnings[0].startswith("WARNING:")
    assert server.http.get("/health").status_code == 200


def test_models_have_the_base_as_parent(client):
    parents = {model.id: model.to_dict()["parent"] for model in client.models.list()}
    assert parents == {"tiny": None, "default": None, "attention": "tiny", "all": "tiny"}


def test_a_mixed_batch_over_http_gives_each_request_its_solo_tokens(server):
    prompts = [list(range(40, 40 + 7 * i)) for i in range(1, 7)]
    asked = [(MODELS[i % 3], prompt) for i, prompt in enumerate(prompts)]
    alone = [server.tokens(model, prompt, 40) for model, prompt in asked]
    together = at_once(*(lambda m=m, p=p: server.tokens(m, p, 40) for m, p in asked))
    assert together == alone
    same_prompt = [tuple(server.tokens(model, "hello")) for model in MODELS]
    assert len(set(same_prompt)) == 3


def test_metrics_show_a_step_with_the_base_and_both_adapters(server):
    name = "jaxlora_decode_steps_total"
    before = server.metric(name, adapters="2", base="true")
    with server.endless("tiny"), server.endless("attention"), server.endless("all"):
        wait_until(lambda: server.metric(name, adapters="2", base="true") > before, PATIENCE)
        assert server.running == 3
        assert server.metric("vllm:kv_cache_usage_perc") > 0
    wait_until(lambda: server.idle, PATIENCE)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "all"},
        {"model": "tiny:all"},
        {"model": "default:all"},
        {"model": "tiny", "adapter": "all"},
        {"model": "default", "lora_name": "all"},
    ],
)
def test_every_way_to_name_an_adapter_gives_its_answer(server, fields):
    expected = server.tokens("all", "hello")
    response = server.post(prompt="hello", max_tokens=12, temperature=0, **fields, **IDS)
    assert response.json()["choices"][0]["token_ids"] == expected
    assert response.json()["model"] == "all"


def test_completions_by_the_client_whole_and_streamed(client):
    for model in MODELS:
        asked: dict[str, Any] = {"model": model, "prompt": "hello", "temperature": 0}
        whole = client.completions.create(**asked, max_tokens=20, extra_body=IDS)
        assert whole.usage and whole.usage.to_dict() == {
            "prompt_tokens": 5,
            "completion_tokens": 20,
            "total_tokens": 25,
        }
        assert whole.choices[0].finish_reason == "length"
        chunks = list(
            client.completions.create(
                **asked,
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=IDS,
            )
        )
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(choice.text for choice in choices) == whole.choices[0].text
        ids = [i for choice in choices for i in choice.to_dict()["token_ids"]]
        assert ids == whole.choices[0].to_dict()["token_ids"]
        assert len(choices) > 5, "it comes in pieces"
        assert chunks[-1].usage == whole.usage


def test_chat_by_the_client_whole_and_streamed(server, client):
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for model in MODELS:
        asked: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0}
        whole = client.chat.completions.create(**asked, max_tokens=20, extra_body=IDS)
        ids = whole.choices[0].to_dict()["token_ids"]
        assert ids == server.tokens(model, "<user>hi<assistant>", 20)
        chunks = list(
            client.chat.completions.create(**asked, max_tokens=20, stream=True, extra_body=IDS)
        )
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert deltas[0].role == "assistant"
        text = "".join(delta.content or "" for delta in deltas)
        assert text == whole.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == "length"
        assert {chunk.model for chunk in chunks} == {model}


def test_chat_without_max_tokens_may_fill_the_context(server):
    messages = [{"role": "user", "content": "x" * (CONTEXT - 40)}]
    response = server.post(
        "/v1/chat/completions", model="all", messages=messages, temperature=0, **IDS
    )
    assert response.json()["usage"]["total_tokens"] == CONTEXT


def test_several_prompts_of_one_request_come_back_in_order(server):
    prompts = ["a", "bb", "ccc", "dddd", "eeeee"]
    body = {"model": "all", "temperature": 0, "max_tokens": 6, **IDS}
    choices = server.post(prompt=prompts, **body).json()["choices"]
    alone = [server.tokens("all", prompt, 6) for prompt in prompts]
    assert [choice["token_ids"] for choice in choices] == alone


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_never_sent(client, stream):
    asked: dict[str, Any] = {"model": "attention", "prompt": "hello", "temperature": 0}
    text = client.completions.create(**asked, max_tokens=40, extra_body=IDS).choices[0].text
    stop = text[9:12]
    answer = client.completions.create(
        **asked, max_tokens=40, extra_body=IDS, stop=[stop], stream=stream
    )
    choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].to_dict()["stop_reason"] == stop


def test_a_seed_repeats_its_answer_whatever_runs_beside_it(server):
    ask: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0}
    alone = server.tokens("all", "hello", seed=7, **ask)
    first, second, other, _ = at_once(
        lambda: server.tokens("all", "hello", seed=7, **ask),
        lambda: server.tokens("all", "hello", seed=7, **ask),
        lambda: server.tokens("all", "hello", seed=8, **ask),
        lambda: server.tokens("tiny", "hello", **ask),
    )
    assert first == second == alone != other


@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_connection_aborts_its_request_and_frees_what_it_held(server, stream):
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    with server.endless("all", stream=stream):
        assert server.metric("vllm:kv_cache_usage_perc") > 0
    wait_until(lambda: server.idle, PATIENCE)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1


def test_a_client_killed_in_mid_stream_disturbs_no_other(server):
    expected = [server.tokens(model, "hello", 200) for model in MODELS]
    code = (
        "import sys, httpx\n"
        "body = {'model': 'all', 'prompt': 'x', 'max_tokens': 1000, 'stream': True,"
        " 'ignore_eos': True}\n"
        "with httpx.stream('POST', sys.argv[1] + '/completions', json=body, timeout=60) as r:\n"
        "    for line in r.iter_lines(): print(line, flush=True)\n"
    )
    command = [sys.executable, "-c", code, server.base_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline().startswith("data: ")
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            others = [pool.submit(server.tokens, model, "hello", 200) for model in MODELS]
            killed.kill()
            assert [other.result() for other in others] == expected


WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "nobody"}, 404, "model"),
    ({"model": "tiny", "adapter": "nobody"}, 404, "adapter"),
    ({"model": "attention", "adapter": "all"}, 400, "adapter"),
    ({"model": None}, 400, "model"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": CONTEXT}, 400, "max_tokens"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [258]}, 400, "prompt"),
    ({"prompt": "x" * 10**6}, 400, "prompt"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"nonsense": 1}, 400, "nonsense"),
]


def test_wrong_requests_are_refused_while_others_stream(server):
    expected = server.tokens("all", "hello", 300)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.tokens, "all", "hello", 300)
        for stream in (False, True):
            for fields, status, param in WRONG:
                body = {"model": "tiny", "prompt": "a", "stream": stream} | fields
                response = server.post(**body)
                assert response.status_code == status, response.text
                assert response.headers["content-type"] == "application/json"
                assert response.json()["error"]["param"] == param
        for content in (b"", b"{", b"[]", b'{"model": "tiny", "prompt": "\\ud800"}', b"\xff"):
            response = server.http.post("/v1/completions", content=content)
            assert response.status_code == 400
        messages = [{"role": "pirate", "content": "x"}]
        response = server.post("/v1/chat/completions", model="tiny", messages=messages)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[0].role"
        assert other.result() == expected


def test_more_requests_than_lanes_wait_and_all_are_answered(server):
    alone = [server.tokens(MODELS[i % 3], f"number {i}", 30) for i in range(12)]
    together = at_once(
        *(lambda i=i: server.tokens(MODELS[i % 3], f"number {i}", 30) for i in range(12))
    )
    assert together == alone


def test_tokenize_and_detokenize(server):
    response = server.post("/tokenize", model="all", prompt="hé")
    assert response.json()["tokens"] == list("hé".encode())
    response = server.post("/detokenize", model="tiny", tokens=list("hé".encode()))
    assert response.json() == {"prompt": "hé"}


def test_sigterm_ends_open_streams_and_exits_0(shared):
    """The last test: the server is gone afterwards."""
    with shared.endless("all") as connection:
        shared.process.send_signal(signal.SIGTERM)
        connection.settimeout(PATIENCE)
        received = b""
        while data := connection.recv(65536):
            received += data
    assert b"the server is stopping" in received
    assert shared.process.wait(PATIENCE) == 0
