"""What the engine tells its recorder: every token and every time once."""

from __future__ import annotations

import pytest

from serving.core import FinishReason, Request, RequestStats, SamplingParams, StepStats
from serving.engine import EngineCore
from serving.kv_cache import BlockPool
from serving.scheduler import Scheduler
from tests.support.fake_device import FakeDevice, FakeTokenizer


class Clock:
    """A second passes between any two looks at it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Recorder:
    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.requests: list[RequestStats] = []

    def record_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def record_request(self, stats: RequestStats) -> None:
        self.requests.append(stats)

    def total(self, name: str) -> int:
        return sum(getattr(step.tokens, name) for step in self.steps)

    def all(self, name: str) -> list[float]:
        return [value for step in self.steps for value in getattr(step.tokens, name)]


def make_engine(recorder: Recorder | None, *, blocks: int = 40) -> EngineCore:
    scheduler = Scheduler(BlockPool(blocks, 4), lanes=4, prefill_budget=8)
    device, tokenizer = FakeDevice(block_size=4), FakeTokenizer()
    return EngineCore(
        device, scheduler, None, tokenizer, max_model_len=64, recorder=recorder, clock=Clock()
    )


def run(engine: EngineCore, prompts: list[int], **sampling: int) -> None:
    for index, length in enumerate(prompts):
        prompt = tuple(range(1, length + 1))
        engine.add(Request(f"r{index}", prompt, SamplingParams(**sampling), arrival=100.0))
    while engine.busy:
        engine.step()


@pytest.mark.parametrize("blocks", [40, 9])
def test_every_token_is_counted_once_whatever_is_preempted(blocks):
    recorder, prompts = Recorder(), [3, 4, 2, 5]
    run(make_engine(recorder, blocks=blocks), prompts, max_tokens=12)
    assert (sum(step.preemptions for step in recorder.steps) > 0) == (blocks == 9)
    assert recorder.total("prompt_tokens") == sum(prompts)
    assert recorder.total("generated_tokens") == 4 * 12
    assert len(recorder.all("first_token_seconds")) == 4
    assert len(recorder.all("intervals")) == 4 * 11
    assert min(recorder.all("intervals")) > 0


def test_times_of_a_request_follow_each_other():
    recorder = Recorder()
    run(make_engine(recorder), [9], max_tokens=5)
    (request,) = recorder.requests
    (first,) = recorder.all("first_token_seconds")
    assert request.max_tokens == 5
    assert request.prefill_seconds is not None and request.decode_seconds is not None
    assert request.queue_seconds + request.prefill_seconds == first
    assert request.decode_seconds == sum(recorder.all("intervals"))
    assert first + request.decode_seconds < request.total_seconds


def test_a_request_that_only_reads_its_prompt_has_no_first_token():
    recorder = Recorder()
    run(make_engine(recorder), [9], max_tokens=0)
    assert (recorder.total("prompt_tokens"), recorder.total("generated_tokens")) == (9, 0)
    assert recorder.all("first_token_seconds") == recorder.all("intervals") == []


def test_a_request_aborted_in_the_queue_reached_nothing():
    recorder = Recorder()
    engine = make_engine(recorder)
    engine.add(Request("r", (1, 2), SamplingParams(), arrival=100.0))
    engine.abort("r")
    engine.step()
    (request,) = recorder.requests
    assert request.finish_reason is FinishReason.ABORT
    assert request.prefill_seconds is None and request.decode_seconds is None
    assert request.queue_seconds > 0


def test_without_a_recorder_nothing_is_kept():
    engine = make_engine(None)
    run(engine, [3, 9], max_tokens=7)
    assert not engine._tokens.intervals and not engine._tokens.first_token_seconds
