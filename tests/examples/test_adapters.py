"""The committed adapters are what the README and the demo say they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open


FOLDER = Path(__file__).parents[2] / "examples" / "adapters"
LAYERS = 30
SIZES = {  # module: (parent, d_in, d_out)
    "q_proj": ("self_attn", 576, 576),
    "k_proj": ("self_attn", 576, 192),
    "v_proj": ("self_attn", 576, 192),
    "o_proj": ("self_attn", 576, 576),
    "gate_proj": ("mlp", 576, 1536),
    "up_proj": ("mlp", 576, 1536),
    "down_proj": ("mlp", 1536, 576),
}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
EXPECTED = {"pirate": (8, True, ATTENTION), "bullets": (3, False, set(SIZES))}


@pytest.mark.parametrize("name", EXPECTED)
def test_config(name: str) -> None:
    rank, rslora, targets = EXPECTED[name]
    text = (FOLDER / name / "adapter_config.json").read_text()
    config = json.loads(text)
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (config["r"], config["use_rslora"]) == (rank, rslora)
    assert set(config["target_modules"]) == targets
    assert text.count("/") == 1  # the hub's name of the base; no path of any machine


@pytest.mark.parametrize("name", EXPECTED)
def test_weights(name: str) -> None:
    rank, _, targets = EXPECTED[name]
    path = FOLDER / name / "adapter_model.safetensors"
    assert path.stat().st_size <= 2_000_000
    expected = {}
    for layer in range(LAYERS):
        for module in targets:
            parent, d_in, d_out = SIZES[module]
            key = f"base_model.model.model.layers.{layer}.{parent}.{module}"
            expected[f"{key}.lora_A.weight"] = (rank, d_in)
            expected[f"{key}.lora_B.weight"] = (d_out, rank)
    with safe_open(path, framework="numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert {key: tensor.shape for key, tensor in tensors.items()} == expected
    for key, tensor in tensors.items():
        assert tensor.dtype.name == "bfloat16", key
        assert np.isfinite(tensor.astype(np.float32)).all(), key
        assert tensor.astype(np.float32).any(), key


@pytest.mark.parametrize("name", EXPECTED)
def test_folder_has_a_readme_and_nothing_else(name: str) -> None:
    files = {entry.name for entry in (FOLDER / name).iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    readme = (FOLDER / name / "README.md").read_text()
    assert "Apache-2.0" in readme
