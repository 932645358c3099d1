"""`LLM`: the same engine in a notebook or a script, without a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.build import build_engine, make_plan
from serving.config import AdapterSource, EngineConfig
from serving.core import AdapterReference, FinishReason, Request, SamplingParams


@dataclasses.dataclass(frozen=True)
class Completion:
    """The whole answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


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

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        adapter: str | None | Sequence[str | None] = None,
    ) -> list[Completion]:
        """Continue each prompt (text or token ids), all in one batch.

        `adapter` is one name for all prompts, or one a prompt; None is the base model. Raises
        ValueError for a prompt that doesn't fit, KeyError for an unknown adapter; then none runs.
        """
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
        added: list[Request] = []
        try:
            for request in requests:
                self.engine.add(request)
                added.append(request)
            texts = {request.request_id: "" for request in requests}
            tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
            reasons: dict[str, FinishReason] = {}
            while self.engine.busy:
                for output in self.engine.step():
                    texts[output.request_id] += output.text
                    tokens[output.request_id] += output.token_ids
                    if output.finish_reason is not None:
                        reasons[output.request_id] = output.finish_reason
        except BaseException:
            for request in added:
                self.engine.abort(request.request_id)
            while self.engine.busy:
                self.engine.step()
            raise
        ids = [request.request_id for request in requests]
        return [Completion(texts[i], tokens[i], reasons[i]) for i in ids]
