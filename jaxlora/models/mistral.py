"""Mistral (Jiang et al. 2023): no biases, a sliding window on every layer where one is set."""

from __future__ import annotations

from jax.typing import DTypeLike

from jaxlora.config import ModelConfig
from jaxlora.layers.attention import Attention
from jaxlora.layers.mlp import GatedMLP
from jaxlora.models.decoder import Decoder, DecoderLayer


class Mistral(Decoder):
    def make_layer(
        self, config: ModelConfig, layer: int, prefix: str, tp: int, dtype: DTypeLike
    ) -> DecoderLayer:
        attention = Attention(
            config, layer, prefix, bias=False, output_bias=False, qk_norm=False, tp=tp, dtype=dtype
        )
        mlp = GatedMLP(config, layer, prefix, False, tp, dtype)
        return DecoderLayer(config, prefix, attention, mlp, tp, dtype)
