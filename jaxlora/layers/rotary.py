"""Rotary position embedding (Su et al. 2021), with the scalings named in `config.ROPE_TYPES`."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxlora.config import RopeConfig


Rotation = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """[head_dim / 2] float32 angles per position."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    match rope.kind:
        case "default":
            return inverse
        case "linear":
            return inverse / np.float32(rope["factor"])
        case "llama3":
            return _llama3(inverse, rope)
        case "yarn":
            return _yarn(rope, head_dim)
        case kind:
            raise NotImplementedError(f"RoPE type {kind}")


def _llama3(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth) * inverse / rope["factor"] + smooth * inverse).astype(np.float32)


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """YaRN (Peng et al. 2023): waves that turn often within the original context are kept, those
    that turn seldom are stretched by `factor`, those between blended linearly by dimension.
    """

    def dimension(turns: float) -> float:
        """Where waves turn so often within the original context."""
        waves = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(rope.theta))

    low, high = dimension(rope["beta_fast"]), dimension(rope["beta_slow"])
    if rope["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.float32(rope.theta) ** exponents
    dimensions = np.arange(head_dim // 2, dtype=np.float32)
    kept = 1 - np.clip((dimensions - np.float32(low)) / np.float32(high - low), 0, 1)
    stretched = 1 / (np.float32(rope["factor"]) * wavelengths)
    return (stretched * (1 - kept) + 1 / wavelengths * kept).astype(np.float32)


def rotation(rope: RopeConfig, head_dim: int, positions: Int[Array, "tokens"]) -> Rotation:
    """(cos, sin) of each token's angles, float32; times the attention factor with yarn."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(rope, head_dim)[None]
    scale = rope["attention_factor"] if rope.kind == "yarn" else 1.0
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "tokens heads head_dim"], by: Rotation
) -> Float[Array, "tokens heads head_dim"]:
    """Rotate pairs (i, i + head_dim/2), in float32, rounded to x's dtype."""
    cos, sin = by[0][:, None], by[1][:, None]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(
        x.dtype
    )
