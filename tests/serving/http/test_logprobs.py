"""Logprobs and echo: both shapes, whole and streamed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serving.core import TokenLogprobs
from serving.http import generation
from serving.http.logprobs import (
    LEAST_LOGPROB,
    CompletionLogprobsWriter,
    TokenNames,
    chat_logprobs,
    prompt_offsets,
)
from serving.http.services import TokenSpelling
from tests.serving.http.fakes import BOS, ByteTokenizer
from tests.serving.http.test_completions import body, events
from tests.serving.tiny_tokenizers import TOKENIZERS


PATH, CHAT = "/v1/completions", "/v1/chat/completions"
NAMES = TokenNames(TokenSpelling(ByteTokenizer()), as_ids=False)


def complete(call, **fields: Any) -> dict[str, Any]:
    response = call("POST", PATH, json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


def streamed(call, **fields: Any) -> dict[int, dict[str, Any]]:
    """Each choice of a stream, its pieces joined."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events(call("POST", PATH, json=body(stream=True, **fields)).text):
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "logprobs": None})
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                lists = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
                choice["logprobs"] = {k: lists[k] + piece["logprobs"][k] for k in lists}
    return choices


def test_completion_logprobs_have_an_entry_for_every_token(call):
    answer = complete(call, prompt="bé", add_special_tokens=False, logprobs=2)
    Completion.model_validate(answer, strict=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["b", r"bytes:\xc3", r"bytes:\xa9"]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["token_logprobs"] == [-0.125, LEAST_LOGPROB, LEAST_LOGPROB]
    assert logprobs["top_logprobs"][0] == {"b": -0.125, "d": -1.125}


def test_top_logprobs_hold_the_token_itself_with_the_same_float(call):
    for count in (0, 1, 5, 20):
        logprobs = complete(call, logprobs=count)["choices"][0]["logprobs"]
        columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
        for token, logprob, top in zip(*columns, strict=True):
            assert top[token] == logprob
            assert max(count, 1) <= len(top) <= count + 1


def test_a_request_for_more_logprobs_of_prompts_than_memory_should_hold_is_refused(
    call, engine, monkeypatch
):
    monkeypatch.setattr(generation, "MAX_SCORED", 24)
    wide = {"prompt": [[104, 105], [106]], "echo": True, "n": 2, "max_tokens": 1}
    response = call("POST", PATH, json=body(**wide, logprobs=4))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "logprobs") and not engine.requests
    assert "6 tokens" in error["message"] and "24" in error["message"]
    assert len(complete(call, **wide, logprobs=3)["choices"]) == 4


@pytest.mark.parametrize("prompt", ["hello", [104, 105]])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_echo_puts_the_prompt_before_the_answer(call, engine, prompt, logprobs):
    fields = {"prompt": prompt, "echo": True, "max_tokens": 2, "logprobs": logprobs}
    answer = complete(call, **fields)
    (choice,) = answer["choices"]
    text = "hello" if isinstance(prompt, str) else "hi"
    assert choice["text"].startswith(text)
    assert engine.requests[0].sampling.prompt_logprobs == logprobs
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    written = choice["logprobs"]
    ids = engine.requests[0].prompt_token_ids
    assert {len(column) for column in written.values()} == {len(ids) + 2}
    assert written["token_logprobs"][0] is None and written["top_logprobs"][0] is None
    assert None not in written["token_logprobs"][1:]
    assert written["text_offset"][len(ids)] == len(text)
    assert answer["usage"]["completion_tokens"] == 2


def test_echo_of_ids_shows_special_tokens_and_of_text_what_was_written(call):
    assert (
        complete(call, prompt=[BOS, 97], echo=True, max_tokens=0)["choices"][0]["text"] == "[BOS]a"
    )
    assert complete(call, prompt="a", echo=True, max_tokens=0)["choices"][0]["text"] == "a"


def test_echo_with_no_token_scores_the_prompt_alone(call, engine):
    answer = complete(call, prompt=[[97, 98], [99]], echo=True, max_tokens=0, logprobs=1)
    first, second = answer["choices"]
    assert (first["text"], second["text"]) == ("ab", "c")
    assert first["finish_reason"] == "length"
    assert first["logprobs"]["tokens"] == ["a", "b"]
    assert first["logprobs"]["text_offset"] == [0, 1]
    assert second["logprobs"]["token_logprobs"] == [None]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert {request.sampling.max_tokens for request in engine.requests} == {0}


