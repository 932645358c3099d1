"""Shapes that a call of the LoRA kernels must have, whatever the backend."""

from __future__ import annotations

from jax import Array

from pallas_kernels.lora.tables import TILE, FactorTables, Routing


PHASES = ("decode", "prefill")


def check_call(
    tables: FactorTables, routing: Routing, tokens: int, kinds: tuple, max_rank: int, phase: str
) -> None:
    """Raise ValueError unless tables, routing and numbers fit each other."""
    if phase not in PHASES:
        raise ValueError(f"phase: wanted one of {PHASES}, got {phase!r}")
    n_kinds, sides, layers, slots, parts = tables.first_row.shape
    for name, array in (("rank", tables.rank), ("scale", tables.scale)):
        if array.shape != (n_kinds, layers, slots, parts):
            wanted = (n_kinds, layers, slots, parts)
            raise ValueError(f"tables.{name}: wanted shape {wanted}, got {array.shape}")
    if sides != 2 or tables.pool.ndim != 2:
        raise ValueError(f"tables: wanted 2 sides and a 2-D pool, got {sides}, {tables.pool.shape}")
    if not kinds or not all(0 <= k < n_kinds for k in kinds):
        raise ValueError(f"kinds: wanted some of 0 to {n_kinds - 1}, got {kinds}")
    if max_rank < 1:
        raise ValueError(f"max_rank: wanted at least 1, got {max_rank}")
    if routing.slots.shape != (tokens,):
        raise ValueError(f"routing.slots: wanted shape {(tokens,)}, got {routing.slots.shape}")
    if routing.segments.ndim != 2 or routing.segments.shape[1] != 3:
        raise ValueError(f"routing.segments: wanted [n, 3], got {routing.segments.shape}")
    if routing.tiles.ndim != 2 or routing.tiles.shape[1] != 1 + TILE:
        raise ValueError(f"routing.tiles: wanted [n, {1 + TILE}], got {routing.tiles.shape}")


def check_outputs(y: Array, kinds: tuple[int, ...], widths: tuple[int, ...]) -> None:
    """Raise ValueError unless y holds an output of its width for each kind."""
    if len(widths) != len(kinds) or y.shape[1] != sum(widths):
        raise ValueError(f"widths: wanted one a kind summing to {y.shape[1]}, got {widths}")
