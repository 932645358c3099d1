"""`EngineCore`: add, step, abort. One thread calls it; it knows nothing of HTTP.

The next step is dispatched before the last one's tokens are read. So a stop or an abort is seen one
step late: the extra token is discarded, and the sequence's KV blocks, lane and pin are given back
only when no step in flight holds them. Every end, whatever its cause, passes `_release`, once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol

from jaxlora.adapters.store import AdapterStore
from serving.core import FinishReason, Request, RequestOutput, RequestStats, StepStats, TokenStats
from serving.errors import InvocationTokensError
from serving.kv_cache import BlockTable
from serving.output import OutputStream
from serving.scheduler import Scheduler
from serving.sequence import Batch, Sequence, StepResults
from serving.tokenizer import Tokenizer


class Pending(Protocol):
    """A dispatched step."""

    @property
    def batch(self) -> Batch: ...

    def results(self) -> StepResults:
        """Waits for the device."""
        ...


class StepRunner(Protocol):
    """What the engine needs of `serving.runner.Runner`; tests fake it without a device."""

    def admit(self, sequence: Sequence) -> None: ...

    def dispatch(self, batch: Batch) -> Pending: ...


class Recorder(Protocol):
    """Where numbers go: `serving.metrics.Metrics`, or nowhere."""

    def record_step(self, stats: StepStats) -> None: ...

    def record_request(self, stats: RequestStats) -> None: ...


class EngineCore:
    """Continuous batching over a runner. Not thread safe."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        store: AdapterStore | None,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        seed: int = 0,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.store = scheduler, store
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._runner = runner
        self._recorder = recorder
        self._clock = clock
        self._seeds = random.Random(seed)
        self._streams: dict[str, OutputStream] = {}  # request id -> live stream
        self._pending: Pending | None = None
        self._tokens = TokenStats()  # not yet recorded

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self._pending is not None or not self.scheduler.idle

    def add(self, request: Request) -> None:
        """Queue a request; its adapter is pinned from now on.

        Raises ValueError for a request that can never run (an empty prompt, one that leaves no room
        for max_tokens, an id in use), KeyError for an adapter that is not resident,
        InvocationTokensError where its invocation tokens are not in the prompt.
        """
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        prompt, answer = len(request.prompt_token_ids), request.sampling.max_tokens
        if not prompt or prompt + answer > self.max_model_len:
            raise ValueError(
                f"a prompt of {prompt} tokens and max_tokens {answer} don't fit a context of"
                f" {self.max_model_len}"
            )
        slot, key, start = self._pin(request)
        seed = request.sampling.seed
        sequence = Sequence(
            request,
            BlockTable(self.scheduler.pool.block_size, key, start),
            slot,
            start,
            self._seeds.getrandbits(64) if seed is None else seed & (2**64 - 1),
        )
        self._streams[request.request_id] = OutputStream(sequence, self.tokenizer)
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now; nothing more is output for it. An unknown id is no error."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.scheduler.finish(stream.sequence, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, then read the last one's tokens; returns their news."""
        started, preempted = self._clock(), self.scheduler.preemptions
        batch = self.scheduler.schedule()
        pending = self._dispatch(batch) if batch else None
        outputs = self._collect(self._pending) if self._pending else []
        self._pending = pending
        for sequence in self.scheduler.settle():
            self._release(sequence)
        if self._recorder and (batch or not self.busy):  # the idle engine's gauges are told too
            self._recorder.record_step(self._step_stats(batch, preempted, self._clock() - started))
        return outputs

    def check_integrity(self) -> None:
        """Nothing is held that no live sequence accounts for."""
        self.scheduler.check_integrity()
        if self.store is not None:
            live = [*self.scheduler.running, *self.scheduler.waiting]
            adapters = [s.request.adapter for s in live]
            self.store.check_integrity(a.key for a in adapters if a is not None)

    def _pin(self, request: Request) -> tuple[int, str | None, int]:
        """Hold the request's adapter; returns its slot, its key and the position it begins at.

        (0, None, 0) for the base model's.
        """
        if request.adapter is None:
            return 0, None, 0
        if self.store is None:
            raise KeyError(request.adapter.name)
        key = request.adapter.key
        adapter = self.store.adapter(key)
        start = adapter.first_position(request.prompt_token_ids)
        if start is None:
            # peft would answer with the base model: never in an adapter's place.
            raise InvocationTokensError(request.adapter.name, adapter.invocation_tokens)
        return self.store.pin(key), key, start

    def _dispatch(self, batch: Batch) -> Pending:
        for chunk in batch.prefills:
            if chunk.start == 0:
                self._runner.admit(chunk.sequence)
                if chunk.sequence.admitted_at is None:
                    chunk.sequence.admitted_at = self._clock()
        return self._runner.dispatch(batch)

    def _collect(self, pending: Pending) -> list[RequestOutput]:
        outputs = []
        results = pending.results()
        self.scheduler.collected(pending.batch)
        for sequence, scored in results.prompt_logprobs:
            sequence.prompt_logprobs.extend(scored)
        news = zip(pending.batch.sampling, results.tokens, results.logprobs, strict=True)
        for sequence, token, logprobs in news:
            if sequence.finish_reason is not None:
                continue  # it ended while this step was in flight: the token never was
            request_id = sequence.request.request_id
            output, reason = self._streams[request_id].add(token, logprobs)
            outputs.append(output)
            if self._recorder:
                self._count(sequence, len(output.token_ids))
            sequence.table.record_full(sequence.token_ids[:-1])
            if reason is not None:
                del self._streams[request_id]
                self.scheduler.finish(sequence, reason)
        return outputs

    def _release(self, sequence: Sequence) -> None:
        """The one way out: blocks and lane are already back, the pin follows, numbers are kept."""
        request = sequence.request
        if request.adapter is not None and self.store is not None:
            self.store.unpin(request.adapter.key)
        if self._recorder:
            assert sequence.finish_reason is not None
            now = self._clock()
            admitted, first = sequence.admitted_at, sequence.first_token_at
            last = sequence.last_token_at
            self._recorder.record_request(
                RequestStats(
                    adapter=request.adapter.name if request.adapter else None,
                    prompt_tokens=sequence.prompt_length,
                    completion_tokens=sequence.output_length,
                    finish_reason=sequence.finish_reason,
                    max_tokens=request.sampling.max_tokens,
                    queue_seconds=(now if admitted is None else admitted) - request.arrival,
                    prefill_seconds=None if admitted is None or first is None else first - admitted,
                    decode_seconds=None if first is None or last is None else last - first,
                    total_seconds=now - request.arrival,
                )
            )

    def _count(self, sequence: Sequence, tokens: int) -> None:
        """Note when a sequence's tokens came: one, or none where only its prompt was to be read."""
        now, stats = self._clock(), self._tokens
        stats.generated_tokens += tokens
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            stats.prompt_tokens += sequence.prompt_length
            if tokens:
                stats.first_token_seconds.append(now - sequence.request.arrival)
        elif sequence.last_token_at is not None:
            stats.intervals.append(now - sequence.last_token_at)
        sequence.last_token_at = now

    def _step_stats(self, batch: Batch, preempted: int, seconds: float) -> StepStats:
        tokens, self._tokens = self._tokens, TokenStats()
        slots = [sequence.slot for sequence in batch.decodes]
        return StepStats(
            decode_rows=len(slots),
            prefill_tokens=sum(chunk.length for chunk in batch.prefills),
            distinct_adapters=len(set(slots) - {0}),
            base_rows=slots.count(0),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_usage=self.scheduler.pool.usage,
            preemptions=self.scheduler.preemptions - preempted,
            seconds=seconds,
            tokens=tokens,
        )
