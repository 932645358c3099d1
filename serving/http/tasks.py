"""Ending asyncio tasks in order."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks` and wait until they have ended, whoever cancels us meanwhile.

    A loop that closes cancels everything once more, and cleaning up must not be cut short by it.
    """
    for task in tasks:
        task.cancel()
    while not all(task.done() for task in tasks):
        with suppress(asyncio.CancelledError):
            await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not report it
