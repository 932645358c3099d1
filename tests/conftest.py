"""Strict JAX and enough CPU devices for every test; a fixed seed for what draws without one."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest


# Ignored where JAX finds a GPU: the platform stays what the machine has.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="oracle tests write what torch says to tests/golden, for the ordinary tests",
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
