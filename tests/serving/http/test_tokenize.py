from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from serving.http.app import create_app
from serving.metrics import Metrics
from tests.serving.http.fakes import BOS, ByteTokenizer, EchoEngine, make_catalog
from tests.serving.http.test_bad_input import assert_error


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": "ab"}, [BOS, 97, 98]),
        ({"prompt": "ab", "add_special_tokens": False}, [97, 98]),
        ({"prompt": ""}, [BOS]),
        ({"model": "pirate", "prompt": "a"}, [BOS, 97]),
        ({"messages": [USER]}, list(b"<u:hi><a:")),
        ({"messages": [USER], "add_generation_prompt": False}, list(b"<u:hi>")),
        (
            {"messages": [USER], "continue_final_message": True},
            list(b"<u:hi"),
        ),
        (
            {"messages": [USER], "chat_template_kwargs": {"greeting": "ho"}},
            list(b"ho<u:hi><a:"),
        ),
        ({"messages": [USER], "add_special_tokens": True}, [BOS, *b"<u:hi><a:"]),
    ],
)
def test_tokenize(call, fields, tokens):
    assert call("POST", "/tokenize", json=fields).json() == {
        "count": len(tokens),
        "max_model_len": 64,
        "tokens": tokens,
        "token_strs": None,
    }


def test_long_text_is_tokenized_whole(call):
    assert call("POST", "/tokenize", json={"prompt": "x" * 100_000}).json()["count"] == 100_001


def test_detokenize_shows_special_tokens(call):
    response = call("POST", "/detokenize", json={"tokens": [BOS, 97, 98]})
    assert response.json() == {"prompt": "[BOS]ab"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "a", "continue_final_message": False}, "continue_final_message"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"messages": [USER], "tools": [{}]}, "tools"),
        ({"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"prompt": "a", "other": 1}, "other"),
    ],
)
def test_bad_tokenize_request_is_400(call, fields, param):
    assert_error(call("POST", "/tokenize", json=fields), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "tokens"),
        ({"tokens": "ab"}, "tokens"),
        ({"tokens": [257]}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [True]}, "tokens[0]"),
    ],
)
def test_bad_detokenize_request_is_400(call, fields, param):
    assert_error(call("POST", "/detokenize", json=fields), 400, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_unknown_model_is_404(call, path):
    fields = {"model": "nobody"} | ({"prompt": "a"} if path == "/tokenize" else {"tokens": [1]})
    assert_error(call("POST", path, json=fields), 404, "model", "model_not_found")


def test_a_long_text_does_not_hold_up_other_requests():
    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            time.sleep(0.3)
            return super().encode(text, add_special_tokens)

    app = create_app(EchoEngine(), make_catalog(), SlowTokenizer(), Metrics("base"))
    ended = []

    async def run() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test"
        ) as client:

            async def slow() -> None:
                await client.post("/tokenize", json={"prompt": "x" * 100_000})
                ended.append("slow")

            async def quick() -> None:
                await client.get("/health")
                ended.append("quick")

            await asyncio.gather(slow(), quick())

    asyncio.run(run())
    assert ended == ["quick", "slow"]
