"""Norms, biases and comparisons of the base's weights, wherever and however they are cut."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxlora.adapters import base_weights
from jaxlora.adapters.adapter import Factors
from jaxlora.adapters.base_weights import BaseWeights
from jaxlora.adapters.modules import EMBEDDING, HEAD
from jaxlora.checkpoints import load_model
from jaxlora.config import ModelConfig
from jaxlora.parallel.mesh import make_mesh
from tests.support.families import GOLDEN


NAMES = ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", EMBEDDING, HEAD)


def load(family: str, tp: int) -> tuple[BaseWeights, dict[str, np.ndarray]]:
    folder, mesh = GOLDEN / family, make_mesh(tp)
    loaded = load_model(folder, ModelConfig.from_folder(folder), mesh, jnp.float32)
    return BaseWeights(loaded, mesh), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("chunk", [7, 512])  # divides no width, and holds each whole
@pytest.mark.parametrize("family", ["llama", "llama_biases"])  # tied, and not
def test_norms_are_those_of_the_rows_of_the_weight_and_delta(monkeypatch, family, chunk, tp):
    monkeypatch.setattr(base_weights, "CHUNK", chunk)
    base_weights._norms.clear_cache()
    base, tensors = load(family, tp)
    rng = np.random.default_rng(0)
    for name in NAMES:
        module, path = base.modules.module(name), base.modules.path(1, name)
        path = EMBEDDING if path == HEAD and base.modules.tied else path
        a = rng.normal(size=(3, module.d_in)).astype(np.float32)
        b = rng.normal(size=(module.d_out, 3)).astype(np.float32)
        weight = tensors[f"{path}.weight"].astype(np.float64)
        whole = (weight.T if name == EMBEDDING else weight) + 0.7 * (b.astype(np.float64) @ a)
        layer = 0 if base.modules.is_outer(name) else 1
        got = base.norms(layer, name, Factors(a, b, 1.0), 0.7)
        np.testing.assert_allclose(got, np.linalg.norm(whole, axis=1), rtol=2e-6, err_msg=name)
    base_weights._norms.clear_cache()


@pytest.mark.parametrize("tp", [1, 2])
def test_biases_are_whole_whatever_the_cut(tp):
    base, tensors = load("llama_biases", tp)
    for name in NAMES[:4]:
        np.testing.assert_array_equal(base.bias(1, name), tensors[f"model.layers.1.{name}.bias"])
    assert load("llama", tp)[0].bias(0, "self_attn.q_proj") is None


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_a_copy_holds_where_every_element_is_the_weights(tp, name):
    for family in ("llama", "llama_biases"):
        base, tensors = load(family, tp)
        weight = tensors[f"{EMBEDDING if base.modules.tied else name}.weight"]
        assert base.holds(name, weight)
        changed = weight.copy()
        changed[-1, -1] += 1
        assert not base.holds(name, changed)
        ids = np.array([3, 100, 51])
        np.testing.assert_array_equal(base.rows(name, ids), weight[ids])
