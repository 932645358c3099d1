"""How an adapter's factors are cut for a mesh and laid out as rows of the factor pool.

Column-parallel: A whole on every rank, B cut along d_out. Row-parallel: A cut along d_in, B whole;
the delta joins the rank's partial sum before the psum, so there is no collective of its own. The
layout of a factor's rows is described in `pallas_kernels.lora.tables`.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from jaxlora.adapters.adapter import Adapter, Factors
from jaxlora.adapters.modules import AdaptableModule, ModuleTable, ParallelKind


# A row of the pool: wide enough to stream, narrow enough that few widths need padding.
MAX_ROW_WIDTH, MIN_ROW_WIDTH = 256, 32


def row_width(modules: ModuleTable, tp: int) -> int:
    """w: the largest power of two, 32 to 256, that divides every cut width (32 may pad some).

    Of the layers' modules: a vocabulary, rarely adapted, is padded rather than narrow all rows.
    """
    widths = [width for module in modules.modules for width in module.local_widths(tp)]
    divisor = math.gcd(*widths)
    power_of_two = divisor & -divisor
    return min(max(power_of_two, MIN_ROW_WIDTH), MAX_ROW_WIDTH)


def factor_rows(rank: int, width: int, w: int) -> int:
    """Pool rows that a factor of this rank and (cut) width takes."""
    return rank * -(-width // w)


def adapter_row_lengths(adapter: Adapter, modules: ModuleTable, tp: int, w: int) -> list[int]:
    """Rows of each factor, A then B, in the order of `adapter.factors`; the same on every rank."""
    lengths = []
    for (_, name), factors in adapter.factors.items():
        for width in modules.module(name).local_widths(tp):
            lengths.append(factor_rows(factors.rank, width, w))
    return lengths


def vector_row_lengths(adapter: Adapter, modules: ModuleTable, tp: int, w: int) -> list[int]:
    """Rows of each of `adapter.vectors`, in their order; the same on every rank."""
    return [-(-modules.module(name).local_widths(tp)[1] // w) for (_, name), _ in adapter.vectors]


def cut(factors: Factors, module: AdaptableModule, tp: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(A, B transposed) of every rank: [rank, local d_in] and [rank, local d_out].

    Views, unless a vocabulary had to be padded.
    """
    a, b = factors.a, factors.b.T
    match module.parallel:
        case ParallelKind.COLUMN:
            return [(a, part) for part in split(b, tp)]
        case ParallelKind.ROW:
            return [(part, b) for part in split(a, tp)]
        case ParallelKind.REPLICATED:
            return [(a, b)] * tp


def cut_vector(
    vector: Float[np.ndarray, "d_out"], module: AdaptableModule, tp: int
) -> Float[np.ndarray, "tp d_local"]:
    """Every rank's part of a vector over a module's outputs."""
    if module.parallel is ParallelKind.COLUMN:
        return np.stack(split(vector, tp))
    return np.broadcast_to(vector, (tp, *vector.shape))


def split(array: np.ndarray, tp: int) -> list[np.ndarray]:
    """The last axis in `tp` equal parts, padded with zeros where it has to be."""
    missing = -array.shape[-1] % tp
    if missing:
        edges = [(0, 0)] * (array.ndim - 1) + [(0, missing)]
        array = np.pad(array, edges)
    return np.split(array, tp, axis=-1)


def to_rows(factor: np.ndarray, w: int) -> np.ndarray:
    """[rank, width] -> [factor_rows, w]: column block after column block, zero past the width."""
    rank, width = factor.shape
    blocks = -(-width // w)
    padded = np.zeros((rank, blocks * w), factor.dtype)
    padded[:, :width] = factor
    return padded.reshape(rank, blocks, w).swapaxes(0, 1).reshape(blocks * rank, w)
