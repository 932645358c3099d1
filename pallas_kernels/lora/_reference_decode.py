"""Decode in plain XLA: token by token, reading the pool in place.

A block of RANK_BLOCK rank rows of one column block is one contiguous slice of the pool, which on a
CPU is several times cheaper than a gather. The loop runs over (token, kind, part) triples, then
over blocks of rank rows; the look-ups are done for all triples beforehand.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.lora._reference_common import (
    RANK_BLOCK,
    Call,
    add_where,
    column_blocks,
    columns_of,
    has_delta,
    zero_padded,
)
from pallas_kernels.lora.tables import SIDE_A, SIDE_B, Routing


_UNROLL = 12  # column blocks a step of the shrink's loop


class _Triples(NamedTuple):
    """The look-ups of every (token, kind, part), tokens outermost."""

    first_row: Int[Array, "2 triples"]
    rank: Int[Array, "triples"]
    start: Int[Array, "triples"]  # where the part's rank rows start in h
    scale: Float[Array, "triples"]


def _triples(call: Call, routing: Routing) -> _Triples:
    kinds = jnp.asarray(call.kinds)

    def by_token(table: Array) -> Array:  # [..., kinds, slots, parts] -> [..., triples]
        of_token = jnp.moveaxis(table[..., routing.slots, :], -2, -3)
        return of_token.reshape(*of_token.shape[:-3], -1)

    rank = call.tables.rank[kinds, call.layer]
    first_row = jnp.moveaxis(call.tables.first_row[kinds, :, call.layer], 1, 0)
    return _Triples(
        by_token(first_row),
        by_token(rank),
        by_token(jnp.cumsum(rank, axis=-1) - rank),
        by_token(call.tables.scale[kinds, call.layer]),
    )


class _Block(NamedTuple):
    """RANK_BLOCK rank rows from i0 of one triple, read `back` rows early.

    A slice past the pool's end would be clamped, each column block by another amount. Moving all of
    them back alike keeps them aligned, and cannot pass the pool's start: with rank >= RANK_BLOCK
    the factor alone is long enough, otherwise `_long_enough` sees to it.
    """

    row: Int[Array, ""]  # of column block 0
    rank: Int[Array, ""]  # rows from one column block to the next
    live: Array  # [RANK_BLOCK] bool: rows from i0 on and below the rank
    back: Int[Array, ""]  # less than RANK_BLOCK


def _block(at: _Triples, m, side: int, i0, columns, pool_rows: int) -> _Block:
    rank, row = at.rank[m], at.first_row[side, m] + i0
    back = jnp.maximum(row + (columns - 1) * rank + RANK_BLOCK - pool_rows, 0)
    j = jnp.arange(RANK_BLOCK) - back
    return _Block(row - back, rank, (j >= 0) & (i0 + j < rank), back)


def _long_enough(pool: Array, columns: int) -> Array:
    """The pool, padded if of toy size."""
    missing = (RANK_BLOCK - 1) * columns + RANK_BLOCK - pool.shape[0]
    return jnp.pad(pool, ((0, missing), (0, 0))) if missing > 0 else pool


def _shrink_block(pool: Array, block: _Block, x3: Float[Array, "tokens c w"], t) -> Array:
    """[RANK_BLOCK] the rank rows' products with token t, zero where not live."""
    columns, w = x3.shape[1:]

    def add_column_block(c, acc):
        a = lax.dynamic_slice(pool, (block.row + c * block.rank, 0), (RANK_BLOCK, w))
        x = lax.dynamic_slice(x3, (t, c, 0), (1, 1, w))[0]
        return acc + a.astype(jnp.float32) * x

    unroll = max(u for u in range(1, _UNROLL + 1) if columns % u == 0)
    acc = jnp.zeros((RANK_BLOCK, w), jnp.float32)
    acc = lax.fori_loop(0, columns, add_column_block, acc, unroll=unroll)
    return jnp.where(block.live, acc.sum(axis=1), 0.0)


def _expand_block(pool: Array, block: _Block, h: Array, delta: Array, begin, columns) -> Array:
    """delta[column blocks, w] with the rank rows times h added from column block `begin` on."""
    w = delta.shape[1]

    def add_to_column_block(c, delta):
        b = lax.dynamic_slice(pool, (block.row + c * block.rank, 0), (RANK_BLOCK, w))
        term = jnp.where(block.live[:, None], b.astype(jnp.float32) * h[:, None], 0.0)
        old = lax.dynamic_slice(delta, (begin + c, 0), (1, w))
        return lax.dynamic_update_slice(delta, old + term.sum(axis=0), (begin + c, 0))

    return lax.fori_loop(0, columns, add_to_column_block, delta)


