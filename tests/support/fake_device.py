"""A runner without a model: it keeps KV by block as a device would, so lost or shared blocks show.

The next token is a hash of all tokens the sequence's block table leads to, and of the slot that
each of them ran with. It is computed at dispatch, as on a device's stream; `results()` may be read
later.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from serving.core import TokenLogprobs
from serving.kv_cache import SCRAP_BLOCK
from serving.sequence import Batch, Sequence, StepResults


def next_token(rows: list[tuple[int, int]], vocab: int) -> int:
    """What the fake model says after (token, slot) rows; the oracle needs no engine for it."""
    digest = hashlib.sha256(np.asarray(rows, "<i8").tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % vocab


def solo_answer(
    prompt: list[int], slot: int, vocab: int, length: int, *, start: int = 0
) -> list[int]:
    """The answer to a prompt whose tokens from `start` on run with `slot`, as generated ones do."""
    rows = [(token, slot if i >= start else 0) for i, token in enumerate(prompt)]
    for _ in range(length):
        rows.append((next_token(rows, vocab), slot))
    return [token for token, _ in rows[len(prompt) :]]


def fake_logprobs(token: int, mark: int) -> TokenLogprobs:
    """What stands for a token's logprobs; `mark` tells where they were made."""
    return TokenLogprobs(token, float(-mark), ())


def slot_at(sequence: Sequence, position: int) -> int:
    return sequence.slot if position >= sequence.adapter_start else 0


@dataclasses.dataclass
class FakePending:
    batch: Batch
    values: list[int]

    def results(self) -> StepResults:
        wanted = [sequence.request.sampling.logprobs for sequence in self.batch.sampling]
        return StepResults(
            tokens=self.values,
            logprobs=[
                None if count is None else fake_logprobs(token, count)
                for token, count in zip(self.values, wanted, strict=True)
            ],
            prompt_logprobs=[
                (chunk.sequence, [fake_logprobs(chunk.sequence.token_ids[i + 1], i)])
                for chunk in self.batch.prefills
                for i in chunk.scored
            ],
        )


class FakeDevice:
    """Satisfies `serving.engine.StepRunner`."""

    def __init__(self, *, block_size: int, vocab: int = 50) -> None:
        self.block_size, self.vocab = block_size, vocab
        self.kv: dict[int, tuple[int, int]] = {}  # pool index -> (token, slot that made it)
        self.last_token: dict[int, int] = {}  # lane -> token
        self.batches: list[Batch] = []

    def admit(self, sequence: Sequence) -> None:
        assert sequence.lane is not None
        self.last_token[sequence.lane] = -1

    def dispatch(self, batch: Batch) -> FakePending:
        self.batches.append(batch)
        lanes = [sequence.lane for sequence in batch.sequences]
        assert len(set(lanes)) == len(lanes), "a sequence is in a step once"
        values = []
        for sequence in batch.decodes:
            assert sequence.lane is not None
            position = sequence.computed - 1
            self._write(sequence, position, self.last_token[sequence.lane])
            values.append(self._sample(sequence, position + 1))
        for chunk in batch.prefills:
            for position in range(chunk.start, chunk.start + chunk.length):
                self._write(chunk.sequence, position, chunk.sequence.token_ids[position])
            if chunk.last:
                values.append(self._sample(chunk.sequence, chunk.start + chunk.length))
        return FakePending(batch, values)

    def _index(self, sequence: Sequence, position: int) -> int:
        block = sequence.table.blocks[position // self.block_size]
        assert block != SCRAP_BLOCK
        return block * self.block_size + position % self.block_size

    def _write(self, sequence: Sequence, position: int, token: int) -> None:
        assert token >= 0, "a lane's token is read before it is written"
        self.kv[self._index(sequence, position)] = (token, slot_at(sequence, position))

    def _sample(self, sequence: Sequence, length: int) -> int:
        rows = [self.kv[self._index(sequence, position)] for position in range(length)]
        for position, (_, slot) in enumerate(rows):
            assert slot == slot_at(sequence, position), "KV made by another adapter"
        token = next_token(rows, self.vocab)
        assert sequence.lane is not None
        self.last_token[sequence.lane] = token
        return token


class FakeTokenizer:
    """Token i is the letter chr(65 + i) (the alphabet goes on); `eos` ids print nothing."""

    def __init__(self, eos: tuple[int, ...] = ()) -> None:
        self.eos_token_ids = eos
        self.vocab_size = 50

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) - 65 for character in text]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(chr(65 + token) for token in ids if token not in self.eos_token_ids)

    def is_silent(self, token_id: int) -> bool:
        return token_id in self.eos_token_ids

    def is_byte_fallback(self, token_id: int) -> bool:
        return False
