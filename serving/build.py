"""From an `EngineConfig` to a running engine: read, check, place, compile.

Everything a user can get wrong is checked before any model weight is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import cast

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.base_weights import BaseWeights
from jaxlora.adapters.modules import ModuleTable
from jaxlora.adapters.peft import read_adapter
from jaxlora.adapters.pool import FactorPool
from jaxlora.adapters.pool_shape import PoolShape
from jaxlora.adapters.store import AdapterStore
from jaxlora.checkpoints import dummy_model, load_model
from jaxlora.config import ModelConfig
from jaxlora.errors import CapacityError, CheckpointError, ConfigError
from jaxlora.layers.kv_cache import kv_block_bytes
from jaxlora.models import build
from jaxlora.parallel.mesh import check_divisible, make_mesh, prepare_devices
from pallas_kernels import lora
from serving.config import EngineConfig
from serving.core import MAX_STOP_TOKEN_IDS
from serving.engine import EngineCore, Recorder
from serving.kv_cache import BlockPool
from serving.runner import Runner
from serving.scheduler import Scheduler
from serving.shapes import BLOCK_SIZE, PLATFORM_DEFAULTS, StepShapes
from serving.tokenizer import Tokenizer


logger = logging.getLogger(__name__)

# Share of a card's free memory that the KV pool takes when --kv-memory is auto; the rest is for
# activations and the compiler's scratch.
KV_SHARE = 0.85

# Of sequences, adapters or ranks: more than any device serves, and arrays of that size still fit.
MAX_COUNT = 65536

DTYPES = {"float32": jnp.dtype(jnp.float32), "bfloat16": jnp.dtype(jnp.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """An `EngineConfig` that has been checked against the model, the adapters and the machine."""

    config: EngineConfig
    model: ModelConfig
    modules: ModuleTable
    tokenizer: Tokenizer
    adapters: tuple[Adapter, ...]
    pool: PoolShape | None  # None: no adapters, and nothing of their machinery runs
    shapes: StepShapes
    kv_blocks: int | None  # None: what the device has left, known once the weights are there
    platform: str
    dtype: jnp.dtype


def make_plan(config: EngineConfig) -> Plan:
    """Read and check everything but the weights. Raises JaxloraError, one line that says why."""
    model = ModelConfig.from_folder(config.model)
    _check_options(config, model)
    check_divisible(model, config.tp)
    prepare_devices(config.tp)
    make_mesh(config.tp)  # there are as many devices
    platform = jax.default_backend()
    _check_platform(config, platform)
    tokenizer = _read_tokenizer(config, model)
    model = dataclasses.replace(model, eos_token_ids=tokenizer.eos_token_ids)
    _check_eos(model)
    dtype = _choose_dtype(config, model, platform)
    modules = build(model, config.tp, dtype).modules
    adapters = _read_adapters(config, model, modules)
    pool = _pool_shape(config, adapters, modules, dtype.itemsize) if adapters else None
    shapes = StepShapes.choose(config, platform, model.max_position_embeddings)
    plan = Plan(config, model, modules, tokenizer, adapters, pool, shapes, None, platform, dtype)
    memory = config.kv_memory or PLATFORM_DEFAULTS[platform].kv_memory
    return dataclasses.replace(plan, kv_blocks=memory and _kv_blocks(plan, memory))


def build_engine(plan: Plan, recorder: Recorder | None = None) -> EngineCore:
    """Load the weights and adapters, allocate the pools and compile every step shape.

    Raises JaxloraError where a weight file or the device's memory does not hold what is needed.
    """
    config, mesh = plan.config, make_mesh(plan.config.tp)
    with _memory_holds("the weights"):
        if config.load_format == "dummy":
            model = dummy_model(plan.model, mesh, plan.dtype)
        else:
            model = load_model(config.model, plan.model, mesh, plan.dtype)
    pool = store = None
    if plan.pool is not None:
        with _memory_holds("the adapters: lower --adapter-memory or --adapter-slots"):
            base = BaseWeights(model, mesh)
            pool = FactorPool(plan.pool, plan.modules, mesh, plan.dtype, base)
            store = AdapterStore(pool)
            for adapter in progress(plan.adapters, "adapters"):
                store.add(adapter)
    blocks = plan.kv_blocks or _kv_blocks(plan, int(KV_SHARE * _free_device_memory()))
    with _memory_holds("the KV pool: lower --kv-memory"):
        runner = Runner(
            plan.model,
            model,
            mesh,
            plan.shapes,
            dtype=plan.dtype,
            kv_blocks=blocks,
            adapters=pool,
            kernel_backend=cast(lora.Backend | None, config.kernel_backend),  # checked in the plan
        )
    with _memory_holds("a step: lower --kv-memory, --prefill-chunk or --max-num-seqs"):
        programs = runner.warm_ups()
    logger.info("compiling %d programs", len(programs))
    for compile_and_run in progress(programs, "compiling"):
        compile_and_run()
    scheduler = Scheduler(
        BlockPool(blocks, BLOCK_SIZE),
        lanes=plan.shapes.max_num_seqs,
        prefill_budget=plan.shapes.prefill_chunk,
    )
    return EngineCore(
        runner,
        scheduler,
        store,
        plan.tokenizer,
        max_model_len=plan.shapes.max_model_len,
        seed=config.seed,
        recorder=recorder,
    )


def progress(items: Iterable, what: str) -> tqdm:
    """A progress bar on a terminal or in a notebook, silent elsewhere."""
    return tqdm(
        items, desc=what, disable=not sys.stderr.isatty() and "ipykernel" not in sys.modules
    )


@contextlib.contextmanager
def _memory_holds(what: str) -> Iterator[None]:
    """Turn an allocation that fails into a CapacityError that says for what, and what helps."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise CapacityError(f"the device's memory does not hold {what}") from error
        raise


