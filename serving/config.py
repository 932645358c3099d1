"""`EngineConfig`: every option of the engine, once. Command line defaults are read from here."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class AdapterSource:
    """An adapter to serve: its name, its PEFT folder, and a multiplier on its scale."""

    name: str
    folder: Path
    strength: float = 1.0


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from. None means: chosen at start from the model and the machine.

    The memory options fix every array's shape at start; nothing grows while the engine runs.
    """

    model: Path
    adapters: tuple[AdapterSource, ...] = ()
    dtype: str = "auto"  # float32 on a CPU, the checkpoint's own on a GPU
    load_format: str = "auto"  # "dummy": random weights from config.json alone
    tp: int = 1
    max_num_seqs: int | None = None  # sequences decoded together; 8 on a CPU, 256 on a GPU
    max_model_len: int | None = None  # prompt + answer; the model's own limit
    prefill_chunk: int | None = None  # prompt tokens a program takes; 256 on a CPU, 2048 on a GPU
    kv_memory: int | None = None  # bytes a device; what is left of it, or what can be used
    adapter_memory: int | None = None  # bytes a device for factors; what the adapters need
    adapter_slots: int | None = None  # adapters at once; as many as are given
    max_adapter_rank: int | None = None  # the largest rank among the adapters given
    kernel_backend: str | None = None  # of pallas_kernels.lora; the platform's default
    seed: int = 0  # of unseeded requests' random numbers
