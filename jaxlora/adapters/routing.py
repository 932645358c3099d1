"""A step's routing: which token uses which slot, and how a linear module adds its rows' deltas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import lora
from pallas_kernels.lora.tables import FactorTables, Routing


BASE_SLOT = 0


def build_routing(slots: Sequence[int], tokens: int, max_segments: int) -> Routing:
    """Host arrays for a step of `tokens` tokens; those past `len(slots)` are padding (base rows).

    Raises ValueError where the slots change more often than `max_segments` runs can say.
    """
    padded = np.full(tokens, BASE_SLOT, np.int32)
    padded[: len(slots)] = slots
    starts = np.flatnonzero(np.diff(padded, prepend=-1))
    lengths = np.diff(starts, append=tokens)
    adapted = padded[starts] != BASE_SLOT
    runs = np.stack([padded[starts], starts, lengths], axis=1)[adapted]
    if len(runs) > max_segments:
        raise ValueError(f"{len(runs)} runs of slots in a step that holds {max_segments}")
    segments = np.zeros((max_segments, 3), np.int32)
    segments[: len(runs)] = runs
    return Routing(slots=padded, segments=segments)


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
    backend: str | None = None

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
        return lora.add_delta(
            y,
            x,
            self.tables,
            self.routing,
            layer=layer,
            kinds=tuple(self.kinds[name] for name in modules),
            widths=tuple(widths),
            max_rank=self.max_rank,
            phase=self.phase,
            backend=self.backend,
        )


def local_tables(tables: FactorTables) -> FactorTables:
    """This rank's tables inside `shard_map`: the pool's leading tp axis, cut to one, is dropped."""
    return tables._replace(pool=jax.lax.squeeze(tables.pool, (0,)))
