"""From the prompt or messages of a request to token ids."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from serving.errors import ContextLengthError, InvalidRequestError
from serving.http.body import decode
from serving.http.schemas import REFUSED_MESSAGE, ROLES, ChatRequest, Message, TokenizeRequest
from serving.http.services import Tokenizer


MAX_PROMPTS = 2048  # of one request

TokenIds = tuple[int, ...]
T = TypeVar("T")

_LONG = 4096  # characters, or ids: what takes less than about a millisecond is done in place


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a completion. `text` is what the client wrote, None where it sent ids."""

    ids: TokenIds
    text: str | None = None


async def run_long(size: int, work: Callable[[], T]) -> T:
    """Do `work`, in a thread where `size` says it takes long, so that other streams go on."""
    return work() if size < _LONG else await asyncio.to_thread(work)


async def completion_prompts(
    tokenizer: Tokenizer,
    prompt: str | list[Any] | None,
    add_special_tokens: bool,
    max_model_len: int,
) -> list[Prompt]:
    """The prompts of a completion, in order: text, token ids, or a list of either.

    Raises InvalidRequestError where one is empty, an id is out of range, or there are too many;
    ContextLengthError where a text can't fit `max_model_len` whatever its tokens are.
    """
    if prompt is None:
        raise InvalidRequestError("you must provide a prompt", param="prompt")
    items = _items(prompt)
    if len(items) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {len(items)} prompts, at most {MAX_PROMPTS} are served", param="prompt"
        )

    def read() -> list[Prompt]:
        return [_prompt(tokenizer, item, add_special_tokens, max_model_len) for item in items]

    return await run_long(sum(map(len, items)), read)


async def chat_prompt(
    tokenizer: Tokenizer,
    fields: ChatRequest | TokenizeRequest,
    add_special_tokens: bool,
    max_model_len: int | None = None,
) -> TokenIds:
    """The prompt that the chat template makes of the messages in `fields`.

    `add_special_tokens` is off by default in the routes, as templates write their own. Raises
    InvalidRequestError for an unknown role, content that isn't text, or what the template refuses;
    ContextLengthError where the text can't fit `max_model_len` whatever its tokens are.
    """
    checked = [_message(message, i) for i, message in enumerate(fields.messages or ())]
    if not checked:
        raise InvalidRequestError("you must provide at least one message", param="messages")
    goes_on = bool(fields.continue_final_message)
    begins = not goes_on if fields.add_generation_prompt is None else fields.add_generation_prompt

    def render() -> list[int]:
        try:
            text = tokenizer.apply_chat_template(
                checked, begins, goes_on, fields.chat_template_kwargs
            )
        except ValueError as error:
            raise _template_error(error) from None
        _check_fits(text, tokenizer, max_model_len, "messages")
        return tokenizer.encode(text, add_special_tokens)

    ids = await run_long(sum(_size(message) for message in checked), render)
    return _not_empty(ids, "messages")


def _template_error(error: ValueError) -> InvalidRequestError:
    """A chat template's refusal. One that is about a field's value begins with the field's name."""
    message = str(error)
    first = message.partition(" ")[0].rstrip(":")
    field = first in ("continue_final_message", "chat_template_kwargs")
    return InvalidRequestError(message, param=first if field else "messages")


def _size(message: dict[str, Any]) -> int:
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return sum(len(text) + 16 for text in texts)


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError where an id is not one of the tokenizer's."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequestError(
            f"{param}: token id {wrong} is not between 0 and {vocab_size - 1}", param=param
        )


def _items(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds in ({str}, {list}):
        return prompt
    if kinds:
        raise InvalidRequestError("prompt mixes texts and token ids", param="prompt")
    raise InvalidRequestError("prompt must not be empty", param="prompt")


def _prompt(
    tokenizer: Tokenizer, item: str | list[int], add_special_tokens: bool, max_model_len: int
) -> Prompt:
    if isinstance(item, list):
        check_ids(item, tokenizer.vocab_size, "prompt")
        return Prompt(_not_empty(item, "prompt"))
    ids = []
    _check_fits(item, tokenizer, max_model_len, "prompt")
    if item:  # an empty text may not become a lone BOS
        ids = tokenizer.encode(item, add_special_tokens)
    return Prompt(_not_empty(ids, "prompt"), item)


def _check_fits(text: str, tokenizer: Tokenizer, max_model_len: int | None, param: str) -> None:
    """Raise ContextLengthError where `text` is too long for any tokens: it isn't tokenized then."""
    if max_model_len is None or tokenizer.longest_token is None:
        return
    least = -(-len(text) // max(tokenizer.longest_token, 1))
    if least > max_model_len:
        raise ContextLengthError(
            f"this model's context length is {max_model_len} tokens, but a text of {len(text)} "
            f"characters takes at least {least}",
            param=param,
        )


def _not_empty(ids: list[int], param: str) -> TokenIds:
    if not ids:
        raise InvalidRequestError(f"{param} must not be empty", param=param)
    return tuple(ids)


def _message(data: dict[str, Any], position: int) -> dict[str, Any]:
    where = f"messages[{position}]."
    message = decode(data, Message, REFUSED_MESSAGE, where)
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{where}role {message.role!r} is not one of {', '.join(ROLES)}", param=f"{where}role"
        )
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    if not message.content:
        raise InvalidRequestError(f"{where}content must not be empty", param=f"{where}content")
    for part in message.content:
        if part.type != "text":
            raise InvalidRequestError(
                f"{where}content holds a part of type {part.type!r}, only text is served",
                param=f"{where}content",
            )
    parts = [{"type": part.type, "text": part.text} for part in message.content]
    return {"role": message.role, "content": parts}
