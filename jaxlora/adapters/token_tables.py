"""Rows of the embedding and the head that adapters replace, token by token.

The rows of all adapters lie in one array, each adapter's in a run with ascending ids. Whole on
every rank: they are few.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jaxlora.layers.product import dot


class Use(enum.IntEnum):
    """What a slot's rows stand in for. With tied weights both are the same run."""

    EMBEDDING = 0
    HEAD = 1


class TokenTables(NamedTuple):
    """The rows, and each slot's run of them."""

    ids: Int[Array, "token_rows"]
    rows: Float[Array, "token_rows hidden"]  # the model's dtype
    starts: Int[Array, "2 slots"]  # by `Use`
    counts: Int[Array, "2 slots"]


def replace_rows(
    x: Float[Array, "tokens hidden"],
    tokens: Int[Array, "tokens"],
    tables: TokenTables,
    slots: Int[Array, "tokens"],
) -> Float[Array, "tokens hidden"]:
    """x, with the row of each token whose slot has one for it."""
    first = tables.starts[Use.EMBEDDING][slots]
    end = first + tables.counts[Use.EMBEDDING][slots]
    low, high, last = first, end, tables.ids.shape[0] - 1
    for _ in range(max(last, 1).bit_length()):  # bisection: the first row whose id is not below
        middle = (low + high) // 2
        below = (low < high) & (tables.ids[jnp.minimum(middle, last)] < tokens)
        low, high = jnp.where(below, middle + 1, low), jnp.where(below, high, middle)
    at = jnp.minimum(low, last)
    found = (low < end) & (tables.ids[at] == tokens)
    return lax.optimization_barrier(jnp.where(found[:, None], tables.rows[at], x))


def replace_scores(
    scores: Float[Array, "rows vocab_local"],
    hidden: Float[Array, "rows hidden"],
    tables: TokenTables,
    slots: Int[Array, "rows"],
    first_id: int | Int[Array, ""],
    most: int,
) -> Float[Array, "rows vocab_local"]:
    """Scores of the tokens from `first_id` on, with those by the slots' own rows in their place.

    `most` is the largest number of rows that a slot has.
    """
    start, count = tables.starts[Use.HEAD][slots], tables.counts[Use.HEAD][slots]
    own = dot(hidden, tables.rows, jnp.float32)  # of all adapters: far fewer than the vocabulary
    place = jnp.minimum(start[:, None] + jnp.arange(most)[None], tables.ids.shape[0] - 1)
    column = tables.ids[place] - first_id
    width = scores.shape[1]
    mine = (jnp.arange(most)[None] < count[:, None]) & (column >= 0) & (column < width)
    column = jnp.where(mine, column, width)  # past the end: dropped
    row = jnp.arange(scores.shape[0])[:, None]
    values = jnp.take_along_axis(own, place, axis=1)
    return lax.optimization_barrier(scores.at[row, column].set(values, mode="drop"))
