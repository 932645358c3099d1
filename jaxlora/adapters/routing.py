"""A step's routing: which token uses which slot, and how a linear module adds its rows' deltas."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxlora.adapters.adapter import Vector
from jaxlora.adapters.corrections import CorrectionTables, add_biases, scale_rows
from jaxlora.adapters.modules import EMBEDDING
from jaxlora.adapters.token_tables import TokenTables, replace_rows, replace_scores
from pallas_kernels import lora
from pallas_kernels.lora.tables import TILE, FactorTables, Routing, decode_tiles


BASE_SLOT = 0


def decode_routing(slots: Int[np.ndarray, "tokens"]) -> Routing:
    """Host arrays for a step whose every token has its own slot; padding is a base row."""
    return Routing(slots, np.zeros((0, 3), np.int32), decode_tiles(slots))


def prefill_routing(slots: Int[np.ndarray, "tokens"], max_segments: int) -> Routing:
    """Host arrays for a step of runs of tokens of one slot; padding is a base row.

    Raises ValueError where the slots change more often than `max_segments` runs can say.
    """
    starts = np.flatnonzero(np.diff(slots, prepend=-1))
    lengths = np.diff(starts, append=len(slots))
    runs = np.stack([slots[starts], starts, lengths], axis=1)[slots[starts] != BASE_SLOT]
    if len(runs) > max_segments:
        raise ValueError(f"{len(runs)} runs of slots in a step that holds {max_segments}")
    segments = np.zeros((max_segments, 3), np.int32)
    segments[: len(runs)] = runs
    return Routing(slots, segments, np.zeros((0, 1 + TILE), np.int32))


class AdapterTables(NamedTuple):
    """What the device holds of all adapters; None: no adapter on the server needs it."""

    factors: FactorTables
    corrections: CorrectionTables | None
    tokens: TokenTables | None


@dataclasses.dataclass(frozen=True)
class AdapterStep:
    """What the modules of one step need to apply adapters. Built inside the compiled step.

    Lives inside `shard_map`: tables and widths are this rank's. `jaxlora.layers.linear` says what
    the methods mean; where no adapter on the server needs one, it adds nothing to the program.
    """

    tables: AdapterTables
    routing: Routing
    kinds: Mapping[str, int]  # module name -> kind, of the model's ModuleTable
    max_rank: int
    phase: lora.Phase
    backend: lora.Backend | None = None
    first_layer: int | Int[Array, ""] = 0  # a program that serves several layers is told which
    max_token_rows: int = 0  # that one adapter has
    vector_kinds: tuple[frozenset[int], ...] = (frozenset(), frozenset())  # by `Vector`

    def add_delta(
        self,
        y: Float[Array, "tokens d_out"],
        x: Float[Array, "tokens d_in"],
        *,
        layer: int,
        modules: Sequence[str],
        widths: Sequence[int],
    ) -> Float[Array, "tokens d_out"]:
        how = self._how(layer, modules, widths)
        y = lora.add_delta(y, x, self.tables.factors, self._resolved, **how)
        return self._scaled(y, layer, modules, widths)

    def add_delta_to_parts(
        self,
        parts: Float[Array, "splits tokens d_out"],
        x: Float[Array, "tokens d_in"],
        *,
        dtype: DTypeLike,
        layer: int,
        modules: Sequence[str],
        widths: Sequence[int],
    ) -> Float[Array, "tokens d_out"]:
        how = self._how(layer, modules, widths)
        y = lora.add_delta_to_parts(
            parts, x, self.tables.factors, self._resolved, dtype=dtype, **how
        )  # fmt: skip
        return self._scaled(y, layer, modules, widths)

    def add_delta_gated(
        self,
        y: Float[Array, "tokens d2"],
        x: Float[Array, "tokens d_in"],
        bias: Float[Array, "d2"] | None,
        *,
        layer: int,
        modules: Sequence[str],
        widths: Sequence[int],
    ) -> Float[Array, "tokens d"]:
        kinds = self._kinds(modules)
        if bias is None and all(having.isdisjoint(kinds) for having in self.vector_kinds):
            how = self._how(layer, modules, widths)
            return lora.add_delta_gated(y, x, self.tables.factors, self._resolved, **how)
        at: dict[str, Any] = {"layer": layer, "modules": modules, "widths": widths}
        y = jax.lax.optimization_barrier(self.add_delta(y, x, **at))
        return lora.gate(self.add_bias(y, bias, **at))

    def add_bias(
        self,
        y: Float[Array, "tokens d_out"],
        bias: Float[Array, "d_out"] | None,
        *,
        layer: int,
        modules: Sequence[str],
        widths: Sequence[int],
    ) -> Float[Array, "tokens d_out"]:
        if self.vector_kinds[Vector.BIAS].isdisjoint(self._kinds(modules)):
            return y if bias is None else y + bias[None]
        assert self.tables.corrections is not None
        return add_biases(
            y,
            bias,
            self.tables.corrections,
            jnp.asarray(self.routing.slots),
            self.first_layer + layer,
            self._kinds(modules),
            widths,
        )

    def add_embedding_delta(
        self, rows: Float[Array, "tokens hidden"], ids: Int[Array, "tokens"]
    ) -> Float[Array, "tokens hidden"]:
        kind, width = self.kinds[EMBEDDING], rows.shape[1]
        factors, routing = self.tables.factors, self._resolved
        h = lora.look_up(ids, factors, routing, layer=0, kind=kind, max_rank=self.max_rank)
        rows = lora.expand_add(
            rows,
            h,
            factors,
            routing,
            layer=0,
            kinds=(kind,),
            widths=(width,),
            max_rank=self.max_rank,
            phase=self.phase,
            backend=self.backend,
        )
        return self._scaled(rows, 0, (EMBEDDING,), (width,))

    def replace_rows(
        self, rows: Float[Array, "tokens hidden"], tokens: Int[Array, "tokens"]
    ) -> Float[Array, "tokens hidden"]:
        if self.tables.tokens is None:
            return rows
        return replace_rows(rows, tokens, self.tables.tokens, jnp.asarray(self.routing.slots))

    def replace_scores(
        self,
        scores: Float[Array, "rows vocab_local"],
        hidden: Float[Array, "rows hidden"],
        first_id: int | Int[Array, ""],
    ) -> Float[Array, "rows vocab_local"]:
        if self.tables.tokens is None:
            return scores
        slots = jnp.asarray(self.routing.slots)
        return replace_scores(
            scores, hidden, self.tables.tokens, slots, first_id, self.max_token_rows
        )

    @functools.cached_property
    def _resolved(self) -> Routing:
        factors = self.tables.factors
        return lora.resolve(factors, self.routing, phase=self.phase, backend=self.backend)

    def _scaled(self, y: Array, layer: int, modules: Sequence[str], widths: Sequence[int]) -> Array:
        if self.vector_kinds[Vector.GAIN].isdisjoint(self._kinds(modules)):
            return y
        assert self.tables.corrections is not None
        return scale_rows(
            y,
            self.tables.corrections,
            jnp.asarray(self.routing.slots),
            self.first_layer + layer,
            self._kinds(modules),
            widths,
        )

    def _how(self, layer: int, modules: Sequence[str], widths: Sequence[int]) -> dict[str, Any]:
        return {
            "layer": self.first_layer + layer,
            "kinds": self._kinds(modules),
            "widths": tuple(widths),
            "max_rank": self.max_rank,
            "phase": self.phase,
            "backend": self.backend,
        }

    def _kinds(self, modules: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.kinds[name] for name in modules)


def local_tables(tables: AdapterTables) -> AdapterTables:
    """This rank's tables inside `shard_map`: the pools' leading tp axis, cut to one, is dropped."""

    def local(part):
        return None if part is None else part._replace(pool=jax.lax.squeeze(part.pool, (0,)))

    return tables._replace(factors=local(tables.factors), corrections=local(tables.corrections))
