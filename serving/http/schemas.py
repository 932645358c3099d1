"""What a request's body may hold. Decoded strictly: "5" is no integer, neither is true.

A field that OpenAI or vLLM know and we don't do stands in `field_rows` with the values that mean
"off"; anything else in it is refused by name, and so is a field nobody knows. Ranges stand here for
the document that describes the routes as much as for the decoder; a number that needs 64 bits, or
is compared with the model, is checked later and only described here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.core import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from serving.http.field_rows import Routes, refused


MAX_ANSWER = 2**31 - 1  # tokens; the context ends it long before
MAX_CHOICES = 128  # a prompt
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024  # characters; stop strings are searched for after every token
MAX_METADATA = 16  # OpenAI's numbers
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_SAFETY_IDENTIFIER = 128

ROLES = ("system", "user", "assistant")


def _described(name: str) -> Meta:
    """Described as the type `name`, though decoded apart, for messages that say where."""
    return Meta(extra_json_schema={"$ref": f"#/components/schemas/{name}"})


TokenId = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Messages = Annotated[
    list[Annotated[dict[str, Any], _described("Message")]],
    Meta(extra_json_schema={"minItems": 1}),
]
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=MAX_METADATA_KEY)],
        Annotated[str, Meta(max_length=MAX_METADATA_VALUE)],
    ],
    Meta(max_length=MAX_METADATA),
]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `stream_options` holds."""

    include_usage: bool | None = None


class PromptCacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `prompt_cache_options` holds."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class ModelFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model answers: see ModelCatalog.resolve."""

    model: str | None = None
    adapter: str | None = None
    lora_name: str | None = None


class GenerationFields(ModelFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and plain completions have in common. None is the same as left out."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_ANSWER)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Token ids are texts here, as JSON's keys are.
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: Annotated[dict[str, Any], _described("StreamOptions")] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_ANSWER)] | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None  # default: unless the final message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_ANSWER)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_ANSWER)] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    metadata: Metadata | None = None
    safety_identifier: Annotated[str, Meta(max_length=MAX_SAFETY_IDENTIFIER)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    parallel_tool_calls: bool | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a message's content."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `messages`."""

    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | list[TextPart]


class TokenizeRequest(ModelFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt, or messages that go through the chat template."""

    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None  # default: unless the final message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages


class DetokenizeRequest(ModelFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[TokenId]


# Field -> the values that ask for nothing. null always does.
Refused = dict[str, tuple[Any, ...]]

REFUSED_COMPLETION: Refused = refused(Routes.COMPLETIONS)
REFUSED_CHAT: Refused = refused(Routes.CHAT)

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
    "documents": ([],),
    "return_token_strs": (False,),
    "tools": ([],),
}
