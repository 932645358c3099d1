"""The LoRA kernels in Pallas-Triton.

Grids are static and trip counts over rank tiles dynamic, so the cost follows the true ranks. All
tile shapes follow from the table's shape alone (`w`, the widths, `max_rank`), never from the batch,
and every sum has a fixed order. The layer is an operand: all layers share one compiled kernel.

Column tiles lie inside one column block (both widths are powers of two), where the rank rows of a
factor are consecutive pool rows: a tile is one two-dimensional slice of the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float

from pallas_kernels.lora.tables import SIDE_A, SIDE_B, FactorTables, Routing


class Tiling(NamedTuple):
    """How one kernel cuts a width: `per_program` tiles of `columns`, in `programs` programs."""

    columns: int
    per_program: int
    programs: int

    @property
    def span(self) -> int:
        return self.columns * self.per_program


DECODE_RANKS = 16  # rank rows of a tile
DECODE_SHRINK_SPAN = 256
DECODE_EXPAND_SPAN = 512
MAX_SPLITS = 16
PREFILL_TOKENS = 64
PREFILL_SHRINK_COLUMNS = 64
PREFILL_SHRINK_SPAN = 2048
PREFILL_SHRINK_RANKS = 64  # at most
PREFILL_EXPAND_SPAN = 128
PREFILL_EXPAND_RANKS = 16
_SHORT = 16  # static loops up to here are unrolled

_DECODE_SHRINK = pltriton.CompilerParams(num_warps=2, num_stages=1)
_DECODE_EXPAND = pltriton.CompilerParams(num_warps=4, num_stages=1)
_PREFILL = pltriton.CompilerParams(num_warps=4, num_stages=3)


def _tiling(d: int, columns: int, span: int, max_programs: int | None = None) -> Tiling:
    tiles = pl.cdiv(d, columns)
    per_program = max(1, span // columns)
    if max_programs is not None:
        per_program = max(per_program, pl.cdiv(tiles, max_programs))
    return Tiling(columns, per_program, pl.cdiv(tiles, per_program))


def shrink_tiling(d_in: int, w: int, phase: str) -> Tiling:
    """Its `programs` are h's splits."""
    if phase == "decode":
        return _tiling(d_in, min(w, DECODE_SHRINK_SPAN), DECODE_SHRINK_SPAN, MAX_SPLITS)
    return _tiling(d_in, min(w, PREFILL_SHRINK_COLUMNS), PREFILL_SHRINK_SPAN, MAX_SPLITS)


def expand_tiling(d_out: int, w: int, phase: str) -> Tiling:
    span = DECODE_EXPAND_SPAN if phase == "decode" else PREFILL_EXPAND_SPAN
    return _tiling(d_out, min(w, span), span)


def check(tables: FactorTables) -> None:
    """Raise NotImplementedError for a pool these kernels cannot read."""
    w, dtype = tables.pool.shape[1], tables.pool.dtype
    if w < 16 or w & (w - 1):
        raise NotImplementedError(f"triton: the pool's w must be a power of two from 16, got {w}")
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"triton: the pool must be float32 or bfloat16, got {dtype}")


# What the kernels share. Scalars are int32; everything named *_ref is a whole array.


def _pick(values: Sequence[int], n: Array) -> Array:
    """values[n] for static values."""
    out = jnp.int32(values[0])
    for i, value in enumerate(values[1:], 1):
        out = jnp.where(n == i, jnp.int32(value), out)
    return out


def _iota(n: int) -> Array:
    return lax.iota(jnp.int32, n)


def _ceil_div(a: Array, b: int) -> Array:
    return lax.div(a + jnp.int32(b - 1), jnp.int32(b))


