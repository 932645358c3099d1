from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.layers.product import product


def test_float32_products_are_never_done_in_lower_precision() -> None:
    text = str(
        jax.make_jaxpr(lambda x, w: product(x, w, jnp.float32))(jnp.ones((2, 3)), jnp.ones((4, 3)))
    )
    assert "HIGHEST" in text
    assert text.count("optimization_barrier") == 2


def test_bfloat16_products_are_summed_in_float32() -> None:
    x, weight = jnp.ones((1, 1000), jnp.bfloat16), jnp.ones((2, 1000), jnp.bfloat16)
    # A bfloat16 sum of ones stops at 256.
    np.testing.assert_array_equal(product(x, weight, jnp.float32), [[1000.0, 1000.0]])
    assert product(x, weight, jnp.bfloat16).dtype == jnp.bfloat16
