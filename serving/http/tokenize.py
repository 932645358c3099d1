"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from serving.errors import InvalidRequestError
from serving.http.body import decode, read_object
from serving.http.openapi import WITH_BODY, operation
from serving.http.prompts import TokenIds, chat_prompt, check_ids, run_long
from serving.http.responses import Text, TokenizerInfo, Tokens, json_response
from serving.http.schemas import REFUSED_TOKENIZE, DetokenizeRequest, ModelFields, TokenizeRequest
from serving.http.services import Services, Tokenizer


def tokenize_router(services: Services) -> APIRouter:
    router = APIRouter(default_response_class=Response)
    tokenizer = services.tokenizer

    @router.post("/tokenize", openapi_extra=operation(Tokens, TokenizeRequest, errors=WITH_BODY))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of the prompt that the chat template makes of messages."""
        fields = decode(await read_object(request), TokenizeRequest, REFUSED_TOKENIZE)
        _check_model(services, fields)
        tokens = list(await _tokens(tokenizer, fields))
        limit = services.catalog.max_model_len
        return json_response(Tokens(count=len(tokens), max_model_len=limit, tokens=tokens))

    @router.post("/detokenize", openapi_extra=operation(Text, DetokenizeRequest, errors=WITH_BODY))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        fields = decode(await read_object(request), DetokenizeRequest, {})
        _check_model(services, fields)
        ids = fields.tokens
        check_ids(ids, tokenizer.vocab_size, "tokens")
        text = await run_long(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=False))
        return json_response(Text(prompt=text))

    @router.get("/tokenizer_info", openapi_extra=operation(TokenizerInfo))
    async def tokenizer_info() -> Response:
        """The named special tokens, and the chat template."""
        return json_response(_info(tokenizer, services.catalog.max_model_len))

    return router


def _info(tokenizer: Tokenizer, max_model_len: int) -> TokenizerInfo:
    named, ends = tokenizer.special_tokens, list(tokenizer.eos_token_ids)
    eos = named.get("eos_token")
    if eos is None and ends:  # whoever asks needs one
        eos = tokenizer.token_bytes(ends[0]).decode(errors="replace") or None
    return TokenizerInfo(
        bos_token=named.get("bos_token"),
        eos_token=eos,
        unk_token=named.get("unk_token"),
        pad_token=named.get("pad_token"),
        eos_token_ids=ends,
        vocab_size=tokenizer.vocab_size,
        model_max_length=max_model_len,
        chat_template=tokenizer.chat_template,
    )


def _check_model(services: Services, fields: ModelFields) -> None:
    """All models share one tokenizer, so none needs to be named; a wrong name is an error still."""
    model = services.catalog.base if fields.model is None else fields.model
    services.catalog.resolve(model, fields.adapter, fields.lora_name)


async def _tokens(tokenizer: Tokenizer, fields: TokenizeRequest) -> TokenIds | list[int]:
    prompt = fields.prompt
    if (prompt is None) == (fields.messages is None):
        raise InvalidRequestError("you must provide either prompt or messages", param="prompt")
    if prompt is None:
        return await chat_prompt(tokenizer, fields, bool(fields.add_special_tokens))
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(fields, name) is not None:
            raise InvalidRequestError(f"{name} needs messages", param=name)
    special = fields.add_special_tokens is not False
    return await run_long(len(prompt), lambda: tokenizer.encode(prompt, special))
