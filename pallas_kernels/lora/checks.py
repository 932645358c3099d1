"""Shapes and dtypes that a call of the LoRA kernels must have, whatever the backend."""

from __future__ import annotations

from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.lora.tables import TILE, FactorTables, Routing


Phase = Literal["decode", "prefill"]
PHASES = get_args(Phase)
STATIC = (int, np.integer)  # a layer whose number is known while a program is traced
FLOATS = (jnp.float32, jnp.bfloat16)


def check_call(
    tables: FactorTables,
    routing: Routing,
    tokens: int,
    layer: int | Array,
    kinds: tuple[int, ...],
    max_rank: int,
    phase: str,
) -> None:
    """Raise ValueError unless tables, routing and numbers fit each other."""
    check_tables(tables)
    check_routing(tables, routing, phase)
    if routing.slots.shape != (tokens,):
        raise ValueError(f"routing.slots: wanted shape {(tokens,)}, got {routing.slots.shape}")
    check_numbers(tables, layer, kinds, max_rank)


def check_tables(tables: FactorTables) -> None:
    """Raise ValueError unless the tables have one shape and their dtypes."""
    pool, first_row = tables.pool, tables.first_row
    if first_row.ndim != 5 or first_row.shape[1] != 2:
        wanted = "[kinds, 2, layers, slots, parts]"
        raise ValueError(f"tables.first_row: wanted {wanted}, got {first_row.shape}")
    if pool.ndim != 2:
        raise ValueError(f"tables.pool: wanted [rows, w], got {pool.shape}")
    wanted = (first_row.shape[0], *first_row.shape[2:])
    for name, array in (("rank", tables.rank), ("scale", tables.scale)):
        if array.shape != wanted:
            raise ValueError(f"tables.{name}: wanted shape {wanted}, got {array.shape}")
    dtypes = {"first_row": jnp.int32, "rank": jnp.int32, "scale": jnp.float32}
    for name, dtype in dtypes.items():
        found = getattr(tables, name).dtype
        if found != dtype:
            raise ValueError(f"tables.{name}: wanted {jnp.dtype(dtype)}, got {found}")


def check_routing(tables: FactorTables, routing: Routing, phase: str) -> None:
    """Raise ValueError unless the routing is one of `phase` that fits the tables."""
    if phase not in PHASES:
        raise ValueError(f"phase: wanted one of {PHASES}, got {phase!r}")
    slots, segments, tiles, entries = routing
    if slots.ndim != 1 or not slots.shape[0]:
        raise ValueError(f"routing.slots: wanted [tokens], one or more, got {slots.shape}")
    if segments.ndim != 2 or segments.shape[1] != 3:
        raise ValueError(f"routing.segments: wanted [n, 3], got {segments.shape}")
    if tiles.ndim != 2 or tiles.shape[1] != 1 + TILE:
        raise ValueError(f"routing.tiles: wanted [n, {1 + TILE}], got {tiles.shape}")
    for name, array in (("slots", slots), ("segments", segments), ("tiles", tiles)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"routing.{name}: wanted integers, got {array.dtype}")
    name, rows = ("tiles", tiles) if phase == "decode" else ("segments", segments)
    if not len(rows):
        raise ValueError(f"routing.{name}: has no row, so it is not the routing of a {phase}")
    if entries is None:
        return
    kinds, layers, _, parts = tables.rank.shape
    wanted = [(kinds, len(tiles), 4 * parts)] * layers
    found = [entry.shape for entry in entries]
    if found != wanted:
        raise ValueError(
            f"routing.entries: of other tables or tiles; wanted {layers} of shape {wanted[0]},"
            f" got {len(found)} of {sorted(set(found))}"
        )


def check_numbers(
    tables: FactorTables, layer: int | Array, kinds: tuple[int, ...], max_rank: int
) -> None:
    """Raise ValueError for what lies outside the tables. A traced layer's value is not known."""
    n_kinds, layers = tables.rank.shape[:2]
    if not isinstance(kinds, tuple) or not kinds or not all(0 <= k < n_kinds for k in kinds):
        raise ValueError(f"kinds: wanted some of 0 to {n_kinds - 1} in a tuple, got {kinds}")
    if isinstance(layer, STATIC):
        if not 0 <= layer < layers:
            raise ValueError(f"layer: wanted 0 to {layers - 1}, got {layer}")
    elif layer.shape or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise ValueError(f"layer: wanted one integer, got {layer.dtype}{list(layer.shape)}")
    if max_rank < 1:
        raise ValueError(f"max_rank: wanted at least 1, got {max_rank}")


def check_rows(name: str, rows: Array, tokens: int | None = None) -> None:
    """Raise ValueError unless `rows` is [tokens, d] of a dtype the kernels take."""
    if rows.ndim != 2:
        raise ValueError(f"{name}: wanted [tokens, d], got {rows.shape}")
    if rows.dtype not in FLOATS:
        raise ValueError(f"{name}: wanted float32 or bfloat16, got {rows.dtype}")
    if tokens is not None and rows.shape[0] != tokens:
        raise ValueError(f"{name}: wanted {tokens} tokens as in y, got {rows.shape[0]}")


def check_outputs(columns: int, kinds: tuple[int, ...], widths: tuple[int, ...]) -> None:
    """Raise ValueError unless `columns` are an output of its width for each kind."""
    fit = isinstance(widths, tuple) and len(widths) == len(kinds) and sum(widths) == columns
    if not fit or min(widths) < 1:
        raise ValueError(f"widths: wanted one a kind summing to {columns}, got {widths}")


def check_h(h: Array, wanted: tuple[int, int, int], splits: int | None) -> None:
    """Raise ValueError unless h is [kinds, splits, tokens, max_rank] in float32."""
    if h.ndim != 4 or (h.shape[0], *h.shape[2:]) != wanted or not h.shape[1]:
        kinds, *rest = wanted
        raise ValueError(f"h: wanted shape {(kinds, 'splits', *rest)}, got {h.shape}")
    if splits is not None and h.shape[1] != splits:
        raise ValueError(f"h: wanted {splits} splits, got {h.shape[1]}: of another backend?")
    if h.dtype != jnp.float32:
        raise ValueError(f"h: wanted float32, got {h.dtype}")
