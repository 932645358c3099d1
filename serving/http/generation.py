"""A checked generation request as data, and running it: what chat and completions share."""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from serving.core import AdapterReference, FinishReason, Request, RequestOutput, SamplingParams
from serving.engine_protocol import Engine
from serving.errors import (
    ContextLengthError,
    InternalServerError,
    InvalidRequestError,
    UnavailableError,
)
from serving.http.body import decode
from serving.http.merge import merge
from serving.http.prompts import TokenIds, check_ids
from serving.http.responses import Usage
from serving.http.schemas import REFUSED_STREAM_OPTIONS, GenerationFields, StreamOptions


MAX_ANSWER = 2**31 - 1  # tokens; the context ends it long before
MAX_CHOICES = 128  # a prompt
MAX_CHOICES_IN_ALL = 2048
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024  # characters; stop strings are searched for after every token

_MAX_TOP_K = 2**31 - 1  # above any vocabulary, so no limit; larger ones don't fit on the device


@dataclasses.dataclass(frozen=True)
class Generation:
    """What is to run, in full: choice i of the answer is `requests[i]`'s."""

    id: str
    model: str  # the name in the answer: the adapter's where there is one
    prompts: tuple[TokenIds, ...]
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def usage(self, completion_tokens: int) -> Usage:
        """Each prompt counts once, however many choices it has."""
        prompt_tokens = sum(map(len, self.prompts))
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


@dataclasses.dataclass(slots=True)
class Answer:
    """One choice, whole."""

    text: str
    token_ids: list[int]
    completion_tokens: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None


def plan(
    id_prefix: str,
    fields: GenerationFields,
    adapter: AdapterReference | None,
    prompts: Sequence[TokenIds],
    prompt_field: str,
    max_tokens: int | None,
    max_model_len: int,
    vocab_size: int,
    max_tokens_field: str = "max_tokens",
) -> Generation:
    """Check `fields` against the prompts and the model's limits.

    `max_tokens` None gives each answer what its prompt leaves of the context. The two `_field`s are
    what the client calls them. Raises InvalidRequestError, or ContextLengthError with the numbers.
    """
    if max_tokens is not None and not 1 <= max_tokens <= MAX_ANSWER:
        raise InvalidRequestError(
            f"{max_tokens_field} must be 1 to {MAX_ANSWER}, got {str(max_tokens)[:40]}",
            param=max_tokens_field,
        )
    options = decode(
        fields.stream_options or {}, StreamOptions, REFUSED_STREAM_OPTIONS, "stream_options."
    )
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    choices = 1 if fields.n is None else fields.n
    if not 1 <= choices <= MAX_CHOICES or choices * len(prompts) > MAX_CHOICES_IN_ALL:
        raise InvalidRequestError(
            f"n must be 1 to {MAX_CHOICES}, and at most {MAX_CHOICES_IN_ALL} over all prompts,"
            f" got {choices}",
            param="n",
        )
    request_id = f"{id_prefix}-{uuid.uuid4().hex}"
    requests = []
    for prompt in prompts:
        field = prompt_field if max_tokens is None else max_tokens_field
        limit = answer_limit(len(prompt), max_tokens, max_model_len, field)
        sampling = sampling_params(fields, limit, vocab_size)
        for choice in range(choices):
            child = f"{request_id}-{len(requests)}"
            requests.append(Request(child, prompt, choice_sampling(sampling, choice), adapter))
    return Generation(
        id=request_id,
        model=adapter.name if adapter else fields.model or "",
        prompts=tuple(prompts),
        requests=tuple(requests),
        stream=bool(fields.stream),
        include_usage=bool(options.include_usage),
        return_token_ids=bool(fields.return_token_ids),
    )


