"""Logprobs in the two shapes that OpenAI has for them.

The numbers are the engine's: natural logarithms of the model's own distribution, in float32, before
temperature, penalties, biases and filters.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.core import TokenLogprobs
from serving.detokenizer import IncrementalDetokenizer
from serving.http.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from serving.http.services import Tokenizer, TokenSpelling


# In place of minus infinity, which JSON can't hold: the number that OpenAI and vLLM use.
LEAST_LOGPROB = -9999.0


class TokenNames:
    """How one request's logprobs spell tokens: as their text, or as "token_id:N"."""

    def __init__(self, spelling: TokenSpelling, *, as_ids: bool) -> None:
        self._spelling = spelling
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._spelling(token_id)[0]

    def bytes(self, token_id: int) -> list[int]:
        return self._spelling(token_id)[1]


def chat_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """A chat choice's logprobs, of a whole answer or of one chunk's tokens."""
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=names.name(entry.token_id),
                logprob=_finite(entry.logprob),
                bytes=names.bytes(entry.token_id),
                top_logprobs=[
                    TopLogprob(names.name(token), _finite(logprob), names.bytes(token))
                    for token, logprob in entry.top
                ],
            )
            for entry in entries
        ]
    )


class CompletionLogprobsWriter:
    """One completion choice's logprobs, a piece at a time; keeps the place in the choice's text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        names: TokenNames,
        prompt_token_ids: Sequence[int],
        echo: str | None,
    ) -> None:
        """`echo` is the prompt's text where the choice's text begins with it."""
        self._tokenizer = tokenizer
        self._names = names
        self._prompt = prompt_token_ids
        self._echo = echo
        self._place = len(echo or "")
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)

    def write(
        self,
        prompt: Sequence[TokenLogprobs | None] | None,
        answer: Sequence[TokenLogprobs],
    ) -> CompletionLogprobs:
        """The tokens of `prompt`, where the echo has them, and of the next part of the answer."""
        written = CompletionLogprobs([], [], [], [])
        if prompt is not None and self._echo is not None:
            written.text_offset += prompt_offsets(self._tokenizer, self._prompt, self._echo)
            for token, entry in zip(self._prompt, prompt, strict=True):
                self._append(written, token, entry)
        for entry in answer:
            written.text_offset.append(self._place)
            self._place += len(self._detokenizer.add([entry.token_id]))
            self._append(written, entry.token_id, entry)
        return written

    def _append(self, written: CompletionLogprobs, token: int, entry: TokenLogprobs | None) -> None:
        name = self._names.name(token)
        written.tokens.append(name)
        if entry is None:  # the first token of all follows nothing
            written.token_logprobs.append(None)
            written.top_logprobs.append(None)
            return
        logprob = _finite(entry.logprob)
        top: dict[str, float] = {}
        # Two ids may share a spelling: the likelier one keeps it.
        for other, value in entry.top:
            top.setdefault(self._names.name(other), _finite(value))
        top.setdefault(name, logprob)
        written.token_logprobs.append(logprob)
        written.top_logprobs.append(top)


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Where in `text`, a prompt's, each of its tokens begins.

    A special token has a length only where the text holds its name.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, ())
    place, offsets = 0, []
    for token in ids:
        offsets.append(place)
        if tokenizer.is_silent(token):
            name = tokenizer.token_bytes(token).decode(errors="replace")
            piece = name if text.startswith(name, place) else ""
        else:
            piece = detokenizer.add([token])
        place = min(place + len(piece), len(text))  # the text may spell it otherwise
    return offsets


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
