"""Base products of few rows on a GPU, left as partial sums for deltas to be added to.

Which products come this way depends on their shapes and dtype and on the card, never on adapters,
and the partial sums are added in order: a row without an adapter has the same bits with and without
deltas.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels.lora import _triton_product
from pallas_kernels.lora._triton_product import Cut
from pallas_kernels.lora.tilings import ProductChoice, product_choice


MAX_ROWS = 64


def product_cut(rows: int, weight: tuple[int, ...], dtype: DTypeLike) -> Cut | None:
    """How `product_parts` cuts [rows, d_in] x [d_out, d_in]^T; None where it does not take it."""
    if rows > MAX_ROWS or dtype != jnp.bfloat16 or jax.default_backend() != "gpu":
        return None
    tile, (d_out, d_in) = (16 if rows <= 16 else 64), weight
    choice = product_choice(tile, d_out, d_in)
    return None if choice is None else _triton_product.cut_of(tile, d_out, d_in, choice)


def product_parts(
    x: Float[Array, "rows d_in"],
    weight: Float[Array, "d_out d_in"],
    *,
    dtype: DTypeLike,
    cut: Cut,
    choice: ProductChoice | None = None,  # None: this card's
    interpret: bool = False,
) -> Float[Array, "splits rows d_out"]:
    """float32 sums over each split of d_in; the product itself in `dtype` where there is one.

    Raises ValueError where `cut` is not one of x and weight, and NotImplementedError on a card that
    has no choice for it.
    """
    wanted = (cut.columns * cut.tiles, cut.depth * cut.steps * cut.splits)
    if weight.shape != wanted:
        raise ValueError(f"weight: wanted shape {wanted} as in the cut, got {weight.shape}")
    if x.ndim != 2 or x.shape[0] > cut.rows or x.shape[1] != wanted[1]:
        raise ValueError(f"x: wanted [{cut.rows} rows at most, {wanted[1]}], got {x.shape}")
    choice = choice or product_choice(cut.rows, *wanted)
    if choice is None:
        raise NotImplementedError("product_parts: this card has no choice in tilings.json")
    return _product_parts(
        x, weight, dtype=jnp.dtype(dtype), cut=cut, choice=choice, interpret=interpret
    )


# The inner jit makes a program of many layers trace and lower each kernel once.
@functools.partial(jax.jit, static_argnames=("dtype", "cut", "choice", "interpret"))
def _product_parts(x, weight, *, dtype, cut: Cut, choice: ProductChoice, interpret):
    shape = (cut.splits, x.shape[0], weight.shape[0])
    return pl.pallas_call(
        functools.partial(_triton_product.product_kernel, cut=cut),
        out_shape=jax.ShapeDtypeStruct(shape, dtype if cut.splits == 1 else jnp.float32),
        grid=(cut.tiles, cut.splits),
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=choice.warps, num_stages=choice.stages),
        name="product",
    )(x, weight)


def sum_parts(parts: Float[Array, "splits rows d"], dtype: DTypeLike) -> Float[Array, "rows d"]:
    """The parts added in order."""
    if parts.shape[0] == 1 and parts.dtype == dtype:
        return parts[0]
    return rounded(_in_order(parts), dtype)


def add_parts_and_delta(
    parts: Float[Array, "splits rows d"],
    delta: Float[Array, "rows d"],
    live: Array,
    dtype: DTypeLike,
) -> Float[Array, "rows d"]:
    """The parts added in order, plus the float32 delta where `live` [rows, d] says so."""
    y = _in_order(parts)
    return rounded(jnp.where(live, y + delta, y), dtype)


def rounded(y: Float[Array, "rows d"], dtype: DTypeLike) -> Float[Array, "rows d"]:
    """y in `dtype`, rounded even where XLA fuses what follows and would keep float32."""
    info = jnp.finfo(dtype)
    return lax.reduce_precision(y, info.nexp, info.nmant).astype(dtype)


def _in_order(parts: Array) -> Array:
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in list(parts)])
