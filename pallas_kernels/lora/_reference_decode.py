"""Decode in plain XLA: token by token, reading the pool in place.

A block of RANK_BLOCK rank rows of one column block is one contiguous slice of the pool, which on a
CPU is several times cheaper than a gather. The loop runs over (token, kind, part) triples, then
over blocks of rank rows; all look-ups are done beforehand. A loop body costs by its number of
operations, so the integers of a triple travel as one vector, whose entries XLA reads inside the
operations that use them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from pallas_kernels.lora._reference_common import (
    RANK_BLOCK,
    Call,
    column_blocks,
    from_column_blocks,
    to_column_blocks,
    zero_padded,
)
from pallas_kernels.lora.tables import SIDE_A, SIDE_B, Routing


_UNROLL = 12  # column blocks a step of the shrink's loop


class _Triple(NamedTuple):
    """The look-ups of one (token, kind, part); columns of the array that `_triples` makes."""

    first_a: Int[Array, ""]
    first_b: Int[Array, ""]
    rank: Int[Array, ""]
    start: Int[Array, ""]  # where the part's rank rows start in h
    scale_bits: Int[Array, ""]
    kind: Int[Array, ""]  # its place among the call's kinds
    token: Int[Array, ""]
    begin: Int[Array, ""]  # first of its column blocks among the outputs of all tokens
    columns: Int[Array, ""]  # column blocks of its output

    @property
    def scale(self) -> Float[Array, ""]:
        return lax.bitcast_convert_type(self.scale_bits, jnp.float32)


def _triples(call: Call, routing: Routing) -> Int[Array, "triples fields"]:
    """A row a triple, tokens outermost, parts innermost."""
    tables = call.tables

    def of_tokens(table: Array) -> Array:
        # Of all kinds, so that XLA makes it once for a layer's many calls.
        of_layer = lax.dynamic_index_in_dim(table, call.layer, 1, keepdims=False)
        return of_layer[:, routing.slots]  # [kinds, tokens, parts]

    rank = of_tokens(tables.rank)
    looked_up = jnp.stack(
        [
            of_tokens(tables.first_row[:, SIDE_A]),
            of_tokens(tables.first_row[:, SIDE_B]),
            rank,
            jnp.cumsum(rank, axis=-1) - rank,
            lax.bitcast_convert_type(of_tokens(tables.scale), jnp.int32),
        ],
        axis=-1,
    )
    looked_up = jnp.moveaxis(looked_up[np.asarray(call.kinds)], 0, 1)
    tokens, parts = looked_up.shape[0], looked_up.shape[2]
    counts = np.asarray(call.columns or [0] * len(call.kinds), np.int32)
    known = np.zeros((tokens, len(counts), parts, 4), np.int32)
    known[..., 0] = np.arange(len(counts))[:, None]
    known[..., 1] = np.arange(tokens)[:, None, None]
    known[..., 2] = known[..., 1] * counts.sum() + (counts.cumsum() - counts)[:, None]
    known[..., 3] = counts[:, None]
    return jnp.concatenate([looked_up, jnp.asarray(known)], axis=-1).reshape(
        -1, len(_Triple._fields)
    )


class _Block(NamedTuple):
    """RANK_BLOCK rank rows from i0 of one triple's factor, read `back` rows early.

    A slice past the pool's end would be clamped, each column block by another amount. Moving all of
    them back alike keeps them aligned, and cannot pass the pool's start: with rank >= RANK_BLOCK
    the factor alone is long enough, otherwise `_long_enough` sees to it.
    """

    row: Int[Array, ""]  # of column block 0
    rank: Int[Array, ""]  # rows from one column block to the next
    live: Bool[Array, "block"]  # from i0 on and below the rank
    back: Int[Array, ""]  # less than RANK_BLOCK


def _block(first_row: Array, rank: Array, i0: Array, columns, pool: Array) -> _Block:
    row = first_row + i0
    back = jnp.maximum(row + (columns - 1) * rank + RANK_BLOCK - pool.shape[0], 0)
    j = jnp.arange(RANK_BLOCK) - back
    return _Block(row - back, rank, (j >= 0) & (i0 + j < rank), back)


def _long_enough(pool: Array, columns: int) -> Array:
    """The pool, padded if of toy size."""
    missing = (RANK_BLOCK - 1) * columns + RANK_BLOCK - pool.shape[0]
    return jnp.pad(pool, ((0, missing), (0, 0))) if missing > 0 else pool


def _shrink_block(
    pool: Array, block: _Block, x3: Float[Array, "tokens c w"], token: Array
) -> Float[Array, "block"]:
    """The rank rows' products with the token, zero where not live."""
    columns, w = x3.shape[1:]

    def add_column_block(c, acc):
        a = lax.dynamic_slice(pool, (block.row + c * block.rank, 0), (RANK_BLOCK, w))
        x = lax.dynamic_slice(x3, (token, c, 0), (1, 1, w))[0]
        return acc + a.astype(jnp.float32) * x

    unroll = max(u for u in range(1, _UNROLL + 1) if columns % u == 0)
    acc = jnp.zeros((RANK_BLOCK, w), jnp.float32)
    acc = lax.fori_loop(0, columns, add_column_block, acc, unroll=unroll)
    return jnp.where(block.live, acc.sum(axis=1), 0.0)


