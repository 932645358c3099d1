from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxlora import compat
from jaxlora.config import ModelConfig
from jaxlora.errors import ConfigError
from jaxlora.parallel.mesh import check_divisible, make_mesh, prepare_devices
from tests.support.families import GOLDEN


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("intermediate_size", "intermediate_size"),
    ],
)
def test_counts_that_tp_does_not_divide_are_refused_by_name(field: str, key: str) -> None:
    config = ModelConfig.from_folder(GOLDEN / "llama")
    check_divisible(config, 2)
    with pytest.raises(ConfigError, match=f"--tp 2 does not divide {key} 3 of .*config.json"):
        check_divisible(dataclasses.replace(config, **{field: 3}), 2)


def test_an_odd_vocabulary_or_hidden_size_refuses_no_tp() -> None:
    config = ModelConfig.from_folder(GOLDEN / "llama")
    check_divisible(dataclasses.replace(config, vocab_size=7, hidden_size=9), 2)


def test_more_ranks_than_devices_are_refused() -> None:
    count = len(jax.devices())
    with pytest.raises(ConfigError, match=f"--tp {count + 1}: this machine has {count} "):
        make_mesh(count + 1)


def test_devices_are_asked_for_unless_xla_flags_already_force_a_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(compat, "request_cpu_devices", asked.append)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    prepare_devices(1)
    prepare_devices(3)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    prepare_devices(5)
    assert asked == [3]
