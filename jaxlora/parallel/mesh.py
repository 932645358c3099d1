"""The device mesh: one axis, "tp", over which weights, KV heads and factors are cut."""

from __future__ import annotations

import os

import jax

from jaxlora import compat
from jaxlora.config import ModelConfig
from jaxlora.errors import ConfigError


TP_AXIS = "tp"


def prepare_devices(tp: int) -> None:
    """Make room for `tp` ranks on a CPU. Call before anything starts a JAX backend.

    XLA_FLAGS that already force a device count win; a GPU is not touched. Raises ConfigError where
    JAX has started with fewer.
    """
    if tp == 1 or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        compat.request_cpu_devices(tp)
    except RuntimeError:
        if (count := len(jax.devices())) < tp:
            raise ConfigError(
                f"--tp {tp}: JAX has already started with {count} {jax.default_backend()} device(s)"
            ) from None


def make_mesh(tp: int) -> jax.sharding.Mesh:
    """A mesh of the first `tp` devices. Raises ConfigError where there are fewer."""
    devices = jax.devices()
    if tp < 1 or len(devices) < tp:
        raise ConfigError(
            f"--tp {tp}: this machine has {len(devices)} {devices[0].platform} device(s)"
        )
    return compat.auto_mesh((tp,), (TP_AXIS,), devices[:tp])


def check_divisible(config: ModelConfig, tp: int) -> None:
    """Raise ConfigError where `tp` ranks cannot share the model (the vocabulary is padded)."""
    counts = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    for name, count in counts.items():
        if count % tp:
            raise ConfigError(f"--tp {tp} does not divide {name} {count} of {config.source}")
