"""Prefill in plain XLA: segment by segment in tiles of TOKEN_TILE tokens, with matrix products.

A tile's products have one shape whatever the batch, so a row's bits do not depend on its place.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from pallas_kernels.lora._reference_common import (
    RANK_BLOCK,
    Call,
    Factor,
    add_where,
    column_blocks,
    columns_of,
    has_delta,
    zero_padded,
)
from pallas_kernels.lora.tables import SIDE_A, SIDE_B, Routing


TOKEN_TILE = 32


def _rank_rows(call: Call, factor: Factor, p, i0, columns: int) -> Float[Array, "block d"]:
    """RANK_BLOCK rank rows at full width, zero past the part's rank."""
    i = i0 + jnp.arange(RANK_BLOCK)
    live = i < factor.rank[p]
    rows = factor.first_row[p] + jnp.arange(columns)[None] * factor.rank[p] + i[:, None]
    rows = jnp.where(live[:, None], rows, 0)
    block = call.tables.pool.at[rows].get(mode="promise_in_bounds")
    block = jnp.where(live[:, None, None], block.astype(jnp.float32), 0.0)
    return block.reshape(RANK_BLOCK, columns * call.width)


def _product(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _shrink_tile(call: Call, x: Float[Array, "tile d"], slot, which) -> Float[Array, "tile rank"]:
    """h of one tile at kind number `which`, with RANK_BLOCK spare columns; zero past the ranks."""
    factor = call.factor(SIDE_A, which, slot)

    def body(p, i0, h):
        a = _rank_rows(call, factor, p, i0, x.shape[1] // call.width)
        return lax.dynamic_update_slice(h, _product(x, a.T), (0, factor.start[p] + i0))

    h = jnp.zeros((x.shape[0], call.max_rank + RANK_BLOCK), jnp.float32)
    return factor.each_block(body, h)


def _expand_tile(call: Call, h: Float[Array, "tile rank"], slot, kind: int):
    """The delta of kind number `kind` (static) of one tile."""
    factor = call.factor(SIDE_B, jnp.int32(kind), slot)
    columns = call.columns[kind]

    def body(p, i0, delta):
        h_block = lax.dynamic_slice(h, (0, factor.start[p] + i0), (h.shape[0], RANK_BLOCK))
        live = i0 + jnp.arange(RANK_BLOCK) < factor.rank[p]
        h_block = jnp.where(live[None], h_block * factor.scale[p], 0.0)
        return delta + _product(h_block, _rank_rows(call, factor, p, i0, columns))

    delta = jnp.zeros((h.shape[0], columns * call.width), jnp.float32)
    return factor.each_block(body, delta)


def _each_tile(routing: Routing, tokens: int, body, carry):
    """carry = body(slot, first row, live rows of the tile, carry) over the segments' tiles.

    A tile that would pass the last row starts earlier; the rows of others in it are not live.
    """
    segments = routing.segments

    def over_tiles(s, carry):
        slot, start, length = segments[s, 0], segments[s, 1], segments[s, 2]

        def one(n, carry):
            begin = start + n * TOKEN_TILE
            first = jnp.minimum(begin, tokens - TOKEN_TILE)
            row = first + jnp.arange(TOKEN_TILE)
            live = (row >= begin) & (row < start + length)
            return body(slot, first, live, carry)

        return lax.fori_loop(0, (length + TOKEN_TILE - 1) // TOKEN_TILE, one, carry)

    last = jnp.max(jnp.where(segments[:, 2] > 0, jnp.arange(segments.shape[0]) + 1, 0), initial=0)
    return lax.fori_loop(0, last, over_tiles, carry)


def _padded(call: Call, x: Float[Array, "tokens d_in"]) -> Float[Array, "rows d"]:
    columns = column_blocks(x.shape[1], call.width)
    return zero_padded(x.astype(jnp.float32), TOKEN_TILE, columns * call.width)


def shrink(call: Call, x, routing: Routing) -> Float[Array, "kinds 1 tokens max_rank"]:
    tokens = x.shape[0]
    x = _padded(call, x)

    def tile(slot, first, live: Bool[Array, "tile"], h):
        rows = lax.dynamic_slice(x, (first, 0), (TOKEN_TILE, x.shape[1]))
        for n in range(len(call.kinds)):
            at = (n, first, 0)
            old = lax.dynamic_slice(h, at, (1, TOKEN_TILE, call.max_rank))
            new = _shrink_tile(call, rows, slot, jnp.int32(n))[None, :, : call.max_rank]
            h = lax.dynamic_update_slice(h, jnp.where(live[None, :, None], new, old), at)
        return h

    h = jnp.zeros((len(call.kinds), x.shape[0], call.max_rank), jnp.float32)
    return _each_tile(routing, x.shape[0], tile, h)[:, None, :tokens]


def _add_tiles(call: Call, y, routing: Routing, widths: tuple[int, ...], h_of):
    """y plus the deltas of h_of(slot, first row, kind number)."""
    tokens = y.shape[0]
    y = zero_padded(y, TOKEN_TILE, y.shape[1])

    def tile(slot: Int[Array, ""], first, live, y):
        deltas = [_expand_tile(call, h_of(slot, first, n), slot, n) for n in range(len(call.kinds))]
        delta = columns_of(jnp.concatenate(deltas, axis=1), widths, call.columns, call.width)
        rows = lax.dynamic_slice(y, (first, 0), (TOKEN_TILE, y.shape[1]))
        rows = add_where(rows, delta, live[:, None] & has_delta(call, slot, widths)[None])
        return lax.dynamic_update_slice(y, rows, (first, 0))

    return _each_tile(routing, y.shape[0], tile, y)[:tokens]


def expand_add(call: Call, y, h, routing: Routing, widths: tuple[int, ...]):
    h = h[:, 0]
    missing = max(TOKEN_TILE - h.shape[1], 0)
    h = jnp.pad(h, ((0, 0), (0, missing), (0, RANK_BLOCK)))

    def h_of(slot, first, n):
        return lax.dynamic_slice(h[n], (first, 0), (TOKEN_TILE, h.shape[2]))

    return _add_tiles(call, y, routing, widths, h_of)


def add_delta(call: Call, y, x, routing: Routing, widths: tuple[int, ...]):
    x = _padded(call, x)

    def h_of(slot, first, n):
        rows = lax.dynamic_slice(x, (first, 0), (TOKEN_TILE, x.shape[1]))
        return _shrink_tile(call, rows, slot, jnp.int32(n))

    return _add_tiles(call, y, routing, widths, h_of)
