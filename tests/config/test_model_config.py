from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxlora.config import FAMILY_DEFAULTS, ROPE_TYPES, ModelConfig, RopeConfig
from jaxlora.errors import ConfigError
from jaxlora.layers.rotary import inverse_frequencies
from jaxlora.models import supported_model_types


LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
YARN = {"type": "yarn", "factor": 4.0}


def read(folder: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in (LLAMA | changes).items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_folder(folder)


def test_every_configured_family_has_a_model() -> None:
    assert supported_model_types() == tuple(sorted(FAMILY_DEFAULTS))


def test_absent_keys_mean_what_transformers_assumes(tmp_path: Path) -> None:
    llama = read(tmp_path)
    assert (llama.num_kv_heads, llama.head_dim, llama.rms_norm_eps) == (4, 6, 1e-6)
    assert llama.rope == RopeConfig(10000.0)
    assert not llama.tie_word_embeddings
    mistral = read(tmp_path, model_type="mistral", hidden_size=32, num_attention_heads=16)
    assert (mistral.num_kv_heads, mistral.windows) == (8, (4096,) * 3)
    qwen3 = read(tmp_path, model_type="qwen3", num_key_value_heads=2)
    assert (qwen3.head_dim, qwen3.windows) == (128, (None,) * 3)


def test_old_and_new_keys_read_the_same(tmp_path: Path) -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = read(
        tmp_path,
        rope_theta=5e5,
        rope_scaling={"rope_type": "llama3", **llama3},
        torch_dtype="bfloat16",
    )
    new = read(
        tmp_path,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3},
        dtype="bfloat16",
    )
    assert old == new
    assert old.rope["factor"] == 8.0
    assert old.dtype == "bfloat16"
    older = read(tmp_path, rope_scaling={"type": "linear", "factor": 2})
    assert older.rope == RopeConfig(10000.0, "linear", (("factor", 2.0),))


def test_yarn_has_every_default_resolved_and_stretches_the_context(tmp_path: Path) -> None:
    config = read(tmp_path, rope_scaling=YARN, max_position_embeddings=32768)
    assert config.rope["original_max_position_embeddings"] == 32768
    assert (config.rope["beta_fast"], config.rope["beta_slow"]) == (32.0, 1.0)
    assert config.rope["truncate"] == 1.0
    assert config.rope["attention_factor"] == pytest.approx(0.1 * math.log(4) + 1)
    assert config.max_position_embeddings == 131072
    spelled = YARN | {"original_max_position_embeddings": 8192, "attention_factor": 1.0}
    config = read(tmp_path, rope_scaling=spelled, max_position_embeddings=40960)
    assert (config.rope["attention_factor"], config.max_position_embeddings) == (1.0, 32768)
    config = read(tmp_path, rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7})
    assert config.rope["attention_factor"] == 1.0


