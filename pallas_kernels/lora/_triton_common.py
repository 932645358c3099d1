"""What the Pallas-Triton kernels share. Scalars are int32; everything named *_ref is a whole array.

Column tiles lie inside one column block (both widths are powers of two), where the rank rows of a
factor are consecutive pool rows: a tile is one two-dimensional slice of the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float

from pallas_kernels.lora.tilings import Choice


MAX_SPLITS = 16
MAX_RANK_PROGRAMS = 4


class Tiling(NamedTuple):
    """How one kernel cuts a width: `per_program` tiles of `columns`, in `programs` programs."""

    columns: int
    per_program: int
    programs: int

    @property
    def span(self) -> int:
        return self.columns * self.per_program


def tiling(d: int, w: int, choice: Choice, max_programs: int | None = None) -> Tiling:
    columns = min(w, choice.columns)
    tiles = pl.cdiv(d, columns)
    per_program = max(1, choice.span // columns)
    if max_programs is not None:
        per_program = max(per_program, pl.cdiv(tiles, max_programs))
    return Tiling(columns, per_program, pl.cdiv(tiles, per_program))


def rank_tile(max_rank: int, choice: Choice) -> int:
    """Rank rows of a tile: no more than any slot can have; 16 is the least a dot takes."""
    return max(16, min(choice.ranks, pl.next_power_of_2(max_rank)))


def pick(values: Sequence[int], n: Array) -> Array:
    """values[n] for static values."""
    out = jnp.int32(values[0])
    for i, value in enumerate(values[1:], 1):
        out = jnp.where(n == i, jnp.int32(value), out)
    return out


def iota(n: int) -> Array:
    return lax.iota(jnp.int32, n)


def ceil_div(a: Array, b: int) -> Array:
    return lax.div(a + jnp.int32(b - 1), jnp.int32(b))


def loop(n: int, body: Callable[[Any, Any], Any], carry: Any, *, unroll: bool) -> Any:
    if not unroll:
        return lax.fori_loop(0, n, body, carry)
    for i in range(n):
        carry = body(i, carry)
    return carry


class Slot(NamedTuple):
    """One slot's entries at one kind and layer, a value for each part."""

    first_row: list[Array]
    rank: list[Array]
    scale: list[Array]

    @property
    def total(self) -> Array:
        return functools.reduce(jnp.add, self.rank)

    def each_tile(
        self, ranks: int, max_rank: int, body: Callable, carry: Any, first: Any = 0, step: int = 1
    ) -> Any:
        """carry = body(part, first rank row of the tile, its place in h, carry), in order.

        Of each part every `step`-th tile from `first` on. Where that can be one only, it is exactly
        one, whatever the part's rank.
        """
        start, skip = jnp.int32(0), first * jnp.int32(ranks)
        for p, rank in enumerate(self.rank):
            if max_rank <= ranks * step:
                carry = body(p, skip, start + skip, carry)
            else:

                def tile(i, carry, p=p, start=start):
                    i0 = skip + i * (ranks * step)
                    return body(p, i0, start + i0, carry)

                tiles = ceil_div(rank - skip, ranks * step)
                carry = lax.fori_loop(jnp.int32(0), tiles, tile, carry)
            start = start + rank
        return carry


class TableRefs(NamedTuple):
    """The slot tables, for kernels that look slots up themselves."""

    layer: Any
    first_row: Any
    rank: Any
    scale: Any

    def slot(self, kind: Array, side: int, slot: Array) -> Slot:
        layer, parts = self.layer[0], range(self.rank.shape[3])
        return Slot(
            [self.first_row[kind, side, layer, slot, p] for p in parts],
            [self.rank[kind, layer, slot, p] for p in parts],
            [self.scale[kind, layer, slot, p] for p in parts],
        )


