from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.layers.embedding import VocabTable
from tests.support.on_mesh import call


VOCAB, HIDDEN = 7, 6


def table(tp: int) -> tuple[np.ndarray, np.ndarray]:
    """(the true table, the padded one): pad rows are what must never show."""
    true = np.random.default_rng(0).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    padded = np.full((-(-VOCAB // tp) * tp, HIDDEN), 1e30, np.float32)
    padded[:VOCAB] = true
    return true, padded


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_every_token_gets_its_row_exactly(tp: int) -> None:
    true, padded = table(tp)
    tokens = np.array([6, 0, 3, 3, 5, 1, 2, 4], np.int32)
    module = VocabTable("t", VOCAB, HIDDEN, tp, jnp.float32)
    got = call(module, {"weight": padded}, tp, lambda m, t: m.embed(t, None), tokens)
    np.testing.assert_array_equal(got, true[tokens])


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_float32_of_the_true_vocabulary(tp: int, dtype) -> None:
    true, padded = table(tp)
    hidden = np.random.default_rng(1).normal(size=(3, HIDDEN)).astype(dtype)
    module = VocabTable("t", VOCAB, HIDDEN, tp, dtype)
    params = {"weight": padded.astype(dtype)}
    got = call(module, params, tp, lambda m, h: m.logits(h, None), hidden)
    assert (got.shape, got.dtype) == ((3, VOCAB), jnp.float32)
    wanted = hidden.astype(np.float64) @ true.astype(dtype).astype(np.float64).T
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
