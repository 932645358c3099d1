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
    InvocationTokensError,
    UnavailableError,
)
from serving.http.body import decode
from serving.http.merge import merge
from serving.http.prompts import TokenIds, check_ids
from serving.http.responses import Usage
from serving.http.schemas import REFUSED_STREAM_OPTIONS, GenerationFields, StreamOptions
from serving.http.services import Services


MAX_CHOICES_IN_ALL = 2048  # of one request
MAX_SCORED = 2**20  # logprobs of prompts in one request's answer, which is held whole

_MAX_TOP_K = 2**31 - 1  # above any vocabulary, so no limit; larger ones don't fit on the device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What chat and plain completions ask for under names and defaults of their own."""

    id_prefix: str
    prompt_field: str
    max_tokens: int | None  # None: what the prompt leaves of the context
    max_tokens_field: str = "max_tokens"
    logprobs: int | None = None  # alternatives a token
    echoes: tuple[str, ...] | None = None  # the prompts' texts, where answers begin with them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What is to run, in full: choice i of the answer is `requests[i]`'s."""

    id: str
    model: str  # the name in the answer: the adapter's where there is one
    adapter: AdapterReference | None
    prompts: tuple[TokenIds, ...]
    echoes: tuple[str, ...] | None
    choices: int  # a prompt
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def usage(self, completion_tokens: int) -> Usage:
        """Each prompt counts once, however many choices it has."""
        prompt_tokens = sum(map(len, self.prompts))
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)

    def echo(self, index: int) -> str | None:
        """What the text of a choice begins with, where the prompt is asked for."""
        return None if self.echoes is None else self.echoes[index // self.choices]


def plan(
    services: Services,
    fields: GenerationFields,
    adapter: AdapterReference | None,
    prompts: Sequence[TokenIds],
    asked: Asked,
) -> Generation:
    """Check what a request asks for against its prompts and the model's limits.

    Raises InvalidRequestError; ContextLengthError with the numbers; InvocationTokensError for a
    prompt in which the adapter would not begin.
    """
    _check_max_tokens(asked)
    options = decode(
        fields.stream_options or {}, StreamOptions, REFUSED_STREAM_OPTIONS, "stream_options."
    )
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    choices = _choices(fields, len(prompts))
    _check_scored(asked, choices * sum(map(len, prompts)))
    request_id = f"{asked.id_prefix}-{uuid.uuid4().hex}"
    requests = []
    for prompt in prompts:
        if adapter is not None and not adapter.acts_on(prompt):
            raise InvocationTokensError(
                adapter.name, adapter.invocation_tokens, param=asked.prompt_field
            )
        field = asked.prompt_field if asked.max_tokens is None else asked.max_tokens_field
        limit = answer_limit(len(prompt), asked.max_tokens, services.catalog.max_model_len, field)
        sampling = sampling_params(fields, asked, limit, services.tokenizer.vocab_size)
        for choice in range(choices):
            child = f"{request_id}-{len(requests)}"
            requests.append(Request(child, prompt, choice_sampling(sampling, choice), adapter))
        services.metrics.record_choices(choices)
    return Generation(
        id=request_id,
        model=adapter.name if adapter else fields.model or "",
        adapter=adapter,
        prompts=tuple(prompts),
        echoes=asked.echoes,
        choices=choices,
        requests=tuple(requests),
        stream=bool(fields.stream),
        include_usage=bool(options.include_usage),
        return_token_ids=bool(fields.return_token_ids),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
    )


def _check_max_tokens(asked: Asked) -> None:
    """An answer has a token at least, except where the prompt alone is an answer."""
    if asked.max_tokens == 0 and asked.echoes is None:
        raise InvalidRequestError(
            f"{asked.max_tokens_field} 0 needs echo to be true", param=asked.max_tokens_field
        )


def _check_scored(asked: Asked, tokens: int) -> None:
    """`tokens` of echoed prompts, each with its own logprob and its alternatives'."""
    if asked.echoes is None or asked.logprobs is None:
        return
    scored = tokens * (1 + asked.logprobs)
    if scored > MAX_SCORED:
        raise InvalidRequestError(
            f"echoing {tokens} tokens with logprobs {asked.logprobs} is {scored} logprobs, over"
            f" {MAX_SCORED}",
            param="logprobs",
        )


def _choices(fields: GenerationFields, prompts: int) -> int:
    choices = 1 if fields.n is None else fields.n
    if choices * prompts > MAX_CHOICES_IN_ALL:
        raise InvalidRequestError(
            f"n {choices} for {prompts} prompts is over {MAX_CHOICES_IN_ALL} choices", param="n"
        )
    return choices


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


def sampling_params(
    fields: GenerationFields, asked: Asked, max_tokens: int, vocab_size: int
) -> SamplingParams:
    """The sampling fields, with OpenAI's defaults. Raises InvalidRequestError naming the field."""
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
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
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
            ignore_eos=bool(fields.ignore_eos),
            logprobs=asked.logprobs,
            prompt_logprobs=None if asked.echoes is None else asked.logprobs,
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


async def collect(engine: Engine, generation: Generation) -> list[RequestOutput]:
    """Run it to the end; each choice's outputs as one. Raises QueueFullError before it begins."""
    news: list[list[RequestOutput]] = [[] for _ in generation.requests]
    with engine.places(generation.requests):
        async with aclosing(run(engine, generation)) as outputs:
            async for index, output in outputs:
                news[index].append(output)
    return [_joined(outputs) for outputs in news]


def _joined(outputs: list[RequestOutput]) -> RequestOutput:
    first, last = outputs[0], outputs[-1]
    logprobs = None
    if first.logprobs is not None:
        logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
    return dataclasses.replace(
        last,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs,
    )


def logprobs_held(answers: Sequence[RequestOutput]) -> int:
    """How many logprobs there are to write."""
    return sum(
        1 + len(entry.top)
        for answer in answers
        for entry in (*(answer.prompt_logprobs or ()), *(answer.logprobs or ()))
        if entry is not None
    )


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
