"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from serving.core import RequestOutput
from serving.http.body import decode, read_object
from serving.http.generation import Answer, Generation, collect, plan, run
from serving.http.openapi import operation
from serving.http.prompts import completion_prompts
from serving.http.responses import Completion, CompletionChoice, json_response
from serving.http.schemas import REFUSED_COMPLETION, CompletionRequest
from serving.http.services import Services
from serving.http.streaming import DONE, EventStream, event, unless_disconnected


DEFAULT_MAX_TOKENS = 16  # OpenAI's


def completions_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=operation(Completion, CompletionRequest))
    async def create_completion(request: Request) -> Response:
        data = await read_object(request)
        generation = await check_completion(
            services, decode(data, CompletionRequest, REFUSED_COMPLETION)
        )
        if generation.stream:
            return EventStream(completion_events(services, generation))
        answers = await unless_disconnected(request.receive, collect(services.engine, generation))
        return json_response(completion(generation, answers))

    return router


async def check_completion(services: Services, fields: CompletionRequest) -> Generation:
    """All that can be wrong with a request is found here, before anything runs or streams."""
    services.check_alive()
    adapter = services.catalog.resolve(fields.model, fields.adapter, fields.lora_name)
    special = fields.add_special_tokens is not False
    limit = services.catalog.max_model_len
    prompts = await completion_prompts(services.tokenizer, fields.prompt, special, limit)
    return plan(
        "cmpl",
        fields,
        adapter,
        prompts,
        "prompt",
        DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens,
        limit,
        services.tokenizer.vocab_size,
    )


def completion(generation: Generation, answers: list[Answer]) -> Completion:
    with_ids = generation.return_token_ids
    choices = [
        CompletionChoice(
            index=index,
            text=answer.text,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if with_ids else UNSET,
            prompt_token_ids=_prompt_ids(generation, index) if with_ids else UNSET,
        )
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
    completion_tokens = [0] * len(generation.requests)
    async with aclosing(run(services.engine, generation)) as outputs:
        async for index, output in outputs:
            first = completion_tokens[index] == 0
            completion_tokens[index] = output.completion_tokens
            if (
                output.text
                or output.finish_reason
                or (generation.return_token_ids and output.token_ids)
            ):
                chunk.choices = [_chunk_choice(generation, index, output, first)]
                yield event(chunk)
    if generation.include_usage:
        chunk.choices = []
        chunk.usage = generation.usage(sum(completion_tokens))
        yield event(chunk)
    yield DONE


def _chunk_choice(
    generation: Generation, index: int, output: RequestOutput, first: bool
) -> CompletionChoice:
    with_ids = generation.return_token_ids
    return CompletionChoice(
        index=index,
        text=output.text,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        token_ids=list(output.token_ids) if with_ids else UNSET,
        prompt_token_ids=_prompt_ids(generation, index) if with_ids and first else UNSET,
    )


def _prompt_ids(generation: Generation, index: int) -> list[int]:
    return list(generation.requests[index].prompt_token_ids)
