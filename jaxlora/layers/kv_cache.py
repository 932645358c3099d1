"""The paged key/value pools, and the arrays that tell a step where to write and what to read."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxlora.config import ModelConfig
from jaxlora.parallel.mesh import TP_AXIS


class LayerKV(NamedTuple):
    """One layer's pools. Block 0 is scrap: padding tokens write there and nobody reads it.

    kv_width is kv_heads x head_dim, cut over the ranks by heads. It is one axis because the CPU
    compiler picks another layout for an axis of one head, and then copies the pool to change it.
    """

    k: Float[Array, "blocks block_size kv_width"]
    v: Float[Array, "blocks block_size kv_width"]


KVCache = tuple[LayerKV, ...]  # one a layer

POOL_SPEC = PartitionSpec(None, None, TP_AXIS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """A step of `sequences` x `queries` tokens, flattened sequence by sequence.

    Context index j of sequence s lives in block block_tables[s, j // block_size]. A padding token
    has position 0 and a write_index inside block 0.
    """

    block_tables: Int[Array, "sequences blocks_per_sequence"]
    positions: Int[Array, "tokens"]  # absolute
    write_index: Int[Array, "tokens"]  # block * block_size + offset
    queries: int = dataclasses.field(metadata={"static": True})
    # Contexts longer than this are attended in pieces of it, a multiple of the block size.
    context_chunk: int = dataclasses.field(default=256, metadata={"static": True})


def kv_specs(config: ModelConfig) -> tuple[LayerKV, ...]:
    """PartitionSpecs of a KVCache, for shard_map."""
    return (LayerKV._make((POOL_SPEC, POOL_SPEC)),) * config.num_layers


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: DTypeLike, tp: int) -> int:
    """Bytes that one block takes on each rank, all layers together."""
    width = config.num_kv_heads // tp * config.head_dim
    return 2 * config.num_layers * block_size * width * jnp.dtype(dtype).itemsize


def make_kv_cache(
    config: ModelConfig, mesh: Mesh, blocks: int, block_size: int, dtype: DTypeLike
) -> KVCache:
    """Zeroed pools, cut over the mesh along the KV heads."""
    shape = (blocks, block_size, config.num_kv_heads * config.head_dim)
    sharding = NamedSharding(mesh, POOL_SPEC)
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return tuple(LayerKV(zeros(), zeros()) for _ in range(config.num_layers))
