"""Causal grouped-query attention over the paged pool, in plain XLA."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jaxlora.layers.kv_cache import AttentionInputs, LayerKV
from jaxlora.layers.product import precision


class _Running(NamedTuple):
    """An online softmax: the largest score so far, and sums relative to it (all float32)."""

    top: Float[Array, "sequences kv_heads group queries"]
    total: Float[Array, "sequences kv_heads group queries"]
    mixed: Float[Array, "sequences kv_heads group queries head_dim"]


def write_kv(
    pools: LayerKV,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    inputs: AttentionInputs,
) -> LayerKV:
    """Put this step's keys and values at write_index. In place where the pools are donated.

    The CPU compiler turns a scatter of one row into a slice update and then copies the whole pool
    before it, so a lone token gets a second write, into the scrap block.
    """
    index = inputs.write_index
    alone = (0, 1 if index.shape[0] == 1 else 0)

    def write(pool: Array, new: Array) -> Array:
        rows = jnp.pad(new.reshape(new.shape[0], -1).astype(pool.dtype), (alone, (0, 0)))
        # Only padding tokens share an index, and what lands in the scrap block does not matter.
        written = (
            pool.reshape(-1, pool.shape[2])
            .at[jnp.pad(index, alone)]
            .set(rows, mode="promise_in_bounds", unique_indices=True)
        )
        return written.reshape(pool.shape)

    return LayerKV(write(pools.k, k), write(pools.v, v))


def attend(
    q: Float[Array, "tokens heads head_dim"],
    pools: LayerKV,
    inputs: AttentionInputs,
    window: int | None,
) -> Float[Array, "tokens heads head_dim"]:
    """Each query at position p sees context indices j <= p, and j > p - window if there is one.

    What lies past a query's position may be anything, NaN included. A row's result does not depend
    on how many pieces the longest row of the batch needs: pieces past its own change nothing.
    """
    sequences, (heads, head_dim) = inputs.block_tables.shape[0], q.shape[1:]
    block_size, kv_heads = pools.k.shape[1], pools.k.shape[2] // head_dim
    q = q.reshape(sequences, inputs.queries, kv_heads, heads // kv_heads, head_dim)
    positions = inputs.positions.reshape(sequences, inputs.queries)
    tables, piece = _pieces(inputs, block_size)

    def attend_piece(index: Int[Array, ""], running: _Running) -> _Running:
        blocks = lax.dynamic_slice_in_dim(
            tables, index * (piece // block_size), piece // block_size, 1
        )
        context = index * piece + jnp.arange(piece, dtype=positions.dtype)
        return _attend_piece(
            q,
            _read(pools.k, blocks, head_dim),
            _read(pools.v, blocks, head_dim),
            positions,
            context,
            window,
            running,
        )

    state_shape = (sequences, kv_heads, heads // kv_heads, inputs.queries)
    running = _Running(
        jnp.full(state_shape, jnp.finfo(jnp.float32).min, jnp.float32),
        jnp.zeros(state_shape, jnp.float32),
        jnp.zeros((*state_shape, head_dim), jnp.float32),
    )
    if tables.shape[1] * block_size == piece:
        running = attend_piece(jnp.int32(0), running)
    else:
        needed = jnp.max(positions) // piece + 1
        running = lax.fori_loop(0, needed, attend_piece, running)
    out = running.mixed / running.total[..., None]
    return (
        out.transpose(0, 3, 1, 2, 4)
        .reshape(q.shape[0] * inputs.queries, heads, head_dim)
        .astype(q.dtype)
    )


def _pieces(inputs: AttentionInputs, block_size: int) -> tuple[Array, int]:
    """The block tables, padded with scrap to whole pieces, and the piece's length in tokens."""
    blocks = inputs.block_tables.shape[1]
    per_piece = min(blocks, inputs.context_chunk // block_size)
    padding = -blocks % per_piece
    return jnp.pad(inputs.block_tables, ((0, 0), (0, padding))), per_piece * block_size


def _read(
    pool: Float[Array, "blocks block_size kv_width"],
    blocks: Int[Array, "sequences blocks"],
    head_dim: int,
) -> Float[Array, "sequences context kv_heads head_dim"]:
    rows = pool.at[blocks].get(mode="promise_in_bounds")
    return rows.reshape(blocks.shape[0], -1, pool.shape[2] // head_dim, head_dim)


def _attend_piece(
    q: Float[Array, "sequences queries kv_heads group head_dim"],
    k: Float[Array, "sequences context kv_heads head_dim"],
    v: Float[Array, "sequences context kv_heads head_dim"],
    positions: Int[Array, "sequences queries"],
    context: Int[Array, "context"],
    window: int | None,
    running: _Running,
) -> _Running:
    seen = context[None, None] <= positions[:, :, None]  # [sequences, queries, context]
    if window is not None:
        seen &= context[None, None] > positions[:, :, None] - window
    seen = seen[:, None, None]
    scores = jnp.einsum(
        "sqkgd,sckd->skgqc", q, k, precision=precision(q.dtype), preferred_element_type=jnp.float32
    )
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
    top = jnp.maximum(running.top, jnp.max(scores, axis=-1))
    shrink = jnp.exp(running.top - top)
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    written = context[None] <= jnp.max(positions, axis=1)[:, None]  # [sequences, context]
    v = jnp.where(written[:, :, None, None], v, 0)
    mixed = jnp.einsum(
        "skgqc,sckd->skgqd",
        weights.astype(v.dtype),
        v,
        precision=precision(v.dtype),
        preferred_element_type=jnp.float32,
    )
    return _Running(
        top,
        running.total * shrink + jnp.sum(weights, axis=-1),
        running.mixed * shrink[..., None] + mixed,
    )