def choice_sampling(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Choices of one prompt differ by their seeds, which follow the request's own."""
    if sampling.seed is None or not choice:
        return sampling
    return dataclasses.replace(sampling, seed=(sampling.seed + choice) % 2**64)


def answer_limit(prompt_tokens: int, max_tokens: int | None, max_model_len: int, field: str) -> int:
    """`max_tokens`, or what is left of the context.

    Raises ContextLengthError, about the request's `field`, where they don't fit.
    """
    wanted = 1 if max_tokens is None else max_tokens
    if prompt_tokens + wanted > max_model_len:
        raise ContextLengthError(
            f"this model's context length is {max_model_len} tokens, but {prompt_tokens + wanted} "
            f"were requested: {prompt_tokens} in the prompt and {wanted} for the answer",
            param=field,
        )
    return max_model_len - prompt_tokens if max_tokens is None else max_tokens


def sampling_params(fields: GenerationFields, max_tokens: int, vocab_size: int) -> SamplingParams:
    """The sampling fields, with OpenAI's defaults. Raises InvalidRequestError naming the field."""
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stop) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_LENGTH for text in stop):
        raise InvalidRequestError(
            f"stop must be at most {MAX_STOP_STRINGS} strings of {MAX_STOP_LENGTH} characters",
            param="stop",
        )
    stop_token_ids = fields.stop_token_ids or []
    check_ids(stop_token_ids, vocab_size, "stop_token_ids")
    top_k = fields.top_k or 0
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=fields.min_tokens or 0,
            temperature=_or(fields.temperature, 1.0),
            top_p=_or(fields.top_p, 1.0),
            top_k=0 if top_k == -1 else min(top_k, _MAX_TOP_K),  # -1 is vLLM's "no limit"
            min_p=_or(fields.min_p, 0.0),
            repetition_penalty=_or(fields.repetition_penalty, 1.0),
            presence_penalty=_or(fields.presence_penalty, 0.0),
            frequency_penalty=_or(fields.frequency_penalty, 0.0),
            logit_bias=logit_bias(fields.logit_bias or {}, vocab_size),
            seed=fields.seed,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=bool(fields.ignore_eos),
        )
    except ValueError as error:
        message = str(error)
        raise InvalidRequestError(message, param=message.partition(" ")[0]) from None


def logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's map from a token id to its bias. Raises InvalidRequestError for what is no id."""
    for key in biases:
        if not re.fullmatch("0|[1-9][0-9]{0,11}", key):
            raise InvalidRequestError(
                f"logit_bias has {key!r:.60}, no token id", param="logit_bias"
            )
    pairs = tuple((int(key), bias) for key, bias in biases.items())
    check_ids([token for token, _ in pairs], vocab_size, "logit_bias")
    return pairs


def run(engine: Engine, generation: Generation) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (choice, output) as they come. Closing it aborts what still runs.

    Raises UnavailableError where the engine aborts a request: a part never passes for the whole.
    """
    return merge([_outputs(engine, request) for request in generation.requests])


async def collect(engine: Engine, generation: Generation) -> list[Answer]:
    """Run it to the end."""
    texts: list[list[str]] = [[] for _ in generation.requests]
    ids: list[list[int]] = [[] for _ in generation.requests]
    last: dict[int, RequestOutput] = {}
    async with aclosing(run(engine, generation)) as outputs:
        async for index, output in outputs:
            texts[index].append(output.text)
            ids[index].extend(output.token_ids)
            last[index] = output
    return [
        Answer(
            text="".join(texts[i]),
            token_ids=ids[i],
            completion_tokens=last[i].completion_tokens,
            finish_reason=last[i].finish_reason,
            stop_reason=last[i].stop_reason,
        )
        for i in range(len(generation.requests))
    ]


async def _outputs(engine: Engine, request: Request) -> AsyncGenerator[RequestOutput, None]:
    finished = False
    async with aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            if output.finish_reason is FinishReason.ABORT:
                raise UnavailableError("the server aborted the request")
            finished = output.finish_reason is not None
            yield output
    if not finished:
        raise InternalServerError("the answer ended without a reason")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
