"""Logprobs against float64 on the host."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from serving.core import MAX_LOGPROBS
from serving.logprobs import read_scores, score
from tests.tolerances import LOGPROB_ATOL


@pytest.mark.parametrize(("rows", "vocab"), [(1, 3), (2, 20), (5, 257), (3, 1001)])
def test_logprobs_are_the_log_of_the_softmax_in_float32(rows, vocab):
    rng = np.random.default_rng(rows)
    logits = (rng.normal(size=(rows, vocab)) * 8).astype(np.float32)
    tokens = rng.integers(0, vocab, rows).astype(np.int32)
    counts = [(7 * row) % (MAX_LOGPROBS + 1) for row in range(rows)]
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    got = read_scores(score(jnp.asarray(logits), jnp.asarray(tokens)), counts)
    for row, (one, count) in enumerate(zip(got, counts, strict=True)):
        assert one.token_id == tokens[row]
        assert one.logprob == pytest.approx(exact[row, tokens[row]], abs=LOGPROB_ATOL)
        best = np.argsort(-exact[row], kind="stable")[: min(count, vocab)]
        assert [token for token, _ in one.top] == best.tolist()
        np.testing.assert_allclose([p for _, p in one.top], exact[row, best], atol=LOGPROB_ATOL)


def test_a_token_among_its_own_alternatives_has_the_same_float():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 100)), jnp.float32)
    tokens = jnp.argmax(logits, axis=1).astype(jnp.int32)
    for one in read_scores(score(logits, tokens), [1] * 4):
        assert one.top == ((one.token_id, one.logprob),)


def test_padding_rows_are_not_read():
    logits = jnp.full((4, 10), jnp.nan).at[:2].set(0.0)
    got = read_scores(score(logits, jnp.zeros(4, jnp.int32)), [1, 0])
    assert [one.logprob for one in got] == pytest.approx([-np.log(10)] * 2)
