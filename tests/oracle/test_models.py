"""Every family against transformers: logits of prompts and decode steps, in float32.

With `--rewrite-golden` the tiny models and transformers' logits are written to tests/golden/models,
where the ordinary tests find them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.checkpoints import load_model
from jaxlora.config import ModelConfig
from jaxlora.parallel.mesh import make_mesh
from tests.support.decoding import run, run_alone
from tests.support.families import CASES, DECODE, GOLDEN, YARN_CASES, sequences
from tests.tolerances import LOGITS_ATOL


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle


def make_oracle(name: str) -> Any:
    """A tiny model with every parameter random: fresh biases are zero and norms one."""
    model_type, fields = (CASES | YARN_CASES)[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for path, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if path.endswith("norm.weight"):
            parameter.data = 1 + 0.2 * noise
        elif path.endswith("bias"):
            parameter.data = 0.3 * noise
        else:
            parameter.data = noise * parameter.shape[-1] ** -0.5 * 1.5
    return model.float().eval()


def oracle_logits(model: Any) -> list[np.ndarray]:
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0].numpy() for tokens in sequences()]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(folder that transformers saved, its logits)."""
    model = make_oracle(request.param)
    logits = oracle_logits(model)
    folder = tmp_path_factory.mktemp("models") / request.param
    model.save_pretrained(folder)
    if request.config.getoption("--rewrite-golden"):
        target = GOLDEN / request.param
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(folder / file, target)
        np.savez_compressed(target / "logits.npz", **{str(i): x for i, x in enumerate(logits)})
    return folder, logits


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("chunk", [None, 5])
def test_logits_equal_transformers_in_a_batch(
    case: tuple[Path, list[np.ndarray]], tp: int, chunk: int | None
) -> None:
    folder, expected = case
    mesh = make_mesh(tp)
    loaded = load_model(folder, ModelConfig.from_folder(folder), mesh, jnp.float32)
    logits = run(loaded, mesh, sequences(), decode=DECODE, chunk=chunk, context_chunk=8)
    for got, wanted in zip(logits, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=LOGITS_ATOL)


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_equal_transformers_alone(case: tuple[Path, list[np.ndarray]], tp: int) -> None:
    folder, expected = case
    mesh = make_mesh(tp)
    loaded = load_model(folder, ModelConfig.from_folder(folder), mesh, jnp.float32)
    got = run_alone(loaded, mesh, sequences()[0], decode=DECODE, chunk=7)
    np.testing.assert_allclose(got, expected[0], rtol=0, atol=LOGITS_ATOL)


def test_sharded_checkpoint_reads_as_the_single_file(tmp_path: Path) -> None:
    model = make_oracle("llama")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    mesh = make_mesh(2)
    one, many = (
        load_model(folder, ModelConfig.from_folder(folder), mesh, jnp.float32).params
        for folder in (tmp_path / "one", tmp_path / "many")
    )
    for path, value in one.items():
        np.testing.assert_array_equal(value, many[path])


@pytest.mark.parametrize("name", YARN_CASES)
def test_logits_equal_transformers_with_yarn(name: str, tmp_path: Path) -> None:
    model = make_oracle(name)
    expected = oracle_logits(model)
    model.save_pretrained(tmp_path)
    mesh = make_mesh(1)
    loaded = load_model(tmp_path, ModelConfig.from_folder(tmp_path), mesh, jnp.float32)
    logits = run(loaded, mesh, sequences(), decode=DECODE, chunk=5, context_chunk=8)
    for got, wanted in zip(logits, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=LOGITS_ATOL)
