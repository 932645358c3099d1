"""How an adapter's factors are cut for a mesh and laid out as rows of the factor pool.

Column-parallel: A whole on every rank, B cut along d_out. Row-parallel: A cut along d_in, B whole;
the delta joins the rank's partial sum before the psum, so there is no collective of its own. The
layout of a factor's rows is described in `pallas_kernels.lora.tables`.
"""

from __future__ import annotations

import math

import numpy as np

from jaxlora.adapters.adapter import Adapter, Factors
from jaxlora.adapters.modules import AdaptableModule, ModuleTable, ParallelKind


# A row of the pool: wide enough to stream, narrow enough that few widths need padding.
MAX_ROW_WIDTH, MIN_ROW_WIDTH = 256, 32


def row_width(modules: ModuleTable, tp: int) -> int:
    """w: the largest power of two, 32 to 256, that divides every cut width (32 may pad some)."""
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
        for width in modules.modules[modules.kinds[name]].local_widths(tp):
            lengths.append(factor_rows(factors.rank, width, w))
    return lengths


def cut(factors: Factors, module: AdaptableModule, tp: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(A, B transposed) of every rank: [rank, local d_in] and [rank, local d_out]. Views."""
    a, b = factors.a, factors.b.T
    match module.parallel:
        case ParallelKind.COLUMN:
            return [(a, part) for part in np.split(b, tp, axis=1)]
        case ParallelKind.ROW:
            return [(part, b) for part in np.split(a, tp, axis=1)]
        case ParallelKind.REPLICATED:
            return [(a, b)] * tp


def to_rows(factor: np.ndarray, w: int) -> np.ndarray:
    """[rank, width] -> [factor_rows, w]: column block after column block, zero past the width."""
    rank, width = factor.shape
    blocks = -(-width // w)
    padded = np.zeros((rank, blocks * w), factor.dtype)
    padded[:, :width] = factor
    return padded.reshape(rank, blocks, w).swapaxes(0, 1).reshape(blocks * rank, w)
