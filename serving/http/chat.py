"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from serving.core import RequestOutput
from serving.errors import InvalidRequestError
from serving.http.body import decode, read_object
from serving.http.generation import Asked, Generation, collect, logprobs_held, plan, run
from serving.http.logprobs import TokenNames, chat_logprobs
from serving.http.openapi import GENERATING, operation
from serving.http.prompts import chat_prompt, run_long
from serving.http.request_log import note_adapter
from serving.http.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    Delta,
    json_response,
)
from serving.http.schemas import REFUSED_CHAT, ChatRequest
from serving.http.services import Services
from serving.http.streaming import DONE, event, open_stream, unless_disconnected


def chat_router(services: Services) -> APIRouter:
    router = APIRouter(default_response_class=Response)
    described = operation(ChatCompletion, ChatRequest, errors=GENERATING, events=ChatChunk)

    @router.post("/v1/chat/completions", openapi_extra=described)
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, with the base model or an adapter."""
        data = await read_object(request)
        generation = await check_chat(services, decode(data, ChatRequest, REFUSED_CHAT))
        note_adapter(request, generation.adapter)
        if generation.stream:
            events = chat_events(services, generation)
            return await open_stream(services.engine, generation.requests, events)
        answers = await unless_disconnected(request.receive, collect(services.engine, generation))
        return json_response(
            await run_long(
                logprobs_held(answers), lambda: chat_completion(services, generation, answers)
            )
        )

    return router


async def check_chat(services: Services, fields: ChatRequest) -> Generation:
    """All that can be wrong with a request is found here, before anything runs or streams."""
    services.check_alive()
    adapter = services.catalog.resolve(fields.model, fields.adapter, fields.lora_name)
    limit = services.catalog.max_model_len
    special = bool(fields.add_special_tokens)
    prompt = await chat_prompt(services.tokenizer, fields, special, limit)
    newer = fields.max_completion_tokens is not None
    asked = Asked(
        id_prefix="chatcmpl",
        prompt_field="messages",
        max_tokens=_max_tokens(fields),
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        logprobs=_logprobs(fields),
    )
    return plan(services, fields, adapter, [prompt], asked)


def chat_completion(
    services: Services, generation: Generation, answers: list[RequestOutput]
) -> ChatCompletion:
    with_ids = generation.return_token_ids
    names = TokenNames(services.spelling, as_ids=generation.tokens_as_ids)
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessage(content=answer.text),
            logprobs=None if answer.logprobs is None else chat_logprobs(names, answer.logprobs),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=list(answer.token_ids) if with_ids else UNSET,
        )
        for index, answer in enumerate(answers)
    ]
    return ChatCompletion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=choices,
        usage=generation.usage(sum(answer.completion_tokens for answer in answers)),
        prompt_token_ids=list(generation.prompts[0]) if with_ids else UNSET,
    )


async def chat_events(services: Services, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The events of a stream. Closing it aborts the request."""
    with_ids = generation.return_token_ids
    chunk = ChatChunk(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[],
        usage=None if generation.include_usage else UNSET,
        prompt_token_ids=list(generation.prompts[0]) if with_ids else UNSET,
    )
    for index in range(len(generation.requests)):
        chunk.choices = [ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))]
        yield event(chunk)
        chunk.prompt_token_ids = UNSET
    completion_tokens = [0] * len(generation.requests)
    names = TokenNames(services.spelling, as_ids=generation.tokens_as_ids)
    async with aclosing(run(services.engine, generation)) as outputs:
        async for index, output in outputs:
            completion_tokens[index] = output.completion_tokens
            if output.text or output.logprobs or (with_ids and output.token_ids):
                choice = ChatChunkChoice(index=index, delta=Delta(content=output.text))
                choice.token_ids = list(output.token_ids) if with_ids else UNSET
                if output.logprobs is not None:
                    choice.logprobs = chat_logprobs(names, output.logprobs)
                chunk.choices = [choice]
                yield event(chunk)
            if output.finish_reason is not None:
                choice = ChatChunkChoice(index=index, delta=Delta())
                choice.finish_reason = output.finish_reason
                choice.stop_reason = output.stop_reason
                chunk.choices = [choice]
                yield event(chunk)
    if generation.include_usage:
        chunk.choices = []
        chunk.usage = generation.usage(sum(completion_tokens))
        yield event(chunk)
    yield DONE


def _max_tokens(fields: ChatRequest) -> int | None:
    """The newer name or the older one, which may not contradict each other."""
    newer, older = fields.max_completion_tokens, fields.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequestError(
            f"max_completion_tokens {newer} and max_tokens {older} differ",
            param="max_completion_tokens",
        )
    return older if newer is None else newer


def _logprobs(fields: ChatRequest) -> int | None:
    """How many alternatives are asked for; None where logprobs are not."""
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None
