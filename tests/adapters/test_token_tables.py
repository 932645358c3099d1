"""Rows of the embedding and the head that adapters replace, against a loop over the tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters.token_tables import TokenTables, replace_rows, replace_scores


HIDDEN, VOCAB = 5, 12
# slot -> the tokens whose rows it has, for the embedding and for the head.
IDS = {1: ((0, 3, 11), (0, 3, 11)), 2: ((4,), ()), 3: ((), (1, 2, 5, 6, 7))}


def make_tables() -> tuple[TokenTables, dict[tuple[int, int, int], np.ndarray]]:
    """Runs of rows in no order of slots; (use, slot, token) -> row."""
    rng = np.random.default_rng(0)
    ids, rows, known = [9, 9], [np.full(HIDDEN, np.nan)] * 2, {}  # what no slot uses
    place = np.zeros((2, 2, 4), np.int32)
    for slot in (3, 1, 2):
        for use in (0, 1):
            place[:, use, slot] = len(ids), len(IDS[slot][use])
            for token in IDS[slot][use]:
                known[use, slot, token] = rng.normal(size=HIDDEN).astype(np.float32)
                ids.append(token)
                rows.append(known[use, slot, token])
    tables = TokenTables(
        jnp.asarray(ids, jnp.int32), jnp.asarray(np.stack(rows), jnp.float32), place[0], place[1]
    )
    return tables, known


def test_each_token_gets_its_adapters_row_and_others_keep_their_bits():
    tables, known = make_tables()
    tokens = np.tile(np.arange(VOCAB, dtype=np.int32), 4)
    slots = np.repeat(np.arange(4, dtype=np.int32), VOCAB)
    x = np.random.default_rng(1).normal(size=(len(tokens), HIDDEN)).astype(np.float32)
    x[0, 0] = -0.0
    got = jax.jit(replace_rows)(x, tokens, tables, slots)
    wanted = [known.get((0, s, t), row) for s, t, row in zip(slots, tokens, x, strict=True)]
    assert np.asarray(got).tobytes() == np.stack(wanted).tobytes()


@pytest.mark.parametrize(("first", "width"), [(0, VOCAB), (0, 7), (7, 7)])
def test_scores_are_those_of_the_adapters_rows_on_whichever_rank(first, width):
    tables, known = make_tables()
    tables = tables._replace(rows=jnp.nan_to_num(tables.rows))
    slots = np.array([0, 1, 2, 3, 1, 0], np.int32)
    rng = np.random.default_rng(2)
    hidden = rng.normal(size=(len(slots), HIDDEN)).astype(np.float32)
    scores = rng.normal(size=(len(slots), width)).astype(np.float32)
    run = jax.jit(replace_scores, static_argnums=5)
    got = np.asarray(run(scores, hidden, tables, slots, first, 5))
    wanted = scores.astype(np.float64)
    for row, slot in enumerate(slots):
        for token in IDS.get(slot, ((), ()))[1]:
            if first <= token < first + width:
                wanted[row, token - first] = hidden[row] @ known[1, slot, token].astype(np.float64)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    assert got[slots == 0].tobytes() == scores[slots == 0].tobytes()
