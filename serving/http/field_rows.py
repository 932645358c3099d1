"""The table of fields: everything a generation request may hold, and what is done about it.

`serving.http.schemas` gives the types of what is accepted, and a test holds it, OpenAI's own two
schemas and docs/api.md to this table.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Effect(enum.StrEnum):
    HONOURED = "honoured"
    NONE = "no effect"  # its type is checked: OpenAI too says that it does not change the answer
    REFUSED = "refused"  # except for the values that ask for nothing


class Routes(enum.StrEnum):
    BOTH = "both"
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclasses.dataclass(frozen=True)
class Field:
    """One field. `off` are a refused field's values that ask for nothing; null always does."""

    name: str
    routes: Routes
    effect: Effect
    note: str
    off: tuple[Any, ...] = ()


def _rows(routes: Routes, effect: Effect, **notes: str) -> list[Field]:
    return [Field(name, routes, effect, note) for name, note in notes.items()]


def _refused(routes: Routes, **rows: tuple[tuple[Any, ...], str]) -> list[Field]:
    return [Field(name, routes, Effect.REFUSED, note, off) for name, (off, note) in rows.items()]


ROWS: tuple[Field, ...] = (
    *_rows(
        Routes.BOTH,
        Effect.HONOURED,
        model="the base's name or alias, an adapter's name, or `base:adapter`",
        adapter="the adapter, beside the base's name in `model`",
        lora_name="the same as `adapter`",
    ),
    *_rows(
        Routes.COMPLETIONS,
        Effect.HONOURED,
        prompt="a text, token ids, or a list of either",
        echo="the answer begins with the prompt; with `logprobs` those of the prompt come too",
        logprobs="so many alternatives a token; 0 for the tokens alone",
        best_of="only the same number as `n`",
    ),
    *_rows(
        Routes.CHAT,
        Effect.HONOURED,
        messages="roles system, user, assistant; content a text or text parts",
        max_completion_tokens="the newer name of `max_tokens`; the two may not differ",
        logprobs="whether the answer has them",
        top_logprobs="so many alternatives a token; needs `logprobs`",
        add_generation_prompt="the prompt ends with the beginning of an answer; the default, unless"
        " the final message is continued",
        continue_final_message="the answer goes on with the last message",
        chat_template_kwargs="switches of the model's chat template",
    ),
    *_rows(
        Routes.BOTH,
        Effect.HONOURED,
        max_tokens="the longest answer. Completions: 16 by default, 0 with `echo`; chat: what is"
        " left of the context",
        min_tokens="before so many tokens nothing ends the answer",
        n="choices a prompt",
        temperature="0 is greedy; the default is 1",
        top_p="the likeliest tokens that have this much of the probability together",
        top_k="so many of the likeliest tokens; 0 or -1: all",
        min_p="tokens at least so likely, compared with the likeliest",
        repetition_penalty="on tokens of prompt and answer, multiplied",
        presence_penalty="on tokens of the answer, once",
        frequency_penalty="on tokens of the answer, each time",
        logit_bias="token id to a number added to its logit, at most 300",
        seed="repeats an answer; choice i of a prompt has the seed + i",
        stop="strings that end the answer, and are not in it",
        stop_token_ids="tokens that end the answer",
        include_stop_str_in_output="the stop string is in the answer",
        ignore_eos="the model's own end of an answer does not count",
        stream="server-sent events",
        stream_options="`include_usage`: a last chunk with the usage; needs `stream`",
        add_special_tokens="those that the tokenizer puts around a text. Completions: true by"
        " default; chat: false, as templates write them",
        return_token_ids="the ids of prompt and answer beside their text",
        return_tokens_as_token_ids="logprobs name tokens `token_id:N`",
    ),
    *_rows(Routes.BOTH, Effect.NONE, user="for your own records"),
    *_rows(
        Routes.CHAT,
        Effect.NONE,
        metadata="for your own records",
        safety_identifier="for your own records",
        prompt_cache_key="a hint for OpenAI's caches",
        prompt_cache_options="a hint for OpenAI's caches",
        prompt_cache_retention="a hint for OpenAI's caches",
        parallel_tool_calls="of no tools",
    ),
    *_refused(
        Routes.COMPLETIONS,
        suffix=(("",), "models here continue a text, they don't fill one in"),
        response_format=(({"type": "text"},), "answers are free text"),
    ),
    *_refused(
        Routes.CHAT,
        audio=((), "text only"),
        chat_template=((), "the model's own template is used"),
        documents=(([],), "templates get none"),
        echo=((False,), "a completion can"),
        function_call=(("none", "auto"), "no tools"),
        functions=(([],), "no tools"),
        modalities=((["text"],), "text only"),
        moderation=((), "there is none"),
        prediction=((), "no speculation"),
        reasoning_effort=(("none",), "switches of a template go in `chat_template_kwargs`"),
        response_format=(({"type": "text"},), "answers are free text"),
        service_tier=(("auto", "default"), "there is one"),
        store=((False,), "nothing is kept"),
        tool_choice=(("none", "auto"), "no tools"),
        tools=(([],), "no tools"),
        verbosity=(("medium",), "ask for it in a message"),
        web_search_options=((), "no search"),
    ),
    *_refused(
        Routes.BOTH,
        allowed_token_ids=((), "`logit_bias` can"),
        bad_words=(([],), "`logit_bias` can"),
        cache_salt=((), "no shared prefix cache"),
        length_penalty=((1,), "no beam search"),
        priority=((0,), "first come, first served"),
        prompt_logprobs=((), "`echo` with `logprobs` can"),
        request_id=((), "send the header X-Request-Id"),
        skip_special_tokens=((True,), "`return_token_ids` shows them"),
        spaces_between_special_tokens=((True,), "special tokens are left out"),
        structured_outputs=((), "answers are free text"),
        truncate_prompt_tokens=((), "a prompt is read whole or refused"),
        use_beam_search=((False,), "no beam search"),
    ),
)


def rows_of(routes: Routes) -> list[Field]:
    """The rows of one route's requests."""
    return [row for row in ROWS if row.routes in (Routes.BOTH, routes)]


def refused(routes: Routes) -> dict[str, tuple[Any, ...]]:
    """One route's refused fields, each with the values that ask for nothing."""
    return {row.name: row.off for row in rows_of(routes) if row.effect is Effect.REFUSED}
