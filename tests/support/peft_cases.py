"""Adapters for the tiny models of `tests.support.families`, and the batch that mixes them.

What peft makes of them is found by tests/oracle/test_adapters.py, and some of it kept in GOLDEN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlora.adapters.base_weights import BaseWeights
from jaxlora.adapters.peft import read_adapter
from jaxlora.adapters.pool import FactorPool
from jaxlora.adapters.pool_shape import PoolShape
from jaxlora.checkpoints import LoadedModel, load_model
from jaxlora.config import ModelConfig
from jaxlora.parallel.mesh import make_mesh
from tests.support import families
from tests.support.decoding import AdapterRows, make_programs, run
from tests.support.families import DECODE
from tests.tolerances import LOGITS_ATOL


GOLDEN = Path(__file__).parents[1] / "golden" / "models_adapters"

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_ALL = [*_ATTENTION, "gate_proj", "up_proj", "down_proj"]

# name -> arguments of peft's LoraConfig
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 3, "lora_alpha": 5, "target_modules": _ALL},
    "patterns": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": _ALL,
        "rank_pattern": {"[qk]_proj": 5, "layers.1.self_attn.o_proj": 4, "up_proj": 1},
        "alpha_pattern": {"down_proj": 5, "layers.0.self_attn.*": 4, "layers.1.mlp.gate_proj": 1},
    },
    "rslora": {"r": 7, "lora_alpha": 4, "use_rslora": True, "target_modules": _ALL},
    "regex": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": r"^(?!.*layers\.1\.).*\.(q_proj|up_proj|o_proj)$",
    },
    "layers": {"r": 4, "lora_alpha": 7, "target_modules": _ALL, "layers_to_transform": [1]},
    "attention": {"r": 6, "lora_alpha": 9, "target_modules": _ATTENTION},
}

# Those that are more than factors of the layers' modules: of the same form.
_TOKENS = [97, 3, 0, 41, 100, 64, 12, 58, 7, 33, 86, 21]  # in no order; with tp 2 on either rank
BEYOND: dict[str, dict[str, Any]] = {
    "lora_bias": {"r": 2, "lora_alpha": 3, "target_modules": _ALL, "lora_bias": True},
    "bias_lora_only": {"r": 3, "target_modules": ["q_proj", "v_proj", "o_proj"]}
    | {"bias": "lora_only"},
    "bias_all": {"r": 2, "target_modules": ["k_proj", "down_proj"], "bias": "all"},
    "both_biases": {"r": 2, "target_modules": _ALL, "lora_bias": True, "bias": "lora_only"},
    "dora": {"r": 2, "lora_alpha": 3, "target_modules": _ALL, "use_dora": True}
    | {"rank_pattern": {"[qk]_proj": 5, "layers.1.mlp.down_proj": 4}},
    "dora_rslora": {"r": 3, "lora_alpha": 4, "target_modules": ["v_proj", "o_proj", "gate_proj"]}
    | {"use_dora": True, "use_rslora": True, "layers_to_transform": [1], "bias": "lora_only"},
    "head": {"r": 4, "lora_alpha": 5, "target_modules": ["q_proj", "lm_head"]},
    "head_dora": {"r": 3, "target_modules": ["up_proj", "lm_head"], "use_dora": True},
    "embedding": {"r": 5, "lora_alpha": 7, "target_modules": ["v_proj", "embed_tokens"]},
    "vocabulary_dora": {"r": 2, "lora_alpha": 3, "use_dora": True}
    | {"target_modules": ["embed_tokens", "lm_head", "k_proj"], "rank_pattern": {"lm_head": 6}},
    "tokens": {"r": 2, "target_modules": ["v_proj"], "trainable_token_indices": _TOKENS},
    "tokens_apart": {"r": 2, "target_modules": ["v_proj"]}
    | {"trainable_token_indices": {"lm_head": _TOKENS[:5], "embed_tokens": _TOKENS[3:]}},
    "tokens_and_head": {"r": 2, "lora_alpha": 3, "target_modules": ["o_proj", "lm_head"]}
    | {"trainable_token_indices": _TOKENS[::2]},
    "everything": {"r": 2, "lora_alpha": 2, "target_modules": [*_ALL, "embed_tokens", "lm_head"]}
    | {"use_dora": True, "use_rslora": True, "bias": "all"},
    # Of a tied base peft saves one set of rows, otherwise two.
    "tokens_of_both": {"r": 2, "target_modules": ["v_proj"]}
    | {"trainable_token_indices": {"embed_tokens": _TOKENS[1:8], "lm_head": _TOKENS[1:8]}},
}

# Of the prompts of 13, 5 and 22 tokens, the first two go in whole and the last in two pieces.
CHUNK = 13

# family -> the adapters of it that GOLDEN holds
GOLDEN_CASES = {"llama": ("patterns", "rslora"), "qwen3_biases": ("plain", "layers")}
BEYOND_GOLDEN = Path(__file__).parents[1] / "golden" / "models_beyond"
BEYOND_CASES = {
    "llama": ("dora", "embedding", "tokens_and_head"),
    "llama_biases": ("both_biases", "bias_all", "vocabulary_dora", "tokens_apart"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A sequence of a batch: which of `families.sequences()`, and its adapter (None: the base)."""

    adapter: str | None
    sequence: int

    @property
    def tokens(self) -> list[int]:
        return families.sequences()[self.sequence]

    @property
    def golden_key(self) -> str:
        return f"{self.adapter}_{self.sequence}"


