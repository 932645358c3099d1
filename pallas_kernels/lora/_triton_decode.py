"""Decode in Pallas-Triton: one tile of tokens of one slot and one span of a width a program.

A tile is up to TILE tokens of one slot, anywhere in the batch: they share the factors' reads. Each
token is a row of a matrix product of fixed shape, so its bits do not depend on the other rows of
its tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.lora._triton_common import (
    Outputs,
    Slot,
    Tiling,
    dot,
    dot_terms,
    factor_tile,
    iota,
    loop,
    pick,
    sum_splits,
    terms_of,
)
from pallas_kernels.lora.tables import SIDE_A, SIDE_B, TILE


class Entries(NamedTuple):
    """What a decode kernel reads to find a tile's factors: `resolve`'s rows of one layer."""

    rows: Any  # [kinds, tiles, 4 * parts]

    def slot(self, kind: Array, side: int, tile: Array) -> Slot:
        def column(i: int) -> list[Array]:
            return [self.rows[kind, tile, at] for at in range(i, self.rows.shape[2], 4)]

        scale = [lax.bitcast_convert_type(bits, jnp.float32) for bits in column(3)]
        return Slot(column(side), column(2), scale)


def resolve_kernel(tiles, first_row, rank, scale, *entries):
    """entries[layer][kind, tile] = (first row of A, of B, rank, scale's bits) of each part."""
    layer, kind = pl.program_id(0), pl.program_id(1)
    count = tiles.shape[0]
    tile = iota(pl.next_power_of_2(count))
    live = tile < count
    slot = pltriton.load(tiles.at[tile, jnp.int32(0)], mask=live, other=0)

    def found(p: int) -> list[Array]:
        at = [first_row.at[kind, side, layer, slot, p] for side in (SIDE_A, SIDE_B)]
        at += [table.at[kind, layer, slot, p] for table in (rank, scale)]
        values = [pltriton.load(ref, mask=live, other=0) for ref in at]
        return [*values[:3], lax.bitcast_convert_type(values[3], jnp.int32)]

    values = [value for p in range(rank.shape[3]) for value in found(p)]
    for i, out in enumerate(entries):

        @pl.when(layer == i)
        def _(out=out):
            for column, value in enumerate(values):
                pltriton.store(out.at[kind, tile, jnp.int32(column)], value, mask=live)


def _each_tile(axis: int, tiles, programs: int, body: Callable[[Array], None]) -> None:
    """body(every `programs`-th tile) from this program's on, as far as tiles are used."""
    program, count = pl.program_id(axis), tiles.shape[0]

    def one(i: int) -> None:
        following = program + (i + programs)
        # Read before the body, whose reads it then waits with.
        used = tiles[jnp.minimum(following, count - 1), 0] > 0 if i + programs < count else None
        body(program + i)
        if used is not None:
            pl.when(used & (following < count))(functools.partial(one, i + programs))

    one(0)


def shrink_kernel(
    tiles,
    entries,
    pool,
    x_ref,
    h_ref,
    *,
    kinds,
    cut: Tiling,
    ranks,
    rank_programs,
    programs,
    unroll,
):
    split, n = pl.program_id(0), pl.program_id(1)
    n, first = lax.div(n, jnp.int32(rank_programs)), lax.rem(n, jnp.int32(rank_programs))
    tables = Entries(entries)
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
                a = factor_tile(pool, entry, p, i0, ranks, c, cut.columns, d)
                return acc + dot(x, a, trans_b=True)

            acc = jnp.zeros((TILE, ranks), jnp.float32)
            acc = loop(cut.per_program, column_tile, acc, unroll=unroll)
            r = iota(ranks)
            live = (tokens < rows)[:, None] & (i0 + r < entry.rank[p])[None, :]
            out = h_ref.at[n, split, tokens[:, None], (place + r)[None, :]]
            pltriton.store(out, acc, mask=live)
            return carry

        @pl.when(entry.total > first * ranks)
        def _():
            max_rank = h_ref.shape[3]
            entry.each_tile(ranks, max_rank, rank_tile, jnp.int32(0), first, rank_programs)

    _each_tile(2, tiles, programs, one)


def expand_kernel(tiles, entries, pool, h_ref, y_ref, o_ref, **how):
    """o, which is y, with the deltas added."""
    _expand(tiles, entries, pool, h_ref, y_ref, o_ref, **how)


def delta_kernel(tiles, entries, pool, h_ref, o_ref, **how):
    """o = the deltas. Rows and kinds without one are not written."""
    _expand(tiles, entries, pool, h_ref, None, o_ref, **how)


def _expand(
    tiles, entries, pool, h_ref, y_ref, o_ref, *,
    outputs: Outputs, ranks, programs, unroll, terms_for=None,
):  # fmt: skip
    j = pl.program_id(0)
    tables = Entries(entries)
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
                b = factor_tile(pool, entry, p, i0, ranks, first + m, columns, width)
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

    _each_tile(1, tiles, programs, one)
