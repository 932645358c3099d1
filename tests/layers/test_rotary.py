from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.config import ROPE_TYPES, RopeConfig
from jaxlora.layers.rotary import inverse_frequencies, rotate, rotation


LLAMA3 = RopeConfig(
    10000.0,
    "llama3",
    (
        ("factor", 8.0),
        ("low_freq_factor", 1.0),
        ("high_freq_factor", 4.0),
        ("original_max_position_embeddings", 256.0),
    ),
)


def test_pairs_are_turned_as_complex_numbers() -> None:
    rope, head_dim = RopeConfig(100.0), 8
    x = np.random.default_rng(0).normal(size=(5, 3, head_dim))
    positions = np.array([0, 1, 7, 40, 3])
    turn = np.exp(1j * positions[:, None] * 100.0 ** -(np.arange(0, head_dim, 2) / head_dim))
    turned = (x[..., :4] + 1j * x[..., 4:]) * turn[:, None]
    by = rotation(rope, head_dim, jnp.asarray(positions, jnp.int32))
    got = rotate(jnp.asarray(x, jnp.float32), by)
    np.testing.assert_allclose(
        got, np.concatenate([turned.real, turned.imag], axis=-1), rtol=0, atol=1e-5
    )


def test_linear_scaling_stretches_every_wave() -> None:
    plain = inverse_frequencies(RopeConfig(10000.0), 16)
    linear = inverse_frequencies(RopeConfig(10000.0, "linear", (("factor", 4.0),)), 16)
    np.testing.assert_array_equal(linear, plain / np.float32(4))


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, scaled = inverse_frequencies(RopeConfig(10000.0), 64), inverse_frequencies(LLAMA3, 64)
    turns = 256 * plain / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns >= 4], plain[turns >= 4])
    np.testing.assert_array_equal(scaled[turns <= 1], plain[turns <= 1] / np.float32(8))
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert np.all(scaled[between] < plain[between])
    assert np.all(scaled[between] > plain[between] / 8)


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_every_rope_type_has_an_implementation(kind: str) -> None:
    rope = RopeConfig(
        10000.0, kind, tuple((name, 2.0 + i) for i, name in enumerate(ROPE_TYPES[kind]))
    )
    assert np.isfinite(inverse_frequencies(rope, 16)).all()
