"""Whatever is wrong with a request is a 4xx in OpenAI's shape, and nothing runs."""

from __future__ import annotations

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from serving.http import schemas
from serving.http.body import MAX_BODY_BYTES
from serving.http.prompts import MAX_PROMPTS
from tests.serving.http.fakes import ByteTokenizer


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MANY_STOPS = [str(i) for i in range(33)]


def assert_error(response, status: int, param: str | None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]
    assert error["param"] == param
    assert error["code"] == code
    return error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"model": "pirate", "adapter": "team/formal"}, "adapter"),
        ({"model": "gpt:pirate", "lora_name": "team/formal"}, "lora_name"),
        ({"adapter": "pirate", "lora_name": "team/formal"}, "lora_name"),
        ({"adapter": ["pirate"]}, "adapter"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**4299}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": MANY_STOPS}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(33))}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"user": 1}, "user"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 100, "prompt": ["a"] * 21}, "n"),
        ({"n": True}, "n"),
        ({"echo": 0}, "echo"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"no_such_field": None}, "no_such_field"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_completion_field(call, engine, fields, param, stream):
    body = {"model": "gpt", "prompt": "hello", "stream": stream, **fields}
    assert_error(call("POST", COMPLETIONS, content=json.dumps(body)), 400, param)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ],
)
def test_stream_field(call, fields, param):
    body = {"model": "gpt", "prompt": "hello", **fields}
    assert_error(call("POST", COMPLETIONS, json=body), 400, param)


USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "wizard", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].image_url"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio", "text": "x"}]}]},
            "messages[0].content",
        ),
        ({"messages": [USER | {"name": "Ann"}]}, "messages[0].name"),
        ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [USER | {"mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
        ({"prompt": "hi"}, "prompt"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": -4}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"safety_identifier": "x" * 129}, "safety_identifier"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"mode": "wild"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"size": 1}}, "prompt_cache_options.size"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_chat_field(call, engine, fields, param, stream):
    body = {"model": "gpt", "messages": [USER], "stream": stream, **fields}
    assert_error(call("POST", CHAT, json=body), 400, param)
    assert engine.requests == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"5",
        b"{} {}",
        b'{"prompt": NaN}',
        b'{"temperature": 1e999}',
        b'{"prompt": "\xff"}',
        rb'{"prompt": "\ud800"}',
        rb'{"prompt": "a\udc00b", "model": "gpt"}',
        b'{"model": "gpt", "seed": 1' + b"0" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        "{}".encode("utf-16"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_body_that_is_no_json_object(call, engine, path, content):
    assert_error(call("POST", path, content=content), 400, None)
    assert engine.requests == []


def test_body_over_the_limit_is_413(call):
    content = b'{"model": "gpt", "prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    assert_error(call("POST", COMPLETIONS, content=content), 413, None, "payload_too_large")


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "nobody"},
        {"model": "org/base-1:nobody"},
        {"model": "org/base-1:"},
        {"model": "nobody:pirate"},
        {"model": "pirate:pirate"},
        {"model": "pirate\n"},
        {"model": ""},
        {"model": "x" * 10_000},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model_is_404_and_never_the_base(call, engine, fields, stream):
    response = call("POST", COMPLETIONS, json={"prompt": "hi", "stream": stream, **fields})
    message = assert_error(response, 404, "model", "model_not_found")
    assert len(message) < 1100
    assert engine.requests == []


@pytest.mark.parametrize("field", ["adapter", "lora_name"])
@pytest.mark.parametrize("name", ["nobody", "", "gpt", "org/base-1:pirate"])
def test_unknown_adapter_is_404_and_never_the_base(call, engine, field, name):
    response = call("POST", COMPLETIONS, json={"model": "gpt", "prompt": "hi", field: name})
    assert_error(response, 404, field, "model_not_found")
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_in_which_an_activated_adapter_would_not_begin_is_400(call, engine, stream):
    """And never the base model's answer in its place."""
    bodies = {
        COMPLETIONS: ("prompt", {"prompt": ["so <!> on", "so on"]}),
        CHAT: ("messages", {"messages": [{"role": "user", "content": "so on"}]}),
    }
    for path, (param, body) in bodies.items():
        body |= {"model": "later", "stream": stream, "max_tokens": 2}
        response = call("POST", path, json=body)
        message = assert_error(response, 400, param, "invocation_tokens_missing")
        assert "adapter 'later' begins at its invocation tokens [60, 33, 62]" in message
        assert engine.requests == []
    assert call("POST", COMPLETIONS, json={"model": "later", "prompt": "<!>"}).status_code == 200


def test_prompt_and_answer_over_the_context_is_400_with_the_numbers(call, engine):
    fields = {"model": "gpt", "prompt": [97] * 60, "max_tokens": 5}
    code = "context_length_exceeded"
    message = assert_error(call("POST", COMPLETIONS, json=fields), 400, "max_tokens", code)
    assert all(number in message for number in ("64", "65", "60", "5"))
    messages = [{"role": "user", "content": "x" * 60}]
    response = call("POST", CHAT, json={"model": "gpt", "messages": messages})
    assert_error(response, 400, "messages", code)
    assert engine.requests == []
    fields["max_tokens"] = 4
    assert call("POST", COMPLETIONS, json=fields).status_code == 200


def test_a_text_too_long_for_any_tokens_is_400_without_being_tokenized(call, engine, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", None)
    text = "x" * 100
    for path, param, fields in (
        (COMPLETIONS, "prompt", {"prompt": text}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": text}]}),
    ):
        response = call("POST", path, json={"model": "gpt", **fields})
        message = assert_error(response, 400, param, "context_length_exceeded")
        assert "64" in message and "characters" in message
    assert engine.requests == []


def test_one_bad_prompt_of_several_keeps_all_from_running(call, engine):
    fields = {"model": "gpt", "prompt": [[97], [97] * 64]}
    assert call("POST", COMPLETIONS, json=fields).status_code == 400
    assert engine.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_wrong_route_or_method(call, method, path, status, code):
    assert_error(call(method, path), status, None, code)


FIELDS = sorted(
    {*schemas.CompletionRequest.__struct_fields__, *schemas.ChatRequest.__struct_fields__}
    | schemas.REFUSED_CHAT.keys()
)
ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["gpt", "pirate", "user", "text", 97, 2**63, -(2**64)])
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@hypothesis.settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
)
def test_no_value_of_any_field_is_a_fault_of_the_server(call, engine, path, fields):
    good = {"model": "gpt", "prompt" if path == COMPLETIONS else "messages": [97]}
    if path == CHAT:
        good["messages"] = [{"role": "user", "content": "hi"}]
    # Infinity and NaN, which JSON has not, must be sent as other writers of JSON send them.
    content = json.dumps(good | fields)
    response = call("POST", path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()) == {"error"}
    assert engine.running == 0
