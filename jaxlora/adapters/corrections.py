"""Vectors over a module's outputs that adapters have beside factors: gains (DoRA) and biases.

A vector of width d is ceil(d / w) rows of a pool of its own, one after the other, float32 and cut
as the outputs are. Like the factor pool it holds what each adapter truly has, and slots index it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxlora.adapters.adapter import Vector


class CorrectionTables(NamedTuple):
    """One rank's vectors, and where each slot's begin."""

    pool: Float[Array, "rows w"]  # float32
    first_row: Int[Array, "kinds 2 layers slots"]  # by `Vector`; -1: the slot has none


def scale_rows(
    y: Float[Array, "tokens d_out"],
    tables: CorrectionTables,
    slots: Int[Array, "tokens"],
    layer: int | Int[Array, ""],
    kinds: Sequence[int],
    widths: Sequence[int],
) -> Float[Array, "tokens d_out"]:
    """y times each token's gains; a module without one is left as it is.

    y holds the outputs of `kinds` side by side. The product is float32 and rounded to y's dtype.
    """

    def scaled(y: Array) -> Array:
        gains = [
            jnp.where(has[:, None], vectors, 1.0)
            for has, vectors in _each(tables, Vector.GAIN, slots, layer, kinds, widths)
        ]
        return (y.astype(jnp.float32) * jnp.concatenate(gains, axis=1)).astype(y.dtype)

    return _where(_has_any(tables, Vector.GAIN, slots, layer, kinds), scaled, y)


def add_biases(
    y: Float[Array, "tokens d_out"],
    bias: Float[Array, "d_out"] | None,
    tables: CorrectionTables,
    slots: Int[Array, "tokens"],
    layer: int | Int[Array, ""],
    kinds: Sequence[int],
    widths: Sequence[int],
) -> Float[Array, "tokens d_out"]:
    """y plus each token's own bias where its slot has one, otherwise plus the base's `bias`.

    The bias is chosen and then added as the base's is, so that rows of the base keep their bits.
    """

    def chosen(defaults: Array) -> Array:
        each = _each(tables, Vector.BIAS, slots, layer, kinds, widths)
        parts = jnp.split(defaults, np.cumsum(widths)[:-1], axis=1)
        own = [
            jnp.where(has[:, None], vectors.astype(y.dtype), default)
            for (has, vectors), default in zip(each, parts, strict=True)
        ]
        return jnp.concatenate(own, axis=1)

    has = _has_any(tables, Vector.BIAS, slots, layer, kinds)
    if bias is None:
        return _where(has, lambda y: y + chosen(jnp.zeros_like(y)), y)
    return y + _where(has, chosen, jnp.broadcast_to(bias, y.shape))


def _where(
    has: Bool[Array, "tokens"],
    change: Callable[[Array], Array],
    y: Float[Array, "tokens d_out"],
) -> Float[Array, "tokens d_out"]:
    """change(y) in the rows that `has` marks, computed apart from what comes before and after.

    XLA on a CPU drops optimization barriers before it fuses, and contracts a fused multiplication
    and addition: rows that are only passed on would then round otherwise than in the program
    without adapters. It fuses nothing into or out of a loop, and this one runs once or not at all.
    """

    def changed(_: Array, y: Array) -> Array:
        return jnp.where(has[:, None], change(y), y)

    if jax.default_backend() == "cpu":
        return lax.fori_loop(0, has.any().astype(jnp.int32), changed, y)
    return lax.optimization_barrier(changed(jnp.int32(0), lax.optimization_barrier(y)))


def _has_any(
    tables: CorrectionTables,
    which: Vector,
    slots: Int[Array, "tokens"],
    layer: int | Int[Array, ""],
    kinds: Sequence[int],
) -> Bool[Array, "tokens"]:
    first_rows = tables.first_row[np.asarray(kinds), which, layer]  # [kinds, slots]
    return (first_rows >= 0).any(axis=0)[slots]


def _each(
    tables: CorrectionTables,
    which: Vector,
    slots: Int[Array, "tokens"],
    layer: int | Int[Array, ""],
    kinds: Sequence[int],
    widths: Sequence[int],
) -> Iterator[tuple[Bool[Array, "tokens"], Float[Array, "tokens width"]]]:
    """For each kind whether a token has a vector, and the vector: anything where it has none."""
    w = tables.pool.shape[1]
    for kind, width in zip(kinds, widths, strict=True):
        first = tables.first_row[kind, which, layer][slots]
        rows = jnp.where(first >= 0, first, 0)[:, None] + jnp.arange(-(-width // w))[None]
        vectors = tables.pool.at[rows].get(mode="clip")
        yield first >= 0, vectors.reshape(slots.shape[0], -1)[:, :width]
