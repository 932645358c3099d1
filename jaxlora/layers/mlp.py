"""The gated feed-forward block (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxlora.adapters.modules import AdaptableModule, ParallelKind
from jaxlora.config import ModelConfig
from jaxlora.layers.linear import AdapterStep, ColumnLinear, RowLinear


def mlp_modules(config: ModelConfig) -> tuple[AdaptableModule, ...]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return (
        AdaptableModule("mlp.gate_proj", hidden, inner, ParallelKind.COLUMN),
        AdaptableModule("mlp.up_proj", hidden, inner, ParallelKind.COLUMN),
        AdaptableModule("mlp.down_proj", inner, hidden, ParallelKind.ROW),
    )


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: ModelConfig, layer: int, prefix: str, bias: bool, tp: int, dtype: DTypeLike
    ) -> None:
        gate, up, down = mlp_modules(config)
        self.gate_up = ColumnLinear(layer, prefix, (gate, up), bias, tp, dtype)
        self.down = RowLinear(layer, prefix, down, bias, tp, dtype)

    def __call__(
        self, x: Float[Array, "tokens hidden"], adapters: AdapterStep | None
    ) -> Float[Array, "tokens hidden"]:
        return self.down(self.gate_up.gated(x, adapters), adapters)
