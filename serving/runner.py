"""`Runner`: the compiled steps and the state they keep on the device.

A step is one forward pass for each prompt chunk and one for all decoding rows, each followed by the
sampler. Every pass has one of a small set of shapes, compiled at start, in two executables: with
adapters and without. The host picks by whether any row has an adapter, so which adapter a row has
is data and never a reason to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxlora.adapters.pool import FactorPool
from jaxlora.adapters.routing import decode_routing, prefill_routing
from jaxlora.checkpoints import LoadedModel
from jaxlora.config import ModelConfig
from jaxlora.layers.kv_cache import AttentionInputs, make_kv_cache
from pallas_kernels.lora import Backend, Phase
from serving.core import SamplingParams
from serving.kv_cache import SCRAP_BLOCK
from serving.logprobs import score
from serving.pending import PendingStep, PromptScores, Sampled
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


# Prompt tokens scored at a time: their logits are so many rows of the whole vocabulary.
SCORED_ROWS = 64

# Runs of one slot in a prompt chunk: the base's and an adapter's that begins in mid-prompt.
MAX_SEGMENTS = 2


class StepInputs(NamedTuple):
    """What the host tells one forward pass; padding points at the scrap lane and block."""

    tokens: Int[np.ndarray, "tokens"]  # of a prompt; decoding rows take theirs from their lanes
    lanes: Int[np.ndarray, "rows"]
    positions: Int[np.ndarray, "tokens"]
    write_index: Int[np.ndarray, "tokens"]
    block_tables: Int[np.ndarray, "rows blocks"]


class Hidden(NamedTuple):
    """What a pass leaves for the head."""

    states: Float[jax.Array, "tokens hidden"]
    slots: Int[np.ndarray, "tokens"] | None  # None: the head runs without adapters


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
            length = sequence.prompt_length
            self._admit_history(lane, sequence.token_ids[:length], sequence.token_ids[length:])

    def _admit_history(self, lane: np.int32, prompt: list[int], answer: list[int]) -> None:
        limit = self.shapes.max_model_len
        self._history = admit_history(
            self._history, lane, padded(prompt, limit), padded(answer, limit)
        )

    def dispatch(self, batch: Batch) -> PendingStep:
        """Start a step; returns before the device has finished it."""
        step = PendingStep(batch, [], [])
        if batch.decodes:
            step.sampled.append(self._decode(batch.decodes))
        for chunk in batch.prefills:
            hidden = self._prefill(chunk)
            step.scored.extend(self._score_prompt(chunk, hidden))
            if chunk.last:
                step.sampled.append(self._first_token(chunk, hidden))
        step.copy_to_host_async()
        return step

    def warm_ups(self) -> list[Callable[[], None]]:
        """One call for each program, which compiles it by running it on padding alone."""
        kinds: list[tuple[Phase, tuple[int, ...]]] = [
            ("prefill", self.shapes.prefill_tokens),
            ("decode", self.shapes.decode_rows),
        ]
        steps = [
            functools.partial(self._warm_up, phase, tokens, context, adapted)
            for adapted in ((False, True) if self.adapters else (False,))
            for context in self.shapes.contexts
            for phase, sizes in kinds
            for tokens in sizes
            if phase == "decode" or tokens <= context
        ]
        return [self._warm_up_admission, *steps]

    def _warm_up_admission(self) -> None:
        lane = np.int32(self._scrap_lane)
        self._lanes = admit(self._lanes, lane, lane_row(SamplingParams(), 0, 0, self._eos_ids))
        self._admit_history(lane, [], [])

    def _warm_up(self, phase: Phase, tokens: int, context: int, adapted: bool) -> None:
        rows = tokens if phase == "decode" else 1
        inputs = self._padding(rows=rows, tokens=tokens, context=context)
        hidden = self._run(phase, inputs, np.zeros(tokens, np.int32), adapted)
        logits = self._logits(hidden, np.arange(rows))
        for plain in (True, False):
            chosen = self._choose(inputs.lanes, inputs.positions[:rows], logits, plain)
        score(logits, chosen)
        if phase == "prefill":
            score(
                self._logits(hidden, np.zeros(SCORED_ROWS, np.int32)),
                np.zeros(SCORED_ROWS, np.int32),
            )
        jax.block_until_ready(self._lanes)

    def _decode(self, sequences: tuple[Sequence, ...]) -> Sampled:
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
        hidden = self._run("decode", inputs, slots, bool(slots.any()))
        logits = self._logits(hidden, np.arange(rows))
        return self._sample(sequences, inputs.lanes, inputs.positions + 1, logits)

    def _prefill(self, chunk: PrefillChunk) -> Hidden:
        """The hidden states of the chunk's tokens, padding behind them."""
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
        slots = np.zeros(tokens, np.int32)
        slots[max(sequence.adapter_start - chunk.start, 0) : chunk.length] = sequence.slot
        return self._run("prefill", inputs, slots, bool(slots.any()))

    def _first_token(self, chunk: PrefillChunk, hidden: Hidden) -> Sampled:
        """The token behind a prompt's last chunk."""
        logits = self._logits(hidden, np.array([chunk.length - 1]))
        lanes = np.array([chunk.sequence.lane], np.int32)
        positions = np.array([chunk.start + chunk.length], np.int32)
        return self._sample((chunk.sequence,), lanes, positions, logits)

    def _score_prompt(self, chunk: PrefillChunk, hidden: Hidden) -> list[PromptScores]:
        """Logprobs of the prompt tokens behind `chunk.scored`, so many rows at a time."""
        scored = []
        for first in chunk.scored[::SCORED_ROWS]:
            positions = range(first, min(first + SCORED_ROWS, chunk.scored.stop))
            rows = np.zeros(SCORED_ROWS, np.int32)
            tokens = np.zeros(SCORED_ROWS, np.int32)
            rows[: len(positions)] = np.asarray(positions) - chunk.start
            tokens[: len(positions)] = chunk.sequence.token_ids[first + 1 : positions.stop + 1]
            scores = score(self._logits(hidden, rows), tokens)
            scored.append(PromptScores(chunk.sequence, scores, len(positions)))
        return scored

    def _padding(self, *, rows: int, tokens: int, context: int) -> StepInputs:
        return StepInputs(
            tokens=np.zeros(tokens, np.int32),
            lanes=np.full(rows, self._scrap_lane, np.int32),
            positions=np.zeros(tokens, np.int32),
            write_index=np.zeros(tokens, np.int32),
            block_tables=np.full((rows, context // BLOCK_SIZE), SCRAP_BLOCK, np.int32),
        )

    def _run(
        self, phase: Phase, inputs: StepInputs, slots: Int[np.ndarray, "tokens"], adapted: bool
    ) -> Hidden:
        """Dispatch the forward pass; returns what the head takes."""
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
        placed: Any = jax.device_put((tokens, attention, routing), self._replicated)
        tokens, attention, routing = placed
        step = AttentionInputs(
            **attention,
            queries=len(inputs.positions) // len(inputs.lanes),
            context_chunk=self.shapes.context_chunk or inputs.block_tables.shape[1] * BLOCK_SIZE,
        )
        self._kv, states = self._programs.run(
            tokens,
            self._lanes.last_token if phase == "decode" else None,
            self._kv,
            LayerInputs(step, tables, routing),
            phase=phase,
        )
        adapts_head = adapted and self.adapters is not None and self.adapters.shape.head
        return Hidden(states, slots if adapts_head else None)

    def _logits(
        self, hidden: Hidden, rows: Int[np.ndarray, "rows"]
    ) -> Float[jax.Array, "rows vocab"]:
        tables = routing = None
        if hidden.slots is not None and self.adapters is not None:
            tables, routing = self.adapters.tables, decode_routing(hidden.slots[rows])
        placed: Any = jax.device_put((rows.astype(np.int32), routing), self._replicated)
        return self._programs.logits(hidden.states, placed[0], tables, placed[1])

    def _sample(
        self,
        sequences: tuple[Sequence, ...],
        lanes: Int[np.ndarray, "rows"],
        positions: Int[np.ndarray, "rows"],
        logits: Float[jax.Array, "rows vocab"],
    ) -> Sampled:
        """Choose a token for each sequence; padding rows are behind them."""
        sampling = [sequence.request.sampling for sequence in sequences]
        tokens = self._choose(lanes, positions, logits, all(params.plain for params in sampling))
        wanted = [params.logprobs for params in sampling]
        scores = None if wanted.count(None) == len(wanted) else score(logits, tokens)
        return Sampled(tokens, wanted, scores)

    def _choose(
        self,
        lanes: Int[np.ndarray, "rows"],
        positions: Int[np.ndarray, "rows"],
        logits: Float[jax.Array, "rows vocab"],
        plain: bool,
    ) -> Int[jax.Array, "rows"]:
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
