from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxlora.layers.norm import RMSNorm
from jaxlora.layers.parameter import bind


def test_rows_are_scaled_to_unit_mean_square_in_float32() -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, 33)) * 50
    weight = np.random.default_rng(1).normal(size=33)
    wanted = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    norm = bind(
        RMSNorm("n", 33, 1e-5, 1, jnp.float32), {"weight": jnp.asarray(weight, jnp.float32)}
    )
    got = norm(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_bfloat16_squares_are_summed_in_float32() -> None:
    norm = bind(RMSNorm("n", 512, 1e-5, 1, jnp.bfloat16), {"weight": jnp.ones(512, jnp.bfloat16)})
    got = norm(jnp.full((1, 512), 3, jnp.bfloat16))  # a bfloat16 sum of 512 nines stops early
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jnp.bfloat16(1))
