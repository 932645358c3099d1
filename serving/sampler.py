"""Choosing tokens on the device, and the per-lane state that it needs. Pure functions.

A lane is a running sequence's place in the device's state. The last lane is scrap: padding rows
read and write it. What a step must know about earlier tokens lives here, because a step is
dispatched before the host has read the last one's tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt

from serving.core import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams


class LaneState(NamedTuple):
    """What the device keeps of each lane between steps."""

    last_token: Int[Array, "lanes"]
    seed: UInt[Array, "lanes 2"]
    temperature: Float[Array, "lanes"]  # 0 is greedy
    top_k: Int[Array, "lanes"]  # 0 is no limit
    top_p: Float[Array, "lanes"]
    min_p: Float[Array, "lanes"]
    repetition_penalty: Float[Array, "lanes"]
    presence_penalty: Float[Array, "lanes"]
    frequency_penalty: Float[Array, "lanes"]
    bias_ids: Int[Array, "lanes biases"]  # -1 where unused
    biases: Float[Array, "lanes biases"]
    stop_after: Int[Array, "lanes"]  # a token at an earlier position may not be a stop token
    stop_ids: Int[Array, "lanes stop_ids"]  # -1 where unused


class TokenHistory(NamedTuple):
    """Which tokens a lane has seen. Written at admission where penalties need it, else stale."""

    in_prompt: Bool[Array, "lanes vocab"]
    counts: Int[Array, "lanes vocab"]  # how often each is in the answer


def empty_lanes(lanes: int) -> LaneState:
    """Host arrays for `lanes` lanes, scrap included, all greedy."""
    fields: dict[str, Any] = {
        "last_token": np.zeros(lanes, np.int32),
        "seed": np.zeros((lanes, 2), np.uint32),
        "temperature": np.zeros(lanes, np.float32),
        "top_k": np.zeros(lanes, np.int32),
        "top_p": np.ones(lanes, np.float32),
        "min_p": np.zeros(lanes, np.float32),
        "repetition_penalty": np.ones(lanes, np.float32),
        "presence_penalty": np.zeros(lanes, np.float32),
        "frequency_penalty": np.zeros(lanes, np.float32),
        "bias_ids": np.full((lanes, MAX_LOGIT_BIAS), -1, np.int32),
        "biases": np.zeros((lanes, MAX_LOGIT_BIAS), np.float32),
        "stop_after": np.zeros(lanes, np.int32),
        "stop_ids": np.full((lanes, MAX_STOP_IDS), -1, np.int32),
    }
    return LaneState(**fields)


# Stop ids a lane holds: a request's own, and the model's end-of-sequence ids.
MAX_STOP_IDS = 2 * MAX_STOP_TOKEN_IDS


def lane_row(
    sampling: SamplingParams, seed: int, prompt_length: int, eos_ids: tuple[int, ...]
) -> LaneState:
    """One lane's row for a sequence, as host arrays without the lanes axis."""
    stop_ids = list(dict.fromkeys((*sampling.stop_token_ids, *eos_ids)))
    fields: dict[str, Any] = {
        "last_token": np.int32(0),
        "seed": np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32),
        "temperature": np.float32(sampling.temperature),
        "top_k": np.int32(min(sampling.top_k, np.iinfo(np.int32).max)),
        "top_p": np.float32(sampling.top_p),
        "min_p": np.float32(sampling.min_p),
        "repetition_penalty": np.float32(sampling.repetition_penalty),
        "presence_penalty": np.float32(sampling.presence_penalty),
        "frequency_penalty": np.float32(sampling.frequency_penalty),
        "bias_ids": padded([token for token, _ in sampling.logit_bias], MAX_LOGIT_BIAS),
        "biases": padded([bias for _, bias in sampling.logit_bias], MAX_LOGIT_BIAS, np.float32),
        "stop_after": np.int32(prompt_length + sampling.min_tokens),
        "stop_ids": padded(stop_ids, MAX_STOP_IDS),
    }
    return LaneState(**fields)


def padded(values: Sequence[float], length: int, dtype: DTypeLike = np.int32) -> np.ndarray:
    """`values` as a vector of `length`, with -1 behind them."""
    vector = np.full(length, -1, dtype)
    vector[: len(values)] = values
    return vector


@functools.partial(jax.jit, donate_argnums=0)
def admit(lanes: LaneState, lane: Int[Array, ""], row: LaneState) -> LaneState:
    """Donates `lanes`; row `lane` becomes `row`."""
    return jax.tree.map(lambda table, value: table.at[lane].set(value), lanes, row)


@functools.partial(jax.jit, donate_argnums=0)
def admit_history(
    history: TokenHistory,
    lane: Int[Array, ""],
    prompt: Int[Array, "context"],
    answer: Int[Array, "context"],
) -> TokenHistory:
    """Donates `history`; lane `lane` has seen these tokens (-1 is padding)."""
    vocab = history.counts.shape[1]
    in_prompt = history.in_prompt.at[lane].set(False)
    counts = history.counts.at[lane].set(0)
    prompt = jnp.where(prompt < 0, vocab, prompt)  # past the end: dropped
    answer = jnp.where(answer < 0, vocab, answer)
    return TokenHistory(
        in_prompt.at[lane, prompt].set(True, mode="drop"),
        counts.at[lane, answer].add(1, mode="drop"),
    )


