"""Products of few rows in Pallas-Triton.

Such a product is bound by the reading of its weight. A program multiplies all rows by one tile of
the weight's rows over one split of d_in.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.lora._triton_common import dot, iota
from pallas_kernels.lora.tilings import ProductChoice


MAX_SPLITS = 8


class Cut(NamedTuple):
    """How a product [rows, d_in] x [d_out, d_in]^T is cut. Static."""

    rows: int  # of a tile of x
    columns: int  # of the output a program makes
    depth: int  # of d_in a step
    steps: int  # of a program
    splits: int  # of d_in
    tiles: int  # of the output


def cut_of(rows: int, d_out: int, d_in: int, choice: ProductChoice) -> Cut | None:
    """None where tiles do not divide the widths."""
    if d_out % choice.columns or d_in % choice.depth:
        return None
    tiles, steps, splits = d_out // choice.columns, d_in // choice.depth, 1
    while tiles * splits < choice.programs and splits < MAX_SPLITS and steps % 2 == 0:
        splits, steps = 2 * splits, steps // 2
    return Cut(rows, choice.columns, choice.depth, steps, splits, tiles)


def product_kernel(x_ref, w_ref, parts_ref, *, cut: Cut):
    """parts[split, :, tile] = x @ w^T over the split."""
    tile, split = pl.program_id(0), pl.program_id(1)
    row, column = iota(cut.rows)[:, None], tile * cut.columns + iota(cut.columns)
    live = jnp.broadcast_to(row < x_ref.shape[0], (cut.rows, cut.depth))
    swap = cut.rows < 64  # the matrix units want 64 rows on the left

    def step(i, acc):
        start = (split * cut.steps + i) * cut.depth
        w = pltriton.load(w_ref.at[pl.ds(tile * cut.columns, cut.columns), pl.ds(start, cut.depth)])
        x_at = x_ref.at[row, (start + iota(cut.depth))[None, :]]
        x = pltriton.load(x_at, mask=live, other=0.0)
        return acc + (dot(w, x, trans_b=True) if swap else dot(x, w, trans_b=True))

    shape = (cut.columns, cut.rows) if swap else (cut.rows, cut.columns)
    acc = lax.fori_loop(0, cut.steps, step, jnp.zeros(shape, jnp.float32))
    acc = (acc.T if swap else acc).astype(parts_ref.dtype)
    there = jnp.broadcast_to(row < x_ref.shape[0], acc.shape)
    pltriton.store(parts_ref.at[split, row, column[None, :]], acc, mask=there)
