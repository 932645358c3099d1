"""`EngineThread`: runs an `EngineCore` in a thread of its own; an event loop talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from serving.core import Request, RequestOutput
from serving.engine import EngineCore
from serving.engine_protocol import EngineDeadError, QueueFullError


logger = logging.getLogger(__name__)

# What a client's stream is sent: an output, or the error that ended it.
News = RequestOutput | Exception


class EngineThread:
    """The `Engine` of `serving.engine_protocol` over a real core.

    Commands go in through one queue and are carried out between steps; outputs come back through
    the event loop of whoever asked. An error inside a step ends the engine: every stream is told,
    and `alive` turns False.

    `max_queue` bounds the requests that wait. One that a free lane can take at the next step does
    not wait, unless the last step left others behind.
    """

    def __init__(self, core: EngineCore, *, max_queue: int | None = None) -> None:
        self._core = core
        self._max_queue = max_queue
        self._placed: set[str] = set()  # ids that have a place, and are not in the core yet
        self._over = 0  # requests in the core's queue beyond its free lanes; may be negative
        self._count_queue()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, Callable[[News], None]] = {}  # of the step thread alone
        self._ended: str | None = None  # why, once it has
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._ended is None

    def close(self) -> None:
        """End the step loop; open streams get EngineDeadError. Waits for the step in progress."""
        self._commands.put(None)
        self._thread.join()

    @contextlib.contextmanager
    def places(self, requests: Sequence[Request]) -> Iterator[None]:
        """See `serving.engine_protocol.Engine.places`."""
        if self._max_queue is not None:
            wanted, lanes = len(requests), self._core.scheduler.lanes
            if self._over + len(self._placed) + wanted > self._max_queue:
                most = lanes + self._max_queue
                raise QueueFullError(
                    f"no room in the queue for {wanted} more, it holds {self._max_queue}"
                    if wanted <= most
                    else f"{wanted} choices in one request, at most {most} are served at once",
                    ever=wanted <= most,
                )
        ids = {request.request_id for request in requests}
        self._placed |= ids
        try:
            yield
        finally:
            self._placed -= ids

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """See `serving.engine_protocol.Engine.generate`."""
        if self._ended is not None:
            raise EngineDeadError(self._ended)
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[News] = asyncio.Queue()

        def deliver(item: News) -> None:
            loop.call_soon_threadsafe(news.put_nowait, item)

        finished = False
        self._commands.put(lambda: self._add(request, deliver))
        if self._ended is not None:
            deliver(EngineDeadError(self._ended))  # nobody may be left to carry it out
        try:
            while not finished:
                item = await news.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not finished:
                self._commands.put(lambda: self._abort(request.request_id))

    def _run(self) -> None:
        reason = "the engine has been closed"
        try:
            while self._carry_out_commands():
                outputs = self._core.step()
                self._count_queue()
                for output in outputs:
                    self._tell(output)
        except Exception as failure:
            logger.exception("a step failed; the engine has ended")
            reason = f"the engine has ended: {failure}"
        finally:
            self._ended = reason  # from here on the core is left as it is
            with contextlib.suppress(queue.Empty):
                while True:
                    if command := self._commands.get_nowait():
                        command()
            for deliver in self._streams.values():
                _try(deliver, EngineDeadError(reason))
            self._streams.clear()

    def _carry_out_commands(self) -> bool:
        """Carry out what has been asked for, waiting while there is no work; False at the end."""
        while True:
            try:
                command = self._commands.get(block=not self._core.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, request: Request, deliver: Callable[[News], None]) -> None:
        try:
            if self._ended is not None:
                raise EngineDeadError(self._ended)
            self._core.add(request)
        except Exception as error:  # what is wrong with a request is its own caller's news alone
            _try(deliver, error)
        else:
            self._streams[request.request_id] = deliver
            self._count_queue()
        self._placed.discard(request.request_id)  # last: never uncounted in between

    def _count_queue(self) -> None:
        """Publish the queue's length to the other threads, as one number."""
        scheduler = self._core.scheduler
        free = 0 if scheduler.blocked else scheduler.free_lanes
        self._over = len(scheduler.waiting) - free

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) and self.alive:
            self._core.abort(request_id)

    def _tell(self, output: RequestOutput) -> None:
        heard = _try(self._streams[output.request_id], output)
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        elif not heard:
            self._abort(output.request_id)


def _try(deliver: Callable[[News], None], item: News) -> bool:
    """Deliver, unless the client's event loop has closed: then it can't abort by itself either."""
    try:
        deliver(item)
    except RuntimeError:
        return False
    return True
