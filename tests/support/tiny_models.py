"""Model folders small enough to compile in a test, with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxlora.config import ModelConfig
from jaxlora.layers.parameter import weight_specs
from jaxlora.models import build
from serving.build import Plan, make_plan
from serving.config import EngineConfig
from serving.tokenizer import Tokenizer


TINY_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 259,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 258,
    "attention_bias": False,
}


def tiny_plan(folder: Path, changes: dict | None = None, **options) -> Plan:
    """A plan for a tiny random model that speaks bytes; `options` are `EngineConfig`'s."""
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3 | (changes or {})))
    write_checkpoint(folder)
    write_byte_tokenizer(folder)
    options = {"max_num_seqs": 4, "max_model_len": 96, "prefill_chunk": 32} | options
    return make_plan(EngineConfig(model=folder, **options))


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer.json whose token i is byte i."""
    Tokenizer.of_bytes(()).save(folder)


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Random weights beside the config.json of `folder`, the same whatever reads them."""
    rng = np.random.default_rng(seed)
    model = build(ModelConfig.from_folder(folder), 1, np.float32)
    pieces = [piece for spec in weight_specs(model).values() for piece in spec.pieces]
    tensors = {
        piece.name: np.asarray(rng.normal(size=piece.shape, scale=0.2), np.float32)
        + ("norm" in piece.name)
        for piece in pieces
    }
    save_file(tensors, folder / "model.safetensors")
