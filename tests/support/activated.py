"""An activated adapter (aLoRA) on a tiny model, and an engine that keeps all its logits.

The adapters and peft's answers are in GOLDEN; tests/oracle/test_alora.py makes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from jaxtyping import Float

from serving.build import build_engine
from serving.config import AdapterSource
from serving.core import AdapterReference, Request, SamplingParams
from serving.engine import EngineCore
from serving.pending import PendingStep
from serving.runner import Hidden, Runner
from serving.sequence import Batch, Sequence
from tests.support.tiny_models import tiny_plan


GOLDEN = Path(__file__).parents[1] / "golden" / "alora"
VOCAB_STRIDE = 8  # GOLDEN holds every eighth logit of a position

INVOCATION = (7, 30, 7)
TOKENS = 36  # of an answer


def _prompts() -> dict[str, list[int]]:
    rng = np.random.default_rng(6)

    def others(count: int) -> list[int]:
        return rng.integers(40, 256, count).tolist()

    return {
        "start": [*INVOCATION, *others(6)],
        "middle": [*others(19), *INVOCATION, *others(4), 7, 30, *INVOCATION, *others(6)],
        "end": [*others(16), *INVOCATION],  # the first position of a block and of a chunk
        "absent": [*others(11), 7, 30, 8],
    }


PROMPTS = _prompts()
# (adapter, prompt) of one batch; "plain" is a LoRA that is not activated.
ROWS: tuple[tuple[str | None, str], ...] = (
    ("activated", "middle"),
    (None, "middle"),
    ("plain", "middle"),
    ("activated", "start"),
    ("activated", "end"),
)

# All that a row gave: its answer, and the logits of every position of prompt and answer.
Answer = tuple[list[int], Float[np.ndarray, "positions vocab"]]


class RecordingRunner(Runner):
    """A `Runner` that keeps the logits of every token: request id -> position -> logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logits: dict[str, dict[int, np.ndarray]] = {}
        self._passes: list[np.ndarray] = []

    def dispatch(self, batch: Batch) -> PendingStep:
        self._passes.clear()
        pending = super().dispatch(batch)
        passes = iter(self._passes)
        if batch.decodes:
            for sequence, row in zip(batch.decodes, next(passes), strict=False):
                self._keep(sequence, sequence.computed - 1, row)
        for chunk in batch.prefills:
            for i, row in enumerate(next(passes)[: chunk.length]):
                self._keep(chunk.sequence, chunk.start + i, row)
        return pending

    def _run(self, phase: Any, inputs: Any, slots: np.ndarray, adapted: bool) -> Hidden:
        hidden = super()._run(phase, inputs, slots, adapted)
        self._passes.append(np.asarray(self._logits(hidden, np.arange(len(inputs.positions)))))
        return hidden

    def _keep(self, sequence: Sequence, position: int, row: np.ndarray) -> None:
        self.logits.setdefault(sequence.request.request_id, {})[position] = row


def recording_engine(
    model: Path, adapters: Path, *, tp: int = 1, kv_blocks: int = 40
) -> EngineCore:
    """A tiny model in `model` (written there) with the adapters of folder `adapters`."""
    names = ("activated", "plain")
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4 // tp  # layers, k and v, heads, head_dim, tokens, float32
    plan = tiny_plan(
        model,
        adapters=tuple(AdapterSource(name, adapters / name) for name in names),
        tp=tp,
        prefill_chunk=16,
        kv_memory=kv_blocks * block_bytes,
    )
    with mock.patch("serving.build.Runner", RecordingRunner):
        return build_engine(plan)


def run(engine: EngineCore, rows: tuple[tuple[str | None, str], ...]) -> list[Answer]:
    """What each row is answered when all are asked at once."""
    runner = engine._runner
    assert isinstance(runner, RecordingRunner) and engine.store is not None
    runner.logits.clear()
    tokens: dict[str, list[int]] = {}
    for adapter, prompt in rows:
        reference = AdapterReference(adapter, engine.store.keys[adapter]) if adapter else None
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        request_id = f"{adapter} {prompt}"
        engine.add(Request(request_id, tuple(PROMPTS[prompt]), sampling, reference))
        tokens[request_id] = []
    while engine.busy:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    answers = []
    for request_id, answer in tokens.items():
        by_position = runner.logits[request_id]
        answers.append((answer, np.stack([by_position[i] for i in range(len(by_position))])))
    return answers
