"""`python -m serving.server`: one model and its adapters behind OpenAI's HTTP API."""

from __future__ import annotations

import contextlib
import dataclasses
import logging.config
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from jaxlora.errors import ConfigError, JaxloraError
from serving.catalog import ModelCatalog, ServedAdapter, check_names
from serving.config import EngineConfig
from serving.core import AdapterReference
from serving.engine_protocol import Engine
from serving.http.app import create_app
from serving.http.services import Tokenizer
from serving.metrics import Metrics
from serving.options import ServerConfig, parse_options


GRACE_SECONDS = 2  # that open streams have to end after a signal

USER_MISTAKE = 2  # exit status


@dataclasses.dataclass(frozen=True)
class Backend:
    """A running engine and what the HTTP layer needs beside it. `close` ends the engine."""

    engine: Engine
    catalog: ModelCatalog
    tokenizer: Tokenizer
    metrics: Metrics
    close: Callable[[], None]


Build = Callable[[EngineConfig, ServerConfig], Backend]


def build_backend(engine_config: EngineConfig, server: ServerConfig) -> Backend:
    """Load and start the real engine. Raises JaxloraError for what a user can put right."""
    from serving.build import build_engine, make_plan  # imports JAX
    from serving.engine_thread import EngineThread

    plan = make_plan(engine_config)
    served = {
        adapter.name: ServedAdapter(
            AdapterReference(adapter.name, adapter.key, adapter.invocation_tokens), adapter.source
        )
        for adapter in plan.adapters
    }
    catalog = ModelCatalog(
        base=server.name,
        base_root=str(engine_config.model),
        max_model_len=plan.shapes.max_model_len,
        aliases=server.aliases,
        adapters=served,
    )
    slots = engine_config.adapter_slots or len(served)
    metrics = Metrics(server.name, slots, plan.shapes.max_model_len)
    core = build_engine(plan, metrics)
    metrics.record_adapters(served)
    metrics.record_kv_pool(core.scheduler.pool.block_size, core.scheduler.pool.usable)
    engine = EngineThread(core, max_queue=server.max_queue)
    return Backend(engine, catalog, plan.tokenizer, metrics, engine.close)


def main(arguments: Sequence[str] | None = None, build: Build = build_backend) -> int:
    """Serve until SIGINT or SIGTERM; the exit status. A user's mistake is one line on stderr."""
    engine_config, server = parse_options(arguments)
    try:
        check_names(
            server.name, server.aliases, tuple(source.name for source in engine_config.adapters)
        )
        with bind(server.host, server.port) as listener:  # found taken before anything is loaded
            backend = build(engine_config, server)
            with contextlib.closing(backend):
                serve(backend, server, listener)
    except JaxloraError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_MISTAKE
    except KeyboardInterrupt:  # before there was anything to stop in order
        return 128 + signal.SIGINT
    return 0


def serve(backend: Backend, server: ServerConfig, listener: socket.socket) -> None:
    """Answer requests until a signal says stop. Open streams then get GRACE_SECONDS."""
    app = create_app(
        backend.engine,
        backend.catalog,
        backend.tokenizer,
        backend.metrics,
        api_key=server.api_key,
    )
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=logging_config(),
        access_log=False,  # the app has its own, with request ids
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    try:
        listener.listen(config.backlog)
    except OSError as error:
        raise _cannot_listen(server.host, server.port, error) from None
    names = ", ".join(card.id for card in backend.catalog.cards())
    print(f"serving {names} on {url(listener)}/v1", flush=True)
    SignalledServer(config).run(sockets=[listener])


class SignalledServer(uvicorn.Server):
    """Ends by returning when a signal stops it. (Uvicorn's own raises the signal again.)"""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address, not listening yet. Raises ConfigError where it can't be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # localhost is 127.0.0.1 first
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def url(listener: socket.socket) -> str:
    """Where a client on this machine finds a listening socket."""
    address, port = str(listener.getsockname()[0]), listener.getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def logging_config() -> dict[str, Any]:
    """Uvicorn's, with our own modules' warnings and errors in the same form."""
    config = dict(LOGGING_CONFIG)
    ours = {"handlers": ["default"], "level": "INFO", "propagate": False}
    config["loggers"] = config["loggers"] | {"serving": ours, "jaxlora": ours}
    return config


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(f"cannot listen on {host}:{port}: {reason}")


if __name__ == "__main__":
    logging.config.dictConfig(logging_config())  # for warnings while it loads; uvicorn's is later
    sys.exit(main())
