"""How likely tokens were: computed on the device, read on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from serving.core import MAX_LOGPROBS, TokenLogprobs


class Scores(NamedTuple):
    """A row's token and the likeliest tokens in its place, best first. Logprobs are float32."""

    token: Int[Array, "rows"]
    logprob: Float[Array, "rows"]
    top: Int[Array, "rows alternatives"]
    top_logprobs: Float[Array, "rows alternatives"]


@jax.jit
def score(logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows"]) -> Scores:
    """Logprobs of `tokens` under the model's own float32 logits, before anything is done to them.

    A token's logprob is the same float whether it is read as itself or among the alternatives.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    logprob = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return Scores(tokens, logprob, top.astype(jnp.int32), top_logprobs)


def read_scores(scores: Scores, alternatives: Sequence[int]) -> list[TokenLogprobs]:
    """The first `len(alternatives)` rows, with so many each. Waits for the device."""
    tokens, logprobs, tops, top_logprobs = (np.asarray(array).tolist() for array in scores)
    return [
        TokenLogprobs(
            tokens[row],
            logprobs[row],
            tuple(zip(tops[row][:count], top_logprobs[row][:count], strict=True)),
        )
        for row, count in enumerate(alternatives)
    ]
