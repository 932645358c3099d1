from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.config import ROPE_TYPES, ModelConfig, RopeConfig
from jaxlora.layers.rotary import inverse_frequencies, rotate, rotation
from tests.support.families import CASES, YARN
from tests.tolerances import ROPE_RTOL


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


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "yarn.json").read_text())


def yarn(folder: Path, name: str) -> RopeConfig:
    fields = CASES["qwen3"][1] | {"model_type": "qwen3", "rope_parameters": YARN[name]}
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_folder(folder).rope


@pytest.mark.parametrize("name", YARN)
def test_yarn_has_the_frequencies_and_factor_of_transformers(name: str, tmp_path: Path) -> None:
    rope, golden = yarn(tmp_path, name), GOLDEN[name]
    got = inverse_frequencies(rope, 32)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, golden["inverse_frequencies"], rtol=ROPE_RTOL)
    assert rope["attention_factor"] == pytest.approx(golden["attention_factor"], rel=1e-12)


def test_yarn_scales_cosine_and_sine_by_the_attention_factor(tmp_path: Path) -> None:
    rope = yarn(tmp_path, "attention_factor")
    cos, sin = rotation(rope, 32, jnp.arange(5))
    np.testing.assert_allclose(cos**2 + sin**2, np.full((5, 16), 0.7**2), rtol=1e-6)


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_every_rope_type_has_an_implementation(kind: str) -> None:
    rope = RopeConfig(
        10000.0, kind, tuple((name, 2.0 + i) for i, name in enumerate(ROPE_TYPES[kind]))
    )
    assert np.isfinite(inverse_frequencies(rope, 16)).all()
