"""Prefill in Pallas-Triton: one tile of consecutive tokens and one span of a width a program.

A program goes through the segments that meet its tile; the products run on the matrix units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.lora._triton_common import (
    Outputs,
    TableRefs,
    Tiling,
    dot,
    dot_terms,
    factor_tile,
    iota,
    pick,
    sum_splits,
    terms_of,
)
from pallas_kernels.lora.tables import SIDE_A, SIDE_B


def each_segment(segments_ref, first: Array, rows: int, body: Callable, carry: Any) -> Any:
    """carry = body(slot, [tokens] bool, carry) over the segments in the tile from `first`."""
    count = segments_ref.shape[0]
    index = iota(pl.next_power_of_2(count))
    there = jnp.minimum(index, count - 1)

    def column(c: int) -> Array:
        return pltriton.load(segments_ref.at[there, jnp.int32(c)], mask=index < count, other=0)

    start, length = column(1), column(2)
    meets = (length > 0) & (start < first + rows) & (start + length > first)
    tokens = first + iota(rows)
    begin = jnp.min(jnp.where(meets, index, count))
    end = jnp.max(jnp.where(meets, index + 1, 0))

    def one(s, carry):
        start = segments_ref[s, 1]
        inside = (tokens >= start) & (tokens < start + segments_ref[s, 2])
        return body(segments_ref[s, 0], inside, carry)

    return lax.fori_loop(begin, end, one, carry)


def shrink_kernel(
    layer,
    segments,
    pool,
    first_row,
    rank,
    scale,
    x_ref,
    h_ref,
    *,
    kinds,
    cut: Tiling,
    ranks,
    rows,
):
    # Programs of the same tokens run side by side, so that they share the reads of x.
    n, split, tile = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tables = TableRefs(layer, first_row, rank, scale)
    kind, d = pick(kinds, n), x_ref.shape[1]
    first = tile * rows

    def segment(slot, inside, carry):
        entry = tables.slot(kind, SIDE_A, slot)

        def rank_tile(p, i0, place, carry):
            def column_tile(m, acc):
                c = split * cut.per_program + m
                column = c * cut.columns
                live = inside[:, None] & (column + iota(cut.columns) < d)[None, :]
                at = (pl.ds(first, rows), pl.ds(column, cut.columns))
                x = pltriton.load(x_ref.at[at], mask=live, other=0.0)
                a = factor_tile(pool, entry, p, i0, ranks, c, cut.columns, d)
                return acc + dot(x, a, trans_b=True)

            acc = jnp.zeros((rows, ranks), jnp.float32)
            acc = lax.fori_loop(0, cut.per_program, column_tile, acc)
            live = inside[:, None] & (i0 + iota(ranks) < entry.rank[p])[None, :]
            at = (n, split, pl.ds(first, rows), pl.ds(place, ranks))
            pltriton.store(h_ref.at[at], acc, mask=live)
            return carry

        return entry.each_tile(ranks, h_ref.shape[3], rank_tile, carry)

    each_segment(segments, first, rows, segment, jnp.int32(0))


def expand_kernel(
    layer,
    segments,
    pool,
    first_row,
    rank,
    scale,
    h_ref,
    y_ref,
    o_ref,
    *,
    outputs: Outputs,
    ranks,
    rows,
):
    j, tile = pl.program_id(0), pl.program_id(1)
    tables = TableRefs(layer, first_row, rank, scale)
    n, kind, begin, width, offset = outputs.find(j)
    columns, per_program = outputs.tilings[0][:2]
    first = tile * rows
    where = pl.ds(first, rows)

    def segment(slot, inside, carry):
        entry = tables.slot(kind, SIDE_B, slot)
        inside = (inside & (entry.total > 0))[:, None]

        def rank_tile(p, i0, place, accs):
            there = inside & (i0 + iota(ranks) < entry.rank[p])[None, :]

            def at(place):
                return where, pl.ds(place, ranks)

            h = sum_splits(h_ref, n, at, place, inside, there, len(entry.rank))
            terms = terms_of(h * entry.scale[p], pool.dtype, o_ref.dtype)

            def one(m, acc):
                b = factor_tile(pool, entry, p, i0, ranks, begin + m, columns, width)
                return acc + dot_terms(terms, b)

            return tuple(one(m, acc) for m, acc in enumerate(accs))

        # Each row belongs to one segment. y is read first, so that all loads wait together.
        starts = [(begin + m) * columns for m in range(per_program)]
        masks = [inside & (at + iota(columns) < width)[None, :] for at in starts]
        places = [(where, pl.ds(offset + at, columns)) for at in starts]
        old = [
            pltriton.load(y_ref.at[place], mask=mask, other=0.0)
            for place, mask in zip(places, masks, strict=True)
        ]
        zero = jnp.zeros((rows, columns), jnp.float32)
        accs = entry.each_tile(ranks, h_ref.shape[3], rank_tile, (zero,) * per_program)
        for place, mask, y, acc in zip(places, masks, old, accs, strict=True):
            y = (y.astype(jnp.float32) + acc).astype(o_ref.dtype)
            pltriton.store(o_ref.at[place], y, mask=mask)
        return carry

    each_segment(segments, first, rows, segment, jnp.int32(0))
