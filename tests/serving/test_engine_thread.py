"""The step thread over a fake device: streams of several tasks, aborts, loops that close, ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.adapters.store import AdapterStore
from serving.core import AdapterReference, Request, SamplingParams
from serving.engine import EngineCore
from serving.engine_protocol import EngineDeadError
from serving.engine_thread import EngineThread
from serving.kv_cache import BlockPool
from serving.scheduler import Scheduler
from tests.support.adapters import CountingLoader, tiny_adapter
from tests.support.fake_device import FakeDevice, FakeTokenizer, solo_answer


BLOCK, VOCAB, MAX_MODEL_LEN = 4, 50, 64
PATIENCE = 30.0  # seconds; only a hang takes that long


class GatedDevice(FakeDevice):
    """A fake device whose steps, after `hold_after` of them, wait for `open`; or which fails."""

    def __init__(self) -> None:
        super().__init__(block_size=BLOCK, vocab=VOCAB)
        self.hold_after: int | None = None
        self.failure: Exception | None = None
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def dispatch(self, batch):
        if self.hold_after is not None and len(self.batches) >= self.hold_after:
            assert self._opened.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        return super().dispatch(batch)

    @property
    def tokens(self) -> int:
        return sum(len(batch.sampling) for batch in self.batches)


class World:
    """A running thread, its core and two adapters."""

    def __init__(self, *, blocks: int = 40, lanes: int = 4) -> None:
        self.device = GatedDevice()
        self.store = AdapterStore(CountingLoader())
        for index, name in enumerate(("a", "b")):
            self.store.add(tiny_adapter(name, seed=index))
        scheduler = Scheduler(BlockPool(blocks, BLOCK), lanes=lanes, prefill_budget=8)
        self.core = EngineCore(
            self.device, scheduler, self.store, FakeTokenizer(), max_model_len=MAX_MODEL_LEN
        )
        self.thread = EngineThread(self.core)
        self.asked = 0

    def request(self, prompt=(1, 2, 3), adapter=None, request_id=None, **sampling) -> Request:
        self.asked += 1
        reference = AdapterReference(adapter, self.store.keys[adapter]) if adapter else None
        name = request_id or f"r{self.asked}"
        return Request(name, tuple(prompt), SamplingParams(**sampling), reference)

    def solo(self, request: Request) -> list[int]:
        slot = 0
        if request.adapter is not None:
            slot = self.store.pin(request.adapter.key)
            self.store.unpin(request.adapter.key)
        prompt = list(request.prompt_token_ids)
        return solo_answer(prompt, slot, VOCAB, request.sampling.max_tokens)

    async def read(self, request: Request, most: int | None = None) -> list[int]:
        """The answer's tokens; after `most` outputs the client goes."""
        tokens: list[int] = []
        async with contextlib.aclosing(self.thread.generate(request)) as outputs:
            count = 0
            async for output in outputs:
                tokens += output.token_ids
                count += 1
                assert (output.finish_reason is not None) == (
                    len(tokens) == request.sampling.max_tokens
                )
                if count == most:
                    break
        return tokens

    def settled(self) -> None:
        """Wait until the core has nothing to do, then check that nothing is held."""
        end = time.monotonic() + PATIENCE
        while self.core.busy:
            assert time.monotonic() < end, "the engine never became idle"
            time.sleep(0.001)
        self.thread.close()
        for _ in range(2):  # an abort may have been the thread's last deed
            self.core.step()
        assert not self.core.busy
        self.core.check_integrity()
        self.store.check_integrity()  # no pins
        assert self.core.scheduler.pool.free == self.core.scheduler.pool.usable
        assert not self.thread._streams


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.device.open()
    world.thread.close()


def run(work: Callable) -> Any:
    return asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_tasks_at_once_each_get_their_solo_answer(world):
    requests = [
        world.request([i, 1, 2], (None, "a", "b")[i % 3], max_tokens=5 + i) for i in range(9)
    ]

    async def work():
        return await asyncio.gather(*(world.read(request) for request in requests))

    expected = [world.solo(request) for request in requests]
    assert run(work) == expected
    assert any(len({s.slot for s in batch.decodes}) == 3 for batch in world.device.batches)
    world.settled()


def test_outputs_come_while_the_answer_is_being_made(world):
    request = world.request(max_tokens=40)
    world.device.hold_after = 3

    async def work():
        async with contextlib.aclosing(world.thread.generate(request)) as outputs:
            first = await anext(outputs)
            assert first.finish_reason is None
            assert len(world.device.batches) <= 3
            world.device.open()
            return list(first.token_ids) + [t async for o in outputs for t in o.token_ids]

    expected = world.solo(request)
    assert run(work) == expected


def test_a_client_that_goes_aborts_its_request_and_no_other(world):
    going = world.request([1], "a", max_tokens=60)
    staying = world.request([2], "a", max_tokens=30)
    world.device.hold_after = 4

    async def work():
        stays = asyncio.create_task(world.read(staying))
        tokens = await world.read(going, most=2)
        world.device.open()
        return tokens, await stays

    expected = world.solo(going)[:2], world.solo(staying)
    assert run(work) == expected
    world.settled()
    assert world.device.tokens < 40


