"""Drive a Decoder over known tokens, in chunks and single steps, through a paged cache.

Everything a step must not read is NaN: pools start poisoned, blocks are handed out in a shuffled
order, and sequences of different lengths share a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlora.adapters.pool import FactorPool
from jaxlora.adapters.routing import decode_routing, prefill_routing
from jaxlora.checkpoints import LoadedModel
from jaxlora.layers.kv_cache import AttentionInputs, KVCache, make_kv_cache
from pallas_kernels.lora import Backend, Phase
from serving.programs import LayerInputs, StepPrograms


BLOCK_SIZE = 4


@dataclasses.dataclass(frozen=True)
class AdapterRows:
    """Adapters in a pool on the model's mesh, and the slot of each sequence (0 is the base)."""

    pool: FactorPool
    slots: Sequence[int]
    backend: Backend | None = None


@dataclasses.dataclass(frozen=True)
class Span:
    """The next tokens of one sequence in a step; empty where it has none."""

    start: int
    tokens: Sequence[int]


def make_programs(
    loaded: LoadedModel,
    mesh: Mesh,
    *,
    adapters: AdapterRows | None = None,
    layers_per_program: int = 1,
) -> StepPrograms:
    """The served programs, by default one a kind of layer as on a CPU; runs may share them."""
    return StepPrograms(
        loaded.model.config,
        loaded,
        mesh,
        layers_per_program=layers_per_program,
        adapters=adapters.pool if adapters else None,
        backend=adapters.backend if adapters else None,
    )


def run(
    loaded: LoadedModel,
    mesh: Mesh,
    sequences: Sequence[Sequence[int]],
    *,
    decode: int,
    chunk: int | None = None,
    context_chunk: int = 256,
    dtype: jnp.dtype = jnp.float32,
    adapters: AdapterRows | None = None,
    programs: StepPrograms | None = None,
    context: int | None = None,
) -> list[np.ndarray]:
    """Logits [tokens, vocab] of every position of each sequence, all sequences in one batch.

    The last `decode` tokens of a sequence go in one a step, those before in chunks of `chunk` (at
    once if None). A context longer than `context_chunk` is attended in pieces.
    Where a test runs more than once, `programs` are those of `make_programs` for the same pool, and
    `context` the most tokens that a sequence of any run has, so that one shape serves them all.
    """
    lengths = [len(sequence) for sequence in sequences]
    prompts = [length - decode for length in lengths]
    chunk = chunk or max(prompts)
    blocks = -(-(context or max(lengths)) // BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(len(sequences) * blocks).astype(np.int32) + 1
    tables = order.reshape(len(sequences), blocks)
    config = loaded.model.config
    kv = _poisoned(make_kv_cache(config, mesh, order.size + 1, BLOCK_SIZE, dtype))
    programs = programs or make_programs(loaded, mesh, adapters=adapters)
    rows: list[list[np.ndarray]] = [[] for _ in sequences]

    def forward(spans: list[Span], queries: int, phase: Phase) -> None:
        nonlocal kv
        tokens, inputs = _inputs(spans, queries, tables, context_chunk)
        lora = (None, None) if adapters is None else _lora_inputs(adapters, queries, phase)
        every = np.arange(tokens.size, dtype=np.int32)
        kv, hidden = programs.run(tokens, None, kv, LayerInputs(inputs, *lora), phase=phase)
        head = (None, None)
        if adapters is not None and adapters.pool.shape.head:
            head = _lora_inputs(adapters, queries, "decode")
        logits = programs.logits(hidden, every, *head)
        shaped = np.asarray(logits).reshape(len(spans), queries, -1)
        for row, span, result in zip(rows, spans, shaped, strict=True):
            row.extend(result[: len(span.tokens)])

    for start in range(0, max(prompts), chunk):
        spans = [
            Span(start, sequence[start : min(start + chunk, prompt)])
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        forward(spans, chunk, "prefill")
    for i in range(decode):
        at = [prompt + i for prompt in prompts]
        forward([Span(p, s[p : p + 1]) for s, p in zip(sequences, at, strict=True)], 1, "decode")
    return [np.stack(row) for row in rows]


def run_alone(loaded: LoadedModel, mesh: Mesh, sequence: Sequence[int], **how) -> np.ndarray:
    """`run` of a batch of one."""
    return run(loaded, mesh, [sequence], **how)[0]


def _poisoned(kv: KVCache) -> KVCache:
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), kv)


def _inputs(
    spans: list[Span], queries: int, tables: np.ndarray, context_chunk: int
) -> tuple[np.ndarray, AttentionInputs]:
    tokens = np.zeros((len(spans), queries), np.int32)
    positions = np.zeros((len(spans), queries), np.int32)
    write = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape) % BLOCK_SIZE
    for row, span in enumerate(spans):
        count = len(span.tokens)
        at = np.arange(span.start, span.start + count, dtype=np.int32)
        tokens[row, :count], positions[row, :count] = span.tokens, at
        write[row, :count] = tables[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
    inputs = AttentionInputs(tables, positions.ravel(), write.ravel(), queries, context_chunk)
    return tokens.ravel(), inputs


def _lora_inputs(adapters: AdapterRows, queries: int, phase: Phase) -> tuple:
    slots = np.repeat(np.asarray(adapters.slots, np.int32), queries)
    routing = (
        decode_routing(slots)
        if phase == "decode"
        else prefill_routing(slots, max_segments=len(adapters.slots))
    )
    return adapters.pool.tables, routing
