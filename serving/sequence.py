"""`Sequence`: a request on its way, and `Batch`: what one step does."""

from __future__ import annotations

import dataclasses
import enum

from serving.core import FinishReason, Request, TokenLogprobs
from serving.kv_cache import BlockTable


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTING = enum.auto()  # gives up its blocks once no step in flight uses them
    FINISHED = enum.auto()


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request's tokens and the resources it holds.

    A step is dispatched before the last one's tokens are read, so the device may be ahead:
    `sampled` counts answer tokens asked of it, `token_ids` holds those that have come back.
    """

    request: Request
    table: BlockTable
    slot: int  # the adapter's, or 0
    adapter_start: int  # a position of the prompt: tokens from there on run with the slot
    seed: int  # of its random numbers: the request's own, or one drawn for it
    status: Status = Status.WAITING
    lane: int | None = None  # its place in the device's per-sequence state
    token_ids: list[int] = dataclasses.field(init=False)  # prompt, then answer
    computed: int = 0  # tokens whose KV is written, or will be by a dispatched step
    prefill_target: int = 0  # tokens to compute before it decodes; fixed at admission
    sampled: int = 0
    scored: int = 0  # prompt positions whose next token's logprobs have been asked for
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)  # come back
    in_flight: int = 0  # dispatched steps that hold it and have not been collected
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def decodes(self) -> bool:
        """Whether all of its prefill has been dispatched."""
        return self.computed >= self.prefill_target

    @property
    def wants_more(self) -> bool:
        """Whether another token may be asked for: max_tokens is not yet reached."""
        return self.sampled < self.request.sampling.max_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`length` tokens of a sequence from `start`; `last` ones give its next token.

    `scored` are the positions among them whose next prompt token's logprobs are wanted.
    """

    sequence: Sequence
    start: int
    length: int
    last: bool
    scored: range = range(0)


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes: chunks of prompts, and one token for each decoding sequence."""

    prefills: tuple[PrefillChunk, ...] = ()
    decodes: tuple[Sequence, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prefills or self.decodes)

    @property
    def sampling(self) -> list[Sequence]:
        """The sequences that get a token of this step, in the order the runner returns them."""
        return [*self.decodes, *(chunk.sequence for chunk in self.prefills if chunk.last)]

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(chunk.sequence for chunk in self.prefills)]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResults:
    """What one step gave: a token for each of `Batch.sampling`, and logprobs where asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]  # beside `tokens`
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs]]]  # in order of position
