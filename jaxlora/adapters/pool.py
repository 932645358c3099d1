"""Adapters on the device: factors, vectors, token rows and slot tables; allocate, write, free.

One array holds all factors of all adapters, cut over the mesh along a leading tp axis: every rank
keeps its own cut, or its own copy, of a factor at the same rows. Vectors have such an array too,
and rows of tokens one that is whole everywhere. Loads are ordered with the steps on the device's
stream through donated updates, so each array exists once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.allocator import RunAllocator
from jaxlora.adapters.base_weights import BaseWeights
from jaxlora.adapters.corrections import CorrectionTables
from jaxlora.adapters.modules import EMBEDDING, HEAD, ModuleTable
from jaxlora.adapters.placement import (
    adapter_row_lengths,
    cut,
    cut_vector,
    row_width,
    to_rows,
    vector_row_lengths,
)
from jaxlora.adapters.pool_shape import PoolShape
from jaxlora.adapters.routing import BASE_SLOT, AdapterTables
from jaxlora.adapters.token_tables import TokenTables, Use
from jaxlora.adapters.vectors import check_copies, check_with_weights, compute_vectors
from jaxlora.errors import CapacityError
from pallas_kernels.lora.tables import SIDE_A, SIDE_B, FactorTables


# Rows written by one update, whatever the adapter's rank: one compiled program for all loads.
WRITE_ROWS = 2048
WRITE_TOKEN_ROWS = 64

# Every rank has its own pools, all have the same slots and token rows.
_FACTOR_SPECS = FactorTables._make((P("tp"), P(), P(), P()))
_CORRECTION_SPECS = CorrectionTables._make((P("tp"), P()))
_TOKEN_SPECS = TokenTables._make((P(), P(), P(), P()))


@dataclasses.dataclass(frozen=True)
class _Runs:
    """Where a slot's rows begin: its factors', its vectors', its sets of token rows."""

    factors: list[int]
    vectors: list[int]
    tokens: list[int]


