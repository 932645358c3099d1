"""Call a part of a model inside shard_map with given whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxlora.compat import shard_map
from jaxlora.layers.parameter import bind, param_specs
from jaxlora.parallel.mesh import make_mesh


def call(
    module: nnx.Module,
    params: Mapping[str, Any],
    tp: int,
    body: Callable,
    *args: Any,
    in_specs: tuple = (),
    out_specs: Any = None,
) -> Any:
    """body(bound module, *args) on `tp` ranks; arguments are whole on every rank by default."""
    specs = param_specs(module)
    run = shard_map(
        lambda params, *args: body(bind(module, params), *args),
        make_mesh(tp),
        in_specs=(specs, *(in_specs or (P(),) * len(args))),
        out_specs=P() if out_specs is None else out_specs,
    )
    return jax.jit(run)(dict(params), *args)
