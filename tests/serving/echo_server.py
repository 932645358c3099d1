"""The real command line over an engine that needs no model."""

from __future__ import annotations

import sys

from serving.catalog import ModelCatalog, ServedAdapter
from serving.config import EngineConfig
from serving.core import AdapterReference
from serving.metrics import Metrics
from serving.options import ServerConfig
from serving.server import Backend, main
from tests.serving.http.fakes import ByteTokenizer, EchoEngine


def build(engine_config: EngineConfig, server: ServerConfig) -> Backend:
    engine = EchoEngine()
    engine.hold = True
    served = {
        source.name: ServedAdapter(AdapterReference(source.name, "key"), str(source.folder))
        for source in engine_config.adapters
    }
    catalog = ModelCatalog(server.name, str(engine_config.model), 64, server.aliases, served)

    def close() -> None:
        print(f"closed with {engine.running} running", flush=True)

    return Backend(engine, catalog, ByteTokenizer(), Metrics(server.name), close)


if __name__ == "__main__":
    sys.exit(main(build=build))
