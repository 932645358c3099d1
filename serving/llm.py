"""`LLM`: the same engine in a notebook or a script, without a server."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.build import build_engine, make_plan
from serving.config import AdapterSource, EngineConfig
from serving.core import (
    AdapterReference,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from serving.engine_protocol import EngineDeadError


@dataclasses.dataclass(frozen=True)
class Completion:
    """The whole answer to one prompt.

    `logprobs` and `prompt_logprobs` are as in `RequestOutput`, None where not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Completion:
        """All outputs of a finished request, as one."""
        reason = outputs[-1].finish_reason
        assert reason is not None, "the last output of a request says why it is the last"
        return cls(
            text="".join(output.text for output in outputs),
            token_ids=tuple(token for output in outputs for token in output.token_ids),
            finish_reason=reason,
            logprobs=None
            if outputs[0].logprobs is None
            else tuple(one for output in outputs for one in output.logprobs or ()),
            prompt_logprobs=outputs[0].prompt_logprobs,
        )


class LLM:
    """One model and its adapters.

    >>> llm = LLM("models/smollm2-135m-instruct", adapters={"pirate": "examples/adapters/pirate"})
    >>> llm.chat([[{"role": "user", "content": "Who are you?"}]], adapter="pirate")

    Further keywords are `EngineConfig`'s. Raises JaxloraError as the server would refuse to start.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        sources = tuple(AdapterSource(name, Path(path)) for name, path in (adapters or {}).items())
        self._plan = make_plan(EngineConfig(model=Path(model), adapters=sources, **options))
        self.engine = build_engine(self._plan)
        self.tokenizer = self._plan.tokenizer
        self._next_id = 0
        self._failure: str | None = None

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        adapter: str | None | Sequence[str | None] = None,
    ) -> list[Completion]:
        """Continue each prompt (text or token ids), all in one batch.

        `adapter` is one name for all prompts, or one a prompt; None is the base model. Raises
        ValueError for a prompt that doesn't fit, KeyError for an unknown adapter,
        InvocationTokensError for a prompt without an activated adapter's tokens; then none runs.
        Ctrl-C ends all of them after the step in progress.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts: wanted a list of prompts, got one text")
        sampling = sampling or SamplingParams()
        names = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else adapter
        requests = [
            self._request(prompt, sampling, name)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        return self._run(requests)

    def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        sampling: SamplingParams | None = None,
        *,
        adapter: str | None | Sequence[str | None] = None,
    ) -> list[Completion]:
        """`generate` over the model's chat template; a conversation is a list of messages."""
        prompts = [
            self.tokenizer.encode(
                self.tokenizer.apply_chat_template([dict(m) for m in messages]),
                add_special_tokens=False,
            )
            for messages in conversations
        ]
        return self.generate(prompts, sampling, adapter=adapter)

    def _request(
        self, prompt: str | Sequence[int], sampling: SamplingParams, adapter: str | None
    ) -> Request:
        reference = None
        if adapter is not None:
            store = self.engine.store
            if store is None or adapter not in store.keys:
                raise KeyError(f"no adapter is named {adapter!r}")
            reference = AdapterReference(adapter, store.keys[adapter])
        tokens = self.tokenizer.encode(prompt, True) if isinstance(prompt, str) else prompt
        self._next_id += 1
        return Request(f"llm-{self._next_id}", tuple(tokens), sampling, reference)

    def _run(self, requests: list[Request]) -> list[Completion]:
        outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        with _interrupts_held() as interrupted, self._aborted_unless_finished(requests):
            for request in requests:
                self.engine.add(request)
            while self.engine.busy:
                for output in self._step():
                    outputs[output.request_id].append(output)
                if interrupted.is_set():
                    raise KeyboardInterrupt
        return [Completion.of(outputs[request.request_id]) for request in requests]

    def _step(self) -> list[RequestOutput]:
        try:
            return self.engine.step()
        except Exception as error:
            self._failure = f"a step has failed, this LLM has ended: {error}"
            raise

    @contextlib.contextmanager
    def _aborted_unless_finished(self, requests: list[Request]) -> Iterator[None]:
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        try:
            yield
        finally:  # an id that is finished, or was never added, is no error
            for request in requests:
                self.engine.abort(request.request_id)
            while self._failure is None and self.engine.busy:
                self._step()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[threading.Event]:
    """Turn Ctrl-C into an event: a step that is cut short would lose what it has dispatched."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted  # Ctrl-C never reaches another thread
        return
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
