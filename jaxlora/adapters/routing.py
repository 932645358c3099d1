"""A step's routing: which token uses which slot, and how a linear module adds its rows' deltas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

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


@dataclasses.dataclass(frozen=True)
class AdapterStep:
    """What the linear modules of one step need to add deltas. Built inside the compiled step.

    Lives inside `shard_map`: tables and widths are this rank's.
    """

    tables: FactorTables
    routing: Routing
    kinds: Mapping[str, int]  # module name -> kind, of the model's ModuleTable
    max_rank: int
    phase: lora.Phase
    backend: lora.Backend | None = None
    first_layer: int | Int[Array, ""] = 0  # a program that serves several layers is told which

    def add_delta(
        self,
        y: Float[Array, "tokens d_out"],
        x: Float[Array, "tokens d_in"],
        *,
        layer: int,
        modules: Sequence[str],
        widths: Sequence[int],
    ) -> Float[Array, "tokens d_out"]:
        """y + scale * B (A x) for every token with an adapter; other rows of y keep their bits.

        `modules` share the input x; their outputs stand side by side in y, `widths` columns each.
        """
        how = self._how(layer, modules, widths)
        return lora.add_delta(y, x, self.tables, self.routing, **how)

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
        """The same for a product left in parts, whose sum is rounded to `dtype` once."""
        how = self._how(layer, modules, widths)
        return lora.add_delta_to_parts(
            parts, x, self.tables, self.routing, dtype=dtype, **how
        )  # fmt: skip

    def _how(self, layer: int, modules: Sequence[str], widths: Sequence[int]) -> dict[str, Any]:
        return {
            "layer": self.first_layer + layer,
            "kinds": tuple(self.kinds[name] for name in modules),
            "widths": tuple(widths),
            "max_rank": self.max_rank,
            "phase": self.phase,
            "backend": self.backend,
        }


def local_tables(tables: FactorTables) -> FactorTables:
    """This rank's tables inside `shard_map`: the pool's leading tp axis, cut to one, is dropped."""
    return tables._replace(pool=jax.lax.squeeze(tables.pool, (0,)))
