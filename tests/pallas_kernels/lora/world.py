"""A small factor pool with every kind of slot, routings over it, and the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora import (
    FactorTables,
    Routing,
    add_delta,
    add_delta_to_parts,
    decode_tiles,
    mosaic_gpu,
)


D_IN = 200
WIDTHS = (150, 40, 128)  # no multiple of w, less than w, w itself
GATED_WIDTH = 150
GATED_WIDTHS = (GATED_WIDTH, GATED_WIDTH)  # gate and up
MAX_RANK = 512
LAYERS, LAYER = 2, 1
# The ranks of each slot's parts. UNUSED is a slot that no token uses: its factors are NaN.
RANKS = ((0, 0), (1, 0), (17, 0), (8, 0), (3, 9), (500, 12), (16, 0), (5, 0), (3, 0))
BASE, WIDE, TWO_PARTS, NOT_EVERYWHERE, UNUSED = 0, 5, 4, 6, 7
USED = tuple(s for s in range(1, len(RANKS)) if s != UNUSED)


def _rank(kind: int, layer: int, slot: int, part: int) -> int:
    if layer != LAYER and slot == WIDE:
        return 2
    return 0 if slot == NOT_EVERYWHERE and kind == 1 else RANKS[slot][part]


@dataclasses.dataclass(frozen=True)
class World:
    tables: FactorTables
    factors: dict  # (kind, side, slot, part) at LAYER -> float64 [rank, d]
    scale: np.ndarray


@functools.cache
def world(pool_dtype: str = "float32", w: int = 128, widths: tuple = WIDTHS) -> World:
    """Runs lie in shuffled order with gaps of NaN between; the last one ends at the pool's end."""
    rng = np.random.default_rng(0)
    kinds, slots, parts = len(widths), len(RANKS), len(RANKS[0])
    scale = rng.uniform(0.5, 2.0, (kinds, LAYERS, slots, parts)).astype(np.float32)
    rank = np.zeros(scale.shape, np.int32)
    first_row = np.zeros((kinds, 2, LAYERS, slots, parts), np.int32)
    keys = [
        (k, side, layer, s, p)
        for (k, layer, s, p) in np.ndindex(rank.shape)
        for side in (0, 1)
        if _rank(k, layer, s, p)
    ]
    last = (kinds - 1, 1, LAYER, slots - 1, 0)
    keys = [keys[i] for i in rng.permutation(len(keys)) if keys[i] != last] + [last]
    runs, factors, rows = [], {}, 0
    for key in keys:
        k, side, layer, s, p = key
        r, d = _rank(k, layer, s, p), (widths[k] if side else D_IN)
        rank[k, layer, s, p] = r
        rows += int(rng.integers(0, 4))
        first_row[key] = rows
        factor = rng.standard_normal((r, d)) / np.sqrt(r if side else d)
        factor = np.array(jnp.asarray(factor, pool_dtype).astype(jnp.float32))
        if s == UNUSED:
            factor[:] = np.nan
        if layer == LAYER:
            factors[k, side, s, p] = factor.astype(np.float64)
        blocks = np.pad(factor, ((0, 0), (0, -d % w))).reshape(r, -1, w).swapaxes(0, 1)
        runs.append((rows, blocks.reshape(-1, w)))
        rows += len(runs[-1][1])
    pool = np.full((rows, w), np.nan, np.float32)
    for first, run in runs:
        pool[first : first + len(run)] = run
    tables = FactorTables(
        jnp.asarray(pool, pool_dtype), *map(jnp.asarray, (first_row, rank, scale))
    )
    return World(tables, factors, scale)


def routing(slots, spare: int = 2) -> Routing:
    """Slots as given; segments are their runs, with empty ones among and after them."""
    slots = np.asarray(slots, np.int32)
    edges = np.flatnonzero(np.diff(slots, prepend=-1, append=-1))
    runs = [
        (slots[a], a, b - a) for a, b in zip(edges, edges[1:], strict=False) if slots[a] != BASE
    ]
    empty = [(0, 0, 0)] * spare
    segments = np.asarray((runs[:1] + empty[:1] + runs[1:] + empty)[: len(slots) + spare])
    segments = np.pad(segments, ((0, len(slots) + spare - len(segments)), (0, 0)))
    tiles = jnp.asarray(decode_tiles(slots))
    return Routing(jnp.asarray(slots), jnp.asarray(segments, jnp.int32), tiles)


def inputs(tokens: int, x_dtype: str = "float32", y_dtype: str = "float32", seed: int = 1):
    """x[tokens, D_IN] and y[tokens, sum(WIDTHS)]."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((tokens, D_IN)), x_dtype)
    y = rng.standard_normal((tokens, sum(WIDTHS)))
    y[:, ::7] = -0.0
    return x, jnp.asarray(y, y_dtype)


def skip_unless_it_runs(backend: str, interpret: bool) -> None:
    if backend != "mosaic":
        return
    if interpret:
        pytest.skip("mosaic is not interpreted")
    try:
        mosaic_gpu.check(world().tables)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


def poison(x, slots):
    """x with NaN in the rows of the base model."""
    return jnp.where(jnp.asarray(slots)[:, None] == BASE, jnp.asarray(np.nan, x.dtype), x)


@functools.partial(jax.jit, static_argnames=("phase", "backend", "interpret"))
def run(y, x, tables, routing, layer, *, phase, backend, interpret):
    return add_delta_of(phase)(
        y,
        x,
        tables,
        routing,
        layer=layer,
        kinds=(0, 1, 2),
        widths=WIDTHS,
        max_rank=MAX_RANK,
        backend=backend,
        interpret=interpret,
    )


def add_delta_of(phase: str):
    """`add_delta` of a phase; of a phase "apart", the same by way of `add_delta_to_parts`."""
    phase, _, apart = phase.partition(" ")
    if not apart:
        return functools.partial(add_delta, phase=phase)

    def add(y, *args, **how):
        return add_delta_to_parts(y[None], *args, dtype=y.dtype, phase=phase, **how)

    return add


def expected(w: World, y, x, slots, widths: tuple = WIDTHS) -> tuple[np.ndarray, np.ndarray]:
    """(y + delta, the sum of the magnitudes that went into it), token by token in float64."""
    x, y = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, y))
    out, size = y.copy(), np.abs(y)
    ends = np.cumsum(widths)
    for t, slot in enumerate(np.asarray(slots)):
        for (k, side, s, p), a in w.factors.items():
            if s != slot or side:
                continue
            b, scale = w.factors[k, 1, s, p], w.scale[k, LAYER, s, p]
            at = slice(ends[k] - widths[k], ends[k])
            out[t, at] += scale * (a @ x[t]) @ b
            size[t, at] += scale * (np.abs(a) @ np.abs(x[t])) @ np.abs(b)
    return out, size


def bits(a) -> np.ndarray:
    a = np.asarray(a)
    return a.view({2: np.uint16, 4: np.uint32}[a.dtype.itemsize])
