from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion

from tests.serving.http.fakes import BOS


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt", "prompt": "hello", **fields}


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_answer_is_openais_completion_with_usage(call):
    response = call("POST", "/v1/completions", json=body())
    assert response.status_code == 200
    answer = response.json()
    Completion.model_validate(answer, strict=True)
    assert answer["model"] == "gpt"
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12}
    (choice,) = answer["choices"]
    assert choice["text"] == "hello"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "\n"
    assert "token_ids" not in choice


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_every_form_of_prompt_gives_a_choice_each_in_order(call, prompt, texts):
    answer = call("POST", "/v1/completions", json=body(prompt=prompt)).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


def test_special_tokens_are_added_unless_told_otherwise_and_never_to_ids(call, engine):
    call("POST", "/v1/completions", json=body(prompt="a"))
    call("POST", "/v1/completions", json=body(prompt="a", add_special_tokens=False))
    call("POST", "/v1/completions", json=body(prompt=[97]))
    assert [r.prompt_token_ids for r in engine.requests] == [(BOS, 97), (97,), (97,)]


def test_sixteen_tokens_are_the_default(call, engine):
    answer = call("POST", "/v1/completions", json=body(prompt="x" * 40)).json()
    assert engine.requests[0].sampling.max_tokens == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_sampling_fields_reach_the_engine(call, engine):
    call(
        "POST",
        "/v1/completions",
        json=body(
            max_tokens=5,
            min_tokens=2,
            temperature=0,
            top_p=0.5,
            top_k=7,
            min_p=0.25,
            seed=-3,
            stop="end",
            stop_token_ids=[1, 2],
            ignore_eos=True,
            user="me",
        ),
    )
    sampling = engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (5, 2, 0.0)
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 7, 0.25, -3)
    assert (sampling.stop, sampling.stop_token_ids) == (("end",), (1, 2))
    assert sampling.ignore_eos


@pytest.mark.parametrize(("given", "kept"), [(-1, 0), (None, 0), (2**70, 2**31 - 1)])
def test_top_k_without_a_limit(call, engine, given, kept):
    call("POST", "/v1/completions", json=body(top_k=given))
    assert engine.requests[0].sampling.top_k == kept


def test_null_is_the_same_as_left_out(call, engine):
    fields = ["temperature", "seed", "stop", "max_tokens", "logprobs", "n", "stream_options"]
    response = call("POST", "/v1/completions", json=body(**dict.fromkeys(fields)))
    assert response.status_code == 200
    assert engine.requests[0].sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model": "org/base-1"}, None),
        ({"model": "gpt"}, None),
        ({"model": "pirate"}, "pirate"),
        ({"model": "org/base-1:team/formal"}, "team/formal"),
        ({"model": "gpt:pirate"}, "pirate"),
        ({"model": "gpt", "adapter": "pirate"}, "pirate"),
        ({"model": "gpt", "lora_name": "pirate"}, "pirate"),
        ({"model": "pirate", "adapter": "pirate", "lora_name": "pirate"}, "pirate"),
    ],
)
def test_adapter_is_the_one_named_and_the_answer_says_so(call, engine, fields, name):
    answer = call("POST", "/v1/completions", json=body(**fields)).json()
    adapter = engine.requests[0].adapter
    assert (adapter.name if adapter else None) == name
    assert answer["model"] == (name or fields["model"])


def test_return_token_ids(call):
    answer = call("POST", "/v1/completions", json=body(prompt=[97, 98], return_token_ids=True))
    (choice,) = answer.json()["choices"]
    assert choice["prompt_token_ids"] == [97, 98]
    assert choice["token_ids"] == [97, 98]


def test_stream_joined_is_the_whole_answer_and_ends_with_done(call):
    response = call("POST", "/v1/completions", json=body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert all("usage" not in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    Completion.model_validate(chunks[-1])  # OpenAI's own type has no place for the nulls before


def test_stream_of_several_prompts_keeps_choices_apart(call, engine):
    response = call("POST", "/v1/completions", json=body(prompt=["abc", "xy"], stream=True))
    texts = ["", ""]
    for chunk in events(response.text):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["abc", "xy"]
    assert engine.running == 0
    assert engine.aborted == 0


def test_stream_usage_comes_last_and_is_null_before(call):
    options = {"include_usage": True}
    response = call(
        "POST",
        "/v1/completions",
        json=body(prompt=["ab", "c"], stream=True, stream_options=options),
    )
    *chunks, last = events(response.text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


def test_stream_with_token_ids_gives_the_prompts_once(call):
    response = call(
        "POST", "/v1/completions", json=body(prompt="ab", stream=True, return_token_ids=True)
    )
    choices = [chunk["choices"][0] for chunk in events(response.text)]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[BOS, 97, 98], None, None]
    assert sum((choice["token_ids"] for choice in choices), []) == [BOS, 97, 98]


def test_n_gives_as_many_choices_a_prompt_whose_tokens_count_once(call, engine):
    answer = call("POST", "/v1/completions", json=body(prompt=["ab", "c"], n=2, seed=7)).json()
    Completion.model_validate(answer, strict=True)
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "c", "c"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}
    assert len({request.request_id for request in engine.requests}) == 4
    assert sorted(request.sampling.seed for request in engine.requests) == [7, 7, 8, 8]


def test_a_stream_of_n_choices_tells_them_apart(call):
    text = call("POST", "/v1/completions", json=body(prompt="ab", n=3, stream=True)).text
    texts = {0: "", 1: "", 2: ""}
    for chunk in events(text):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "ab", 1: "ab", 2: "ab"}


def test_a_line_separator_in_the_text_does_not_cut_an_event_in_two(call):
    """As httpx and str.splitlines end lines; JSON may hold these characters as they are."""
    text = "a\x85b\u2028c\u2029\\d\x0b\x1c"
    response = call("POST", "/v1/completions", json=body(prompt=text, stream=True))
    lines = [line for line in response.text.splitlines() if line]
    assert lines == [line for line in response.text.split("\n") if line]
    assert "".join(event["choices"][0]["text"] for event in events(response.text)) == text