def test_a_prompt_as_long_as_the_context_can_be_scored(call):
    assert (
        len(complete(call, prompt=[97] * 64, echo=True, max_tokens=0)["choices"][0]["text"]) == 64
    )


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["héllo", ["a日b", "c"], [104, 0xF0, 0x9F, 0x98, 0x80]])
def test_a_stream_joined_has_what_the_whole_answer_has(call, prompt, echo):
    fields = {"prompt": prompt, "echo": echo, "logprobs": 2, "n": 2, "max_tokens": 30}
    whole = complete(call, **fields)["choices"]
    joined = streamed(call, **fields)
    for choice in whole:
        for key in ("text", "logprobs", "finish_reason"):
            assert joined[choice["index"]][key] == choice[key]


def test_a_stream_of_an_echo_alone_sends_it(call):
    joined = streamed(call, prompt="hello", echo=True, max_tokens=0)
    assert joined == {0: {"text": "hello", "logprobs": None, "finish_reason": "length"}}


def test_tokens_as_ids(call):
    logprobs = complete(call, prompt=[98], logprobs=2, return_tokens_as_token_ids=True)
    logprobs = logprobs["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:98"]
    assert logprobs["top_logprobs"] == [{"token_id:98": -0.125, "token_id:100": -1.125}]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt", "messages": [{"role": "user", "content": "é"}], **fields}


def test_chat_logprobs(call):
    fields = chat_body(logprobs=True, top_logprobs=2)
    answer = call("POST", CHAT, json=fields).json()
    ChatCompletion.model_validate(answer, strict=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert len(logprobs["content"]) == answer["usage"]["completion_tokens"]
    assert logprobs["content"][1] == {
        "token": "u",
        "logprob": LEAST_LOGPROB,
        "bytes": [117],
        "top_logprobs": [
            {"token": "v", "logprob": -0.125, "bytes": [118]},
            {"token": "x", "logprob": -1.125, "bytes": [120]},
        ],
    }
    spelled = bytes(byte for entry in logprobs["content"] for byte in entry["bytes"])
    assert spelled.decode() == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("top", [None, 0])
def test_chat_logprobs_without_alternatives(call, top):
    answer = call("POST", CHAT, json=chat_body(logprobs=True, top_logprobs=top)).json()
    assert all(not entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"])


def test_chat_stream_has_every_token_once_though_its_text_is_held(call):
    fields = chat_body(logprobs=True, top_logprobs=1, n=2)
    whole = call("POST", CHAT, json=fields).json()
    joined: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in events(call("POST", CHAT, json=fields | {"stream": True}).text):
        ChatCompletionChunk.model_validate(chunk, strict=True)
        for choice in chunk["choices"]:
            if choice["logprobs"] is not None:
                joined[choice["index"]] += choice["logprobs"]["content"]
    for choice in whole["choices"]:
        assert joined[choice["index"]] == choice["logprobs"]["content"]


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_no_number_that_json_lacks_is_written(value):
    entry = TokenLogprobs(97, value, ((98, value),))
    written = CompletionLogprobsWriter(ByteTokenizer(), NAMES, [1], None).write(None, [entry])
    assert written.token_logprobs == [LEAST_LOGPROB]
    assert written.top_logprobs == [{"b": LEAST_LOGPROB, "a": LEAST_LOGPROB}]
    assert chat_logprobs(NAMES, [entry]).content[0].top_logprobs[0].logprob == LEAST_LOGPROB


def test_two_tokens_of_one_spelling_keep_the_likelier():
    class Same(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"same"

    tokenizer = Same()
    names = TokenNames(TokenSpelling(tokenizer), as_ids=False)
    entry = TokenLogprobs(99, -3.0, ((97, -0.5), (98, -1.0)))
    written = CompletionLogprobsWriter(tokenizer, names, [1], None).write(None, [entry])
    assert written.top_logprobs == [{"same": -0.5}]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_offsets_of_a_prompt_grow_and_stay_in_its_text(name):
    tokenizer = TOKENIZERS[name]
    text = "ab a\n日 é<|end|>he"
    ids = tokenizer.encode(text, False)
    offsets = prompt_offsets(tokenizer, ids, text)
    assert len(offsets) == len(ids)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text)


def test_offsets_point_at_the_tokens_text():
    tokenizer = TOKENIZERS["byte_level"]
    text = "he he<|end|>\U0001f600é."
    ids = tokenizer.encode(text, False)
    for token, offset in zip(ids, prompt_offsets(tokenizer, ids, text), strict=True):
        data = tokenizer.token_bytes(token)
        if data.isascii():
            assert text.startswith(data.decode(), offset)
        else:
            assert data in text[offset].encode()
