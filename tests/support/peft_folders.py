"""PEFT folders for tests: written byte by byte, so that any of it can be wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.modules import EMBEDDING, HEAD, AdaptableModule, ModuleTable, ParallelKind
from jaxlora.adapters.peft import read_adapter


FINGERPRINT = "ab" * 32
VOCAB_SIZE = 100

_DTYPE_NAMES = {
    np.dtype("float64"): "F64",
    np.dtype("float32"): "F32",
    np.dtype("float16"): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype("int8"): "I8",
}


def table(
    *names: str, layers: int = 2, prefix: str = "model.layers", width: int = 6
) -> ModuleTable:
    """A base whose modules have widths of their own: d_in = width + i, d_out = width + 2i + 1.

    Those of an even i have a bias; the hidden size is `width`.
    """
    modules = tuple(
        AdaptableModule(name, width + i, width + 2 * i + 1, ParallelKind.COLUMN, bias=i % 2 == 0)
        for i, name in enumerate(names)
    )
    return tiny_table(layers, modules, VOCAB_SIZE, width, prefix)


def tiny_table(
    layers: int,
    modules: tuple[AdaptableModule, ...],
    vocab: int,
    hidden: int,
    prefix: str = "model.layers",
) -> ModuleTable:
    """These modules in each layer, an embedding and a head of its own."""
    return ModuleTable(
        layers,
        modules,
        prefix,
        outer=(
            AdaptableModule(EMBEDDING, vocab, hidden, ParallelKind.ROW),
            AdaptableModule(HEAD, hidden, vocab, ParallelKind.COLUMN),
        ),
        vocab_size=vocab,
    )


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
DENSE = table(*ATTENTION, *MLP)

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 3,
    "lora_alpha": 6,
    "bias": "none",
    "target_modules": ["q_proj", "o_proj"],
}


def random_factors(
    modules: ModuleTable = DENSE,
    names: Iterable[str] = ("self_attn.q_proj", "self_attn.o_proj"),
    *,
    rank: int = 3,
    prefix: str = "base_model.model.model.layers",
    layers: Iterable[int] | None = None,
    seed: int = 0,
    dtype: Any = np.float32,
    suffix: str = "weight",
) -> dict[str, np.ndarray]:
    """Key -> array for A and B of every module named, as peft spells and shapes them."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for path, module in _paths(modules, names, prefix, layers):
        sides = {
            "A": (rank, module.d_in),
            "B": (module.d_out, rank),
        }
        for side, shape in sides.items():
            key = f"{path}.lora_{side}.{suffix}"
            if module.name == EMBEDDING:
                key = f"{path}.lora_embedding_{side}"
            tensors[key] = rng.normal(size=shape).astype(dtype)
    return tensors


def random_vectors(
    kind: str,
    modules: ModuleTable = DENSE,
    names: Iterable[str] = ("self_attn.q_proj", "self_attn.o_proj"),
    *,
    prefix: str = "base_model.model.model.layers",
    layers: Iterable[int] | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Key -> a vector over the outputs of every module named; `kind` is how its key ends."""
    rng = np.random.default_rng(seed)
    return {
        f"{path}.{kind}": rng.uniform(0.5, 1.5, module.d_out).astype(np.float32)
        for path, module in _paths(modules, names, prefix, layers)
    }


def _paths(
    modules: ModuleTable, names: Iterable[str], prefix: str, layers: Iterable[int] | None
) -> Iterator[tuple[str, AdaptableModule]]:
    names = tuple(names)
    for layer in range(modules.num_layers) if layers is None else layers:
        for name in names:
            if not modules.is_outer(name):
                yield f"{prefix}.{layer}.{name}", modules.module(name)
    for name in names:
        if modules.is_outer(name):
            yield f"base_model.model.{name}", modules.module(name)


def safetensors_bytes(tensors: Mapping[str, np.ndarray], **header: Any) -> bytes:
    """A safetensors file; `header` entries replace those made from the tensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        begin, data = len(data), data + array.tobytes()
        entries[name] = {
            "dtype": _DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(entries | header).encode()
    return with_header(text + b" " * (-len(text) % 8), data)


def with_header(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def write_adapter(
    folder: Path,
    tensors: Mapping[str, np.ndarray] | bytes | None = None,
    config: Mapping[str, Any] | bytes | None = None,
    **changes: Any,
) -> Path:
    """Write a PEFT folder: random factors on q and o, rank 3, unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = random_factors()
    if not isinstance(tensors, bytes):
        tensors = safetensors_bytes(tensors)
    if not isinstance(config, bytes):
        config = json.dumps(dict(CONFIG if config is None else config) | changes).encode()
    (folder / "adapter_model.safetensors").write_bytes(tensors)
    (folder / "adapter_config.json").write_bytes(config)
    return folder


def read(folder: Path, modules: ModuleTable = DENSE, **options: Any) -> Adapter:
    return read_adapter(
        folder, **({"name": "tiny", "modules": modules, "base_fingerprint": FINGERPRINT} | options)
    )
