"""The step shapes an engine compiles: a small set, fixed at start. Plain Python."""

from __future__ import annotations

import dataclasses

from serving.config import EngineConfig


BLOCK_SIZE = 16  # tokens of a KV block


@dataclasses.dataclass(frozen=True)
class PlatformDefaults:
    """What "chosen at start" means on a kind of device."""

    max_num_seqs: int
    prefill_chunk: int
    context_chunk: int | None  # attention walks the context in pieces of this many tokens
    layers_per_program: int | None  # None: all of them
    kv_memory: int | None  # bytes; None: what the card has left


# A CPU walks a context piece by piece, so one program serves every length, and runs layer by layer
# (`serving.programs` says why). On a GPU a loop would break the command buffers that hold a step's
# launches, so programs come in context lengths.
PLATFORM_DEFAULTS = {
    "cpu": PlatformDefaults(
        max_num_seqs=8,
        prefill_chunk=256,
        context_chunk=256,
        layers_per_program=1,
        kv_memory=1 << 30,
    ),
    "gpu": PlatformDefaults(
        max_num_seqs=256,
        prefill_chunk=2048,
        context_chunk=None,
        layers_per_program=None,
        kv_memory=None,
    ),
}

SMALLEST_PREFILL = 16
SMALLEST_CONTEXT = 512


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """Each sorted tuple lists the sizes a program is compiled for; the last holds everything."""

    max_model_len: int
    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    contexts: tuple[int, ...]  # tokens a block table covers, multiples of BLOCK_SIZE
    context_chunk: int | None
    layers_per_program: int | None

    @property
    def max_num_seqs(self) -> int:
        return self.decode_rows[-1]

    @property
    def prefill_chunk(self) -> int:
        return self.prefill_tokens[-1]

    @classmethod
    def choose(cls, config: EngineConfig, platform: str, model_limit: int) -> StepShapes:
        """The shapes for a model whose own context limit is `model_limit`."""
        defaults = PLATFORM_DEFAULTS[platform]
        max_model_len = config.max_model_len or model_limit
        chunk = min(config.prefill_chunk or defaults.prefill_chunk, max_model_len)
        longest = -(-max_model_len // BLOCK_SIZE) * BLOCK_SIZE
        contexts = (
            (longest,) if defaults.context_chunk else _powers_of_four(SMALLEST_CONTEXT, longest)
        )
        return cls(
            max_model_len=max_model_len,
            decode_rows=_powers_of_four(1, config.max_num_seqs or defaults.max_num_seqs),
            prefill_tokens=_powers_of_four(SMALLEST_PREFILL, chunk),
            contexts=contexts,
            context_chunk=defaults.context_chunk,
            layers_per_program=defaults.layers_per_program,
        )


def smallest_holding(sizes: tuple[int, ...], wanted: int) -> int:
    """The first of the sorted `sizes` that is at least `wanted`."""
    return next(size for size in sizes if size >= wanted)


def _powers_of_four(first: int, last: int) -> tuple[int, ...]:
    """first, 4 first, 16 first, ... and `last` itself, none of them within a factor of 2 of it."""
    sizes = []
    while 2 * first < last:
        sizes.append(first)
        first *= 4
    return (*sizes, last)
