"""`dot` and `product`: every matrix product of a model goes through here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float


def precision(dtype: DTypeLike) -> lax.Precision:
    """float32 means float32: never TF32 or bfloat16 passes."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def dot(
    x: Float[Array, "rows d_in"], weight: Float[Array, "d_out d_in"], dtype: DTypeLike
) -> Float[Array, "rows d_out"]:
    """x @ weight^T, summed in float32 and rounded to `dtype`.

    Weights keep the checkpoint's [d_out, d_in]: on a CPU it is as fast as the transpose for one
    row and up to twice as fast for several, and each output row is read along memory.
    """
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=jnp.dtype(dtype),
    )


def product(
    x: Float[Array, "rows d_in"], weight: Float[Array, "d_out d_in"], dtype: DTypeLike
) -> Float[Array, "rows d_out"]:
    """A base product, kept apart from what surrounds it.

    The barriers make it the same operation in the programs with and without adapters, so that a
    row without an adapter has the same bits in both.
    """
    return jax.lax.optimization_barrier(dot(lax.optimization_barrier(x), weight, dtype))
