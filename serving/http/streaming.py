"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.core import Request
from serving.engine_protocol import Engine
from serving.errors import ServingError, UnavailableError, error_body
from serving.http.errors import as_serving_error
from serving.http.tasks import end


DONE = b"data: [DONE]\n\n"
COMMENT = b": keepalive\n\n"
KEEPALIVE_SECONDS = 15.0  # of silence, before a comment goes out

T = TypeVar("T")

# JSON may hold these as they are, but for many clients a line, and so an event, ends at them: all
# that split as Python's str.splitlines does. (It escapes the others of that kind anyway.)
_LINE_ENDS = {c.encode(): f"\\u{ord(c):04x}".encode() for c in "\x85\u2028\u2029"}

_encoder = msgspec.json.Encoder()


class ClientDisconnectedError(Exception):
    """Nobody waits for the answer any more."""


def event(content: Any) -> bytes:
    """One server-sent event with `content` as JSON, which is one line however lines are told."""
    data = _encoder.encode(content)
    for line_end, escaped in _LINE_ENDS.items():
        data = data.replace(line_end, escaped)
    return b"data: " + data + b"\n\n"


async def open_stream(
    engine: Engine, requests: Sequence[Request], events: AsyncGenerator[bytes, None]
) -> EventStream:
    """The answer that sends `events`, once the engine has places for `requests`.

    Raises QueueFullError where it has none: that can still be answered with a status.
    """
    placed = _placed(engine, requests, events)
    await anext(placed)
    return EventStream(placed)


async def _placed(
    engine: Engine, requests: Sequence[Request], events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """`events`, behind an empty one that says that the requests have their places."""
    with engine.places(requests):
        async with aclosing(events):
            yield b""
            async for data in events:
                yield data


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled where nobody waits for it any more.

    Raises ClientDisconnectedError where the client hangs up first, UnavailableError where the
    server stops; either only after `work` has cleaned up. The request's body must have been read.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    except asyncio.CancelledError:  # only a server that stops, and has waited long enough, does it
        raise UnavailableError("the server is stopping") from None
    finally:
        await end(task, watcher)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends `events`, and closes them in every case: at the end, an error, a dropped connection.

    An error after the start becomes one last event. (Starlette's own class leaves its iterator to
    the garbage collector when a client goes, and an abort can't wait for that.) While there is
    nothing to send a comment goes out now and then, lest somebody on the way closes the connection.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            with suppress(ClientDisconnectedError):
                await unless_disconnected(receive, self._send_events(send))
        except UnavailableError as error:
            await _send_error(send, error)

    async def _send_events(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._last_sent = clock()
        keeper = asyncio.create_task(self._keep_alive(send))
        failure: Exception | None = None
        try:
            async with aclosing(self._events) as events:
                async for chunk in events:
                    self._last_sent = clock()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            failure = error
        finally:
            await end(keeper)
        if failure is not None:
            await _send_error(send, as_serving_error(failure))
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            idle = clock() - self._last_sent
            if idle >= KEEPALIVE_SECONDS:
                self._last_sent = clock()
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            else:
                await asyncio.sleep(KEEPALIVE_SECONDS - idle)


async def _send_error(send: Send, error: ServingError) -> None:
    body = event(error_body(error))
    await send({"type": "http.response.body", "body": body, "more_body": False})