class FactorPool:
    """Owns the device's `AdapterTables` and knows which rows and slots are free.

    `tables` is replaced by every write (the old arrays are donated): read it anew for each step.
    `base` is needed by adapters that have vectors, token rows or copies of the base's weights.
    """

    def __init__(
        self,
        shape: PoolShape,
        modules: ModuleTable,
        mesh: Mesh,
        dtype: jnp.dtype,
        base: BaseWeights | None = None,
    ) -> None:
        self.shape, self.modules, self.mesh = shape, modules, mesh
        self.dtype = np.dtype(dtype)
        self.tp = mesh.shape["tp"]
        self.w = row_width(modules, self.tp)
        self.allocator = RunAllocator(shape.rows)
        self._base = base
        self._vector_rows = RunAllocator(shape.vector_rows)
        self._token_rows = RunAllocator(shape.token_rows)
        self._free_slots = list(range(shape.slots - 1, BASE_SLOT, -1))
        self._runs: dict[int, _Runs] = {}
        self.tables = self._empty_tables()

    @property
    def table_specs(self) -> AdapterTables:
        """How `tables` is cut over the mesh: PartitionSpecs in its place."""
        return AdapterTables(
            _FACTOR_SPECS,
            _CORRECTION_SPECS if self.shape.vector_rows else None,
            _TOKEN_SPECS if self.shape.token_rows else None,
        )

    def load(self, adapter: Adapter) -> int:
        """Write an adapter's factors, vectors, token rows and its slot; returns the slot.

        Raises CapacityError where no slot or too few rows are free, AdapterError where it does not
        suit the base's weights; nothing is changed then.
        """
        if not self._free_slots:
            raise CapacityError(f"no free adapter slot for {adapter.name!r}")
        if lacking := self.shape.lacks(adapter, self.modules):
            raise CapacityError(
                f"adapter {adapter.name!r} needs {lacking}, which no adapter given at start has"
            )
        vectors = self._vectors(adapter)
        runs = self._allocate(adapter)
        slot = self._free_slots.pop()
        self._runs[slot] = runs
        self._write_factors(adapter, runs.factors)
        self._write_slot(slot, adapter, runs.factors)
        if self.tables.corrections is not None:
            self._write_vectors(slot, adapter, vectors, runs.vectors)
        if self.tables.tokens is not None:
            self._write_tokens(slot, adapter, runs.tokens)
        return slot

    def check(self, adapter: Adapter) -> None:
        """What `load` would refuse of an adapter whose identity key is resident: the key leaves
        copies of the base's weights out. Raises AdapterError.
        """
        if adapter.base_copies:
            assert self._base is not None, "the adapter needs the base's weights"
            check_copies(adapter, self._base)

    def free(self, slot: int) -> None:
        """Give back a slot and its rows. The caller knows that no step in flight uses them."""
        runs = self._runs.pop(slot)
        self.allocator.release(runs.factors)
        self._vector_rows.release(runs.vectors)
        self._token_rows.release(runs.tokens)
        self._free_slots.append(slot)

    def check_integrity(self) -> None:
        """Every slot but the base's is free or used, once; rows likewise."""
        for allocator in (self.allocator, self._vector_rows, self._token_rows):
            allocator.check_integrity()
        slots = sorted([*self._free_slots, *self._runs])
        assert slots == list(range(1, self.shape.slots)), f"slots {slots} of {self.shape.slots}"

    def _vectors(self, adapter: Adapter) -> list[np.ndarray]:
        if not (adapter.vectors or adapter.token_rows or adapter.base_copies):
            return []
        assert self._base is not None, "the adapter needs the base's weights"
        vectors = compute_vectors(adapter, self._base)
        check_with_weights(adapter, vectors, self._base)
        return vectors

    def _allocate(self, adapter: Adapter) -> _Runs:
        """Raises CapacityError, with nothing taken."""
        wanted = (
            (
                "the factor pool",
                self.allocator,
                adapter_row_lengths(adapter, self.modules, self.tp, self.w),
            ),
            (
                "gains and biases",
                self._vector_rows,
                vector_row_lengths(adapter, self.modules, self.tp, self.w),
            ),
            (
                "tokens",
                self._token_rows,
                [len(rows.ids) for rows in adapter.stored_token_rows],
            ),
        )
        taken: list[list[int]] = []
        for what, allocator, lengths in wanted:
            starts = allocator.allocate(lengths) if lengths else []
            if starts is None:
                for (_, other, _), run in zip(wanted, taken, strict=False):
                    other.release(run)
                raise CapacityError(
                    f"adapter {adapter.name!r} needs {sum(lengths)} rows of {what},"
                    f" {allocator.free_rows} are free"
                )
            taken.append(starts)
        return _Runs(*taken)

    def _empty_tables(self) -> AdapterTables:
        shape, kinds, layers = self.shape, len(self.modules.kinds), self.modules.num_layers
        per_slot = (kinds, layers, shape.slots, shape.parts)

        def zeros(dims: tuple[int, ...], dtype: DTypeLike, spec: P) -> jax.Array:
            return jnp.zeros(dims, dtype, device=NamedSharding(self.mesh, spec))

        factors = FactorTables(
            zeros((self.tp, max(shape.rows, 1), self.w), self.dtype, P("tp")),
            zeros((kinds, 2, *per_slot[1:]), np.int32, P()),
            zeros(per_slot, np.int32, P()),
            zeros(per_slot, np.float32, P()),
        )
        corrections = tokens = None
        if shape.vector_rows:
            corrections = CorrectionTables(
                zeros((self.tp, shape.vector_rows, self.w), np.float32, P("tp")),
                zeros((kinds, 2, layers, shape.slots), np.int32, P()) - 1,
            )
        if shape.token_rows:
            hidden = self.modules.module(EMBEDDING).d_out
            tokens = TokenTables(
                zeros((shape.token_rows,), np.int32, P()),
                zeros((shape.token_rows, hidden), self.dtype, P()),
                zeros((2, shape.slots), np.int32, P()),
                zeros((2, shape.slots), np.int32, P()),
            )
        return AdapterTables(factors, corrections, tokens)

    def _write_factors(self, adapter: Adapter, starts: list[int]) -> None:
        blocks = []  # a [tp, factor_rows, w] block for each factor
        for (_, name), factors in adapter.factors.items():
            cuts = cut(factors, self.modules.module(name), self.tp)
            for side in (SIDE_A, SIDE_B):
                blocks.append(
                    np.stack([to_rows(pair[side].astype(self.dtype), self.w) for pair in cuts])
                )
        pool = self._write_rows(self.tables.factors.pool, starts, blocks)
        self.tables = self.tables._replace(factors=self.tables.factors._replace(pool=pool))

    def _write_rows(
        self, pool: jax.Array, starts: Sequence[int], blocks: Sequence[np.ndarray]
    ) -> jax.Array:
        """The pool (donated) with each [tp, rows, w] block at its start."""
        if not blocks:
            return pool
        place = np.concatenate(
            [
                np.arange(start, start + block.shape[1], dtype=np.int32)
                for start, block in zip(starts, blocks, strict=True)
            ]
        )
        rows, sharding = np.concatenate(blocks, axis=1), NamedSharding(self.mesh, P("tp"))
        for first in range(0, len(place), WRITE_ROWS):
            part = place[first : first + WRITE_ROWS]
            indices = np.full(WRITE_ROWS, pool.shape[1], np.int32)  # past the end: dropped
            indices[: len(part)] = part
            values = np.zeros((self.tp, WRITE_ROWS, self.w), rows.dtype)
            values[:, : len(part)] = rows[:, first : first + WRITE_ROWS]
            pool = _write_rows(pool, indices, jax.device_put(values, sharding))
        return pool

    def _write_slot(self, slot: int, adapter: Adapter, starts: list[int]) -> None:
        kinds, layers = len(self.modules.kinds), self.modules.num_layers
        first_row = np.zeros((kinds, 2, layers, self.shape.parts), np.int32)
        rank = np.zeros((kinds, layers, self.shape.parts), np.int32)
        scale = np.zeros((kinds, layers, self.shape.parts), np.float32)
        for index, ((layer, name), factors) in enumerate(adapter.factors.items()):
            kind = self.modules.kinds[name]
            first_row[kind, SIDE_A, layer, 0] = starts[2 * index]
            first_row[kind, SIDE_B, layer, 0] = starts[2 * index + 1]
            rank[kind, layer, 0] = factors.rank
            scale[kind, layer, 0] = factors.scale * adapter.strength
        factors = _write_slot(self.tables.factors, np.int32(slot), first_row, rank, scale)
        self.tables = self.tables._replace(factors=factors)

    def _write_vectors(
        self, slot: int, adapter: Adapter, vectors: list[np.ndarray], starts: list[int]
    ) -> None:
        assert self.tables.corrections is not None
        kinds, layers = len(self.modules.kinds), self.modules.num_layers
        first_row = np.full((kinds, 2, layers), -1, np.int32)
        blocks = []
        for ((layer, name), which), vector, start in zip(
            adapter.vectors, vectors, starts, strict=True
        ):
            first_row[self.modules.kinds[name], which, layer] = start
            cuts = cut_vector(vector, self.modules.module(name), self.tp)
            blocks.append(np.stack([to_rows(part[None], self.w) for part in cuts]))
        old = self.tables.corrections
        self.tables = self.tables._replace(
            corrections=CorrectionTables(
                self._write_rows(old.pool, starts, blocks),
                _write_vector_slot(old.first_row, np.int32(slot), first_row),
            )
        )

    def _write_tokens(self, slot: int, adapter: Adapter, starts: list[int]) -> None:
        assert self.tables.tokens is not None
        run_of = {}
        for rows, start in zip(adapter.stored_token_rows, starts, strict=True):
            run_of[id(rows)] = (start, len(rows.ids))
            self._write_token_rows(np.asarray(rows.ids), rows.rows, start)
        runs = np.zeros((2, 2), np.int32)  # (start, count) by use
        for use, name in ((Use.EMBEDDING, EMBEDDING), (Use.HEAD, HEAD)):
            if name in adapter.token_rows:
                runs[use] = run_of[id(adapter.token_rows[name])]
        old = self.tables.tokens
        start, count = _write_token_slot((old.starts, old.counts), np.int32(slot), runs)
        self.tables = self.tables._replace(tokens=old._replace(starts=start, counts=count))

    def _write_token_rows(self, ids: np.ndarray, rows: np.ndarray, start: int) -> None:
        for first in range(0, len(ids), WRITE_TOKEN_ROWS):
            old = self.tables.tokens
            assert old is not None
            part = ids[first : first + WRITE_TOKEN_ROWS]
            place = np.full(WRITE_TOKEN_ROWS, len(old.ids), np.int32)  # past the end: dropped
            place[: len(part)] = start + first + np.arange(len(part))
            padded_ids = np.zeros(WRITE_TOKEN_ROWS, np.int32)
            padded_ids[: len(part)] = part
            values = np.zeros((WRITE_TOKEN_ROWS, rows.shape[1]), self.dtype)
            values[: len(part)] = rows[first : first + WRITE_TOKEN_ROWS].astype(self.dtype)
            written = _write_tokens((old.ids, old.rows), place, (padded_ids, values))
            self.tables = self.tables._replace(tokens=old._replace(ids=written[0], rows=written[1]))


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


@functools.partial(jax.jit, donate_argnums=0)
def _write_vector_slot(first_rows: jax.Array, slot, first_row) -> jax.Array:
    return first_rows.at[:, :, :, slot].set(first_row)


@functools.partial(jax.jit, donate_argnums=0)
def _write_tokens(arrays: tuple, place, values: tuple) -> tuple:
    return tuple(a.at[place].set(v, mode="drop") for a, v in zip(arrays, values, strict=True))


@functools.partial(jax.jit, donate_argnums=0)
def _write_token_slot(arrays: tuple, slot, runs) -> tuple:
    return tuple(a.at[:, slot].set(runs[:, i]) for i, a in enumerate(arrays))
