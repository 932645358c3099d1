"""What a request's body may hold. Decoded strictly: "5" is no integer, neither is true.

A field that OpenAI or vLLM know and we don't do yet stands in a table with the values that mean
"off"; anything else in it is refused by name, and so is a field nobody knows.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from serving.core import MAX_LOGPROBS


class ModelFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model answers: see ModelCatalog.resolve."""

    model: str | None = None
    adapter: str | None = None
    lora_name: str | None = None


class GenerationFields(ModelFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and plain completions have in common. None is the same as left out."""

    n: int | None = None  # choices a prompt
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None  # token id, as JSON's keys are strings -> bias
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs
    include_stop_str_in_output: bool | None = None
    user: str | None = None  # for a client's own records; changes nothing


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `stream_options` holds."""

    include_usage: bool | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a message's content."""

    type: str
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `messages`."""

    role: str
    content: str | list[TextPart]


class TokenizeRequest(ModelFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt, or messages that go through the chat template."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    add_generation_prompt: bool | None = None  # default: true


class DetokenizeRequest(ModelFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]


# Field -> the values that ask for nothing. null always does.
Refused = dict[str, tuple[Any, ...]]

_REFUSED: Refused = {
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "priority": (0,),
    "request_id": (),
    "cache_salt": (),
}

REFUSED_COMPLETION: Refused = _REFUSED | {
    "suffix": ("",),
    "response_format": ({"type": "text"},),
}

REFUSED_CHAT: Refused = _REFUSED | {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # of no tools
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

# An answer of ours, sent back as part of the conversation, has these.
REFUSED_MESSAGE: Refused = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

REFUSED_STREAM_OPTIONS: Refused = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}

REFUSED_TOKENIZE: Refused = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "return_token_strs": (False,),
    "tools": ([],),
}