def _loop(n: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    if n > _SHORT:
        return lax.fori_loop(0, n, body, carry)
    for i in range(n):
        carry = body(i, carry)
    return carry


class _Slot(NamedTuple):
    """One slot's entries at one kind and layer, a value for each part."""

    first_row: list[Array]
    rank: list[Array]
    scale: list[Array]

    @property
    def total(self) -> Array:
        return functools.reduce(jnp.add, self.rank)

    def each_tile(self, ranks: int, body: Callable, carry: Any) -> Any:
        """carry = body(part, first rank row of the tile, its place in h, carry), in order."""
        start = jnp.int32(0)
        for p, rank in enumerate(self.rank):

            def tile(i, carry, p=p, start=start):
                return body(p, i * ranks, start + i * ranks, carry)

            carry = lax.fori_loop(jnp.int32(0), _ceil_div(rank, ranks), tile, carry)
            start = start + rank
        return carry


class _TableRefs(NamedTuple):
    layer: Any
    pool: Any
    first_row: Any
    rank: Any
    scale: Any

    def slot(self, kind: Array, side: int, slot: Array) -> _Slot:
        layer, parts = self.layer[0], range(self.rank.shape[3])
        return _Slot(
            [self.first_row[kind, side, layer, slot, p] for p in parts],
            [self.rank[kind, layer, slot, p] for p in parts],
            [self.scale[kind, layer, slot, p] for p in parts],
        )

    def tile(self, slot: _Slot, p: int, i0: Array, ranks: int, column: Array, columns: int, d):
        """[ranks, columns] of part p from rank row i0 and a column on; zero outside the factor."""
        w = self.pool.shape[1]
        block, inside = lax.div(column, jnp.int32(w)), lax.rem(column, jnp.int32(w))
        row = slot.first_row[p] + block * slot.rank[p] + i0
        live = (i0 + _iota(ranks) < slot.rank[p])[:, None] & (column + _iota(columns) < d)[None, :]
        at = self.pool.at[pl.ds(row, ranks), pl.ds(inside, columns)]
        return pltriton.load(at, mask=live, other=0.0)


def _sum_splits(h_ref, kind: Array, token, at: Array, ranks: int, live: Array) -> Array:
    """h's partial sums added in order: [ranks] of one token, or [tokens, ranks] of a slice."""
    total = jnp.zeros(live.shape, jnp.float32)
    for split in range(h_ref.shape[1]):
        part = h_ref.at[kind, jnp.int32(split), token, pl.ds(at, ranks)]
        total = total + pltriton.load(part, mask=live, other=0.0)
    return total


# Decode: one token and one span of a width a program.


def _decode_shrink_kernel(
    layer, slots, pool, first_row, rank, scale, x_ref, h_ref, *, kinds, tiling: Tiling
):
    t, split, n = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tables = _TableRefs(layer, pool, first_row, rank, scale)
    slot, d = slots[t], x_ref.shape[1]

    @pl.when(slot > 0)
    def _():
        entry = tables.slot(_pick(kinds, n), SIDE_A, slot)

        def rank_tile(p, i0, place, carry):
            def column_tile(m, acc):
                column = (split * tiling.per_program + m) * tiling.columns
                inside = column + _iota(tiling.columns) < d
                x = x_ref.at[t, pl.ds(column, tiling.columns)]
                x = pltriton.load(x, mask=inside, other=0.0).astype(jnp.float32)
                a = tables.tile(entry, p, i0, DECODE_RANKS, column, tiling.columns, d)
                return acc + a.astype(jnp.float32) * x[None, :]

            acc = jnp.zeros((DECODE_RANKS, tiling.columns), jnp.float32)
            acc = _loop(tiling.per_program, column_tile, acc)
            live = i0 + _iota(DECODE_RANKS) < entry.rank[p]
            out = h_ref.at[n, split, t, pl.ds(place, DECODE_RANKS)]
            pltriton.store(out, jnp.sum(acc, axis=1), mask=live)
            return carry

        entry.each_tile(DECODE_RANKS, rank_tile, jnp.int32(0))


class _Outputs(NamedTuple):
    """Where the column tiles of all kinds lie in y. Static."""

    kinds: tuple[int, ...]
    widths: tuple[int, ...]
    tilings: tuple[Tiling, ...]

    @classmethod
    def of(cls, kinds, widths, w: int, phase: str) -> _Outputs:
        return cls(kinds, widths, tuple(expand_tiling(d, w, phase) for d in widths))

    @property
    def programs(self) -> int:
        return sum(t.programs for t in self.tilings)

    def find(self, j: Array) -> tuple[Array, Array, Array, Array, Array]:
        """(kind's number, kind, first column in it, its width, its first column in y) of span j."""
        begins = [sum(t.programs for t in self.tilings[:i]) for i in range(len(self.kinds))]
        n = jnp.int32(0)
        for begin in begins[1:]:
            n = n + (j >= begin).astype(jnp.int32)
        offsets = [sum(self.widths[:i]) for i in range(len(self.kinds))]
        column = (j - _pick(begins, n)) * self.tilings[0].span
        return n, _pick(self.kinds, n), column, _pick(self.widths, n), _pick(offsets, n)


def _decode_expand_kernel(
    layer, slots, pool, first_row, rank, scale, h_ref, y_ref, o_ref, *, outputs: _Outputs
):
    t, j = pl.program_id(0), pl.program_id(1)
    tables = _TableRefs(layer, pool, first_row, rank, scale)
    n, kind, column, width, offset = outputs.find(j)
    entry = tables.slot(kind, SIDE_B, slots[t])
    columns, per_program = outputs.tilings[0][:2]

    @pl.when(entry.total > 0)
    def _():
        def rank_tile(p, i0, place, accs):
            live = i0 + _iota(DECODE_RANKS) < entry.rank[p]
            h = _sum_splits(h_ref, n, t, place, DECODE_RANKS, live) * entry.scale[p]

            def one(m, acc):
                b = tables.tile(entry, p, i0, DECODE_RANKS, column + m * columns, columns, width)
                return acc + b.astype(jnp.float32) * h[:, None]

            return tuple(one(m, acc) for m, acc in enumerate(accs))

        zero = jnp.zeros((DECODE_RANKS, columns), jnp.float32)
        accs = entry.each_tile(DECODE_RANKS, rank_tile, (zero,) * per_program)
        for m, acc in enumerate(accs):
            at = column + m * columns
            inside = at + _iota(columns) < width
            where = (t, pl.ds(offset + at, columns))
            y = pltriton.load(y_ref.at[where], mask=inside, other=0.0).astype(jnp.float32)
            y = (y + jnp.sum(acc, axis=0)).astype(o_ref.dtype)
            pltriton.store(o_ref.at[where], y, mask=inside)


# Prefill: one tile of tokens and one span of a width a program, on the matrix units.


def _dot(a: Float[Array, "m k"], b: Float[Array, "k n"], *, trans_b: bool = False) -> Array:
    """a @ b in float32: bfloat16 operands on the matrix units, others in true float32."""
    if a.dtype == b.dtype == jnp.bfloat16:
        return pltriton.dot(a, b, trans_b=trans_b)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return pltriton.dot(a, b, trans_b=trans_b, precision=lax.Precision.HIGHEST)


def _dot_float32(h: Float[Array, "m k"], b: Float[Array, "k n"]) -> Array:
    """float32 h @ b. With b bfloat16, h goes as three bfloat16 terms that hold all its bits."""
    if b.dtype != jnp.bfloat16:
        return _dot(h, b)
    high = h.astype(jnp.bfloat16)
    rest = h - high.astype(jnp.float32)
    middle = rest.astype(jnp.bfloat16)
    low = (rest - middle.astype(jnp.float32)).astype(jnp.bfloat16)
    return _dot(high, b) + (_dot(middle, b) + _dot(low, b))


def _each_segment(segments_ref, first: Array, body: Callable, carry: Any) -> Any:
    """carry = body(slot, [tokens] bool, carry) over the segments in the tile from `first`."""
    count = segments_ref.shape[0]
    index = _iota(pl.next_power_of_2(count))
    there = jnp.minimum(index, count - 1)

    def column(c: int) -> Array:
        return pltriton.load(segments_ref.at[there, jnp.int32(c)], mask=index < count, other=0)

    start, length = column(1), column(2)
    meets = (length > 0) & (start < first + PREFILL_TOKENS) & (start + length > first)
    tokens = first + _iota(PREFILL_TOKENS)
    begin = jnp.min(jnp.where(meets, index, count))
    end = jnp.max(jnp.where(meets, index + 1, 0))

    def one(s, carry):
        start = segments_ref[s, 1]
        inside = (tokens >= start) & (tokens < start + segments_ref[s, 2])
        return body(segments_ref[s, 0], inside, carry)

    return lax.fori_loop(begin, end, one, carry)


def _prefill_shrink_kernel(
    layer, segments, pool, first_row, rank, scale, x_ref, h_ref, *, kinds, tiling: Tiling, ranks
):
    tile, split, n = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tables = _TableRefs(layer, pool, first_row, rank, scale)
    kind, d = _pick(kinds, n), x_ref.shape[1]
    first = tile * PREFILL_TOKENS

    def segment(slot, inside, carry):
        entry = tables.slot(kind, SIDE_A, slot)

        def rank_tile(p, i0, place, carry):
            def column_tile(m, acc):
                column = (split * tiling.per_program + m) * tiling.columns
                live = inside[:, None] & (column + _iota(tiling.columns) < d)[None, :]
                at = (pl.ds(first, PREFILL_TOKENS), pl.ds(column, tiling.columns))
                x = pltriton.load(x_ref.at[at], mask=live, other=0.0)
                a = tables.tile(entry, p, i0, ranks, column, tiling.columns, d)
                return acc + _dot(x, a, trans_b=True)

            acc = jnp.zeros((PREFILL_TOKENS, ranks), jnp.float32)
            acc = lax.fori_loop(0, tiling.per_program, column_tile, acc)
            live = inside[:, None] & (i0 + _iota(ranks) < entry.rank[p])[None, :]
            at = (n, split, pl.ds(first, PREFILL_TOKENS), pl.ds(place, ranks))
            pltriton.store(h_ref.at[at], acc, mask=live)
            return carry

        return entry.each_tile(ranks, rank_tile, carry)

    _each_segment(segments, first, segment, jnp.int32(0))


def _prefill_expand_kernel(
    layer, segments, pool, first_row, rank, scale, h_ref, y_ref, o_ref, *, outputs: _Outputs
):
    tile, j = pl.program_id(0), pl.program_id(1)
    tables = _TableRefs(layer, pool, first_row, rank, scale)
    n, kind, column, width, offset = outputs.find(j)
    columns, per_program = outputs.tilings[0][:2]
    first = tile * PREFILL_TOKENS
    rows = pl.ds(first, PREFILL_TOKENS)
    ranks = PREFILL_EXPAND_RANKS

    def segment(slot, inside, carry):
        entry = tables.slot(kind, SIDE_B, slot)

        def rank_tile(p, i0, place, accs):
            live = inside[:, None] & (i0 + _iota(ranks) < entry.rank[p])[None, :]
            h = _sum_splits(h_ref, n, rows, place, ranks, live) * entry.scale[p]

            def one(m, acc):
                b = tables.tile(entry, p, i0, ranks, column + m * columns, columns, width)
                return acc + jnp.where(inside[:, None], _dot_float32(h, b), 0.0)

            return tuple(one(m, acc) for m, acc in enumerate(accs))

        live, accs = carry
        # As integers: the loop's carry may not hold booleans.
        live = jnp.where(inside & (entry.total > 0), 1, live)
        return live, entry.each_tile(ranks, rank_tile, accs)

    zero = jnp.zeros((PREFILL_TOKENS, columns), jnp.float32)
    carry = (jnp.zeros(PREFILL_TOKENS, jnp.int32), (zero,) * per_program)
    live, accs = _each_segment(segments, first, segment, carry)
    for m, acc in enumerate(accs):
        at = column + m * columns
        mask = (live > 0)[:, None] & (at + _iota(columns) < width)[None, :]
        where = (rows, pl.ds(offset + at, columns))
        y = pltriton.load(y_ref.at[where], mask=mask, other=0.0).astype(jnp.float32)
        pltriton.store(o_ref.at[where], (y + acc).astype(o_ref.dtype), mask=mask)


# The calls. The inner jit makes a program of many layers trace and lower each kernel once.


def _operands(tables: FactorTables, routing: Routing, layer: Array, phase: str) -> tuple:
    route = routing.slots if phase == "decode" else routing.segments
    return (layer.reshape(1), route, tables.pool, tables.first_row, tables.rank, tables.scale)


@functools.partial(jax.jit, static_argnames=("kinds", "max_rank", "phase", "interpret"))
def shrink(
    x: Array,
    tables: FactorTables,
    routing: Routing,
    layer: Array,
    *,
    kinds: tuple[int, ...],
    max_rank: int,
    phase: str,
    interpret: bool,
) -> Float[Array, "kinds splits tokens max_rank"]:
    tokens, d = x.shape
    tiling = shrink_tiling(d, tables.pool.shape[1], phase)
    if phase == "decode":
        body = functools.partial(_decode_shrink_kernel, kinds=kinds, tiling=tiling)
        params, rows = _DECODE_SHRINK, tokens
    else:
        ranks = max(16, min(PREFILL_SHRINK_RANKS, pl.next_power_of_2(max_rank)))
        body = functools.partial(_prefill_shrink_kernel, kinds=kinds, tiling=tiling, ranks=ranks)
        params, rows = _PREFILL, pl.cdiv(tokens, PREFILL_TOKENS)
    shape = (len(kinds), tiling.programs, tokens, max_rank)
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(rows, tiling.programs, len(kinds)),
        interpret=interpret,
        compiler_params=params,
        name=f"lora_{phase}_shrink",
    )(*_operands(tables, routing, layer, phase), x)


@functools.partial(jax.jit, static_argnames=("kinds", "widths", "phase", "interpret"))
def expand_add(
    y: Array,
    h: Array,
    tables: FactorTables,
    routing: Routing,
    layer: Array,
    *,
    kinds: tuple[int, ...],
    widths: tuple[int, ...],
    phase: str,
    interpret: bool,
) -> Float[Array, "tokens d_out"]:
    outputs = _Outputs.of(kinds, widths, tables.pool.shape[1], phase)
    if phase == "decode":
        body, params, rows = _decode_expand_kernel, _DECODE_EXPAND, y.shape[0]
    else:
        body, params = _prefill_expand_kernel, _PREFILL
        rows = pl.cdiv(y.shape[0], PREFILL_TOKENS)
    operands = _operands(tables, routing, layer, phase)
    return pl.pallas_call(
        functools.partial(body, outputs=outputs),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        grid=(rows, outputs.programs),
        interpret=interpret,
        input_output_aliases={len(operands) + 1: 0},
        compiler_params=params,
        name=f"lora_{phase}_expand_add",
    )(*operands, h, y)
