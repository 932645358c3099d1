"""Token embedding and output head, cut over the ranks along the vocabulary (padded to tp)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxlora import compat
from jaxlora.layers.parameter import parameter
from jaxlora.layers.product import product
from jaxlora.parallel.mesh import TP_AXIS


class VocabTable(nnx.Module):
    """A [vocab, hidden] matrix: rows are looked up as embeddings, or are the head's outputs."""

    def __init__(self, path: str, vocab: int, hidden: int, tp: int, dtype: DTypeLike) -> None:
        self.vocab = vocab
        self.weight = parameter({f"{path}.weight": (vocab, hidden)}, 0, tp, dtype)

    def embed(self, tokens: Int[Array, "tokens"]) -> Float[Array, "tokens hidden"]:
        """Each token's row. Ids must lie in the vocabulary."""
        table = self.weight[...]
        if compat.axis_size(TP_AXIS) == 1:
            return table.at[tokens].get(mode="clip")
        local = tokens - lax.axis_index(TP_AXIS).astype(tokens.dtype) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = table.at[jnp.where(mine, local, 0)].get(mode="promise_in_bounds")
        # One rank has the row and the others add exact zeros, so any dtype will do.
        return lax.psum(jnp.where(mine[:, None], rows, 0), TP_AXIS)

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Float32 scores of the whole vocabulary, on every rank."""
        scores = product(hidden, self.weight[...], jnp.float32)
        if compat.axis_size(TP_AXIS) > 1:
            scores = lax.all_gather(scores, TP_AXIS, axis=1, tiled=True)
        return scores[:, : self.vocab]
