"""`Runner`: the compiled steps and the state they keep on the device.

A step is one forward pass for each prompt chunk and one for all decoding rows, each followed by the
sampler. Every pass has one of a small set of shapes, compiled at start, in two executables: with
adapters and without. The host picks by whether any row has an adapter, so which adapter a row has
is data and never a reason to compile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Int

from jaxlora.adapters.pool import FactorPool
from jaxlora.adapters.routing import decode_routing, prefill_routing
from jaxlora.checkpoints import LoadedModel
from jaxlora.config import ModelConfig
from jaxlora.layers.kv_cache import AttentionInputs, make_kv_cache
from pallas_kernels.lora import Backend, Phase
from serving.kv_cache import SCRAP_BLOCK
from serving.programs import LayerInputs, StepPrograms
from serving.sampler import (
    LaneState,
    TokenHistory,
    admit,
    admit_history,
    empty_lanes,
    lane_row,
    padded,
    sample,
    sample_greedy,
)
from serving.sequence import Batch, PrefillChunk, Sequence
from serving.shapes import BLOCK_SIZE, StepShapes, smallest_holding


# Runs of one slot in a prompt chunk: the base's and an adapter's that begins in mid-prompt.
MAX_SEGMENTS = 2


class StepInputs(NamedTuple):
    """What the host tells one forward pass; padding points at the scrap lane and block."""

    tokens: Int[np.ndarray, "tokens"]  # of a prompt; decoding rows take theirs from their lanes
    lanes: Int[np.ndarray, "rows"]
    positions: Int[np.ndarray, "tokens"]
    write_index: Int[np.ndarray, "tokens"]
    block_tables: Int[np.ndarray, "rows blocks"]
    logits_rows: Int[np.ndarray, "rows"]  # the tokens whose logits are wanted


@dataclasses.dataclass
class PendingStep:
    """A dispatched step. `tokens` waits for the device."""

    batch: Batch
    sampled: list[tuple[jax.Array, int]]  # (tokens, how many of them are rows), decodes first

    def tokens(self) -> list[int]:
        """The new tokens, in the order of `batch.sampling`."""
        return [int(token) for array, rows in self.sampled for token in np.asarray(array)[:rows]]


class Runner:
    """Owns parameters, KV pools and lane state; turns batches into dispatched steps."""

    def __init__(
        self,
        config: ModelConfig,
        loaded: LoadedModel,
        mesh: Mesh,
        shapes: StepShapes,
        *,
        dtype: DTypeLike,
        kv_blocks: int,
        adapters: FactorPool | None,
        kernel_backend: Backend | None,
    ) -> None:
        self.shapes, self.mesh = shapes, mesh
        self.adapters = adapters
        self._eos_ids = config.eos_token_ids
        self._kv = make_kv_cache(config, mesh, kv_blocks, BLOCK_SIZE, dtype)
        self._replicated = NamedSharding(mesh, P())
        self._scrap_lane = shapes.max_num_seqs
        lanes = shapes.max_num_seqs + 1
        self._lanes: LaneState = jax.device_put(empty_lanes(lanes), self._replicated)
        self._history = TokenHistory(
            jnp.zeros((lanes, config.vocab_size), bool, device=self._replicated),
            jnp.zeros((lanes, config.vocab_size), jnp.int32, device=self._replicated),
        )
        self._programs = StepPrograms(
            config,
            loaded,
            mesh,
            layers_per_program=shapes.layers_per_program or config.num_layers,
            adapters=adapters,
            backend=kernel_backend,
        )

    def admit(self, sequence: Sequence) -> None:
        """Write a sequence's sampling state into the lane it was given."""
        request = sequence.request
        assert sequence.lane is not None
        row = lane_row(request.sampling, sequence.seed, sequence.prompt_length, self._eos_ids)
        lane = np.int32(sequence.lane)
        self._lanes = admit(self._lanes, lane, row)
        if request.sampling.penalized:
            length, limit = sequence.prompt_length, self.shapes.max_model_len
            prompt = padded(sequence.token_ids[:length], limit)
            answer = padded(sequence.token_ids[length:], limit)
            self._history = admit_history(self._history, lane, prompt, answer)

    def dispatch(self, batch: Batch) -> PendingStep:
        """Start a step; returns before the device has finished it."""
        sampled = []
        if batch.decodes:
            sampled.append((self._decode(batch.decodes), len(batch.decodes)))
        for chunk in batch.prefills:
            tokens = self._prefill(chunk)
            if chunk.last:
                sampled.append((tokens, 1))
        for tokens, _ in sampled:
            tokens.copy_to_host_async()
        return PendingStep(batch, sampled)

    def warm_ups(self) -> list[Callable[[], None]]:
        """One call for each program, which compiles it by running it on padding alone."""
        kinds: list[tuple[Phase, tuple[int, ...]]] = [
            ("prefill", self.shapes.prefill_tokens),
            ("decode", self.shapes.decode_rows),
        ]
        return [
            functools.partial(self._warm_up, phase, tokens, context, adapted)
            for adapted in ((False, True) if self.adapters else (False,))
            for context in self.shapes.contexts
            for phase, sizes in kinds
            for tokens in sizes
            if phase == "decode" or tokens <= context
        ]

    def _warm_up(self, phase: Phase, tokens: int, context: int, adapted: bool) -> None:
        rows = tokens if phase == "decode" else 1
        inputs = self._padding(rows=rows, tokens=tokens, context=context)
        logits = self._run(phase, inputs, np.zeros(tokens, np.int32), adapted)
        for plain in (True, False):
            self._sample(inputs.lanes, inputs.positions[:rows], logits, plain)
        jax.block_until_ready(self._lanes)

    def _decode(self, sequences: tuple[Sequence, ...]) -> jax.Array:
        rows = smallest_holding(self.shapes.decode_rows, len(sequences))
        positions = [sequence.computed - 1 for sequence in sequences]
        context = smallest_holding(self.shapes.contexts, max(positions) + 1)
        inputs = self._padding(rows=rows, tokens=rows, context=context)
        slots = np.zeros(rows, np.int32)
        for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            blocks = sequence.table.blocks
            inputs.lanes[row] = sequence.lane
            inputs.positions[row] = position
            inputs.block_tables[row, : len(blocks)] = blocks[: inputs.block_tables.shape[1]]
            inputs.write_index[row] = _pool_index(blocks, position)
            slots[row] = sequence.slot
        logits = self._run("decode", inputs, slots, bool(slots.any()))
        plain = all(sequence.request.sampling.plain for sequence in sequences)
        return self._sample(inputs.lanes, inputs.positions + 1, logits, plain)

    def _prefill(self, chunk: PrefillChunk) -> jax.Array:
        """The chunk's program; where it is the last, the sequence's next token, otherwise noise."""
        sequence, end = chunk.sequence, chunk.start + chunk.length
        tokens = smallest_holding(self.shapes.prefill_tokens, chunk.length)
        context = smallest_holding(self.shapes.contexts, max(end, tokens))
        inputs = self._padding(rows=1, tokens=tokens, context=context)
        blocks = np.asarray(sequence.table.blocks)
        positions = np.arange(chunk.start, end)
        inputs.tokens[: chunk.length] = sequence.token_ids[chunk.start : end]
        inputs.lanes[0] = sequence.lane
        inputs.positions[: chunk.length] = positions
        inputs.write_index[: chunk.length] = _pool_index(blocks, positions)
        used = min(len(blocks), inputs.block_tables.shape[1])
        inputs.block_tables[0, :used] = blocks[:used]
        inputs.logits_rows[0] = chunk.length - 1
        slots = np.zeros(tokens, np.int32)
        slots[max(sequence.adapter_start - chunk.start, 0) : chunk.length] = sequence.slot
        logits = self._run("prefill", inputs, slots, bool(slots.any()))
        if not chunk.last:
            return logits
        plain = sequence.request.sampling.plain
        return self._sample(inputs.lanes, np.array([end], np.int32), logits, plain)

    def _padding(self, *, rows: int, tokens: int, context: int) -> StepInputs:
        return StepInputs(
            tokens=np.zeros(tokens, np.int32),
            lanes=np.full(rows, self._scrap_lane, np.int32),
            positions=np.zeros(tokens, np.int32),
            write_index=np.zeros(tokens, np.int32),
            block_tables=np.full((rows, context // BLOCK_SIZE), SCRAP_BLOCK, np.int32),
            logits_rows=np.arange(rows, dtype=np.int32),
        )

    def _run(self, phase: Phase, inputs: StepInputs, slots: np.ndarray, adapted: bool) -> jax.Array:
        """Dispatch the forward pass; returns the logits of `inputs.logits_rows`."""
        tables = routing = None
        if adapted:
            assert self.adapters is not None, "a row has an adapter, the runner has no pool"
            tables = self.adapters.tables
            decode = phase == "decode"
            routing = decode_routing(slots) if decode else prefill_routing(slots, MAX_SEGMENTS)
        tokens = inputs.lanes if phase == "decode" else inputs.tokens
        attention = {
            "block_tables": inputs.block_tables,
            "positions": inputs.positions,
            "write_index": inputs.write_index,
        }
        placed: Any = jax.device_put(
            (tokens, attention, routing, inputs.logits_rows), self._replicated
        )
        tokens, attention, routing, logits_rows = placed
        step = AttentionInputs(
            **attention,
            queries=len(inputs.positions) // len(inputs.lanes),
            context_chunk=self.shapes.context_chunk or inputs.block_tables.shape[1] * BLOCK_SIZE,
        )
        self._kv, logits = self._programs.run(
            tokens,
            self._lanes.last_token if phase == "decode" else None,
            self._kv,
            LayerInputs(step, tables, routing),
            logits_rows,
            phase=phase,
        )
        return logits

    def _sample(
        self,
        lanes: Int[np.ndarray, "rows"],
        positions: Int[np.ndarray, "rows"],
        logits: jax.Array,
        plain: bool,
    ) -> jax.Array:
        if plain:
            self._lanes, tokens = sample_greedy(self._lanes, lanes, positions, logits)
        else:
            self._lanes, self._history, tokens = sample(
                self._lanes, self._history, lanes, positions, logits
            )
        return tokens


def _pool_index(blocks, positions):
    """Where KV of a position (or an array of them) lives in the pool, as a flat token index."""
    return blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
