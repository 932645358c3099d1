from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxlora.checkpoints import dummy_model, load_model, loader
from jaxlora.config import ModelConfig
from jaxlora.errors import CheckpointError
from jaxlora.parallel.mesh import make_mesh
from tests.support.families import GOLDEN, VOCAB


Tensors = dict[str, np.ndarray]


def load(folder: Path, tp: int = 1, dtype=jnp.float32):
    return load_model(folder, ModelConfig.from_folder(folder), make_mesh(tp), dtype)


def changed(tmp_path: Path, change: Callable[[Tensors], object], name: str = "llama") -> Path:
    """A copy of a golden folder whose tensors `change` has edited in place."""
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(GOLDEN / name / "config.json", folder)
    tensors = load_file(GOLDEN / name / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_each_rank_holds_its_cut_of_every_module() -> None:
    stored = load_file(GOLDEN / "qwen2" / "model.safetensors")
    loaded = load(GOLDEN / "qwen2", tp=2)
    attention = "model.layers.1.self_attn"
    q, k, v = (stored[f"{attention}.{name}_proj.weight"] for name in "qkv")
    for shard in loaded.params["layers.1.attention.qkv.weight"].addressable_shards:
        rank = shard.device.id
        cuts = [np.split(weight, 2)[rank] for weight in (q, k, v)]
        np.testing.assert_array_equal(shard.data, np.concatenate(cuts))
    for shard in loaded.params["layers.1.attention.output.weight"].addressable_shards:
        cut = np.split(stored[f"{attention}.o_proj.weight"], 2, axis=1)[shard.device.id]
        np.testing.assert_array_equal(shard.data, cut)
    embedding = np.asarray(loaded.params["embedding.weight"])
    np.testing.assert_array_equal(embedding[:VOCAB], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(embedding[VOCAB:], 0)


def test_stored_dtypes_are_converted(tmp_path: Path) -> None:
    def halve(tensors: Tensors) -> None:
        tensors.update({name: value.astype(np.float16) for name, value in tensors.items()})

    exact = load_file(GOLDEN / "llama" / "model.safetensors")["model.norm.weight"]
    wide = load(changed(tmp_path, halve)).params["norm.weight"]
    np.testing.assert_array_equal(wide, exact.astype(np.float16).astype(np.float32))
    narrow = load(GOLDEN / "llama", dtype=jnp.bfloat16).params["norm.weight"]
    assert narrow.dtype == jnp.bfloat16


def test_harmless_extra_tensors_are_passed_over(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    load(changed(tmp_path, add))


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("llama", lambda t: t.pop("model.norm.weight"), "has no tensor model.norm.weight"),
        ("mistral", lambda t: t.pop("lm_head.weight"), "has no tensor lm_head.weight"),
        (
            "llama",
            lambda t: t.update({"model.norm.weight": np.ones(47, np.float32)}),
            r"model.safetensors: model.norm.weight has shape \[47\], .*config.json says \[48\]",
        ),
        (
            "llama",
            lambda t: t.update({"model.norm.weight": np.ones(48, np.int32)}),
            "model.safetensors: model.norm.weight has dtype I32",
        ),
        (
            "llama",
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones(2, np.float32)}),
            "model.safetensors: model.layers.2.mlp.up_proj.weight belongs to nothing",
        ),
        (
            "mistral",
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(2, np.float32)}),
            "q_proj.bias belongs to nothing",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_any_tensor_is_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change, problem: str
) -> None:
    monkeypatch.setattr(loader, "_read_parameter", lambda *args: pytest.fail("a tensor was read"))
    with pytest.raises(CheckpointError, match=problem) as error:
        load(changed(tmp_path, change, name))
    assert "\n" not in str(error.value)


def test_dummy_weights_are_finite_seeded_and_of_the_loaded_shapes() -> None:
    config, mesh = ModelConfig.from_folder(GOLDEN / "qwen3_biases"), make_mesh(2)
    one, two = (dummy_model(config, mesh, jnp.bfloat16).params for _ in range(2))
    loaded = load(GOLDEN / "qwen3_biases", tp=2, dtype=jnp.bfloat16).params
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), one) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), loaded
    )
    for path, value in one.items():
        np.testing.assert_array_equal(value, two[path])
        assert np.isfinite(np.asarray(value, np.float32)).all()
    first, second = (np.asarray(one[f"layers.{i}.mlp.down.weight"]) for i in range(2))
    assert not np.array_equal(first, second)
