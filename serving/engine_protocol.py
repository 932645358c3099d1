"""What the HTTP layer knows of an engine. Tests fake it; `serving.engine_thread` is real."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from serving.core import Request, RequestOutput


class Engine(Protocol):
    """Runs requests. Every method may be called from the event loop's thread at any time."""

    @property
    def alive(self) -> bool:
        """Whether the step loop runs. Once False it never becomes True again."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's outputs, the last one with a finish_reason.

        Closing the iterator early (a dropped connection) aborts the request: its KV blocks, pin and
        slot are released. Raises EngineDeadError where the step loop has ended.
        """
        ...


class EngineDeadError(RuntimeError):
    """The step loop has ended; nothing can be served any more."""
