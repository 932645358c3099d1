"""Decode in Pallas-Triton: one tile of tokens of one slot and one span of a width a program.

A tile is up to TILE tokens of one slot, anywhere in the batch: they share the factors' reads. Each
token is a row of a matrix product of fixed shape, so its bits do not depend on the other rows of
its tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.lora._triton_common import (
    Outputs,
    TableRefs,
    Tiling,
    dot,
    dot_terms,
    iota,
    loop,
    pick,
    sum_splits,
    terms_of,
)
from pallas_kernels.lora.tables import SIDE_A, SIDE_B, TILE, FactorTables, Routing


@jax.jit
def resolve(tables: FactorTables, routing: Routing) -> FactorTables:
    """The slot tables with a tile's number in a slot's place: one look-up less in every program.

    Does not depend on the layer, so XLA keeps one of it in a program of many layers.
    """
    slots = routing.tiles[:, 0]
    return FactorTables(
        tables.pool,
        tables.first_row[:, :, :, slots],
        tables.rank[:, :, slots],
        tables.scale[:, :, slots],
    )


def each_tile(axis: int, tiles: int, programs: int, body: Callable[[Array], None]) -> None:
    """body(every `programs`-th tile) from this program's on."""
    program = pl.program_id(axis)
    for i in range(0, tiles, programs):
        if i + programs <= tiles:
            body(program + i)
        else:
            pl.when(program + i < tiles)(functools.partial(body, program + i))


def shrink_kernel(
    layer,
    tiles,
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
    programs,
    unroll,
):
    split, n = pl.program_id(0), pl.program_id(1)
    tables = TableRefs(layer, pool, first_row, rank, scale)
    rows, d = x_ref.shape
    kind = pick(kinds, n)

    def one(t):
        entry = tables.slot(kind, SIDE_A, t)
        tokens = tiles[t, pl.ds(1, TILE)]

        def rank_tile(p, i0, place, carry):
            def column_tile(m, acc):
                c = split * cut.per_program + m
                columns = c * cut.columns + iota(cut.columns)
                live = (tokens < rows)[:, None] & (columns < d)[None, :]
                x = pltriton.load(x_ref.at[tokens[:, None], columns[None, :]], mask=live, other=0.0)
                a = tables.tile(entry, p, i0, ranks, c, cut.columns, d)
                return acc + dot(x, a, trans_b=True)

            acc = jnp.zeros((TILE, ranks), jnp.float32)
            acc = loop(cut.per_program, column_tile, acc, unroll=unroll)
            r = iota(ranks)
            live = (tokens < rows)[:, None] & (i0 + r < entry.rank[p])[None, :]
            out = h_ref.at[n, split, tokens[:, None], (place + r)[None, :]]
            pltriton.store(out, acc, mask=live)
            return carry

        @pl.when(entry.total > 0)
        def _():
            entry.each_tile(ranks, h_ref.shape[3], rank_tile, jnp.int32(0))

    each_tile(2, tiles.shape[0], programs, one)


def expand_kernel(layer, tiles, pool, first_row, rank, scale, h_ref, y_ref, o_ref, **how):
    """o, which is y, with the deltas added."""
    _expand(layer, tiles, pool, first_row, rank, scale, h_ref, y_ref, o_ref, **how)


def delta_kernel(layer, tiles, pool, first_row, rank, scale, h_ref, o_ref, **how):
    """o = the deltas. Rows and kinds without one are not written."""
    _expand(layer, tiles, pool, first_row, rank, scale, h_ref, None, o_ref, **how)


def _expand(
    layer, tiles, pool, first_row, rank, scale, h_ref, y_ref, o_ref, *,
    outputs: Outputs, ranks, programs, unroll, terms_for=None,
):  # fmt: skip
    j = pl.program_id(0)
    tables = TableRefs(layer, pool, first_row, rank, scale)
    n, kind, first, width, offset = outputs.find(j)
    columns, per_program = outputs.tilings[0][:2]
    rows, max_rank = o_ref.shape[0], h_ref.shape[3]

    def one(t):
        entry = tables.slot(kind, SIDE_B, t)
        tokens = tiles[t, pl.ds(1, TILE)]
        live = (tokens < rows)[:, None]

        def terms(p, i0, place):
            r = iota(ranks)
            there = live & (i0 + r < entry.rank[p])[None, :]

            def at(place):
                return tokens[:, None], (place + r)[None, :]

            h = sum_splits(h_ref, n, at, place, live, there, len(entry.rank))
            return terms_of(h * entry.scale[p], pool.dtype, terms_for or o_ref.dtype)

        def column_tile(ready, m, carry):
            at = (first + m) * columns + iota(columns)
            mask = live & (at < width)[None, :]
            where = (tokens[:, None], (offset + at)[None, :])
            y = None if y_ref is None else pltriton.load(y_ref.at[where], mask=mask, other=0.0)

            def rank_tile(p, i0, place, acc):
                b = tables.tile(entry, p, i0, ranks, first + m, columns, width)
                return acc + dot_terms(ready[p] if ready else terms(p, i0, place), b)

            acc = jnp.zeros((TILE, columns), jnp.float32)
            acc = entry.each_tile(ranks, max_rank, rank_tile, acc)
            out = acc if y is None else y.astype(jnp.float32) + acc
            pltriton.store(o_ref.at[where], out.astype(o_ref.dtype), mask=mask)
            return carry

        @pl.when(entry.total > 0)
        def _():
            ready = []
            if max_rank <= ranks:
                # One tile a part: its h serves all columns.
                entry.each_tile(
                    ranks, max_rank, lambda p, i0, at, _: ready.append(terms(p, i0, at)), None
                )
            body = functools.partial(column_tile, ready)
            loop(per_program, body, jnp.int32(0), unroll=unroll)

    each_tile(1, tiles.shape[0], programs, one)