def factor_tile(pool, slot: Slot, p: int, i0: Array, ranks: int, c: Array, columns: int, d: Any):
    """[ranks, columns] of part p from rank row i0, column tile c; zero outside the factor."""
    # In units of tiles: the compiler sees the alignment of (c rem n) * columns, but not that of
    # a column rem w, and would read one element at a time.
    n = jnp.int32(pool.shape[1] // columns)
    row = slot.first_row[p] + lax.div(c, n) * slot.rank[p] + i0
    inside = lax.rem(c, n) * columns
    live = i0 + iota(ranks) < slot.rank[p]
    live = live[:, None] & (c * columns + iota(columns) < d)[None, :]
    at = pool.at[pl.ds(row, ranks), pl.ds(inside, columns)]
    return pltriton.load(at, mask=live, other=0.0)


class Outputs(NamedTuple):
    """Where the column tiles of all kinds lie in y. Static."""

    kinds: tuple[int, ...]
    widths: tuple[int, ...]
    tilings: tuple[Tiling, ...]

    @classmethod
    def of(cls, kinds, widths, w: int, choice: Choice) -> Outputs:
        return cls(kinds, widths, tuple(tiling(d, w, choice) for d in widths))

    @property
    def programs(self) -> int:
        return sum(t.programs for t in self.tilings)

    def find(self, j: Array) -> tuple[Array, Array, Array, Array, Array]:
        """(kind's number, kind, first tile in it, its width, its first column in y) of span j."""
        begins = [sum(t.programs for t in self.tilings[:i]) for i in range(len(self.kinds))]
        n = jnp.int32(0)
        for begin in begins[1:]:
            n = n + (j >= begin).astype(jnp.int32)
        offsets = [sum(self.widths[:i]) for i in range(len(self.kinds))]
        tile = (j - pick(begins, n)) * self.tilings[0].per_program
        return n, pick(self.kinds, n), tile, pick(self.widths, n), pick(offsets, n)


def dot(a: Float[Array, "m k"], b: Float[Array, "k n"], *, trans_b: bool = False) -> Array:
    """a @ b in float32: bfloat16 operands on the matrix units, others in true float32."""
    if a.dtype == b.dtype == jnp.bfloat16:
        return pltriton.dot(a, b, trans_b=trans_b)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return pltriton.dot(a, b, trans_b=trans_b, precision=lax.Precision.HIGHEST)


def sum_splits(h_ref, n, token: Callable[[Array], Any], place, alive, there, parts: int) -> Array:
    """[rows, ranks]: h's partial sums of kind n added in order, zero outside `there`.

    token(rank rows of h) are the indices of a tile; `alive` [rows, 1] says which rows are read,
    `there` [rows, ranks] which entries count.
    """
    ranks = there.shape[1]
    # A mask along the ranks makes the loads narrow, so entries that do not count are read, too,
    # where they are sure to exist.
    whole = parts == 1 and h_ref.shape[3] % ranks == 0
    mask = jnp.broadcast_to(alive, there.shape) if whole else there
    h = jnp.zeros(there.shape, jnp.float32)
    for split in range(h_ref.shape[1]):
        part = h_ref.at[(n, jnp.int32(split), *token(place))]
        h = h + pltriton.load(part, mask=mask, other=0.0)
    return jnp.where(there, h, 0.0)


def terms_of(h: Float[Array, "m k"], b_dtype, out_dtype) -> list[Array]:
    """float32 h as terms of falling size to multiply b by: itself, or bfloat16 for bfloat16 b.

    Three bfloat16 terms hold all its bits, two hold 16: more than a bfloat16 result can show.
    """
    if b_dtype != jnp.bfloat16:
        return [h]
    out = []
    for _ in range(2 if out_dtype == jnp.bfloat16 else 3):
        out.append(h.astype(jnp.bfloat16))
        h = h - out[-1].astype(jnp.float32)
    return out


def dot_terms(terms: list[Array], b: Float[Array, "k n"]) -> Array:
    """The float32 sum of the terms' products with b, the smallest first."""
    return functools.reduce(jnp.add, [dot(term, b) for term in reversed(terms)])
