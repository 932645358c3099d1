"""Root-mean-square norm (Zhang and Sennrich 2019), as the served families compute it."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxlora.layers.parameter import parameter


class RMSNorm(nnx.Module):
    """Over the last axis, in float32; the weight multiplies the result rounded to x's dtype."""

    def __init__(self, path: str, width: int, eps: float, tp: int, dtype: DTypeLike) -> None:
        self.eps = eps
        self.weight = parameter({f"{path}.weight": (width,)}, None, tp, dtype, init="ones")

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * scale).astype(x.dtype) * weight
