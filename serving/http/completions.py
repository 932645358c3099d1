"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from serving.core import RequestOutput
from serving.errors import InvalidRequestError
from serving.http.body import decode, read_object
from serving.http.generation import Asked, Generation, collect, logprobs_held, plan, run
from serving.http.logprobs import CompletionLogprobsWriter, TokenNames
from serving.http.openapi import GENERATING, operation
from serving.http.prompts import Prompt, completion_prompts, run_long
from serving.http.request_log import note_adapter
from serving.http.responses import Completion, CompletionChoice, json_response
from serving.http.schemas import REFUSED_COMPLETION, CompletionRequest
from serving.http.services import Services
from serving.http.streaming import DONE, event, open_stream, unless_disconnected


DEFAULT_MAX_TOKENS = 16  # OpenAI's


def completions_router(services: Services) -> APIRouter:
    router = APIRouter(default_response_class=Response)
    described = operation(Completion, CompletionRequest, errors=GENERATING, events=Completion)

    @router.post("/v1/completions", openapi_extra=described)
    async def create_completion(request: Request) -> Response:
        """Continue prompts, with the base model or an adapter."""
        data = await read_object(request)
        generation = await check_completion(
            services, decode(data, CompletionRequest, REFUSED_COMPLETION)
        )
        note_adapter(request, generation.adapter)
        if generation.stream:
            events = completion_events(services, generation)
            return await open_stream(services.engine, generation.requests, events)
        answers = await unless_disconnected(request.receive, collect(services.engine, generation))
        return json_response(
            await run_long(
                logprobs_held(answers), lambda: completion(services, generation, answers)
            )
        )

    return router


async def check_completion(services: Services, fields: CompletionRequest) -> Generation:
    """All that can be wrong with a request is found here, before anything runs or streams."""
    services.check_alive()
    adapter = services.catalog.resolve(fields.model, fields.adapter, fields.lora_name)
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise InvalidRequestError("best_of is served only where it equals n", param="best_of")
    special = fields.add_special_tokens is not False
    limit = services.catalog.max_model_len
    prompts = await completion_prompts(services.tokenizer, fields.prompt, special, limit)
    asked = Asked(
        id_prefix="cmpl",
        prompt_field="prompt",
        max_tokens=DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens,
        logprobs=fields.logprobs,
        echoes=await _echoes(services, prompts) if fields.echo else None,
    )
    return plan(services, fields, adapter, [prompt.ids for prompt in prompts], asked)


async def _echoes(services: Services, prompts: list[Prompt]) -> tuple[str, ...]:
    """What echoes show: the client's own texts; of token ids all of them, special ones too."""

    def text(prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return services.tokenizer.decode(prompt.ids, skip_special_tokens=False)

    tokens = sum(len(prompt.ids) for prompt in prompts)
    return await run_long(tokens, lambda: tuple(map(text, prompts)))


def completion(
    services: Services, generation: Generation, answers: list[RequestOutput]
) -> Completion:
    choices = [
        ChoiceWriter(services, generation, index).write(answer)
        for index, answer in enumerate(answers)
    ]
    return Completion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=choices,
        usage=generation.usage(sum(answer.completion_tokens for answer in answers)),
    )


async def completion_events(
    services: Services, generation: Generation
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. Closing it aborts the request."""
    chunk = Completion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[],
        usage=None if generation.include_usage else UNSET,
    )
    number = range(len(generation.requests))
    writers = [ChoiceWriter(services, generation, index) for index in number]
    completion_tokens = [0] * len(number)
    async with aclosing(run(services.engine, generation)) as outputs:
        async for index, output in outputs:
            completion_tokens[index] = output.completion_tokens
            writer = writers[index]
            if writer.shows(output):
                prompt = len(output.prompt_logprobs or ())
                choice = await run_long(prompt, lambda w=writer, o=output: w.write(o))
                chunk.choices = [choice]
                yield event(chunk)
    if generation.include_usage:
        chunk.choices = []
        chunk.usage = generation.usage(sum(completion_tokens))
        yield event(chunk)
    yield DONE


class ChoiceWriter:
    """One choice, whole or in chunks: the first also has what is said of the prompt."""

    def __init__(self, services: Services, generation: Generation, index: int) -> None:
        request = generation.requests[index]
        self._index = index
        self._echo = generation.echo(index) or ""
        self._with_ids = generation.return_token_ids
        self._prompt = request.prompt_token_ids
        self._first = True
        self._logprobs = None
        if request.sampling.logprobs is not None:
            names = TokenNames(services.spelling, as_ids=generation.tokens_as_ids)
            self._logprobs = CompletionLogprobsWriter(
                services.tokenizer, names, self._prompt, generation.echo(index)
            )

    def shows(self, output: RequestOutput) -> bool:
        """Whether a stream has anything to say of `output`."""
        told_of_tokens = self._with_ids or self._logprobs is not None
        return bool(
            output.text
            or output.finish_reason
            or (self._first and self._echo)
            or (told_of_tokens and output.token_ids)
        )

    def write(self, output: RequestOutput) -> CompletionChoice:
        first, self._first = self._first, False
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs.write(output.prompt_logprobs, output.logprobs or ())
        return CompletionChoice(
            index=self._index,
            text=self._echo + output.text if first else output.text,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=list(output.token_ids) if self._with_ids else UNSET,
            prompt_token_ids=list(self._prompt) if self._with_ids and first else UNSET,
        )
