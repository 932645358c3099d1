"""What the decode and prefill halves of the XLA backend share."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.lora.tables import FactorTables


RANK_BLOCK = 8


class Call(NamedTuple):
    """What one kernel call works on. The tuples are static."""

    tables: FactorTables
    layer: Int[Array, ""]
    kinds: tuple[int, ...]
    columns: tuple[int, ...]  # column blocks of each kind's output; empty for a shrink
    max_rank: int

    @property
    def width(self) -> int:
        return self.tables.pool.shape[1]

    def factor(self, side: int, which: Array, slot: Array) -> Factor:
        kind = jnp.asarray(self.kinds, jnp.int32)[which]
        rank = self.tables.rank[kind, self.layer, slot]
        return Factor(
            self.tables.first_row[kind, side, self.layer, slot],
            rank,
            jnp.cumsum(rank) - rank,
            self.tables.scale[kind, self.layer, slot],
        )


class Factor(NamedTuple):
    """One side of one slot's factors at one module: an entry for each part."""

    first_row: Int[Array, "parts"]
    rank: Int[Array, "parts"]
    start: Int[Array, "parts"]  # where the part's rank rows start in h
    scale: Float[Array, "parts"]

    def each_block(self, body, carry):
        """carry = body(part, first rank row of the block, carry) over the parts' rank blocks."""

        def over_blocks(p, carry):
            blocks = (self.rank[p] + RANK_BLOCK - 1) // RANK_BLOCK
            return lax.fori_loop(0, blocks, lambda b, c: body(p, b * RANK_BLOCK, c), carry)

        return lax.fori_loop(0, self.rank.shape[0], over_blocks, carry)


def column_blocks(width: int, w: int) -> int:
    return -(-width // w)


def zero_padded(x: Float[Array, "rows d"], rows: int, columns: int) -> Float[Array, "r c"]:
    pad = (max(rows - x.shape[0], 0), columns - x.shape[1])
    return x if pad == (0, 0) else jnp.pad(x, ((0, pad[0]), (0, pad[1])))


def columns_of(delta: Float[Array, "rows c"], widths: tuple[int, ...], columns, w: int):
    """The outputs' own columns out of whole column blocks."""
    if all(c * w == d for c, d in zip(columns, widths, strict=True)):
        return delta
    begin = [sum(columns[:i]) * w for i in range(len(columns))]
    return jnp.concatenate(
        [delta[:, b : b + d] for b, d in zip(begin, widths, strict=True)], axis=1
    )


def to_column_blocks(
    y: Float[Array, "tokens d"], widths: tuple[int, ...], columns: tuple[int, ...], w: int
) -> Float[Array, "rows w"]:
    """The outputs as whole column blocks, zero past each one's width."""
    if any(c * w != d for c, d in zip(columns, widths, strict=True)):
        ends = [sum(widths[: i + 1]) for i in range(len(widths))]
        y = jnp.concatenate(
            [
                zero_padded(y[:, end - d : end], 0, c * w)
                for end, d, c in zip(ends, widths, columns, strict=True)
            ],
            axis=1,
        )
    return y.reshape(-1, w)


def from_column_blocks(
    blocks: Float[Array, "rows w"], widths: tuple[int, ...], columns: tuple[int, ...]
) -> Float[Array, "tokens d"]:
    w = blocks.shape[1]
    return columns_of(blocks.reshape(-1, sum(columns) * w), widths, columns, w)


def has_delta(call: Call, slots: Int[Array, "*n"], widths: tuple[int, ...]):
    """[*n, d_out] bool: the columns of kinds at which the slot has any rank."""
    ranks = call.tables.rank[jnp.asarray(call.kinds), call.layer].sum(-1)[:, slots]
    return jnp.concatenate(
        [
            jnp.broadcast_to((r > 0)[..., None], (*r.shape, d))
            for r, d in zip(ranks, widths, strict=True)
        ],
        axis=-1,
    )


def add_where(y: Array, delta: Array, live: Array) -> Array:
    return jnp.where(live, (y.astype(jnp.float32) + delta).astype(y.dtype), y)
