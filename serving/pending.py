"""A dispatched step: what is on its way from the device, and reading it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jaxtyping import Int

from serving.core import TokenLogprobs
from serving.logprobs import Scores, read_scores
from serving.sequence import Batch, Sequence, StepResults


@dataclasses.dataclass(frozen=True)
class Sampled:
    """New tokens, and their logprobs where a row asked for any."""

    tokens: Int[jax.Array, "rows"]  # padding behind the sequences
    wanted: list[int | None]  # of each sequence: alternatives to its token, None for no logprobs
    scores: Scores | None

    def read_tokens(self) -> list[int]:
        return np.asarray(self.tokens)[: len(self.wanted)].tolist()

    def read_logprobs(self) -> list[TokenLogprobs | None]:
        if self.scores is None:
            return [None] * len(self.wanted)
        rows = read_scores(self.scores, [count or 0 for count in self.wanted])
        return [None if c is None else row for c, row in zip(self.wanted, rows, strict=True)]


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """Logprobs of `count` consecutive prompt tokens, padding behind them."""

    sequence: Sequence
    scores: Scores
    count: int

    def read(self) -> list[TokenLogprobs]:
        alternatives = self.sequence.request.sampling.prompt_logprobs or 0
        return read_scores(self.scores, [alternatives] * self.count)


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """Satisfies `serving.engine.Pending`."""

    batch: Batch
    sampled: list[Sampled]  # in the order of `batch.sampling`
    scored: list[PromptScores]

    def copy_to_host_async(self) -> None:
        """Start every copy, so that `results` waits once."""
        arrays = [(sampled.tokens, sampled.scores) for sampled in self.sampled]
        for array in jax.tree.leaves([arrays, [part.scores for part in self.scored]]):
            array.copy_to_host_async()

    def results(self) -> StepResults:
        """Waits for the device."""
        return StepResults(
            tokens=[token for sampled in self.sampled for token in sampled.read_tokens()],
            logprobs=[logprobs for sampled in self.sampled for logprobs in sampled.read_logprobs()],
            prompt_logprobs=[(part.sequence, part.read()) for part in self.scored],
        )
