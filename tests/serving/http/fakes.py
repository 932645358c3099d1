"""An engine and a tokenizer that need no model: the answer to a prompt is the prompt again."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from serving.catalog import ModelCatalog, ServedAdapter
from serving.core import (
    AdapterReference,
    FinishReason,
    Request,
    RequestOutput,
    TokenLogprobs,
)
from serving.detokenizer import IncrementalDetokenizer
from serving.engine_protocol import EngineDeadError, QueueFullError
from serving.http.app import create_app
from serving.metrics import Metrics


BOS = 256
MAX_MODEL_LEN = 64


class ByteTokenizer:
    """A token a byte, and a BOS. "<" and ">" frame what the chat template writes."""

    vocab_size = 257
    longest_token = 1
    eos_token_ids = (0,)
    special_tokens: Mapping[str, str] = {"bos_token": "[BOS]"}
    chat_template = "a template"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = b"" if skip_special_tokens else b"[BOS]"
        spelled = b"".join(special if i == BOS else bytes([i]) for i in ids)
        return spelled.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"[BOS]" if token_id == BOS else bytes([token_id])

    def is_silent(self, token_id: int) -> bool:
        return token_id == BOS

    def is_byte_fallback(self, token_id: int) -> bool:
        return False

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        switches = chat_template_kwargs or {}
        if any(message["content"] == "refuse me" for message in messages):
            raise ValueError("conversation roles must alternate")
        if "messages" in switches:
            raise ValueError("chat_template_kwargs can't set 'messages'")
        if add_generation_prompt and continue_final_message:
            raise ValueError("continue_final_message and add_generation_prompt can't both be true")
        text = "".join(switches.get("greeting", ""))
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                content = "\n".join(part["text"] for part in content)
            text += f"<{message['role'][0]}:{content}>"
        if continue_final_message:
            return text[:-1]
        return text + "<a:" * add_generation_prompt


class EchoEngine:
    """Yields the prompt's bytes, one a step, then stops; counts what opened and how it closed.

    `places_left` is what its queue has room for. `hold` keeps answers from going on; `fail_after`
    raises after that many tokens; `abort_after` ends with the reason "abort".
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.alive = True
        self.hold = False
        self.fail_after: int | None = None
        self.abort_after: int | None = None
        self.places_left: int | None = None
        self.placed: set[str] = set()
        self.requests: list[Request] = []
        self.running = 0
        self.aborted = 0

    @contextlib.contextmanager
    def places(self, requests: Sequence[Request]) -> Iterator[None]:
        left = self.places_left
        if left is not None and left < len(requests):
            raise QueueFullError("no room in the queue", ever=len(requests) < 10)
        ids = {request.request_id for request in requests}
        self.placed |= ids
        try:
            yield
        finally:
            self.placed -= ids

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        assert request.request_id in self.placed
        if not self.alive:
            raise EngineDeadError("gone")
        self.requests.append(request)
        self.running += 1
        finished = False
        try:
            if request.sampling.max_tokens == 0:
                finished = True
                yield _output(request, "", (), 0, FinishReason.LENGTH)
                return
            detokenizer = IncrementalDetokenizer(ByteTokenizer(), ())
            for count, token in enumerate(request.prompt_token_ids, start=1):
                while self.hold and count > 1:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0)
                if self.fail_after == count:
                    raise RuntimeError("a secret detail")
                reason = self._reason(request, count)
                finished = reason is not None
                text = detokenizer.add([token]) + (detokenizer.finish() if finished else "")
                yield _output(request, text, (token,), count, reason)
                if finished:
                    return
        finally:
            self.running -= 1
            self.aborted += not finished

    def _reason(self, request: Request, count: int) -> FinishReason | None:
        if self.abort_after == count:
            return FinishReason.ABORT
        if count == len(request.prompt_token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if count == request.sampling.max_tokens else None


def _output(
    request: Request,
    text: str,
    tokens: tuple[int, ...],
    count: int,
    reason: FinishReason | None,
) -> RequestOutput:
    prompt, sampling = request.prompt_token_ids, request.sampling
    asked = sampling.prompt_logprobs
    return RequestOutput(
        request.request_id,
        text,
        tokens,
        len(prompt),
        count,
        reason,
        "\n" if reason is FinishReason.STOP else None,
        logprobs=None
        if sampling.logprobs is None
        else tuple(token_logprobs(token, sampling.logprobs) for token in tokens),
        prompt_logprobs=None
        if asked is None or count > 1
        else (None, *(token_logprobs(token, asked) for token in prompt[1:])),
    )


def token_logprobs(token: int, alternatives: int) -> TokenLogprobs:
    """An even token is the likeliest, an odd one is not among the likely ones."""
    likely = [(token + 2 * i) % 256 for i in range(alternatives)]
    if token % 2:
        likely = [(other + 1) % 256 for other in likely]
    top = tuple((other, -0.125 - rank) for rank, other in enumerate(likely))
    return TokenLogprobs(token, -0.125 if token % 2 == 0 else -math.inf, top)


def make_catalog(max_model_len: int = MAX_MODEL_LEN) -> ModelCatalog:
    return ModelCatalog(
        base="org/base-1",
        base_root="models/base-1",
        max_model_len=max_model_len,
        aliases=("gpt",),
        adapters={
            name: ServedAdapter(
                AdapterReference(name, f"key of {name}", tuple(tokens)), f"adapters/{name}"
            )
            for name, tokens in (("pirate", b""), ("team/formal", b""), ("later", b"<!>"))
        },
        created=1700000000,
    )


def make_app(engine: EchoEngine, *, api_key: str | None = None, max_model_len: int = 64) -> FastAPI:
    catalog = make_catalog(max_model_len)
    return create_app(engine, catalog, ByteTokenizer(), Metrics("org/base-1"), api_key=api_key)


@contextlib.contextmanager
def live_server(app: FastAPI) -> Iterator[str]:
    """Serve `app` on a free loopback port, in a thread; the base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def wait_until(holds: Any, seconds: float = 5.0) -> None:
    """Wait for `holds()`; AssertionError where it doesn't come true in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)
