"""The LoRA kernels in plain XLA, float32: the CPU path, and the fallback where Pallas has none.

Every loop has a dynamic trip count, so the cost follows the true ranks and the live rows: no factor
is materialised per token, no token is multiplied by another's factors. A row's delta comes from
operations whose shapes do not depend on the batch, in a fixed order, from its own input and its own
adapter's factors, so its bits do not depend on its neighbours.
"""

from __future__ import annotations

import functools
from types import ModuleType

import jax
from jax import Array

from pallas_kernels.lora import _reference_decode, _reference_prefill
from pallas_kernels.lora._reference_common import Call, column_blocks
from pallas_kernels.lora.tables import FactorTables, Routing


_PHASES: dict[str, ModuleType] = {"decode": _reference_decode, "prefill": _reference_prefill}


# The inner jit makes a program of many layers trace each kernel once.
@functools.partial(jax.jit, static_argnames=("kinds", "max_rank", "phase"))
def shrink(
    x: Array, tables: FactorTables, routing: Routing, layer: Array, *, kinds, max_rank, phase
) -> Array:
    call = Call(tables, layer, kinds, (), max_rank)
    return _PHASES[phase].shrink(call, x, routing)


@functools.partial(jax.jit, static_argnames=("kinds", "widths", "max_rank", "phase"))
def expand_add(
    y: Array,
    h: Array,
    tables: FactorTables,
    routing: Routing,
    layer: Array,
    *,
    kinds,
    widths,
    max_rank,
    phase,
) -> Array:
    call = _call(tables, layer, kinds, widths, max_rank)
    return _PHASES[phase].expand_add(call, y, h, routing, widths)


@functools.partial(jax.jit, static_argnames=("kinds", "widths", "max_rank", "phase"))
def add_delta(
    y: Array,
    x: Array,
    tables: FactorTables,
    routing: Routing,
    layer: Array,
    *,
    kinds,
    widths,
    max_rank,
    phase,
) -> Array:
    """One loop for both halves, with h in a row or tile at a time."""
    call = _call(tables, layer, kinds, widths, max_rank)
    return _PHASES[phase].add_delta(call, y, x, routing, widths)


def _call(tables: FactorTables, layer, kinds, widths, max_rank) -> Call:
    w = tables.pool.shape[1]
    return Call(tables, layer, kinds, tuple(column_blocks(d, w) for d in widths), max_rank)
