"""What is known of an adapter only when the base's weights are loaded."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters.adapter import Adapter, Factors, Site, TokenRows, Vector
from jaxlora.adapters.base_weights import BaseWeights
from jaxlora.adapters.modules import EMBEDDING, HEAD
from jaxlora.adapters.pool import FactorPool
from jaxlora.adapters.pool_shape import PoolShape
from jaxlora.adapters.store import AdapterStore
from jaxlora.adapters.vectors import check_with_weights, compute_vectors
from jaxlora.checkpoints import load_model
from jaxlora.config import ModelConfig
from jaxlora.errors import AdapterError
from jaxlora.parallel.mesh import make_mesh
from tests.support.families import GOLDEN


Q: Site = (1, "self_attn.q_proj")


@pytest.fixture(scope="module")
def base() -> BaseWeights:
    folder, mesh = GOLDEN / "llama_biases", make_mesh(1)
    return BaseWeights(load_model(folder, ModelConfig.from_folder(folder), mesh, jnp.float32), mesh)


def untrained(base: BaseWeights, **changes) -> Adapter:
    """B is zero, as where training has not begun."""
    module = base.modules.module(Q[1])
    a, b = np.ones((2, module.d_in), np.float32), np.zeros((module.d_out, 2), np.float32)
    factors = {Q: dataclasses.replace(Factors(a, b, 2.0), **changes.pop("factors", {}))}
    return Adapter("new", "adapters/new", factors, "tiny", **changes)


def refused(adapter: Adapter, base: BaseWeights) -> str:
    with pytest.raises(AdapterError) as caught:
        check_with_weights(adapter, compute_vectors(adapter, base), base)
    return str(caught.value)


def test_what_was_not_trained_at_all_would_change_nothing(base):
    norms = base.norms(*Q, untrained(base).factors[Q], 2.0)
    rows = base.rows(EMBEDDING, np.array([3, 5]))
    for adapter in (
        untrained(base, factors={"magnitude": norms}),
        untrained(base, factors={"b_bias": np.zeros_like(norms)}),
        untrained(base, biases={Q: base.bias(*Q)}),
        untrained(base, token_rows={EMBEDDING: TokenRows((3, 5), rows)}),
    ):
        assert "would change nothing" in refused(adapter, base)


def test_one_changed_number_of_any_of_them_is_an_effect(base):
    bump = np.zeros(base.modules.module(Q[1]).d_out, np.float32)
    bump[-1] = 0.1
    norms = base.norms(*Q, untrained(base).factors[Q], 2.0)
    rows = base.rows(HEAD, np.array([3, 5]))
    for adapter in (
        untrained(base, factors={"magnitude": norms + bump}),
        untrained(base, factors={"b_bias": bump}),
        untrained(base, biases={Q: base.bias(*Q) + bump}),
        untrained(base, token_rows={HEAD: TokenRows((3, 5), rows[::-1])}),
    ):
        check_with_weights(adapter, compute_vectors(adapter, base), base)


def test_a_bias_of_b_is_scaled_and_stands_on_the_replaced_bias_or_the_bases(base):
    b_bias = np.arange(base.modules.module(Q[1]).d_out, dtype=np.float32)
    adapter = untrained(base, factors={"b_bias": b_bias}, strength=0.5)
    assert adapter.vectors == [(Q, Vector.BIAS)]
    (vector,) = compute_vectors(adapter, base)
    np.testing.assert_allclose(vector, base.bias(*Q) + b_bias, rtol=1e-6)  # 2.0 x 0.5
    own = untrained(base, factors={"b_bias": b_bias}, strength=0.5, biases={Q: -b_bias})
    np.testing.assert_array_equal(compute_vectors(own, base)[0], 0 * b_bias)


def test_a_strength_of_its_own_has_norms_of_its_own(base):
    rng = np.random.default_rng(0)
    module = base.modules.module(Q[1])
    changes = {"b": rng.normal(size=(module.d_out, 2)).astype(np.float32)}
    changes["magnitude"] = np.ones(module.d_out, np.float32)
    gains = [
        compute_vectors(untrained(base, factors=changes, strength=s), base)[0] for s in (1.0, 0.5)
    ]
    factors = untrained(base, factors=changes).factors[Q]
    np.testing.assert_array_equal(gains[1], 1 / base.norms(*Q, factors, 1.0))
    assert np.abs(gains[0] - gains[1]).max() > 0.01


def test_a_copy_of_another_bases_weights_is_refused(base):
    copy = base.rows(HEAD, np.arange(101)).copy()
    trained = {"b": np.ones((base.modules.module(Q[1]).d_out, 2), np.float32)}
    good = untrained(base, factors=trained, base_copies={HEAD: copy})
    check_with_weights(good, [], base)
    copy[50, 3] += 1
    assert "lm_head.base_layer.weight is not this base's weight" in refused(good, base)


def test_a_gain_that_is_not_finite_is_refused_by_its_output(base):
    """a and b cancel the base's weights of one output: DoRA would divide by zero."""
    module = base.modules.module(Q[1])
    weight = base._params[base._weight(*Q).path][base._weight(*Q).start]
    a = np.stack([np.asarray(weight), np.zeros(module.d_in, np.float32)])
    b = np.zeros((module.d_out, 2), np.float32)
    b[0, 0] = -0.5
    changes = {"a": a, "b": b, "magnitude": np.ones(module.d_out, np.float32)}
    message = refused(untrained(base, factors=changes), base)
    assert "model.layers.1.self_attn.q_proj: DoRA divides by the norm of output 0" in message


@pytest.mark.parametrize("bias", [True, False])
def test_a_scale_that_makes_a_bias_or_a_norm_infinite_is_refused(base, bias):
    d_out = base.modules.module(Q[1]).d_out
    if bias:
        changes, thing = {"b_bias": np.full(d_out, 3e38, np.float32)}, "lora_bias"
    else:
        changes = {"magnitude": np.ones(d_out, np.float32), "b": np.ones((d_out, 2), np.float32)}
        thing = "DoRA divides by the norm of output 0's weights, which is inf"
    message = refused(untrained(base, factors=changes, strength=1e25), base)
    assert thing in message and "self_attn.q_proj" in message


def test_a_strength_that_is_zero_in_float32_leaves_the_base(base):
    b = np.ones((base.modules.module(Q[1]).d_out, 2), np.float32)
    rows = TokenRows((3,), base.rows(EMBEDDING, np.array([3])))
    adapter = untrained(base, factors={"b": b}, strength=1e-60, token_rows={EMBEDDING: rows})
    assert "would change nothing" in refused(adapter, base)


def test_a_second_name_with_a_copy_of_another_base_is_refused_though_its_key_is_resident(base):
    copy = base.rows(HEAD, np.arange(101)).copy()
    b = np.ones((base.modules.module(Q[1]).d_out, 2), np.float32)
    first = untrained(base, factors={"b": b}, base_copies={HEAD: copy})
    second = dataclasses.replace(first, name="other", base_copies={HEAD: copy + 1})
    shape = PoolShape.for_adapters(
        [first], base.modules, 1, 4, memory=None, slots=None, max_rank=None
    )
    store = AdapterStore(FactorPool(shape, base.modules, make_mesh(1), jnp.dtype("float32"), base))
    store.add(first)
    assert first.key == second.key
    with pytest.raises(AdapterError, match="lm_head.base_layer.weight is not this base's"):
        store.add(second)
    assert list(store.keys) == ["new"]
