"""--max-queue: how many requests may wait in a step thread over a fake device."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from serving.core import Request, SamplingParams
from serving.engine import EngineCore
from serving.engine_protocol import QueueFullError
from serving.engine_thread import EngineThread
from serving.kv_cache import BlockPool
from serving.scheduler import Scheduler
from tests.serving.http.fakes import wait_until
from tests.serving.test_engine_thread import BLOCK, MAX_MODEL_LEN, GatedDevice
from tests.support.fake_device import FakeTokenizer


LANES, MAX_QUEUE = 3, 2


class World:
    def __init__(self, blocks: int = 60, max_queue: int | None = MAX_QUEUE) -> None:
        self.device = GatedDevice()
        self.scheduler = Scheduler(BlockPool(blocks, BLOCK), lanes=LANES, prefill_budget=100)
        self.core = EngineCore(
            self.device, self.scheduler, None, FakeTokenizer(), max_model_len=MAX_MODEL_LEN
        )
        self.thread = EngineThread(self.core, max_queue=max_queue)
        self.asked = 0

    def requests(self, number: int, max_tokens: int = 5) -> list[Request]:
        self.asked += number
        sampling = SamplingParams(max_tokens=max_tokens)
        names = [f"r{self.asked - i}" for i in range(number)]
        return [Request(name, (1, 2, 3), sampling) for name in names]

    def fits(self, number: int) -> bool:
        try:
            with self.thread.places(self.requests(number)):
                return True
        except QueueFullError:
            return False

    async def read(self, request: Request) -> int:
        async with contextlib.aclosing(self.thread.generate(request)) as outputs:
            return sum([len(output.token_ids) async for output in outputs])

    async def answer(self, number: int, max_tokens: int = 5) -> int:
        requests = self.requests(number, max_tokens)
        with self.thread.places(requests):
            return sum(await asyncio.gather(*(self.read(request) for request in requests)))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.device.open()
    world.thread.close()


def test_an_idle_engine_takes_what_its_lanes_and_queue_hold(world):
    assert world.fits(LANES + MAX_QUEUE)
    with pytest.raises(QueueFullError) as caught, world.thread.places(world.requests(6)):
        pass
    assert not caught.value.ever
    assert str(caught.value) == "6 choices in one request, at most 5 are served at once"


def test_places_are_kept_all_or_none_and_given_back(world):
    with world.thread.places(world.requests(3)):
        assert world.fits(2)
        with pytest.raises(QueueFullError) as caught, world.thread.places(world.requests(3)):
            pass
        assert caught.value.ever
        assert world.fits(2)
    assert world.fits(5)
    assert asyncio.run(world.answer(5)) == 25
    assert world.fits(5)


def test_without_a_bound_there_is_always_a_place():
    world = World(max_queue=None)
    assert world.fits(1000)
    world.thread.close()


async def _started(world: World, number: int) -> list[asyncio.Task[int]]:
    """So many requests, in lanes as far as those go; the device then stands still."""
    world.device.hold_after = 2
    tasks = [asyncio.create_task(world.answer(1, 20)) for _ in range(number)]
    while len(world.device.batches) < 2 or len(world.scheduler.waiting) < number - LANES:
        await asyncio.sleep(0.001)
    return tasks


def test_busy_lanes_leave_the_queue_alone():
    async def run(world: World) -> None:
        tasks = await _started(world, LANES)
        assert world.fits(MAX_QUEUE) and not world.fits(MAX_QUEUE + 1)
        world.device.open()
        assert await asyncio.gather(*tasks) == [20] * LANES
        await asyncio.to_thread(wait_until, lambda: world.fits(LANES + MAX_QUEUE))

    world = World()
    asyncio.run(run(world))
    world.thread.close()


def test_free_lanes_are_no_places_while_memory_keeps_others_waiting():
    """Blocks for one sequence only: the second waits although lanes are free."""
    world = World(blocks=3)
    world.thread.close()  # steps are taken here
    for request in world.requests(2):
        world.core.add(request)
    world.thread._count_queue()
    assert world.fits(MAX_QUEUE + LANES - 2), "nobody knows yet"
    world.core.step()
    world.thread._count_queue()
    assert world.scheduler.free_lanes == 2 and len(world.scheduler.waiting) == 1
    assert world.fits(MAX_QUEUE - 1) and not world.fits(MAX_QUEUE)


def test_whatever_comes_at_once_no_more_than_the_bound_waits_after_a_step():
    async def run(world: World) -> tuple[int, int]:
        served = refused = 0

        async def client(number: int) -> None:
            nonlocal served, refused
            for count in range(5):
                try:
                    await world.answer(1 + (number + count) % 3, 1 + number % 4)
                    served += 1
                except QueueFullError:
                    refused += 1
                await asyncio.sleep(0.001 * (number % 3))

        await asyncio.gather(*(client(number) for number in range(12)))
        return served, refused

    class Watching(GatedDevice):
        most = 0

        def dispatch(self, batch):
            self.most = max(self.most, len(world.scheduler.waiting))
            return super().dispatch(batch)

    world = World()
    world.device.__class__ = Watching
    served, refused = asyncio.run(run(world))
    world.thread.close()
    assert served and refused and served + refused == 60
    assert world.device.most <= MAX_QUEUE
    assert not world.thread._placed