def _expand_block(
    pool: Array, block: _Block, h: Float[Array, "block"], y: Float[Array, "rows w"], begin, n
) -> Float[Array, "rows w"]:
    """y with the rank rows times h added to its `n` rows (column blocks) from `begin` on."""
    w = y.shape[1]

    def add_to_column_block(c, y):
        b = lax.dynamic_slice(pool, (block.row + c * block.rank, 0), (RANK_BLOCK, w))
        term = jnp.where(block.live[:, None], b.astype(jnp.float32) * h[:, None], 0.0)
        old = lax.dynamic_slice(y, (begin + c, 0), (1, w))
        return lax.dynamic_update_slice(y, old + term.sum(axis=0, keepdims=True), (begin + c, 0))

    return lax.fori_loop(0, n, add_to_column_block, y)


def _each_block(triples: Int[Array, "triples fields"], body, carry):
    """carry = body(triple, first rank row of the block, carry), in order."""

    def over_blocks(m, carry):
        fields = triples[m]

        def one(b, carry):
            # The barrier keeps XLA from moving pieces of the body out, one operation each.
            inside, b = lax.optimization_barrier((fields, b))
            return body(_Triple(*inside), b * RANK_BLOCK, carry)

        blocks = (_Triple(*fields).rank + RANK_BLOCK - 1) // RANK_BLOCK
        return lax.fori_loop(0, blocks, one, carry)

    return lax.fori_loop(0, triples.shape[0], over_blocks, carry)


def _token_blocks(call: Call, x: Float[Array, "tokens d"]) -> Float[Array, "tokens c w"]:
    columns = column_blocks(x.shape[1], call.width)
    x = zero_padded(x.astype(jnp.float32), 0, columns * call.width)
    return x.reshape(x.shape[0], columns, call.width)


def shrink(call: Call, x, routing: Routing) -> Float[Array, "kinds 1 tokens max_rank"]:
    x3 = _token_blocks(call, x)
    pool = _long_enough(call.tables.pool, x3.shape[1])

    def body(at: _Triple, i0, h):
        block = _block(at.first_a, at.rank, i0, x3.shape[1], pool)
        terms = _shrink_block(pool, block, x3, at.token)[None, None]
        # Each h row has RANK_BLOCK spare entries on either side: entries not live stay as they are.
        where = (at.kind, at.token, RANK_BLOCK + at.start + i0 - block.back)
        old = lax.dynamic_slice(h, where, terms.shape)
        live = block.live[None, None]
        return lax.dynamic_update_slice(h, jnp.where(live, terms, old), where)

    shape = (len(call.kinds), x.shape[0], call.max_rank + 2 * RANK_BLOCK)
    h = _each_block(_triples(call, routing), body, jnp.zeros(shape, jnp.float32))
    return h[:, None, :, RANK_BLOCK:-RANK_BLOCK]


def _add(call: Call, pool: Array, y, routing: Routing, widths, h_of) -> Float[Array, "tokens d"]:
    """y with each triple's h_of(triple, i0, block of B) times B added, a block at a time."""

    def body(at: _Triple, i0, y):
        block = _block(at.first_b, at.rank, i0, at.columns, pool)
        return _expand_block(pool, block, h_of(at, i0, block) * at.scale, y, at.begin, at.columns)

    blocks = to_column_blocks(y.astype(jnp.float32), widths, call.columns, call.width)
    blocks = _each_block(_triples(call, routing), body, blocks)
    return from_column_blocks(blocks, widths, call.columns).astype(y.dtype)


def expand_add(call: Call, y, h, routing: Routing, widths: tuple[int, ...]):
    pool = _long_enough(call.tables.pool, max(call.columns))
    h = jnp.pad(h[:, 0], ((0, 0), (0, 0), (RANK_BLOCK, RANK_BLOCK)))

    def h_of(at: _Triple, i0, block: _Block):
        where = (at.kind, at.token, RANK_BLOCK + at.start + i0 - block.back)
        return lax.dynamic_slice(h, where, (1, 1, RANK_BLOCK))[0, 0]

    return _add(call, pool, y, routing, widths, h_of)


def add_delta(call: Call, y, x, routing: Routing, widths: tuple[int, ...]):
    """One pass: each block of rank rows is used as soon as it is made."""
    x3 = _token_blocks(call, x)
    pool = _long_enough(call.tables.pool, max(x3.shape[1], *call.columns))

    def h_of(at: _Triple, i0, block: _Block):
        of_a = _block(at.first_a, at.rank, i0, x3.shape[1], pool)
        h = jnp.pad(_shrink_block(pool, of_a, x3, at.token), RANK_BLOCK)
        return lax.dynamic_slice(h, (RANK_BLOCK + of_a.back - block.back,), (RANK_BLOCK,))

    return _add(call, pool, y, routing, widths, h_of)
