"""The decoder that the dense families share: embed, layers of attention and MLP, norm, head."""

from __future__ import annotations

import dataclasses

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxlora.adapters.modules import EMBEDDING, HEAD, ModuleTable
from jaxlora.config import ModelConfig
from jaxlora.layers.attention import Attention, attention_modules
from jaxlora.layers.embedding import VocabTable, vocab_modules
from jaxlora.layers.kv_cache import AttentionInputs, KVCache, LayerKV
from jaxlora.layers.linear import AdapterStep
from jaxlora.layers.mlp import GatedMLP, mlp_modules
from jaxlora.layers.norm import RMSNorm
from jaxlora.layers.parameter import weight_specs
from jaxlora.layers.rotary import Rotation, rotation


LAYER_PREFIX = "model.layers"


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        attention: Attention,
        mlp: GatedMLP,
        tp: int,
        dtype: DTypeLike,
    ) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm", width, eps, tp, dtype)
        self.attention = attention
        self.mlp_norm = RMSNorm(f"{prefix}.post_attention_layernorm", width, eps, tp, dtype)
        self.mlp = mlp

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        kv: LayerKV,
        inputs: AttentionInputs,
        by: Rotation,
        adapters: AdapterStep | None,
    ) -> tuple[Float[Array, "tokens hidden"], LayerKV]:
        attended, kv = self.attention(self.input_norm(x), kv, inputs, by, adapters)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x), adapters), kv


class Decoder(nnx.Module):
    """A dense decoder. A family says in `make_layer` what its layers are made of.

    Built without weights (`jaxlora.models.build`); runs inside shard_map over the axis "tp" with
    the parameters that `bind` puts in place.
    """

    def __init__(self, config: ModelConfig, tp: int, dtype: DTypeLike) -> None:
        self.config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = VocabTable(EMBEDDING, vocab, hidden, tp, dtype)
        self.layers = nnx.List(
            [
                self.make_layer(config, layer, f"{LAYER_PREFIX}.{layer}", tp, dtype)
                for layer in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm("model.norm", hidden, config.rms_norm_eps, tp, dtype)
        self.head = (
            None if config.tie_word_embeddings else VocabTable(HEAD, vocab, hidden, tp, dtype)
        )
        self.modules = self._module_table()

    def _module_table(self) -> ModuleTable:
        config = self.config
        names = {piece.name for spec in weight_specs(self).values() for piece in spec.pieces}
        return ModuleTable(
            config.num_layers,
            tuple(
                dataclasses.replace(module, bias=f"{LAYER_PREFIX}.0.{module.name}.bias" in names)
                for module in attention_modules(config) + mlp_modules(config)
            ),
            LAYER_PREFIX,
            outer=vocab_modules(config),
            vocab_size=config.vocab_size,
            tied=config.tie_word_embeddings,
        )

    def make_layer(
        self, config: ModelConfig, layer: int, prefix: str, tp: int, dtype: DTypeLike
    ) -> DecoderLayer:
        raise NotImplementedError

    def __call__(
        self,
        tokens: Int[Array, "tokens"],
        kv: KVCache,
        attention: AttentionInputs,
        adapters: AdapterStep | None,
    ) -> tuple[Float[Array, "tokens hidden"], KVCache]:
        """The last hidden states, before the final norm, and the cache with this step written.

        With `adapters` None nothing of the adapter machinery is in the program.
        """
        layers = range(self.config.num_layers)
        return self.run_layers(layers, self.embed(tokens, adapters), kv, attention, adapters)

    def embed(
        self, tokens: Int[Array, "tokens"], adapters: AdapterStep | None
    ) -> Float[Array, "tokens hidden"]:
        """What the first layer takes."""
        return self.embedding.embed(tokens, adapters)

    def run_layers(
        self,
        layers: range,
        x: Float[Array, "tokens hidden"],
        kv: KVCache,
        attention: AttentionInputs,
        adapters: AdapterStep | None,
    ) -> tuple[Float[Array, "tokens hidden"], KVCache]:
        """Hidden states behind `layers`, whose pools alone `kv` holds, and these pools written."""
        by = rotation(self.config.rope, self.config.head_dim, attention.positions)
        written = []
        for layer, layer_kv in zip(layers, kv, strict=True):
            x, layer_kv = self.layers[layer](x, layer_kv, attention, by, adapters)
            written.append(layer_kv)
        return x, tuple(written)

    def logits(
        self, hidden: Float[Array, "rows hidden"], adapters: AdapterStep | None
    ) -> Float[Array, "rows vocab"]:
        """Final norm and head: float32 logits over the true vocabulary, whole on every rank.

        `adapters` routes the rows of `hidden`.
        """
        return (self.head or self.embedding).logits(self.norm(hidden), adapters)