def _each_block(at: _Triples, body, carry):
    """carry = body(triple, first rank row of the block, carry), in order."""

    def over_blocks(m, carry):
        blocks = (at.rank[m] + RANK_BLOCK - 1) // RANK_BLOCK
        return lax.fori_loop(0, blocks, lambda b, c: body(m, b * RANK_BLOCK, c), carry)

    return lax.fori_loop(0, at.rank.shape[0], over_blocks, carry)


def _token_blocks(call: Call, x: Float[Array, "tokens d"]) -> Float[Array, "tokens c w"]:
    columns = column_blocks(x.shape[1], call.width)
    x = zero_padded(x.astype(jnp.float32), 0, columns * call.width)
    return x.reshape(x.shape[0], columns, call.width)


def shrink(call: Call, x, routing: Routing) -> Float[Array, "kinds 1 tokens max_rank"]:
    x3, at = _token_blocks(call, x), _triples(call, routing)
    pool = _long_enough(call.tables.pool, x3.shape[1])
    pairs, parts = x.shape[0] * len(call.kinds), call.tables.rank.shape[-1]

    def body(m, i0, h):
        pair = m // parts
        block = _block(at, m, SIDE_A, i0, x3.shape[1], pool.shape[0])
        terms = _shrink_block(pool, block, x3, pair // len(call.kinds))
        # Each h row has RANK_BLOCK spare entries on either side: entries not live stay as they are.
        where = (pair, RANK_BLOCK + at.start[m] + i0 - block.back)
        old = lax.dynamic_slice(h, where, (1, RANK_BLOCK))
        return lax.dynamic_update_slice(h, jnp.where(block.live, terms, old), where)

    h = _each_block(at, body, jnp.zeros((pairs, call.max_rank + 2 * RANK_BLOCK), jnp.float32))
    h = h[:, RANK_BLOCK:-RANK_BLOCK].reshape(x.shape[0], 1, len(call.kinds), call.max_rank)
    return jnp.transpose(h, (2, 1, 0, 3))


def _delta(call: Call, tokens: int, at: _Triples, pool, h_of) -> Float[Array, "tokens d"]:
    """The deltas of h_of(triple, token, first rank row, block of B), each from its rank blocks."""
    parts, kinds = call.tables.rank.shape[-1], len(call.kinds)
    column_count = jnp.asarray(call.columns, jnp.int32)
    first_column = jnp.cumsum(column_count) - column_count

    def body(m, i0, delta):
        t, n = m // (parts * kinds), m // parts % kinds
        block = _block(at, m, SIDE_B, i0, column_count[n], pool.shape[0])
        h = h_of(m, t, i0, block) * at.scale[m]
        begin = t * sum(call.columns) + first_column[n]
        return _expand_block(pool, block, h, delta, begin, column_count[n])

    delta = jnp.zeros((tokens * sum(call.columns), call.width), jnp.float32)
    return _each_block(at, body, delta).reshape(tokens, -1)


def expand_add(call: Call, y, h, routing: Routing, widths: tuple[int, ...]):
    at = _triples(call, routing)
    pool = _long_enough(call.tables.pool, max(call.columns))
    parts, kinds = call.tables.rank.shape[-1], len(call.kinds)
    h = jnp.pad(h[:, 0], ((0, 0), (0, 0), (RANK_BLOCK, RANK_BLOCK)))

    def h_of(m, t, i0, block: _Block):
        where = (m // parts % kinds, t, RANK_BLOCK + at.start[m] + i0 - block.back)
        return lax.dynamic_slice(h, where, (1, 1, RANK_BLOCK))[0, 0]

    return _add(call, y, _delta(call, y.shape[0], at, pool, h_of), routing, widths)


def add_delta(call: Call, y, x, routing: Routing, widths: tuple[int, ...]):
    """One pass: each block of rank rows is used as soon as it is made."""
    x3, at = _token_blocks(call, x), _triples(call, routing)
    pool = _long_enough(call.tables.pool, max(x3.shape[1], *call.columns))

    def h_of(m, t, i0, block: _Block):
        of_a = _block(at, m, SIDE_A, i0, x3.shape[1], pool.shape[0])
        h = jnp.pad(_shrink_block(pool, of_a, x3, t), RANK_BLOCK)
        return lax.dynamic_slice(h, (RANK_BLOCK + of_a.back - block.back,), (RANK_BLOCK,))

    return _add(call, y, _delta(call, y.shape[0], at, pool, h_of), routing, widths)


def _add(call: Call, y, delta, routing: Routing, widths: tuple[int, ...]):
    delta = columns_of(delta, widths, call.columns, call.width)
    return add_where(y, delta, has_delta(call, routing.slots, widths))
