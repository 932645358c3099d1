"""`dot` and `product`: every matrix product of a model goes through here.

Weights keep the checkpoint's [d_out, d_in]. On a CPU that is as fast as the transpose for one row
and faster for several, and one layout serves the embedding's look-up and the head.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float


# The row counts for which the CPU compiler's product is up to twice as fast with the weight as the
# left operand. Fixed by measurement; a program's row count is static, so a shape has one form.
WEIGHT_FIRST_ROWS = range(2, 33)


def precision(dtype: DTypeLike) -> lax.Precision:
    """float32 means float32: never TF32 or bfloat16 passes."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def dot(
    x: Float[Array, "rows d_in"], weight: Float[Array, "d_out d_in"], dtype: DTypeLike
) -> Float[Array, "rows d_out"]:
    """x @ weight^T, summed in float32 and rounded to `dtype`."""
    multiply = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=jnp.dtype(dtype),
    )
    if x.shape[0] in WEIGHT_FIRST_ROWS and jax.default_backend() == "cpu":
        # Without the barrier the transpose is folded into the product, which turns it round.
        return lax.optimization_barrier(multiply(weight, x)).T
    return multiply(x, weight)


def product(
    x: Float[Array, "rows d_in"], weight: Float[Array, "d_out d_in"], dtype: DTypeLike
) -> Float[Array, "rows d_out"]:
    """A base product, kept apart from what surrounds it.

    The barriers make it the same operation in the programs with and without adapters, so that a
    row without an adapter has the same bits in both.
    """
    return lax.optimization_barrier(dot(lax.optimization_barrier(x), weight, dtype))
