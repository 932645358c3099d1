"""Token embedding and output head, cut over the ranks along the vocabulary (padded to tp)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxlora import compat
from jaxlora.adapters.modules import EMBEDDING, HEAD, AdaptableModule, ParallelKind
from jaxlora.config import ModelConfig
from jaxlora.layers.linear import AdapterStep
from jaxlora.layers.parameter import parameter
from jaxlora.layers.product import product
from jaxlora.parallel.mesh import TP_AXIS


def vocab_modules(config: ModelConfig) -> tuple[AdaptableModule, ...]:
    vocab, hidden = config.vocab_size, config.hidden_size
    return (
        AdaptableModule(EMBEDDING, vocab, hidden, ParallelKind.ROW),
        AdaptableModule(HEAD, hidden, vocab, ParallelKind.COLUMN),
    )


class VocabTable(nnx.Module):
    """A [vocab, hidden] matrix: rows are looked up as embeddings, or are the head's outputs."""

    def __init__(self, path: str, vocab: int, hidden: int, tp: int, dtype: DTypeLike) -> None:
        self.vocab = vocab
        self.weight = parameter({f"{path}.weight": (vocab, hidden)}, 0, tp, dtype)

    def embed(
        self, tokens: Int[Array, "tokens"], adapters: AdapterStep | None
    ) -> Float[Array, "tokens hidden"]:
        """Each token's row. Ids must lie in the vocabulary."""
        table = self.weight[...]
        if compat.axis_size(TP_AXIS) == 1:
            rows = table.at[tokens].get(mode="clip")
            if adapters is not None:
                rows = adapters.add_embedding_delta(rows, tokens)
        else:
            local = tokens - _first_id(table).astype(tokens.dtype)
            mine = (local >= 0) & (local < table.shape[0])
            local = jnp.where(mine, local, 0)
            rows = table.at[local].get(mode="promise_in_bounds")
            if adapters is not None:
                rows = adapters.add_embedding_delta(rows, local)
            # One rank has the row and the others add exact zeros, so any dtype will do.
            rows = lax.psum(jnp.where(mine[:, None], rows, 0), TP_AXIS)
        return rows if adapters is None else adapters.replace_rows(rows, tokens)

    def logits(
        self, hidden: Float[Array, "rows hidden"], adapters: AdapterStep | None
    ) -> Float[Array, "rows vocab"]:
        """Float32 scores of the whole vocabulary, on every rank."""
        table = self.weight[...]
        scores = product(hidden, table, jnp.float32)
        tp = compat.axis_size(TP_AXIS)
        if adapters is not None:
            scores = adapters.replace_scores(scores, hidden, 0 if tp == 1 else _first_id(table))
            scores = adapters.add_delta(
                scores, hidden, layer=0, modules=(HEAD,), widths=(table.shape[0],)
            )
            scores = adapters.add_bias(
                scores, None, layer=0, modules=(HEAD,), widths=(table.shape[0],)
            )
        if tp > 1:
            scores = lax.all_gather(scores, TP_AXIS, axis=1, tiled=True)
        return scores[:, : self.vocab]


def _first_id(table: Array) -> Array:
    """The token of this rank's first row."""
    return lax.axis_index(TP_AXIS) * table.shape[0]
