"""Every family against golden logits of transformers (tests/oracle/test_models.py writes them)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters.modules import ParallelKind
from jaxlora.checkpoints import LoadedModel, load_model
from jaxlora.config import ModelConfig
from jaxlora.models import build
from jaxlora.parallel.mesh import make_mesh
from tests.support.decoding import run
from tests.support.families import CASES, DECODE, GOLDEN, golden_logits, sequences
from tests.tolerances import BFLOAT16_LOGITS_ATOL, LOGITS_ATOL


@functools.cache
def load(name: str, tp: int, dtype=jnp.float32) -> LoadedModel:
    return load_model(GOLDEN / name, ModelConfig.from_folder(GOLDEN / name), make_mesh(tp), dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("tp", "chunk"), [(1, 5), (2, None)])
def test_logits_equal_transformers(name: str, tp: int, chunk: int | None) -> None:
    logits = run(
        load(name, tp), make_mesh(tp), sequences(), decode=DECODE, chunk=chunk, context_chunk=8
    )
    for got, wanted in zip(logits, golden_logits(name), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=LOGITS_ATOL)


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    loaded, mesh = load("qwen2", 1), make_mesh(1)
    first, second, third = sequences()
    here = run(loaded, mesh, [first, second], decode=4, chunk=5, context_chunk=8)
    there = run(loaded, mesh, [first, third], decode=4, chunk=5, context_chunk=8)
    np.testing.assert_array_equal(here[0], there[0][: len(first)])


@pytest.mark.parametrize("tp", [1, 2])
def test_bfloat16_stays_near_float32_and_gives_float32_logits(tp: int) -> None:
    loaded = load("llama", tp, jnp.bfloat16)
    logits = run(loaded, make_mesh(tp), sequences(), decode=2, chunk=9, dtype=jnp.bfloat16)
    for got, wanted in zip(logits, golden_logits("llama"), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, rtol=0, atol=BFLOAT16_LOGITS_ATOL)


def test_the_adaptable_modules_are_transformers_own_with_true_widths() -> None:
    modules = build(ModelConfig.from_folder(GOLDEN / "qwen3"), 2, jnp.float32).modules
    assert modules.num_layers == 2
    assert {m.name: (m.d_in, m.d_out, m.parallel) for m in modules.modules} == {
        "self_attn.q_proj": (32, 80, ParallelKind.COLUMN),
        "self_attn.k_proj": (32, 40, ParallelKind.COLUMN),
        "self_attn.v_proj": (32, 40, ParallelKind.COLUMN),
        "self_attn.o_proj": (80, 32, ParallelKind.ROW),
        "mlp.gate_proj": (32, 46, ParallelKind.COLUMN),
        "mlp.up_proj": (32, 46, ParallelKind.COLUMN),
        "mlp.down_proj": (46, 32, ParallelKind.ROW),
    }
