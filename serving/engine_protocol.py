"""What the HTTP layer knows of an engine. Tests fake it; `serving.engine_thread` is real."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from serving.core import Request, RequestOutput


class Engine(Protocol):
    """Runs requests. Every method may be called from the event loop's thread at any time."""

    @property
    def alive(self) -> bool:
        """Whether the step loop runs. Once False it never becomes True again."""
        ...

    def places(self, requests: Sequence[Request]) -> AbstractContextManager[None]:
        """Keep places in the queue for `requests`, which are generated inside: all or none.

        Raises QueueFullError where there are too few; nothing has been pinned or queued then.
        """
        ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's outputs, the last one with a finish_reason.

        Closing the iterator early (a dropped connection) aborts the request: its KV blocks, pin and
        slot are released. Raises EngineDeadError where the step loop has ended.
        """
        ...


class QueueFullError(RuntimeError):
    """More requests wait than may. `ever`: whether so many at once can be taken at another time."""

    def __init__(self, message: str, *, ever: bool) -> None:
        super().__init__(message)
        self.ever = ever


class EngineDeadError(RuntimeError):
    """The step loop has ended; nothing can be served any more."""
