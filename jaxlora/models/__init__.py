"""The served model families, by the model_type of their config.json."""

from __future__ import annotations

from jax.typing import DTypeLike

from jaxlora.config import ModelConfig
from jaxlora.models.decoder import Decoder
from jaxlora.models.llama import Llama
from jaxlora.models.mistral import Mistral
from jaxlora.models.qwen2 import Qwen2
from jaxlora.models.qwen3 import Qwen3
from jaxlora.parallel.mesh import check_divisible


_FAMILIES: dict[str, type[Decoder]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}


def supported_model_types() -> tuple[str, ...]:
    return tuple(sorted(_FAMILIES))


def build(config: ModelConfig, tp: int, dtype: DTypeLike) -> Decoder:
    """The model without weights: its parameters are ShapeDtypeStructs of the whole mesh's shapes.

    Raises ConfigError where `tp` ranks cannot share it.
    """
    check_divisible(config, tp)
    return _FAMILIES[config.model_type](config, tp, dtype)
