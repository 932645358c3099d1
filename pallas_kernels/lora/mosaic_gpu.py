"""The LoRA kernels in Pallas Mosaic GPU, plainly: one token and one row of a factor at a time.

It is what remains when Pallas-Triton goes; no default yet, for it reads a token's factors for that
token alone. A row's bits depend on nothing but the row. Both phases use the same kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels.lora._reference_common import (
    column_blocks,
    from_column_blocks,
    to_column_blocks,
    zero_padded,
)
from pallas_kernels.lora._triton_common import pick
from pallas_kernels.lora.tables import SIDE_A, SIDE_B, FactorTables, Routing


LANES = 128  # the threads of a warpgroup, which hold a vector between them


def check(tables: FactorTables) -> None:
    """Raise NotImplementedError for what these kernels cannot do."""
    w, dtype = tables.pool.shape[1], tables.pool.dtype
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError(f"mosaic: needs jax 0.11, this is {jax.__version__}")
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is not None and float(capability) < 9:
        raise NotImplementedError(f"mosaic: needs compute capability 9.0, this has {capability}")
    if w % LANES:
        raise NotImplementedError(f"mosaic: the pool's w must be a multiple of {LANES}, got {w}")
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"mosaic: the pool must be float32 or bfloat16, got {dtype}")


@functools.partial(jax.jit, static_argnames=("kinds", "max_rank"))
def shrink(
    x: Array, tables: FactorTables, routing: Routing, layer: Array, *, kinds, max_rank
) -> Float[Array, "kinds 1 tokens max_rank"]:
    w = tables.pool.shape[1]
    blocks = column_blocks(x.shape[1], w)
    x = zero_padded(x, 0, blocks * w)

    def kernel(layer, slots, first_row, rank, x_ref, pool, h_ref):
        t, n, i = (lax.axis_index(axis) for axis in ("token", "kind", "rank"))
        kind, at = pick(kinds, n), (layer[0], slots[t])
        start = jnp.int32(0)
        for p in range(rank.shape[3]):
            of_part = rank[kind, at[0], at[1], p]
            first = first_row[kind, SIDE_A, at[0], at[1], p]
            inside = (i >= start) & (i < start + of_part)

            def one(first=first, of_part=of_part, start=start):
                def block(c, acc):
                    a = pool[first + c * of_part + i - start, :].astype(jnp.float32)
                    return acc + a * x_ref[t, c, :].astype(jnp.float32)

                acc = block(jnp.int32(0), jnp.float32(0))
                h_ref[n, 0, t, i] = jnp.sum(lax.fori_loop(1, blocks, block, acc))

            lax.cond(inside, one, lambda: None)
            start = start + of_part

    shape = (len(kinds), 1, x.shape[0], max_rank)
    return _kernel(
        kernel,
        jax.ShapeDtypeStruct(shape, jnp.float32),
        {"token": x.shape[0], "kind": len(kinds), "rank": max_rank},
    )(*_operands(tables, routing, layer), x.reshape(-1, blocks, w), tables.pool)


@functools.partial(jax.jit, static_argnames=("kinds", "widths"))
def expand_add(
    y: Array, h: Array, tables: FactorTables, routing: Routing, layer: Array, *, kinds, widths
) -> Float[Array, "tokens d_out"]:
    w = tables.pool.shape[1]
    columns = tuple(column_blocks(d, w) for d in widths)
    begins = [sum(columns[:n]) for n in range(len(columns))]
    blocks = sum(columns)

    def kernel(layer, slots, first_row, rank, scale, h_ref, y_ref, pool, out_ref):
        t, j = lax.axis_index("token"), lax.axis_index("block")
        n = jnp.int32(0)
        for begin in begins[1:]:
            n = n + (j >= begin).astype(jnp.int32)
        kind, at, c = pick(kinds, n), (layer[0], slots[t]), j - pick(begins, n)
        acc, start = y_ref[t * blocks + j, :].astype(jnp.float32), jnp.int32(0)
        for p in range(rank.shape[3]):
            of_part = rank[kind, at[0], at[1], p]
            row = first_row[kind, SIDE_B, at[0], at[1], p] + c * of_part
            by = scale[kind, at[0], at[1], p]

            def one(i, acc, row=row, start=start, by=by):
                b = pool[row + i, :].astype(jnp.float32)
                return acc + b * (h_ref[n, 0, t, start + i] * by)

            acc = lax.fori_loop(jnp.int32(0), of_part, one, acc)
            start = start + of_part
        out_ref[t * blocks + j, :] = acc.astype(out_ref.dtype)

    rows = to_column_blocks(y, widths, columns, w)
    operands = (*_operands(tables, routing, layer), tables.scale, h)
    out = _kernel(
        kernel,
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        {"token": y.shape[0], "block": blocks},
    )(*operands, rows, tables.pool)
    return from_column_blocks(out, widths, columns)


def _operands(tables: FactorTables, routing: Routing, layer: Array) -> tuple[Array, ...]:
    return (layer.reshape(1), jnp.asarray(routing.slots), tables.first_row, tables.rank)


def _kernel(body, out_type: jax.ShapeDtypeStruct, grid: dict[str, int]) -> Any:
    return plgpu.kernel(body, out_type=out_type, grid=tuple(grid.values()), grid_names=tuple(grid))
