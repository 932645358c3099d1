from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from serving.http.merge import merge


class Streams:
    """Makes generators that count up to an end, and notes which of them have been closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def count(self, name: str, end: int, *, fail: bool = False) -> AsyncGenerator[str, None]:
        try:
            for i in range(end):
                await asyncio.sleep(0)
                yield f"{name}{i}"
            if fail:
                raise ValueError(name)
        finally:
            await asyncio.sleep(0)  # an engine may have to wait to clean up
            self.closed.append(name)


def test_every_item_comes_with_its_streams_index_and_in_order():
    async def run():
        streams = Streams()
        merged = merge([streams.count("a", 3), streams.count("b", 0), streams.count("c", 5)])
        items = [item async for item in merged]
        assert [x for i, x in items if i == 0] == ["a0", "a1", "a2"]
        assert [x for i, x in items if i == 2] == ["c0", "c1", "c2", "c3", "c4"]
        assert len(items) == 8
        assert sorted(streams.closed) == ["a", "b", "c"]

    asyncio.run(run())


@pytest.mark.parametrize("number", [1, 3])
def test_closing_early_closes_every_stream_before_it_returns(number):
    async def run():
        streams = Streams()
        merged = merge([streams.count(f"s{i}", 1000) for i in range(number)])
        async with aclosing(merged):
            async for _ in merged:
                break
        assert len(streams.closed) == number
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


@pytest.mark.parametrize("number", [1, 3])
def test_an_error_of_one_stream_is_raised_and_closes_the_others(number):
    async def run():
        streams = Streams()
        others = [streams.count(f"s{i}", 10**6) for i in range(number - 1)]
        with pytest.raises(ValueError, match="bad"):
            async for _ in merge([streams.count("bad", 2, fail=True), *others]):
                pass
        assert len(streams.closed) == number

    asyncio.run(run())


@pytest.mark.parametrize("number", [1, 3])
def test_cancelling_the_reader_closes_every_stream(number):
    async def run():
        streams = Streams()

        async def read():
            merged = merge([streams.count(f"s{i}", 10**6) for i in range(number)])
            async with aclosing(merged):
                async for _ in merged:
                    await asyncio.sleep(0)

        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert len(streams.closed) == number

    asyncio.run(run())
