"""Put a checkpoint's tensors straight into a model's shards, by the model's weights table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxlora.checkpoints.safetensors_files import DTYPES, StoredTensor, open_folder
from jaxlora.config import ModelConfig
from jaxlora.errors import CheckpointError
from jaxlora.layers.parameter import Params, Piece, WeightSpec, param_specs, weight_specs
from jaxlora.models import build
from jaxlora.models.decoder import Decoder
from jaxlora.parallel.mesh import TP_AXIS


class LoadedModel(NamedTuple):
    """A model for `jax.jit(shard_map(...))`: params is an argument, cut by specs; inside,
    `bind(model, params)` is the Decoder."""

    model: Decoder  # abstract
    params: Params
    specs: dict[str, PartitionSpec]


def load_model(
    folder: str | Path, config: ModelConfig, mesh: Mesh, dtype: DTypeLike
) -> LoadedModel:
    """Read the safetensors files of a Hugging Face folder into `dtype` parameters on the mesh.

    Every tensor is checked before one is put on a device: CheckpointError, naming the file and the
    tensor, for what is missing, extra, of another shape or dtype, or truncated. Each rank reads
    its own slices; on the host at most one parameter's cut exists beside the mapped files.
    """
    folder = Path(folder)
    model = build(config, mesh.shape[TP_AXIS], dtype)
    specs = weight_specs(model)
    stored = open_folder(folder)
    _check(folder, config, specs, stored)
    params = {
        path: _read_parameter(spec, stored, mesh, np.dtype(dtype))
        for path, spec in _progress(specs, "Loading weights")
    }
    return _loaded(model, params)


def dummy_model(config: ModelConfig, mesh: Mesh, dtype: DTypeLike) -> LoadedModel:
    """Random weights of the right shapes, made on the devices: for benchmarks, no checkpoint read.

    Deterministic for a config and tp. Scaled so that activations neither vanish nor overflow.
    """
    model = build(config, mesh.shape[TP_AXIS], dtype)
    specs = weight_specs(model)
    params = {
        path: _dummy_parameter(seed, spec, mesh, dtype)
        for seed, (path, spec) in enumerate(_progress(specs, "Making dummy weights"))
    }
    return _loaded(model, params)


def _loaded(model: Decoder, params: Params) -> LoadedModel:
    return LoadedModel(model, params, param_specs(model))


def _progress(specs: Mapping[str, WeightSpec], title: str) -> tqdm:
    return tqdm(specs.items(), desc=title, unit="tensor", disable=not sys.stderr.isatty())


def _check(
    folder: Path,
    config: ModelConfig,
    specs: Mapping[str, WeightSpec],
    stored: Mapping[str, StoredTensor],
) -> None:
    pieces = [piece for spec in specs.values() for piece in spec.pieces]
    for piece in pieces:
        tensor = stored.get(piece.name)
        if tensor is None:
            raise CheckpointError(f"{folder}: has no tensor {piece.name}")
        if tensor.shape != piece.shape:
            raise CheckpointError(
                f"{tensor.path}: {piece.name} has shape {list(tensor.shape)}, "
                f"{config.source} says {list(piece.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{tensor.path}: {piece.name} has dtype {tensor.dtype}")
    known = {piece.name for piece in pieces}
    for name, tensor in stored.items():
        if name not in known and not _harmless(name, config):
            raise CheckpointError(f"{tensor.path}: {name} belongs to nothing in the model")


def _harmless(name: str, config: ModelConfig) -> bool:
    """Old files hold RoPE's tables; some hold the tied head a second time."""
    return name.endswith("rotary_emb.inv_freq") or (
        config.tie_word_embeddings and name == "lm_head.weight"
    )


def _read_parameter(
    spec: WeightSpec, stored: Mapping[str, StoredTensor], mesh: Mesh, dtype: np.dtype
) -> Array:
    sharding = NamedSharding(mesh, spec.partition)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        rank = 0
        if spec.cut is not None and index is not None:
            rank = (index[spec.cut].start or 0) * spec.tp // spec.shape[spec.cut]
        parts = [
            _cut(stored[piece.name].array(), spec, piece, rank, dtype) for piece in spec.pieces
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    return jax.make_array_from_callback(spec.shape, sharding, read)


def _cut(
    tensor: np.ndarray, spec: WeightSpec, piece: Piece, rank: int, dtype: np.dtype
) -> np.ndarray:
    """A rank's cut of a tensor, in memory and in `dtype`, zeros past the tensor's end."""
    if spec.cut is None:
        return np.array(tensor, dtype)
    width = spec.local_shape(piece)[spec.cut]
    mine = [slice(None)] * tensor.ndim
    mine[spec.cut] = slice(rank * width, (rank + 1) * width)
    cut = np.array(tensor[tuple(mine)], dtype)
    if cut.shape[spec.cut] < width:
        padding = [(0, 0)] * tensor.ndim
        padding[spec.cut] = (0, width - cut.shape[spec.cut])
        cut = np.pad(cut, padding)
    return cut


def _dummy_parameter(seed: int, spec: WeightSpec, mesh: Mesh, dtype: DTypeLike) -> Array:
    make = _ones if spec.init == "ones" else _normal
    sharding = NamedSharding(mesh, spec.partition)
    program = jax.jit(make, static_argnums=(1, 2), out_shardings=sharding)
    return program(jnp.uint32(seed), spec.shape, np.dtype(dtype))


def _normal(seed: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    scale = jnp.asarray(shape[-1] ** -0.5, dtype)
    return jax.random.normal(jax.random.key(seed), shape, dtype) * scale


def _ones(seed: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    return jnp.ones(shape, dtype)