@functools.partial(jax.jit, donate_argnums=0)
def sample_greedy(
    lanes: LaneState,
    lane_ids: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    logits: Float[Array, "rows vocab"],
) -> tuple[LaneState, Int[Array, "rows"]]:
    """`sample` for rows that are all `SamplingParams.plain`, which saves most of the work."""
    rows: LaneState = jax.tree.map(lambda table: table[lane_ids], lanes)
    tokens = _best(_without_early_stops(logits, rows, positions))
    return lanes._replace(last_token=lanes.last_token.at[lane_ids].set(tokens)), tokens


@functools.partial(jax.jit, donate_argnums=(0, 1))
def sample(
    lanes: LaneState,
    history: TokenHistory,
    lane_ids: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    logits: Float[Array, "rows vocab"],
) -> tuple[LaneState, TokenHistory, Int[Array, "rows"]]:
    """The tokens at `positions` of the sequences in `lane_ids`. Donates `lanes` and `history`.

    Random numbers depend on a lane's seed and the position alone. A plain row gets the same token
    as from `sample_greedy`.
    """
    rows: LaneState = jax.tree.map(lambda table: table[lane_ids], lanes)
    logits = _without_early_stops(_biased(logits, rows), rows, positions)
    logits = _penalized(logits, rows, history.in_prompt[lane_ids], history.counts[lane_ids])
    drawn = _best(_filtered(logits, rows) + _gumbel(rows.seed, positions, logits))
    tokens = jnp.where(rows.temperature > 0, drawn, _best(logits))
    counts = history.counts.at[lane_ids, tokens].add(1)
    lanes = lanes._replace(last_token=lanes.last_token.at[lane_ids].set(tokens))
    return lanes, history._replace(counts=counts), tokens


def _best(scores):
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def _biased(logits, rows: LaneState):
    """logit_bias: what is added to single tokens' logits."""
    ids = jnp.where(rows.bias_ids < 0, logits.shape[-1], rows.bias_ids)  # past the end: dropped
    return jax.vmap(lambda row, at, bias: row.at[at].add(bias, mode="drop"))(
        logits, ids, rows.biases
    )


def _penalized(logits, rows: LaneState, in_prompt, counts):
    """The three penalties on tokens seen before, in the order of vLLM and of transformers."""
    repetition = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_prompt | (counts > 0), repeated, logits)
    logits = logits - rows.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return logits - jnp.where(counts > 0, rows.presence_penalty[:, None], 0.0)


def _without_early_stops(logits, rows: LaneState, positions):
    """min_tokens: stop ids cannot be chosen before `stop_after`."""
    vocab = logits.shape[-1]
    early = (positions < rows.stop_after)[:, None] & (rows.stop_ids >= 0)
    ids = jnp.where(early, rows.stop_ids, vocab)  # past the end: dropped
    return jax.vmap(lambda row, drop: row.at[drop].set(-jnp.inf, mode="drop"))(logits, ids)


def _gumbel(seeds, positions, logits):
    """Gumbel noise: argmax(logits + noise) draws from softmax(logits)."""

    def row(seed, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    return jax.vmap(row)(seeds, positions)


def _filtered(logits, rows: LaneState):
    """Temperature, then top_k, top_p and min_p, in transformers' order; what is cut is -inf.

    All three keep the tokens nearest to the best one: each is a limit on a token's distance, its
    logit's shortfall. Tokens that tie at a limit are all kept.
    """
    vocab = logits.shape[-1]
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    # From the best logit down, lest a tiny temperature make infinities of good ones.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    distance = -logits

    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    ones = jnp.ones_like(distance)
    limit = _distance_holding(distance, ones, top_k.astype(jnp.float32))

    mass = jnp.where(distance <= limit[:, None], jnp.exp(-distance), 0.0)
    mass = mass / jnp.sum(mass, axis=-1, keepdims=True)
    wanted = jnp.where(rows.top_p < 1, rows.top_p, jnp.inf)
    limit = jnp.minimum(limit, _distance_holding(distance, mass, wanted))

    limit = jnp.minimum(limit, -jnp.log(rows.min_p))
    return jnp.where(distance <= limit[:, None], logits, -jnp.inf)


def _distance_holding(
    distance: Float[Array, "rows vocab"],
    weight: Float[Array, "rows vocab"],
    wanted: Float[Array, "rows"],
) -> Float[Array, "rows"]:
    """The smallest c for which the weight within distance c reaches `wanted`; inf if none does.

    Exact and without a sort: non-negative floats order as their bits do, so c, the largest t with
    too little weight below t, is found bit by bit.
    """
    infinity = jax.lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)

    def turn(index, bits):
        trial = bits | (jnp.int32(1 << 30) >> index)
        below = distance < jax.lax.bitcast_convert_type(trial, jnp.float32)[:, None]
        too_little = jnp.sum(jnp.where(below, weight, 0.0), axis=-1) < wanted
        return jnp.where(too_little & (trial <= infinity), trial, bits)

    bits = jax.lax.fori_loop(0, 31, turn, jnp.zeros(wanted.shape, jnp.int32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
