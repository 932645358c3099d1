"""The shrink of one-hot inputs: h = A x is a column of A, found in the pool instead of multiplied.

Plain XLA on every platform: it reads a few numbers a token.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.lora.checks import check_numbers, check_tables
from pallas_kernels.lora.tables import SIDE_A, FactorTables, Routing


def look_up(
    ids: Int[Array, "tokens"],
    tables: FactorTables,
    routing: Routing,
    *,
    layer: int | Int[Array, ""],
    kind: int,
    max_rank: int,
) -> Float[Array, "1 1 tokens max_rank"]:
    """h of tokens whose x is 1 at `ids` (each below the kind's d_in) and 0 elsewhere.

    For `expand_add`: the rank rows of a slot's parts follow one another. What stands past a row's
    rank, or in a row without an adapter, is of no meaning. Raises ValueError for shapes that do not
    fit; an id past d_in is the caller's mistake, and reads another factor.
    """
    check_tables(tables)
    check_numbers(tables, layer, (kind,), max_rank)
    slots = jnp.asarray(routing.slots)
    if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"ids: wanted [tokens] of integers, got {ids.dtype}{list(ids.shape)}")
    if slots.shape != ids.shape:
        raise ValueError(f"routing.slots: wanted shape {ids.shape}, got {slots.shape}")
    return _look_up(ids, tables, slots, layer, kind=kind, max_rank=max_rank)


@functools.partial(jax.jit, static_argnames=("kind", "max_rank"))
def _look_up(ids, tables: FactorTables, slots, layer, *, kind: int, max_rank: int) -> Array:
    first = tables.first_row[kind, SIDE_A, layer][slots]  # [tokens, parts]
    rank = tables.rank[kind, layer][slots]
    start = jnp.cumsum(rank, axis=1) - rank
    w = tables.pool.shape[1]
    block, lane = ids // w, ids % w
    h = jnp.zeros((ids.shape[0], max_rank), jnp.float32)
    for part in range(rank.shape[1]):
        i = jnp.arange(max_rank)[None] - start[:, part : part + 1]
        live = (i >= 0) & (i < rank[:, part : part + 1])
        rows = (first[:, part] + block * rank[:, part])[:, None] + i
        a = tables.pool.at[jnp.where(live, rows, 0), lane[:, None]].get(mode="promise_in_bounds")
        h = jnp.where(live, a.astype(jnp.float32), h)
    return h[None, None]
