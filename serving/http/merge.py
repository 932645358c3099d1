"""Several async generators read as one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from serving.http.tasks import end


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _News(Generic[T]):
    index: int
    items: tuple[T, ...] = ()  # one, or none at the stream's end
    error: Exception | None = None


async def merge(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the stream, item) as items come, until all have ended.

    Closing it closes every stream before it returns. The first error of a stream ends all others,
    and is raised.
    """
    if len(streams) == 1:  # nothing to wait for in parallel: no task, no queue
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[_News[T]] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    running = len(pumps)
    try:
        while running:
            news = await queue.get()
            if news.error is not None:
                raise news.error
            if not news.items:
                running -= 1
            for item in news.items:
                yield news.index, item
    finally:
        await end(*pumps)


async def _pump(
    index: int, stream: AsyncGenerator[T, None], queue: asyncio.Queue[_News[T]]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put(_News(index, (item,)))
    except Exception as error:
        await queue.put(_News(index, error=error))
    else:
        await queue.put(_News(index))
