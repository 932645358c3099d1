"""What the LoRA benchmarks run on: pools as good as random, tables and routings; the bandwidth."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.lora_table import LAYERS, RANKS, SLOTS, Shape, W
from pallas_kernels.lora import TILE, FactorTables, Routing, decode_tiles


def hashed(shape: tuple[int, int], seed) -> jax.Array:
    """bfloat16 from -1/16 to 1/16, as good as random."""
    row, column = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    bits = (row * shape[1] + column) ^ (jnp.uint32(seed) * jnp.uint32(0x9E3779B9))
    bits = bits * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519) >> 24
    return (bits.astype(jnp.float32) - 127.5).astype(jnp.bfloat16) * (1 / 2048)


def random_pool(shape: Shape) -> jax.Array:
    """Room for the largest rank, so that a program serves all ranks."""
    rows = LAYERS * SLOTS * sum(shape.blocks()) * max(RANKS)
    return jax.jit(hashed, static_argnums=0)((rows, W), 1)


def make_tables(shape: Shape, rank: int, pool: jax.Array) -> FactorTables:
    """Every slot of every layer at one rank; a slot's factors lie one after the other."""
    blocks = np.asarray(shape.blocks())
    kinds, per_slot = len(shape.widths), int(blocks.sum()) * rank
    starts = ((np.cumsum(blocks) - blocks) * rank).reshape(kinds, 2)
    at = np.arange(LAYERS)[:, None] * SLOTS + np.arange(SLOTS)
    first = np.zeros((kinds, 2, LAYERS, SLOTS + 1, 1), np.int32)
    first[..., 1:, 0] = starts[:, :, None, None] + at * per_slot
    ranks = np.full((kinds, LAYERS, SLOTS + 1, 1), rank, np.int32)
    ranks[:, :, 0] = 0

    scale = jnp.full(ranks.shape, 0.5, jnp.float32)
    return FactorTables(pool, jnp.asarray(first), jnp.asarray(ranks), scale)


def decode_routing(tokens: int, adapters: int) -> Routing:
    """Interleaved adapters."""
    slots = 1 + np.arange(tokens, dtype=np.int32) % adapters
    none = np.zeros((0, 3), np.int32)
    return Routing(*map(jnp.asarray, (slots, none, decode_tiles(slots))))


def prefill_routing(tokens: int, adapters: int) -> Routing:
    length = tokens // adapters
    slots = 1 + np.arange(adapters, dtype=np.int32)
    segments = np.zeros((SLOTS, 3), np.int32)
    segments[:adapters] = np.stack(
        [slots, np.arange(adapters) * length, np.full(adapters, length)], axis=1
    )
    none = np.zeros((0, 1 + TILE), np.int32)
    return Routing(*map(jnp.asarray, (np.repeat(slots, length), segments, none)))


def routing_of(phase: str, tokens: int, adapters: int) -> Routing:
    return (decode_routing if phase == "decode" else prefill_routing)(tokens, adapters)


def read_bandwidth() -> float:
    """Bytes a second of summing 4 GB."""
    a = jnp.ones((2**31,), jnp.bfloat16)
    total = jax.jit(lambda a: a.astype(jnp.float32).sum())
    total(a).block_until_ready()
    best = np.inf
    for _ in range(10):
        start = time.perf_counter()
        total(a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return a.nbytes / best
