"""Random adapters of a given rank, for benchmarks: cheap to make, no two alike."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxlora.adapters.adapter import Adapter, Factors
from jaxlora.adapters.modules import ModuleTable


def synthetic_adapters(
    modules: ModuleTable,
    count: int,
    rank: int,
    dtype: np.dtype,
    names: Iterable[str],
    base_fingerprint: str,
) -> tuple[Adapter, ...]:
    """`count` adapters over the named modules of every layer.

    All are windows into one buffer of random numbers, each from a place of its own.
    """
    names = tuple(names)
    widest = max(max(m.d_in, m.d_out) for m in modules.modules) * rank
    places = count * modules.num_layers * len(names) * 2
    numbers = np.random.default_rng(0).normal(size=widest + places, scale=0.02).astype(dtype)
    starts = iter(range(places))

    def window(rows: int, columns: int) -> np.ndarray:
        start = next(starts)
        return numbers[start : start + rows * columns].reshape(rows, columns)

    return tuple(
        Adapter(
            name=f"adapter-{index}",
            source="synthetic",
            factors={
                (layer, name): Factors(
                    a=window(rank, modules.modules[modules.kinds[name]].d_in),
                    b=window(modules.modules[modules.kinds[name]].d_out, rank),
                    scale=1.0,
                )
                for layer in range(modules.num_layers)
                for name in names
            },
            base_fingerprint=base_fingerprint,
        )
        for index in range(count)
    )
