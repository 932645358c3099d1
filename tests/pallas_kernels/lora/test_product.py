"""Base products of few rows in Pallas: right, and each row's bits its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora import product_cut, product_parts, sum_parts, tilings
from pallas_kernels.lora._triton_product import cut_of
from tests.tolerances import LORA_KERNEL


pytestmark = pytest.mark.pallas
INTERPRET = jax.default_backend() != "gpu"
D_OUT, D_IN = 256, 1024


def inputs(rows: int):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, D_IN))
    weight = rng.standard_normal((D_OUT, D_IN)) / np.sqrt(D_IN)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)


def parts_of(x, weight, *, tile: int, programs: int = 16, dtype="float32"):
    choice = tilings.ProductChoice(64, 128, programs, 4, 3)
    cut = cut_of(tile, D_OUT, D_IN, choice)
    assert cut is not None
    return product_parts(x, weight, dtype=dtype, cut=cut, choice=choice, interpret=INTERPRET)


@pytest.mark.parametrize(("rows", "tile"), [(1, 16), (5, 16), (16, 16), (17, 64), (64, 64)])
@pytest.mark.parametrize(("programs", "splits"), [(1, 1), (16, 4)])
def test_error_against_float64(rows, tile, programs, splits):
    x, weight = inputs(rows)
    parts = parts_of(x, weight, tile=tile, programs=programs)
    assert parts.shape == (splits, rows, D_OUT)
    x, weight = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, weight))
    error = np.abs(sum_parts(parts, jnp.float32) - x @ weight.T)
    assert (error <= LORA_KERNEL["float32"] * (np.abs(x) @ np.abs(weight).T)).all()


def test_one_split_is_rounded_once():
    x, weight = inputs(3)
    whole = parts_of(x, weight, tile=16, programs=1)[0]
    rounded = parts_of(x, weight, tile=16, programs=1, dtype="bfloat16")[0]
    np.testing.assert_array_equal(whole.astype(jnp.bfloat16), rounded)


@pytest.mark.parametrize("tile", [16, 64])
def test_a_row_has_the_same_bits_alone_and_at_any_position(tile):
    x, weight = inputs(tile)
    together = np.asarray(parts_of(x, weight, tile=tile))
    for rows in (1, 7):
        alone = np.asarray(parts_of(x[tile - rows :], weight, tile=tile))
        np.testing.assert_array_equal(alone, together[:, tile - rows :])


def test_a_row_of_nan_stays_a_matter_of_its_own():
    x, weight = inputs(9)
    clean = np.asarray(parts_of(x, weight, tile=16))
    bad = np.asarray(parts_of(x.at[4].set(np.nan), weight, tile=16))
    others = np.arange(9) != 4
    np.testing.assert_array_equal(bad[:, others], clean[:, others])
    assert np.isnan(bad[:, 4]).all()


def test_widths_that_tiles_do_not_divide_and_untuned_cards_are_left_to_xla():
    choice = tilings.ProductChoice(64, 128, 16, 4, 3)
    assert cut_of(16, 96, 1024, choice) is None
    assert cut_of(16, 128, 576, choice) is None
    if INTERPRET:
        assert product_cut(1, (4096, 4096), jnp.bfloat16) is None
