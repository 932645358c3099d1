"""Self-attention with grouped queries over a paged cache."""

from __future__ import annotations

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxlora.adapters.modules import AdaptableModule, ParallelKind
from jaxlora.config import ModelConfig
from jaxlora.layers.kv_cache import AttentionInputs, LayerKV
from jaxlora.layers.linear import AdapterStep, ColumnLinear, RowLinear
from jaxlora.layers.norm import RMSNorm
from jaxlora.layers.paged_attention import attend, write_kv
from jaxlora.layers.rotary import Rotation, rotate


def attention_modules(config: ModelConfig) -> tuple[AdaptableModule, ...]:
    hidden = config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        AdaptableModule("self_attn.q_proj", hidden, heads, ParallelKind.COLUMN),
        AdaptableModule("self_attn.k_proj", hidden, kv_heads, ParallelKind.COLUMN),
        AdaptableModule("self_attn.v_proj", hidden, kv_heads, ParallelKind.COLUMN),
        AdaptableModule("self_attn.o_proj", heads, hidden, ParallelKind.ROW),
    )


class Attention(nnx.Module):
    """Project, optionally norm q and k per head, rotate, cache, attend, project back."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        prefix: str,
        *,
        bias: bool,
        output_bias: bool,
        qk_norm: bool,
        tp: int,
        dtype: DTypeLike,
    ) -> None:
        q, k, v, o = attention_modules(config)
        self.head_dim = config.head_dim
        self.window = config.windows[layer]
        self.qkv = ColumnLinear(layer, prefix, (q, k, v), bias, tp, dtype)
        self.output = RowLinear(layer, prefix, o, output_bias, tp, dtype)
        self.q_norm, self.k_norm = (
            RMSNorm(f"{prefix}.self_attn.{name}", config.head_dim, config.rms_norm_eps, tp, dtype)
            if qk_norm
            else None
            for name in ("q_norm", "k_norm")
        )

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        kv: LayerKV,
        inputs: AttentionInputs,
        by: Rotation,
        adapters: AdapterStep | None,
    ) -> tuple[Float[Array, "tokens hidden"], LayerKV]:
        """Returns the block's output and the pools with this step's keys and values in them."""
        q, k, v = (y.reshape(y.shape[0], -1, self.head_dim) for y in self.qkv(x, adapters))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        kv = write_kv(kv, rotate(k, by), v, inputs)
        mixed = attend(rotate(q, by), kv, inputs, self.window)
        return self.output(mixed.reshape(x.shape[0], -1), adapters), kv
