"""The one place that uses JAX names which differ between the supported versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def shard_map(fn: Callable, mesh: jax.sharding.Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map` without the varying-axes check, which Pallas kernels do not pass."""
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def request_cpu_devices(count: int) -> None:
    """Ask for `count` virtual CPU devices. Raises RuntimeError once a backend has started."""
    jax.config.update("jax_num_cpu_devices", count)


def auto_mesh(shape: tuple[int, ...], names: tuple[str, ...], devices: list) -> jax.sharding.Mesh:
    """A mesh with Auto axes: Explicit ones, the newer default, pin the inputs' shardings."""
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(shape, names, devices=devices, axis_types=auto)


def axis_size(name: str) -> int:
    """The size of a mesh axis inside shard_map, as a Python int."""
    return jax.lax.axis_size(name)
