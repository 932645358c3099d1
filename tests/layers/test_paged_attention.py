from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.layers.kv_cache import AttentionInputs, LayerKV
from jaxlora.layers.paged_attention import attend, write_kv


BLOCK, HEAD_DIM = 4, 6


def naive(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, window: int | None):
    """One query [heads, d] over its own k and v [context, kv_heads, d], in float64."""
    group = q.shape[0] // k.shape[1]
    first = 0 if window is None else max(0, position - window + 1)
    k, v = (np.repeat(x[first : position + 1], group, axis=1).astype(np.float64) for x in (k, v))
    scores = np.einsum("hd,chd->hc", q.astype(np.float64), k) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hc,chd->hd", weights / weights.sum(-1, keepdims=True), v)


class Case:
    """Sequences of `lengths` whose last `queries` tokens are asked; all else is NaN."""

    def __init__(
        self, lengths: tuple[int, ...], queries: int, heads: int, kv_heads: int, blocks: int
    ):
        rng = np.random.default_rng(0)
        self.lengths, self.queries = lengths, queries
        self.k, self.v = (
            [rng.normal(size=(n, kv_heads, HEAD_DIM)).astype(np.float32) for n in lengths]
            for _ in range(2)
        )
        self.q = rng.normal(size=(len(lengths), queries, heads, HEAD_DIM)).astype(np.float32)
        order = rng.permutation(len(lengths) * blocks) + 1
        self.tables = order.reshape(len(lengths), blocks).astype(np.int32)
        self.positions = np.array([np.arange(n - queries, n) for n in lengths], np.int32)
        pool = np.full((order.size + 1, BLOCK, kv_heads * HEAD_DIM), np.nan, np.float32)
        self.pools = LayerKV(pool, pool.copy())
        for row, n in enumerate(lengths):
            for j in range(n - queries):
                at = self.tables[row, j // BLOCK], j % BLOCK
                self.pools.k[at], self.pools.v[at] = self.k[row][j].ravel(), self.v[row][j].ravel()

    def step(
        self, window: int | None = None, context_chunk: int = 256, padding: int = 0
    ) -> tuple[np.ndarray, LayerKV]:
        """(outputs, pools); `padding` sequences of none but padding tokens stand behind."""
        pad = ((0, padding), (0, 0))
        tables, positions = np.pad(self.tables, pad), np.pad(self.positions, pad)
        write = np.take_along_axis(tables, positions // BLOCK, 1) * BLOCK + positions % BLOCK
        inputs = AttentionInputs(
            tables, positions.ravel(), write.ravel(), self.queries, context_chunk
        )
        pad = ((0, padding * self.queries), (0, 0), (0, 0))
        k, v = (
            np.pad(np.concatenate([x[-self.queries :] for x in side]), pad)
            for side in (self.k, self.v)
        )
        q = np.pad(self.q.reshape(-1, *self.q.shape[2:]), pad)

        @jax.jit
        def step(q, k, v, pools, inputs):
            pools = write_kv(pools, k, v, inputs)
            return attend(q, pools, inputs, window), pools

        out, pools = step(q, k, v, self.pools, inputs)
        return np.asarray(out)[: len(q) - pad[0][1]].reshape(self.q.shape), pools

    def run(self, window: int | None = None, context_chunk: int = 256) -> np.ndarray:
        return self.step(window, context_chunk)[0]

    def expected(self, window: int | None) -> np.ndarray:
        return np.array(
            [
                [
                    naive(self.q[row, i], self.k[row], self.v[row], position, window)
                    for i, position in enumerate(self.positions[row])
                ]
                for row in range(len(self.lengths))
            ]
        )


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("context_chunk", [256, 8])
@pytest.mark.parametrize(
    ("lengths", "queries", "heads", "kv_heads"),
    [((13, 4, 27), 1, 6, 2), ((9,), 1, 3, 1), ((13, 7), 3, 4, 4), ((23,), 23, 4, 2)],
)
def test_equals_naive_attention_over_poisoned_pools(
    lengths, queries, heads, kv_heads, window, context_chunk
) -> None:
    case = Case(lengths, queries, heads, kv_heads, blocks=7)
    got = case.run(window, context_chunk)
    np.testing.assert_allclose(got, case.expected(window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_a_row_has_the_same_bits_however_many_pieces_others_need(window: int | None) -> None:
    long, short = Case((6, 28), 1, 4, 2, blocks=7), Case((6, 28), 1, 4, 2, blocks=7)
    short.positions[1] = 2  # the first row is as before; the other now needs one piece
    np.testing.assert_array_equal(long.run(window, 8)[0], short.run(window, 8)[0])


def test_padding_rows_write_scrap_and_change_no_other_row() -> None:
    case = Case((6, 9), 1, 4, 2, blocks=3)
    out, pools = case.step()
    padded_out, padded_pools = case.step(padding=2)
    np.testing.assert_allclose(padded_out, out, rtol=0, atol=1e-6)
    for pool, padded in zip(pools, padded_pools, strict=True):
        np.testing.assert_array_equal(padded[1:], pool[1:])


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    ("sequences", "queries", "blocks"), [(1, 1, 4), (1, 1, 8), (8, 1, 8), (2, 5, 8)]
)
def test_no_step_copies_a_pool(kv_heads: int, sequences: int, queries: int, blocks: int) -> None:
    """Pools may fill the memory: a step that copies one fails there, and is slow elsewhere."""
    pool = jax.ShapeDtypeStruct((1003, BLOCK, kv_heads * HEAD_DIM), jnp.float32)
    tokens = sequences * queries
    numbers = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    inputs = AttentionInputs(
        jax.ShapeDtypeStruct((sequences, blocks), jnp.int32), numbers, numbers, queries, 4 * BLOCK
    )
    kv = jax.ShapeDtypeStruct((tokens, kv_heads, HEAD_DIM), jnp.float32)
    q = jax.ShapeDtypeStruct((tokens, 2 * kv_heads, HEAD_DIM), jnp.float32)

    def step(pools, q, k, v, inputs):
        pools = write_kv(pools, k, v, inputs)
        return attend(q, pools, inputs, None), pools

    compiled = (
        jax.jit(step, donate_argnums=0).lower(LayerKV(pool, pool), q, kv, kv, inputs).compile()
    )
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if re.search(r"= f32\[(1003|4012),.* copy\(", line)
    ]
    assert not copies
    assert compiled.memory_analysis().temp_size_in_bytes < 1003 * BLOCK * kv_heads * HEAD_DIM * 4
