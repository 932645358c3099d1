"""Qwen3 (Yang et al. 2025): per-head norms of q and k before the rotation, head_dim of its own."""

from __future__ import annotations

from jax.typing import DTypeLike

from jaxlora.config import ModelConfig
from jaxlora.layers.attention import Attention
from jaxlora.layers.mlp import GatedMLP
from jaxlora.models.decoder import Decoder, DecoderLayer


class Qwen3(Decoder):
    def make_layer(
        self, config: ModelConfig, layer: int, prefix: str, tp: int, dtype: DTypeLike
    ) -> DecoderLayer:
        bias = config.attention_bias
        attention = Attention(
            config, layer, prefix, bias=bias, output_bias=bias, qk_norm=True, tp=tp, dtype=dtype
        )
        mlp = GatedMLP(config, layer, prefix, False, tp, dtype)
        return DecoderLayer(config, prefix, attention, mlp, tp, dtype)
