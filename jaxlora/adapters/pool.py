"""The factor pool and slot tables on the device: allocate, write, free.

One array holds all factors of all adapters, cut over the mesh along a leading tp axis: every rank
keeps its own cut, or its own copy, of a factor at the same rows. Loads are ordered with the steps
on the device's stream through one donated update, so the pool exists once.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.allocator import RunAllocator
from jaxlora.adapters.modules import ModuleTable
from jaxlora.adapters.placement import adapter_row_lengths, cut, row_width, to_rows
from jaxlora.adapters.routing import BASE_SLOT
from jaxlora.errors import CapacityError
from pallas_kernels.lora.tables import SIDE_A, SIDE_B, FactorTables


# Rows written by one update, whatever the adapter's rank: one compiled program for all loads.
WRITE_ROWS = 2048

# PartitionSpecs of the tables: every rank has its own pool, all have the same slots.
_SPECS = (P("tp"), P(), P(), P())
TABLE_SPECS = FactorTables._make(_SPECS)


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """What fixes every array of a pool. `slots` counts the base model's slot 0."""

    rows: int
    slots: int
    max_rank: int
    parts: int = 1

    @classmethod
    def for_adapters(
        cls,
        adapters: list[Adapter],
        modules: ModuleTable,
        tp: int,
        itemsize: int,
        *,
        memory: int | None,
        slots: int | None,
        max_rank: int | None,
    ) -> PoolShape:
        """The shape that the options ask for, or the smallest that holds `adapters`.

        `memory` is bytes a device. Raises CapacityError, naming the option, where the adapters
        don't fit in what was asked for.
        """
        w = row_width(modules, tp)
        needed_rows = sum(sum(adapter_row_lengths(a, modules, tp, w)) for a in adapters)
        rows = memory // (w * itemsize) if memory is not None else needed_rows
        if needed_rows > rows:
            raise CapacityError(
                f"the adapters need {needed_rows * w * itemsize} bytes a device,"
                f" --adapter-memory gives {memory}"
            )
        if slots is not None and len(adapters) > slots:
            raise CapacityError(f"{len(adapters)} adapters were given, --adapter-slots is {slots}")
        largest = max((adapter.max_rank for adapter in adapters), default=1)
        if max_rank is not None and largest > max_rank:
            raise CapacityError(f"an adapter has rank {largest}, --max-adapter-rank is {max_rank}")
        return cls(rows, 1 + (slots if slots is not None else len(adapters)), max_rank or largest)


