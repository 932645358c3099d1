"""What docs/adapters.md tells a person to run does what it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxlora.errors import AdapterError
from tests.support.peft_folders import DENSE, read


DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"


def test_the_mlx_conversion_gives_the_same_delta(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    module = DENSE.modules[0]
    factors = {
        "lora_a": rng.normal(size=(module.d_in, 2)).astype(np.float32),
        "lora_b": rng.normal(size=(2, module.d_out)).astype(np.float32),
    }
    monkeypatch.chdir(tmp_path)
    Path("MLX_ADAPTER").mkdir()
    save_file(
        {f"model.layers.1.{module.name}.{name}": value for name, value in factors.items()},
        "MLX_ADAPTER/adapters.safetensors",
    )
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 10.0}}
    Path("MLX_ADAPTER/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="an MLX adapter: convert it"):
        read(Path("MLX_ADAPTER"))

    code = DOCS.read_text().partition("<!-- mlx conversion -->\n```python\n")[2].partition("```")[0]
    exec(compile(code, "docs/adapters.md", "exec"), {})
    adapter = read(Path("PEFT_ADAPTER"))
    (converted,) = adapter.factors.values()
    assert set(adapter.factors) == {(1, module.name)} and converted.scale == 10.0
    np.testing.assert_array_equal(converted.a, factors["lora_a"].T)
    np.testing.assert_array_equal(converted.b, factors["lora_b"].T)
