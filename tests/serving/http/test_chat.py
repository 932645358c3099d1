from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serving.http.fakes import BOS, MAX_MODEL_LEN
from tests.serving.http.test_completions import events


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt", "messages": [{"role": "user", "content": "hi"}], **fields}


def prompt_of(engine) -> str:
    return "".join(map(chr, engine.requests[-1].prompt_token_ids))


def test_answer_is_openais_chat_completion_with_usage(call):
    response = call("POST", "/v1/chat/completions", json=body())
    assert response.status_code == 200
    answer = response.json()
    ChatCompletion.model_validate(answer, strict=True)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "<u:hi><a:", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}


def test_an_answer_may_be_sent_back_as_part_of_the_conversation(call, engine):
    message = (
        ChatCompletion.model_validate(call("POST", "/v1/chat/completions", json=body()).json())
        .choices[0]
        .message
    )
    sent = message.model_dump() | {"content": "ok"}  # unset fields of the client's type as nulls
    messages = [*body()["messages"], sent, {"role": "user", "content": "bye"}]
    assert call("POST", "/v1/chat/completions", json=body(messages=messages)).status_code == 200
    assert prompt_of(engine) == "<u:hi><a:ok><u:bye><a:"


def test_content_may_be_text_parts(call, engine):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": parts}]
    call("POST", "/v1/chat/completions", json=body(messages=messages))
    assert prompt_of(engine) == "<s:be><u:one\ntwo><a:"


def test_a_final_message_is_continued(call, engine):
    messages = [*body()["messages"], {"role": "assistant", "content": "well"}]
    fields = body(messages=messages, continue_final_message=True)
    assert call("POST", "/v1/chat/completions", json=fields).status_code == 200
    assert prompt_of(engine) == "<u:hi><a:well"


def test_without_a_generation_prompt_the_messages_are_all(call, engine):
    call("POST", "/v1/chat/completions", json=body(add_generation_prompt=False))
    assert prompt_of(engine) == "<u:hi>"


def test_template_switches_reach_the_template(call, engine):
    fields = body(chat_template_kwargs={"greeting": "hey"})
    call("POST", "/v1/chat/completions", json=fields)
    assert prompt_of(engine) == "hey<u:hi><a:"


def test_template_writes_its_own_special_tokens(call, engine):
    call("POST", "/v1/chat/completions", json=body())
    assert engine.requests[-1].prompt_token_ids[0] != BOS
    call("POST", "/v1/chat/completions", json=body(add_special_tokens=True))
    assert engine.requests[-1].prompt_token_ids[0] == BOS


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, MAX_MODEL_LEN - len("<u:hi><a:")),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_completion_tokens": 5, "max_tokens": 5}, 5),
    ],
)
def test_max_tokens_is_the_remaining_context_unless_given(call, engine, fields, max_tokens):
    call("POST", "/v1/chat/completions", json=body(**fields))
    assert engine.requests[-1].sampling.max_tokens == max_tokens


def test_stream_starts_with_the_role_and_ends_with_the_reason(call):
    response = call("POST", "/v1/chat/completions", json=body(stream=True))
    chunks = events(response.text)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in middle) == "<u:hi><a:"
    assert all(choice["finish_reason"] is None for choice in [first, *middle])
    assert last["delta"] == {}
    assert last["finish_reason"] == "stop"


def test_stream_usage_comes_last(call):
    fields = body(stream=True, stream_options={"include_usage": True})
    *chunks, last = events(call("POST", "/v1/chat/completions", json=fields).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 9


def test_token_ids_whole_and_streamed(call):
    whole = call("POST", "/v1/chat/completions", json=body(return_token_ids=True)).json()
    fields = body(return_token_ids=True, stream=True)
    chunks = events(call("POST", "/v1/chat/completions", json=fields).text)
    ids = [chunk["choices"][0].get("token_ids", []) for chunk in chunks]
    assert sum(ids, []) == whole["choices"][0]["token_ids"] == list(b"<u:hi><a:")
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == list(b"<u:hi><a:")
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


def test_off_values_of_fields_not_served_are_accepted(call):
    off = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logprobs": False,
        "chat_template_kwargs": {},
        "continue_final_message": False,
        "add_generation_prompt": True,
        "functions": [],
        "documents": [],
        "logit_bias": {},
        "frequency_penalty": 0.0,
        "n": 1,
        "store": False,
        "stream_options": None,
        "metadata": None,
    }
    assert call("POST", "/v1/chat/completions", json=body(**off)).status_code == 200
