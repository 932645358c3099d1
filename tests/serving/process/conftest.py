"""One server process a module, with the command line options in the module's OPTIONS."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serving.http.fakes import wait_until
from tests.support.server_process import PATIENCE, Server, write_model


@pytest.fixture(scope="module")
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    command = write_model(tmp_path_factory.mktemp("served"))
    server = Server([*command, *getattr(request.module, "OPTIONS", ())])
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.errors)


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The module's server; the test leaves it idle."""
    yield shared
    wait_until(lambda: shared.idle, PATIENCE)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client