def test_an_original_context_at_the_top_wins(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        original_max_position_embeddings=512,
        rope_scaling=YARN | {"original_max_position_embeddings": 1024},
    )
    assert config.max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "mistral", "sliding_window": 7}, (7, 7, 7)),
        ({"model_type": "llama", "sliding_window": 7}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 7}, (None, None, None)),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            (None, None, 7),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (7, None, 7),
        ),
    ],
)
def test_sliding_windows_by_layer(tmp_path: Path, changes: dict, windows: tuple) -> None:
    assert read(tmp_path, **{"num_key_value_heads": 2, **changes}).windows == windows


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 100]}')
    with pytest.raises(ConfigError, match="generation_config.json: eos_token_id: wants ids below"):
        read(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2,)
    assert read(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "gpt2"}, "model_type: 'gpt2' is not served"),
        ({"model_type": 3}, "model_type: wants a string, got 3"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not served"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4} is not served"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not served"),
        ({"use_mrope": True}, "use_mrope: True is not served"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE type 'longrope' is not served"),
        (
            {"rope_scaling": YARN | {"finetuned": True}},
            "finetuned: is not known for RoPE type yarn",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor: is missing"),
        ({"rope_scaling": YARN | {"beta_slow": 33}}, "beta_fast: is less than beta_slow: 32.0"),
        ({"rope_scaling": YARN | {"beta_fast": 0}}, "beta_fast: "),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate: wants true or false, got 1"),
        ({"rope_scaling": YARN | {"mscale": -1}}, "mscale: must not be negative"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor: must be positive"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta: must be above 1 for yarn"),
        ({"rope_scaling": YARN | {"factor": 1e9}}, "yarn stretches it to 2048000000000 tokens"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor: must be positive"),
        ({"rope_scaling": {"mrope_section": [1]}}, "mrope_section: is not known"),
        ({"rope_scaling": 3}, "rope_scaling: wants an object, got 3"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention: is not known"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": "24"}, 'hidden_size: wants a positive integer, got "24"'),
        ({"hidden_size": True}, "hidden_size: wants a positive integer, got true"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: wants a positive integer, got 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: wants a finite number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: wants true or false, got 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4"),
        ({"head_dim": 5}, "head_dim: 5: rotary embeddings need an even"),
        ({"torch_dtype": "int8"}, "torch_dtype: 'int8' is not served"),
        ({"eos_token_id": "two"}, "eos_token_id: wants token ids, got 'two'"),
        ({"eos_token_id": [2, True]}, "eos_token_id: wants token ids, got True"),
        ({"eos_token_id": [2, 100]}, "eos_token_id: wants ids below 100, got 100"),
        ({"eos_token_id": -1}, "eos_token_id: wants ids below 100, got -1"),
        ({"layer_types": ["full_attention"]}, "layer_types: has 1 entries for 3 layers"),
        ({"layer_types": ["linear_attention"] * 3}, "'linear_attention' is not served"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding window is set"),
        ({"layer_types": [1, 2, 3]}, "layer_types: wants a list of strings"),
        (
            {
                "model_type": "mistral",
                "num_key_value_heads": 2,
                "layer_types": ["full_attention"] * 3,
            },
            "layer_types: per-layer attention is not served for mistral",
        ),
    ],
)
def test_refusals_name_the_file_and_the_key(tmp_path: Path, changes: dict, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, **changes)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert problem in message
    assert "\n" not in message


@pytest.mark.parametrize("key", LLAMA)
def test_required_keys_are_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key}: is missing"):
        read(tmp_path, drop=(key,))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"3", b"[" * 100000])
def test_broken_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="config.json: "):
        ModelConfig.from_folder(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config.json: cannot be read: No such file"):
        ModelConfig.from_folder(tmp_path)


def test_fingerprint_is_of_what_changes_the_output(tmp_path: Path) -> None:
    base = read(tmp_path).fingerprint
    (tmp_path / "elsewhere").mkdir()
    same = read(
        tmp_path / "elsewhere",
        torch_dtype="float16",
        eos_token_id=9,
        max_position_embeddings=99,
        num_key_value_heads=4,
        _name_or_path="x",
    )
    assert same.fingerprint == base
    for change in ({"rope_theta": 1e6}, {"vocab_size": 101}, {"attention_bias": True}):
        assert read(tmp_path, **change).fingerprint != base


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = sorted(
    {
        *LLAMA,
        *("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "rope_parameters"),
        *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "dtype"),
        *("torch_dtype", "eos_token_id", "attention_bias", "mlp_bias", "rms_norm_eps"),
        *("hidden_act", "quantization_config", "partial_rotary_factor", "tie_word_embeddings"),
    }
)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    family=st.sampled_from(sorted(FAMILY_DEFAULTS)),
)
def test_any_value_is_read_or_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], family: str
) -> None:
    try:
        config = read(tmp_path, **({"model_type": family, "num_key_value_heads": 2} | changes))
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert len(config.windows) == config.num_layers


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    changes=st.dictionaries(
        st.sampled_from((*ROPE_TYPES["yarn"], "rope_theta", "mscale", "mscale_all_dim")),
        JSON | st.floats(0, 1e15) | st.integers(0, 10**6),
        max_size=4,
    )
)
def test_any_yarn_is_refused_in_one_line_or_has_finite_frequencies(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    try:
        config = read(tmp_path, rope_scaling=YARN | changes)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert np.isfinite(inverse_frequencies(config.rope, config.head_dim)).all()
        assert config.max_position_embeddings >= 1
