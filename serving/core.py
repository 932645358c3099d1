"""The nouns of serving: what a request asks for, and what comes back. Imports no JAX, no HTTP."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Sequence

from jaxlora.adapters.adapter import last_start


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Checked at construction.

    temperature 0 is greedy. top_k 0 means no limit. repetition_penalty divides the positive logits
    of tokens of the prompt and the answer, and multiplies the negative ones; presence_penalty is
    taken off the logits of the answer's tokens once, frequency_penalty each time. A seeded
    request's random numbers depend on its seed and token position alone.

    logprobs asks for each answer token's `TokenLogprobs` with so many alternatives (0 to
    MAX_LOGPROBS), prompt_logprobs for each prompt token's; None for neither. max_tokens 0 reads the
    prompt and answers nothing. Raises ValueError, naming the field.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "max_tokens": (self.max_tokens >= 0, "at least 0"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            "temperature": (0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "min_p": (0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            "repetition_penalty": (
                0.01 <= self.repetition_penalty <= 100.0,
                "between 0.01 and 100",
            ),
            "presence_penalty": (-2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            "frequency_penalty": (-2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            "logit_bias": (
                len(self.logit_bias) <= MAX_LOGIT_BIAS
                and all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias),
                f"at most {MAX_LOGIT_BIAS} biases between -100 and 100",
            ),
            "seed": (self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
            "stop": (all(self.stop), "without empty strings"),
            "stop_token_ids": (
                len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
                f"at most {MAX_STOP_TOKEN_IDS} ids",
            ),
            "logprobs": (_in_logprobs(self.logprobs), f"0 to {MAX_LOGPROBS}"),
            "prompt_logprobs": (_in_logprobs(self.prompt_logprobs), f"0 to {MAX_LOGPROBS}"),
        }
        for field, (holds, wanted) in checks.items():
            if not holds:
                raise ValueError(f"{field} must be {wanted}, got {getattr(self, field)!r}")

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the logits."""
        neutral = (1.0, 0.0, 0.0)
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != neutral

    @property
    def plain(self) -> bool:
        """Whether the token is the largest logit's, as the model gave it."""
        return self.temperature == 0.0 and not self.penalized and not self.logit_bias


# The device keeps this many stop ids (min_tokens masks them there) and biases a sequence.
MAX_STOP_TOKEN_IDS = 32
MAX_LOGIT_BIAS = 300

MAX_LOGPROBS = 20  # alternatives a token


def _in_logprobs(count: int | None) -> bool:
    return count is None or 0 <= count <= MAX_LOGPROBS


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was: natural logarithms, of the model's own distribution in float32.

    That is the distribution before temperature, penalties, biases and every filter. `top` holds the
    likeliest tokens in its place, best first, as many as were asked for; the token itself is among
    them only if it is one of them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterReference:
    """A resolved adapter: the name a request used, and the identity key of what it named."""

    name: str
    key: str
    invocation_tokens: tuple[int, ...] = ()  # a prompt must hold them: aLoRA; empty: any prompt

    def acts_on(self, prompt: Sequence[int]) -> bool:
        """Whether the adapter begins in this prompt, as any but an activated one does."""
        return last_start(self.invocation_tokens, prompt) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. `adapter` None is the base model, asked for as such."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterReference | None = None
    arrival: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """News of one request: what came since the last output, and totals so far.

    `text` joined over all outputs is the whole answer; a stop string is in it only where
    include_stop_str_in_output asks for it. `logprobs` has one entry for each of `token_ids`, where
    asked for. `prompt_logprobs` comes with the first output and has one entry for each prompt
    token, None for the first.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclasses.dataclass(slots=True)
class TokenStats:
    """The tokens that came back from the device, and how long they took."""

    prompt_tokens: int = 0  # of prompts that have been read to their end
    generated_tokens: int = 0
    first_token_seconds: list[float] = dataclasses.field(default_factory=list)  # since arrival
    intervals: list[float] = dataclasses.field(default_factory=list)  # since the token before


@dataclasses.dataclass(frozen=True, slots=True)
class StepStats:
    """What one engine step held, for metrics."""

    decode_rows: int
    prefill_tokens: int
    distinct_adapters: int  # among decode rows, the base not counted
    base_rows: int  # decode rows without an adapter
    running: int
    waiting: int
    kv_usage: float  # 0 to 1
    preemptions: int
    seconds: float
    tokens: TokenStats  # since the step before


@dataclasses.dataclass(frozen=True, slots=True)
class RequestStats:
    """One ended request's times in seconds, for metrics; None for what it did not reach."""

    adapter: str | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason
    max_tokens: int
    queue_seconds: float  # arrival to first step
    prefill_seconds: float | None  # first step to first token
    decode_seconds: float | None  # first token to last
    total_seconds: float
