"""Llama (Touvron et al. 2023; SmolLM2 is one): plain GQA and SwiGLU, biases by config."""

from __future__ import annotations

from jax.typing import DTypeLike

from jaxlora.config import ModelConfig
from jaxlora.layers.attention import Attention
from jaxlora.layers.mlp import GatedMLP
from jaxlora.models.decoder import Decoder, DecoderLayer


class Llama(Decoder):
    def make_layer(
        self, config: ModelConfig, layer: int, prefix: str, tp: int, dtype: DTypeLike
    ) -> DecoderLayer:
        bias = config.attention_bias
        attention = Attention(
            config, layer, prefix, bias=bias, output_bias=bias, qk_norm=False, tp=tp, dtype=dtype
        )
        mlp = GatedMLP(config, layer, prefix, config.mlp_bias, tp, dtype)
        return DecoderLayer(config, prefix, attention, mlp, tp, dtype)
