from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.serving.http.fakes import EchoEngine, make_app


@pytest.fixture(scope="session")
def shared() -> tuple[EchoEngine, FastAPI]:
    """One app for many tests: making it takes longer than most of them."""
    engine = EchoEngine()
    return engine, make_app(engine)


@pytest.fixture
def engine(shared: tuple[EchoEngine, FastAPI]) -> EchoEngine:
    engine, _ = shared
    engine.reset()
    return engine


@pytest.fixture
def call(engine: EchoEngine, shared: tuple[EchoEngine, FastAPI]) -> Callable[..., httpx.Response]:
    """Sends one request to an app over `engine`: call("POST", "/tokenize", json={...})."""
    _, app = shared

    def send(method: str, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(run())

    return send
