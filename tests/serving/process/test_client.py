"""The openai client over every route of one real server process, its answers held to its own types.

The client builds its types without checking them; here each answer is checked.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import openai
import pydantic
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serving.http.fakes import wait_until
from tests.support.server_process import CONTEXT, PATIENCE, at_once


MAX_QUEUE = 2
OPTIONS = ("--max-queue", str(MAX_QUEUE))  # of the server
MESSAGES: list[Any] = [{"role": "user", "content": "hi é"}]
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def checked(kind: type[pydantic.BaseModel], answer: pydantic.BaseModel) -> dict[str, Any]:
    """The answer as JSON, once its client's type has taken it without changing a value."""
    data = answer.model_dump(mode="json", exclude_unset=True)
    kind.model_validate_json(json.dumps(data), strict=True)
    return data


def test_completion_with_logprobs(client):
    answer = client.completions.create(
        model="all", prompt=["hello", "é"], max_tokens=6, logprobs=3, n=2, **GREEDY
    )
    data = checked(Completion, answer)
    assert [choice["index"] for choice in data["choices"]] == [0, 1, 2, 3]
    for choice in data["choices"]:
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {6}
        rows = zip(
            *(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        )
        for token, logprob, top in rows:
            assert top[token] == logprob == max(top.values())
            assert 3 <= len(top) <= 4


def test_an_echo_scores_a_prompt_as_its_own_answer_was_scored(client):
    """Greedy: what the prompt's tokens score as an answer, they score as a prompt."""
    prompt = list(b"hello")
    asked: dict[str, Any] = {"model": "attention", "logprobs": 2, **GREEDY}
    body = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(
        **(asked | {"extra_body": body}), prompt=prompt, max_tokens=8
    ).choices[0]
    whole = prompt + answer.to_dict()["token_ids"]
    echoed = client.completions.create(**asked, prompt=whole, max_tokens=0, echo=True)
    choice = echoed.choices[0]
    assert choice.finish_reason == "length"
    assert echoed.usage.completion_tokens == 0
    logprobs = choice.to_dict()["logprobs"]
    assert logprobs["tokens"][5:] == answer.logprobs.tokens
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][5:] == pytest.approx(answer.logprobs.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_completion_joined_is_the_whole_one(client, echo):
    asked: dict[str, Any] = {
        "model": "all",
        "prompt": "héllo",
        "max_tokens": 20,
        "logprobs": 1,
        "n": 2,
        "seed": 5,
        "echo": echo,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**asked).to_dict()["choices"]
    texts, logprobs = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.to_dict()["choices"]:
            texts[choice["index"]] += choice["text"]
            logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
    for choice in whole:
        assert texts[choice["index"]] == choice["text"]
        wanted = choice["logprobs"]["token_logprobs"]
        assert logprobs[choice["index"]] == pytest.approx(wanted, abs=1e-4)


def test_chat_with_logprobs_whole_and_streamed(client):
    asked: dict[str, Any] = {"model": "all", "messages": MESSAGES, "max_tokens": 12, **GREEDY}
    asked |= {"logprobs": True, "top_logprobs": 2}
    whole = checked(ChatCompletion, client.chat.completions.create(**asked))
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        data = checked(ChatCompletionChunk, chunk)
        streamed += (data["choices"][0]["logprobs"] or {"content": []})["content"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]


def test_chat_stream_helper_gives_the_logprobs(client):
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, **GREEDY}
    with client.chat.completions.stream(**asked, logprobs=True) as stream:
        for _ in stream:
            pass
        final = stream.current_completion_snapshot
    assert len(final.choices[0].logprobs.content) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens_is_shown_where_asked(client, stream):
    asked: dict[str, Any] = {"model": "attention", "prompt": "hello", "max_tokens": 40}
    text = client.completions.create(**asked, **GREEDY).choices[0].text
    stop = text[9:12]
    for include in (False, True):
        answer = client.completions.create(
            **asked,
            temperature=0,
            stop=stop,
            stream=stream,
            extra_body={"ignore_eos": True, "include_stop_str_in_output": include},
        )
        choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
        end = text.index(stop) + len(stop) * include
        assert "".join(choice.text for choice in choices) == text[:end]
        assert choices[-1].finish_reason == "stop"


def test_a_final_message_is_continued(server, client):
    messages = [*MESSAGES, {"role": "assistant", "content": "well"}]
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=8,
        temperature=0,
        extra_body={"continue_final_message": True, "ignore_eos": True, "return_token_ids": True},
    )
    prompt = "<user>hi é<assistant>well"
    assert answer.choices[0].to_dict()["token_ids"] == server.tokens("tiny", prompt, 8)


def test_fields_without_effect(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=2,
        user="me",
        metadata={"run": "1"},
        safety_identifier="me",
        prompt_cache_key="k",
        store=False,
        parallel_tool_calls=False,
    )
    checked(ChatCompletion, answer)


def test_models(client):
    for model in client.models.list():
        checked(Model, model)
        assert checked(Model, client.models.retrieve(model.id))["id"] == model.id


def test_what_the_client_has_no_method_for(client):
    def get(path: str) -> Any:
        return client.get(path, cast_to=object)

    root = str(client.base_url).removesuffix("v1/")
    assert get(f"{root}ready") == {"status": "ready", "model": "tiny"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", get(f"{root}version")["version"])
    info = get(f"{root}tokenizer_info")
    assert info["chat_template"].startswith("{% for m in messages %}")
    assert info["model_max_length"] == CONTEXT
    body = {"model": "all", "messages": MESSAGES}
    tokens = client.post(f"{root}tokenize", body=body, cast_to=object)
    assert tokens["count"] == len("<user>hi é<assistant>".encode())
    text = client.post(f"{root}detokenize", body={"tokens": tokens["tokens"]}, cast_to=object)
    assert text == {"prompt": "<user>hi é<assistant>"}


def test_a_full_queue_is_a_rate_limit_and_leaves_others_alone(server, client):
    expected = client.completions.create(model="all", prompt="a", max_tokens=5, **GREEDY)
    with contextlib.ExitStack() as stack:
        for _ in range(4):  # every lane
            stack.enter_context(server.endless("tiny"))
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(
                    model="all", prompt=["a"] * (MAX_QUEUE + 1), max_tokens=5, stream=stream
                )
            assert caught.value.response.headers["retry-after"] == "1"
            assert caught.value.code == "rate_limit_exceeded"
        assert server.metric("vllm:num_requests_waiting") == 0
        assert server.running == 4
    wait_until(lambda: server.idle, PATIENCE)
    again = at_once(
        *[
            lambda: client.completions.create(model="all", prompt="a", max_tokens=5, **GREEDY)
            for _ in range(MAX_QUEUE)
        ]
    )
    assert {answer.choices[0].text for answer in again} == {expected.choices[0].text}


def test_request_ids_are_in_answers_and_log(server, client):
    answer = client.completions.with_raw_response.create(
        model="all", prompt="a secret", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    wait_until(lambda: any("id=mine-1" in line for line in server.errors), PATIENCE)
    (line,) = [line for line in server.errors if "id=mine-1" in line]
    assert re.search(r"POST /v1/completions 200 \d+\.\d ms adapter=all id=mine-1$", line.strip())
    assert "secret" not in "".join(server.errors)
