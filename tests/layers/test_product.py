from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.layers.product import product


ROWS = [1, 2, 8, 32, 33]  # both sides of where the CPU changes its form


@pytest.mark.parametrize("rows", ROWS)
def test_every_form_is_the_product(rows: int) -> None:
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=(n, 40)).astype(np.float32) for n in (rows, 30))
    got = product(jnp.asarray(x), jnp.asarray(weight), jnp.float32)
    np.testing.assert_allclose(got, x @ weight.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_a_program_holds_one_product_in_full_precision(rows: int) -> None:
    x, weight = jnp.ones((rows, 3)), jnp.ones((4, 3))
    text = jax.jit(lambda x, w: product(x, w, jnp.float32)).lower(x, weight).as_text()
    assert text.count("stablehlo.dot_general") == 1
    assert text.count("precision = [HIGHEST, HIGHEST]") == 1
    turned = jax.default_backend() == "cpu" and rows in (2, 8, 32)
    assert ("stablehlo.transpose" in text) == turned


@pytest.mark.parametrize("rows", ROWS)
def test_bfloat16_products_are_summed_in_float32(rows: int) -> None:
    x, weight = jnp.ones((rows, 1000), jnp.bfloat16), jnp.ones((2, 1000), jnp.bfloat16)
    # A bfloat16 sum of ones stops at 256.
    np.testing.assert_array_equal(product(x, weight, jnp.float32), np.full((rows, 2), 1000.0))
    assert product(x, weight, jnp.bfloat16).dtype == jnp.bfloat16
