"""Gains and biases by slot, against a loop over the tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters.adapter import Vector
from jaxlora.adapters.corrections import CorrectionTables, add_biases, scale_rows


W, LAYERS, SLOTS = 4, 2, 4
WIDTHS = (6, 3, 8)  # of kinds 0, 2 and 1, as a merged layer has them
KINDS = (0, 2, 1)
TOKENS = 7


def make_tables() -> tuple[CorrectionTables, dict[tuple[int, int, int, int], np.ndarray]]:
    """Random vectors for some (kind, vector, layer, slot), none for slot 0; the rest is NaN."""
    rng = np.random.default_rng(0)
    first_row = np.full((3, 2, LAYERS, SLOTS), -1, np.int32)
    pool, known = [np.full((2, W), np.nan)], {}
    row = 2
    for place in np.ndindex(3, 2, LAYERS, SLOTS - 1):
        kind, which, layer, slot = *place[:3], place[3] + 1
        if rng.random() < 0.5:
            width = WIDTHS[KINDS.index(kind)]
            vector = rng.normal(size=width)
            padded = np.full(-(-width // W) * W, np.nan)
            padded[:width] = vector
            known[kind, which, layer, slot] = vector
            first_row[kind, which, layer, slot] = row
            pool.append(padded.reshape(-1, W))
            row += len(pool[-1])
    tables = CorrectionTables(
        jnp.asarray(np.concatenate(pool), jnp.float32), jnp.asarray(first_row)
    )
    return tables, known


def expected(y, known, slots, layer, which, bias=None):
    """y after the vectors, in float32, token by token."""
    y = np.asarray(y, np.float32).copy()
    starts = np.cumsum([0, *WIDTHS])
    for token, slot in enumerate(slots.tolist()):
        for kind, start, end in zip(KINDS, starts, starts[1:], strict=False):
            vector = known.get((kind, which, layer, slot))
            if which is Vector.GAIN and vector is not None:
                y[token, start:end] *= vector.astype(np.float32)
            elif which is Vector.BIAS and (vector is not None or bias is not None):
                y[token, start:end] += bias[start:end] if vector is None else vector
    return y


def inputs(dtype):
    rng = np.random.default_rng(1)
    y = jnp.asarray(rng.normal(size=(TOKENS, sum(WIDTHS))), dtype).at[0, 0].set(-0.0)
    return y, jnp.array([0, 1, 3, 0, 2, 2, 1], jnp.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_gains_multiply_and_other_rows_keep_their_bits(dtype, layer):
    (tables, known), (y, slots) = make_tables(), inputs(dtype)
    run = jax.jit(lambda y, layer: scale_rows(y, tables, slots, layer, KINDS, WIDTHS))
    got = run(y, layer)
    wanted = jnp.asarray(expected(y, known, slots, layer, Vector.GAIN)).astype(dtype)
    assert got.dtype == dtype
    assert_same_bits(got, wanted)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_bias_takes_the_place_of_the_bases(dtype, with_bias):
    (tables, known), (y, slots) = make_tables(), inputs(dtype)
    bias = jnp.asarray(np.random.default_rng(2).normal(size=sum(WIDTHS)), dtype)
    run = jax.jit(
        lambda y: add_biases(y, bias if with_bias else None, tables, slots, 1, KINDS, WIDTHS)
    )
    got = np.asarray(run(y), np.float32)
    rounded = {place: np.asarray(v, dtype).astype(np.float32) for place, v in known.items()}
    base = np.asarray(bias, np.float32) if with_bias else None
    wanted = expected(y, rounded, slots, 1, Vector.BIAS, base)
    np.testing.assert_array_equal(got, np.asarray(wanted.astype(dtype), np.float32))
    untouched = y + bias[None] if with_bias else y
    assert_same_bits(run(y)[slots == 0], untouched[slots == 0])


def assert_same_bits(got, wanted):
    assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()


def test_an_unused_pool_is_not_read():
    (tables, _), (y, _) = make_tables(), inputs(jnp.float32)
    none = tables._replace(
        pool=jnp.full_like(tables.pool, jnp.nan), first_row=jnp.full_like(tables.first_row, -1)
    )
    slots = jnp.array([0, 1, 2, 3, 3, 2, 1], jnp.int32)
    assert_same_bits(scale_rows(y, none, slots, 0, KINDS, WIDTHS), y)
    assert_same_bits(add_biases(y, None, none, slots, 0, KINDS, WIDTHS), y)