def mixed_rows(adapters: Sequence[str]) -> list[Row]:
    """Each adapter once with a prompt that CHUNK holds whole and once with one that it cuts.

    Base rows of all three prompts stand at both ends and in the middle.
    """
    whole = [Row(name, i % 2) for i, name in enumerate(adapters)]
    cut = [Row(name, 2) for name in reversed(adapters)]
    return [Row(None, 0), *whole, Row(None, 2), *cut, Row(None, 1)]


class Served:
    """A tiny model and PEFT folders as served, on `tp` ranks; compiles a step shape once."""

    def __init__(
        self,
        model: Path,
        adapters: Mapping[str, Path],
        tp: int,
        layers_per_program: int = 1,
        strength: float = 1.0,
    ) -> None:
        self.tp = tp
        config = ModelConfig.from_folder(model)
        self.mesh = make_mesh(tp)
        self.loaded: LoadedModel = load_model(model, config, self.mesh, jnp.float32)
        modules = self.loaded.model.modules
        read = [
            read_adapter(
                folder,
                name=name,
                modules=modules,
                base_fingerprint=config.fingerprint,
                strength=strength,
            )
            for name, folder in adapters.items()
        ]
        shape = PoolShape.for_adapters(
            read, modules, tp, itemsize=4, memory=None, slots=None, max_rank=None
        )
        base = BaseWeights(self.loaded, self.mesh)
        self._pool = FactorPool(shape, modules, self.mesh, jnp.dtype(jnp.float32), base)
        self._slots: dict[str | None, int] = {None: 0}
        self._slots |= {adapter.name: self._pool.load(adapter) for adapter in read}
        rows = AdapterRows(self._pool, ())
        self._with, self._without = (
            make_programs(
                self.loaded, self.mesh, adapters=given, layers_per_program=layers_per_program
            )
            for given in (rows, None)
        )

    def run(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Logits [tokens, vocab] of each row, all in one batch."""
        slots = [self._slots[row.adapter] for row in rows]
        return self._run(rows, AdapterRows(self._pool, slots))

    def run_without_adapters(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """The same batch as the base model's, on a server that has no adapters."""
        return self._run(rows, None)

    def _run(self, rows: Sequence[Row], adapters: AdapterRows | None) -> list[np.ndarray]:
        return run(
            self.loaded,
            self.mesh,
            [row.tokens for row in rows],
            decode=DECODE,
            chunk=CHUNK,
            context_chunk=8,
            adapters=adapters,
            programs=self._without if adapters is None else self._with,
            context=max(families.PROMPTS) + DECODE,
        )


def assert_golden(served: Served, rows: Sequence[Row], family: str, golden: Path) -> None:
    """Rows in one batch have peft's logits, kept in `golden`; base rows the bare base's bits."""
    with np.load(golden / "logits.npz") as expected:
        for row, got, bare in zip(
            rows, served.run(rows), served.run_without_adapters(rows), strict=True
        ):
            if row.adapter is None:
                np.testing.assert_array_equal(got.view(np.uint32), bare.view(np.uint32))
                wanted = families.golden_logits(family)[row.sequence]
            else:
                wanted = expected[row.golden_key]
            np.testing.assert_allclose(got, wanted, 0, LOGITS_ATOL, err_msg=str(row))