def _check_options(config: EngineConfig, model: ModelConfig) -> None:
    anything = ("tp", "max_model_len", "prefill_chunk", "kv_memory", "adapter_memory")
    counts = ("max_num_seqs", "adapter_slots", "max_adapter_rank")
    for names, most in ((anything, None), (counts, MAX_COUNT)):
        for name in names:
            value = getattr(config, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1, got {value}")
            if value is not None and most is not None and value > most:
                raise ConfigError(f"{_flag(name)} must be at most {most}, got {value}")
    limit = model.max_position_embeddings
    if config.max_model_len is not None and not 2 <= config.max_model_len <= limit:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is not between 2 and {limit}, the limit of"
            f" {model.source}"
        )
    choices = {
        "dtype": ("auto", *DTYPES),
        "load_format": ("auto", "dummy"),
        "kernel_backend": (None, *lora.supported_backends()),
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            names = ", ".join(str(choice) for choice in allowed if choice)
            raise ConfigError(f"{_flag(name)} {getattr(config, name)!r} is none of: {names}")


def _check_platform(config: EngineConfig, platform: str) -> None:
    if platform not in PLATFORM_DEFAULTS:
        raise ConfigError(f"no step shapes are known for platform {platform!r}")
    if config.kernel_backend in ("triton", "mosaic") and platform != "gpu":
        raise ConfigError(
            f"--kernel-backend {config.kernel_backend} needs a GPU, JAX runs on: {platform}"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _choose_dtype(config: EngineConfig, model: ModelConfig, platform: str) -> jnp.dtype:
    """auto is float32 on a CPU (bfloat16 is ten times slower there), else the checkpoint's."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if platform == "cpu" or model.dtype == "float32":
        return DTYPES["float32"]
    return DTYPES["bfloat16"]  # float16 checkpoints too: its range is the larger


def _read_tokenizer(config: EngineConfig, model: ModelConfig) -> Tokenizer:
    """The folder's; a model made from config.json alone may have none, and then speaks bytes."""
    if config.load_format == "dummy" and not (config.model / "tokenizer.json").exists():
        return Tokenizer.of_bytes(model.eos_token_ids)
    tokenizer = Tokenizer.from_folder(config.model)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"{config.model / 'tokenizer.json'}: has token id {tokenizer.vocab_size - 1}, the model"
            f" embeds {model.vocab_size} tokens"
        )
    return tokenizer


def _check_eos(model: ModelConfig) -> None:
    if len(model.eos_token_ids) > MAX_STOP_TOKEN_IDS:
        raise ConfigError(
            f"{model.source}: eos_token_id: {len(model.eos_token_ids)} ids, at most"
            f" {MAX_STOP_TOKEN_IDS} are served"
        )


def _read_adapters(
    config: EngineConfig, model: ModelConfig, modules: ModuleTable
) -> tuple[Adapter, ...]:
    return tuple(
        read_adapter(
            source.folder,
            name=source.name,
            modules=modules,
            base_fingerprint=model.fingerprint,
            base_name=os.path.basename(os.path.realpath(config.model)),
            strength=source.strength,
            max_rank=config.max_adapter_rank,
        )
        for source in progress(config.adapters, "checking adapters")
    )


def _pool_shape(
    config: EngineConfig, adapters: tuple[Adapter, ...], modules: ModuleTable, itemsize: int
) -> PoolShape:
    return PoolShape.for_adapters(
        list({adapter.key: adapter for adapter in adapters}.values()),
        modules,
        config.tp,
        itemsize,
        memory=config.adapter_memory,
        slots=config.adapter_slots,
        max_rank=config.max_adapter_rank,
    )


def _kv_blocks(plan: Plan, memory: int) -> int:
    """Blocks of a KV pool of `memory` bytes a device, the scrap block included.

    Where the size is not the user's own choice, no more than can be used. Raises CapacityError
    where not even one sequence fits.
    """
    shapes = plan.shapes
    block_bytes = kv_block_bytes(plan.model, BLOCK_SIZE, plan.dtype, plan.config.tp)
    one_sequence = -(-shapes.max_model_len // BLOCK_SIZE)
    usable = memory // block_bytes - 1
    if plan.config.kv_memory is None:
        usable = min(usable, one_sequence * shapes.max_num_seqs)
    if usable < one_sequence:
        raise CapacityError(
            f"the KV pool holds {max(usable, 0) * BLOCK_SIZE} tokens, one sequence may have"
            f" {shapes.max_model_len}: raise --kv-memory to at least"
            f" {(one_sequence + 1) * block_bytes} or lower --max-model-len"
        )
    return usable + 1


def _free_device_memory() -> int:
    """Bytes free on the fullest device of those in use."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats)
