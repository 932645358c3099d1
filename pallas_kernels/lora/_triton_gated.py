"""silu(gate) * up of many rows in Pallas-Triton, with the deltas of gate and up or without.

y holds gate and up side by side. A program makes the same columns of both, so that neither their
deltas nor their sums are ever written. Every row is written, those without a delta included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float

from pallas_kernels.lora._triton_common import (
    Slot,
    TableRefs,
    Tiling,
    dot_terms,
    factor_tile,
    iota,
    sum_splits,
    terms_of,
)
from pallas_kernels.lora._triton_prefill import each_segment
from pallas_kernels.lora.tables import SIDE_B


def gated(gate: Float[Array, "rows d"], up: Float[Array, "rows d"]) -> Float[Array, "rows d"]:
    """silu(gate) * up in float32, rounded once. Every kernel's, so that rows have the same bits."""
    g = gate.astype(jnp.float32)
    return (g / (1.0 + jnp.exp(-g)) * up.astype(jnp.float32)).astype(gate.dtype)


def gate_kernel(y_ref, o_ref, *, cut: Tiling, rows: int):
    span, first = pl.program_id(0), pl.program_id(1) * rows
    tokens, d = o_ref.shape
    alive = (first + iota(rows) < tokens)[:, None]
    for m in range(cut.per_program):
        column = (span * cut.per_program + m) * cut.columns
        mask = alive & (column + iota(cut.columns) < d)[None, :]
        both = [
            pltriton.load(y_ref.at[_block(first, rows, begin, cut)], mask=mask, other=0.0)
            for begin in (column, d + column)
        ]
        pltriton.store(o_ref.at[_block(first, rows, column, cut)], gated(*both), mask=mask)


def _block(first: Array, rows: int, column: Array, cut: Tiling) -> tuple:
    return pl.ds(first, rows), pl.ds(column, cut.columns)


class _Deltas(NamedTuple):
    """Makes tiles of one kind's deltas."""

    tables: TableRefs
    pool: Float[Array, "rows w"]
    n: int  # the kind's number among the call's
    kind: int
    ranks: int
    h_ref: Float[Array, "kinds splits tokens max_rank"]
    o_ref: Float[Array, "tokens d"]

    def slot(self, slot: Array) -> Slot:
        return self.tables.slot(jnp.int32(self.kind), SIDE_B, slot)

    def terms(self, slot: Slot, inside, at: Callable[[Array], tuple], p, i0, place) -> list[Array]:
        """scale * h of a rank tile as terms; at(place) are the rows and rank rows read from h."""
        there = inside & (i0 + iota(self.ranks) < slot.rank[p])[None, :]
        h = sum_splits(self.h_ref, jnp.int32(self.n), at, place, inside, there, len(slot.rank))
        return terms_of(h * slot.scale[p], self.pool.dtype, self.o_ref.dtype)

    def tile(self, slot: Slot, inside, at, c, columns: int) -> Float[Array, "rows columns"]:
        """float32 deltas of column tile c; zero for the rows not `inside` [rows, 1]."""

        def rank_tile(p, i0, place, acc):
            terms = self.terms(slot, inside, at, p, i0, place)
            b = factor_tile(self.pool, slot, p, i0, self.ranks, c, columns, self.o_ref.shape[1])
            return acc + dot_terms(terms, b)

        acc = jnp.zeros((inside.shape[0], columns), jnp.float32)
        return slot.each_tile(self.ranks, self.h_ref.shape[3], rank_tile, acc)


def _added(y: Float[Array, "rows d"], delta: Float[Array, "rows d"], live) -> Array:
    """y plus the delta where `live` says so, in y's dtype; y's very bits elsewhere."""
    return jnp.where(live, (y.astype(jnp.float32) + delta).astype(y.dtype), y)


def prefill_kernel(
    layer, segments, pool, first_row, rank, scale, h_ref, y_ref, o_ref, *,
    kinds, cut: Tiling, ranks, rows,
):  # fmt: skip
    """One tile of consecutive tokens and the same columns of gate and up."""
    span, first = pl.program_id(0), pl.program_id(1) * rows
    tokens, d = o_ref.shape
    tables = TableRefs(layer, first_row, rank, scale)
    deltas = [_Deltas(tables, pool, n, kind, ranks, h_ref, o_ref) for n, kind in enumerate(kinds)]
    alive = (first + iota(rows) < tokens)[:, None]

    def h_at(place):
        return pl.ds(first, rows), pl.ds(place, ranks)

    def column_tile(c):
        column = c * cut.columns
        mask = alive & (column + iota(cut.columns) < d)[None, :]
        # Read before the look-ups, so that all loads wait together.
        both = [
            pltriton.load(y_ref.at[_block(first, rows, begin, cut)], mask=mask, other=0.0)
            for begin in (column, d + column)
        ]

        def segment(slot, inside, carry):
            out = []
            for of, (delta, live) in zip(deltas, carry, strict=True):
                entry = of.slot(slot)
                here = inside & (entry.total > 0)
                made = of.tile(entry, here[:, None], h_at, c, cut.columns)
                # Each row belongs to one segment, and takes nothing of another's.
                out.append((jnp.where(here[:, None], made, delta), live | here.astype(jnp.int32)))
            return tuple(out)

        none = (jnp.zeros((rows, cut.columns), jnp.float32), jnp.zeros((rows,), jnp.int32))
        made = each_segment(segments, first, rows, segment, (none, none))
        added = [
            _added(y, delta, (live > 0)[:, None])
            for y, (delta, live) in zip(both, made, strict=True)
        ]
        pltriton.store(o_ref.at[_block(first, rows, column, cut)], gated(*added), mask=mask)

    for m in range(cut.per_program):
        column_tile(span * cut.per_program + m)