class FactorPool:
    """Owns the device's `FactorTables` and knows which rows and slots are free.

    `tables` is replaced by every write (the old arrays are donated): read it anew for each step.
    """

    def __init__(self, shape: PoolShape, modules: ModuleTable, mesh: Mesh, dtype: jnp.dtype):
        self.shape, self.modules, self.mesh = shape, modules, mesh
        self.dtype = np.dtype(dtype)
        self.tp = mesh.shape["tp"]
        self.w = row_width(modules, self.tp)
        self.allocator = RunAllocator(shape.rows)
        self._free_slots = list(range(shape.slots - 1, BASE_SLOT, -1))
        self._runs: dict[int, list[int]] = {}  # slot -> starts of its runs
        self.tables = self._empty_tables()

    def load(self, adapter: Adapter) -> int:
        """Write an adapter's factors and its slot; returns the slot.

        Raises CapacityError, with nothing changed, where no slot or too few rows are free.
        """
        if not self._free_slots:
            raise CapacityError(f"no free adapter slot for {adapter.name!r}")
        lengths = adapter_row_lengths(adapter, self.modules, self.tp, self.w)
        starts = self.allocator.allocate(lengths)
        if starts is None:
            raise CapacityError(
                f"adapter {adapter.name!r} needs {sum(lengths)} rows of the factor pool,"
                f" {self.allocator.free_rows} are free"
            )
        slot = self._free_slots.pop()
        self._runs[slot] = starts
        self._write_factors(adapter, starts)
        self._write_slot(slot, adapter, starts)
        return slot

    def free(self, slot: int) -> None:
        """Give back a slot and its rows. The caller knows that no step in flight uses them."""
        self.allocator.release(self._runs.pop(slot))
        self._free_slots.append(slot)

    def check_integrity(self) -> None:
        """Every slot but the base's is free or used, once; rows likewise."""
        self.allocator.check_integrity()
        slots = sorted([*self._free_slots, *self._runs])
        assert slots == list(range(1, self.shape.slots)), f"slots {slots} of {self.shape.slots}"

    def _empty_tables(self) -> FactorTables:
        kinds, layers = len(self.modules.modules), self.modules.num_layers
        per_slot = (kinds, layers, self.shape.slots, self.shape.parts)
        shapes = (
            ((self.tp, max(self.shape.rows, 1), self.w), self.dtype),
            ((kinds, 2, *per_slot[1:]), np.int32),
            (per_slot, np.int32),
            (per_slot, np.float32),
        )
        return FactorTables._make(
            jnp.zeros(shape, dtype, device=NamedSharding(self.mesh, spec))
            for (shape, dtype), spec in zip(shapes, _SPECS, strict=True)
        )

    def _write_factors(self, adapter: Adapter, starts: list[int]) -> None:
        places, rows = [], []  # rows: one [tp, factor_rows, w] block for each factor
        run = iter(starts)
        for (_, name), factors in adapter.factors.items():
            cuts = cut(factors, self.modules.modules[self.modules.kinds[name]], self.tp)
            for side in (SIDE_A, SIDE_B):
                block = np.stack([to_rows(pair[side].astype(self.dtype), self.w) for pair in cuts])
                start = next(run)
                places.append(np.arange(start, start + block.shape[1], dtype=np.int32))
                rows.append(block)
        place, block = np.concatenate(places), np.concatenate(rows, axis=1)
        pool_sharding = NamedSharding(self.mesh, P("tp"))
        for first in range(0, len(place), WRITE_ROWS):
            indices = np.full(
                WRITE_ROWS, self.tables.pool.shape[1], np.int32
            )  # past the end: dropped
            part = place[first : first + WRITE_ROWS]
            indices[: len(part)] = part
            values = np.zeros((self.tp, WRITE_ROWS, self.w), self.dtype)
            values[:, : len(part)] = block[:, first : first + WRITE_ROWS]
            pool = _write_rows(self.tables.pool, indices, jax.device_put(values, pool_sharding))
            self.tables = self.tables._replace(pool=pool)

    def _write_slot(self, slot: int, adapter: Adapter, starts: list[int]) -> None:
        kinds, layers = len(self.modules.modules), self.modules.num_layers
        first_row = np.zeros((kinds, 2, layers, self.shape.parts), np.int32)
        rank = np.zeros((kinds, layers, self.shape.parts), np.int32)
        scale = np.zeros((kinds, layers, self.shape.parts), np.float32)
        for index, ((layer, name), factors) in enumerate(adapter.factors.items()):
            kind = self.modules.kinds[name]
            first_row[kind, SIDE_A, layer, 0] = starts[2 * index]
            first_row[kind, SIDE_B, layer, 0] = starts[2 * index + 1]
            rank[kind, layer, 0] = factors.rank
            scale[kind, layer, 0] = factors.scale * adapter.strength
        self.tables = _write_slot(self.tables, np.int32(slot), first_row, rank, scale)


@functools.partial(jax.jit, donate_argnums=0)
def _write_rows(pool: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return pool.at[:, indices].set(values, mode="drop")


@functools.partial(jax.jit, donate_argnums=0)
def _write_slot(tables: FactorTables, slot, first_row, rank, scale) -> FactorTables:
    return tables._replace(
        first_row=tables.first_row.at[:, :, :, slot].set(first_row),
        rank=tables.rank.at[:, :, slot].set(rank),
        scale=tables.scale.at[:, :, slot].set(scale),
    )
