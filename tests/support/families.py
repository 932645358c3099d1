"""The tiny models that stand for the families, and the tokens they are asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


GOLDEN = Path(__file__).parents[1] / "golden" / "models"

VOCAB = 101  # neither a power of two nor even: tp pads it
DECODE = 16
PROMPTS = (13, 5, 22)

_COMMON = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# name -> (model_type, arguments of its transformers config class)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {
            "hidden_size": 48,
            "intermediate_size": 70,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama_biases": (
        "llama",
        {
            "hidden_size": 40,
            "intermediate_size": 54,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 14,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        },
    ),
    "mistral": (
        "mistral",
        {
            "hidden_size": 36,
            "intermediate_size": 50,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": 7,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2": (
        "qwen2",
        {
            "hidden_size": 48,
            "intermediate_size": 62,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": (
        "qwen3",
        {
            "hidden_size": 32,
            "intermediate_size": 46,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 20,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3_biases": (
        "qwen3",
        {
            "hidden_size": 32,
            "intermediate_size": 46,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
CASES = {name: (kind, _COMMON | fields) for name, (kind, fields) in CASES.items()}

_YARN = {"rope_type": "yarn", "rope_theta": 200.0, "factor": 4.0}
YARN: dict[str, dict[str, Any]] = {
    "plain": _YARN | {"original_max_position_embeddings": 16},
    "length_of_the_config": _YARN,
    "betas": _YARN
    | {"original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 0.5, "truncate": False},
    "attention_factor": _YARN
    | {"original_max_position_embeddings": 32, "attention_factor": 0.7, "rope_theta": 1e6},
    "mscales": _YARN
    | {"original_max_position_embeddings": 40, "mscale": 0.707, "mscale_all_dim": 1.2},
    "shrinking": _YARN | {"original_max_position_embeddings": 64, "factor": 0.5},
    "one_dimension_between": _YARN
    | {"original_max_position_embeddings": 64, "beta_fast": 2, "beta_slow": 2, "truncate": False},
}
# Models for each kind of yarn, by the same rule as CASES.
YARN_CASES = {
    f"{case}_yarn_{kind}": (
        CASES[case][0],
        CASES[case][1] | {"rope_parameters": YARN[kind]},
    )
    for case, kind in (
        ("llama", "plain"),
        ("llama_biases", "betas"),
        ("qwen2", "mscales"),
        ("qwen3", "attention_factor"),
        ("qwen3_biases", "length_of_the_config"),
    )
}


def sequences() -> list[list[int]]:
    """Prompts of odd lengths, each with DECODE tokens behind it."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCAB, length + DECODE).tolist() for length in PROMPTS]


def golden_logits(name: str) -> list[np.ndarray]:
    """What transformers says of `sequences()`: [tokens, vocab] float32 each."""
    with np.load(GOLDEN / name / "logits.npz") as file:
        return [file[str(i)] for i in range(len(PROMPTS))]