def test_a_cancelled_task_aborts_its_request(world):
    world.device.hold_after = 2

    async def work():
        task = asyncio.create_task(world.read(world.request(adapter="b", max_tokens=60)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        world.device.open()

    run(work)
    world.settled()
    assert len(world.device.batches) <= 4


def test_a_request_that_waits_for_a_lane_is_aborted_too():
    world = World(lanes=1)
    world.device.hold_after = 1

    async def work():
        running = asyncio.create_task(world.read(world.request(max_tokens=8)))
        waiting = asyncio.create_task(world.read(world.request(adapter="a", max_tokens=8)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        world.device.open()
        return await running

    assert len(run(work)) == 8
    world.settled()
    assert not any(sequence.slot for batch in world.device.batches for sequence in batch.sequences)


def test_closing_before_the_first_output_is_asked_for_runs_nothing(world):
    run(lambda: world.thread.generate(world.request()).aclose())
    world.settled()
    assert not world.device.batches


def test_a_loop_that_closed_without_a_word_ends_its_requests(world):
    """Nobody closes the generator: the thread notices that its news can't be delivered."""
    world.device.hold_after = 3
    loop = asyncio.new_event_loop()
    outputs = world.thread.generate(world.request(adapter="a", max_tokens=60))
    loop.run_until_complete(anext(outputs))
    loop.close()
    world.device.open()
    assert world.thread.alive
    world.settled()
    assert world.device.tokens < 10


def test_a_step_that_raises_ends_every_stream_and_the_engine(world, caplog):
    world.device.hold_after = 2

    async def work():
        reads = [world.read(world.request([i], max_tokens=9)) for i in range(6)]
        together = asyncio.gather(*reads, return_exceptions=True)
        await asyncio.sleep(0.01)
        world.device.failure = MemoryError("out of memory")
        world.device.open()
        errors = await together
        assert not world.thread.alive
        with pytest.raises(EngineDeadError):
            await world.read(world.request())
        return errors

    errors = run(work)
    assert all(isinstance(error, EngineDeadError) for error in errors)
    assert {str(error) for error in errors} == {"the engine has ended: out of memory"}
    assert [record.message for record in caplog.records] == ["a step failed; the engine has ended"]


def test_what_the_core_refuses_reaches_its_caller_alone(world):
    good = world.request(max_tokens=40)
    refused = [
        (world.request([1] * 60, max_tokens=60), ValueError, "context"),
        (world.request(request_id=good.request_id), ValueError, "in use"),
        (Request("u", (1,), SamplingParams(), AdapterReference("gone", "00")), KeyError, "00"),
    ]
    world.device.hold_after = 2

    async def work():
        stream = asyncio.create_task(world.read(good))
        await asyncio.sleep(0.01)
        tasks = [asyncio.create_task(world.read(request)) for request, _, _ in refused]
        await asyncio.sleep(0.01)
        world.device.open()
        for task, (_, error, words) in zip(tasks, refused, strict=True):
            with pytest.raises(error, match=words):
                await task
        return await stream

    expected = world.solo(good)
    assert run(work) == expected
    world.settled()


def test_a_surprise_in_add_reaches_its_caller_alone(world, monkeypatch):
    add = world.core.add

    def surprising(request):
        if request.request_id == "surprise":
            raise OverflowError("nobody thought of it")
        add(request)

    monkeypatch.setattr(world.core, "add", surprising)

    async def work():
        with pytest.raises(OverflowError):
            await world.read(world.request(request_id="surprise"))
        return await world.read(world.request(max_tokens=3))

    assert len(run(work)) == 3
    assert world.thread.alive


def test_close_ends_open_streams_with_an_error(world):
    world.device.hold_after = 2

    async def work():
        reads = [world.read(world.request(max_tokens=60)) for _ in range(3)]
        together = asyncio.gather(*reads, return_exceptions=True)
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(world.thread.close))
        await asyncio.sleep(0.01)
        world.device.open()
        await closing
        return await together

    assert {str(error) for error in run(work)} == {"the engine has been closed"}
    assert not world.thread.alive
    world.thread.close()  # a second time does nothing


def test_generate_after_close_is_an_error_at_once(world):
    world.thread.close()
    with pytest.raises(EngineDeadError):
        run(lambda: world.read(world.request()))


def test_clients_may_come_from_several_event_loops(world):
    requests = [world.request([i], max_tokens=20) for i in range(4)]
    expected = [world.solo(request) for request in requests]
    answers: dict[int, list[int]] = {}

    def client(index: int) -> None:
        answers[index] = run(lambda: world.read(requests[index]))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [answers[i] for i in range(4)] == expected
    world.settled()


@settings(max_examples=40, deadline=None)
@given(
    plans=st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b"]),
            st.integers(1, 12),  # prompt tokens
            st.integers(1, 20),  # max_tokens
            st.one_of(st.none(), st.integers(1, 20)),  # outputs until the client goes
            st.one_of(st.none(), st.floats(0, 0.01)),  # or is cancelled after so many seconds
        ),
        min_size=1,
        max_size=12,
    )
)
def test_random_cancels_lose_nothing_and_change_no_answer(plans):
    world = World(blocks=12, lanes=3)
    world.core.max_model_len = 40

    async def one(index, adapter, prompt, max_tokens, most, cancel_after):
        request = world.request([index] * prompt, adapter, max_tokens=max_tokens)
        expected = world.solo(request)
        task = asyncio.create_task(world.read(request, most))
        done, _ = await asyncio.wait([task], timeout=cancel_after)
        if not done:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            return
        tokens = task.result()
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == max_tokens or most is not None

    async def work():
        await asyncio.gather(*(one(i, *plan) for i, plan in enumerate(plans)))

    run(work)
    world.settled()
