"""Turn an answer's tokens into text as they come, equal to decoding them all at once."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from typing import Protocol


# How many shown tokens are decoded again before new ones. One, because some decoders treat a text's
# first token specially, and that must not be a new one; before a held character also those that may
# have its first bytes: at most three, as each token has at least one.
_CONTEXT_TOKENS = 1
_CONTEXT_TOKENS_HELD = 4
_REPLACEMENT = "\ufffd"


class _Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def is_silent(self, token_id: int) -> bool: ...

    def is_byte_fallback(self, token_id: int) -> bool: ...


class IncrementalDetokenizer:
    """The text of one answer, a piece at a time; special tokens are left out.

    The pieces joined are what `decode(prompt + answer)` has beyond its common start with
    `decode(prompt)`: so an answer after a prompt keeps its leading space, and a character whose
    first bytes are the prompt's belongs to the answer. No piece holds a part of a character: bytes
    that may still become one are held back. A run of byte-fallback tokens is held until it ends,
    because the decoder reads a run as a whole (one wrong byte spoils all of it).

    A token costs the decoding of a few tokens, however long prompt and answer are.
    """

    def __init__(self, tokenizer: _Decoder, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = self._prompt_tail(prompt_token_ids)  # tokens that have been shown
        self._run: list[int] = []  # byte-fallback tokens not yet decoded
        # What of the text of `context` has been shown, or is the prompt's.
        self._shown = tokenizer.decode(self._context)

    def add(self, ids: Sequence[int]) -> str:
        """The text that `ids` make certain, "" where they only begin a character."""
        # Silent tokens must not fill the context: an answer may be thousands of them.
        visible = [token for token in ids if not self._tokenizer.is_silent(token)]
        end = len(visible)
        while end and self._tokenizer.is_byte_fallback(visible[end - 1]):
            end -= 1
        if end == 0:
            self._run += visible
            return ""
        tokens = self._context + self._run + visible[:end]
        self._run = visible[end:]
        text = self._tokenizer.decode(tokens)
        certain = text.removesuffix(_REPLACEMENT)
        piece = self._beyond_shown(certain)
        if not piece:
            self._context = tokens
        elif certain == text:
            self._context = tokens[-_CONTEXT_TOKENS:]
            self._shown = self._tokenizer.decode(self._context)
        else:
            self._context = tokens[-_CONTEXT_TOKENS_HELD:]
            self._shown = self._tokenizer.decode(self._context).removesuffix(_REPLACEMENT)
        return piece

    def finish(self) -> str:
        """The rest of the text, once the answer has ended. Call it once."""
        return self._beyond_shown(self._tokenizer.decode(self._context + self._run))

    def _beyond_shown(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # Only a prompt that ends inside a character, or a text without its held last one.
        return text[len(os.path.commonprefix([text, self._shown])) :]

    def _prompt_tail(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last visible tokens: enough of them, and all of a run of bytes."""
        tail: list[int] = []
        for token in reversed(prompt):
            if len(tail) >= _CONTEXT_TOKENS_HELD and not self._tokenizer.is_byte_fallback(tail[-1]):
                break
            if not self._tokenizer.is_silent(token):
                tail.append(token)
        return tail[::-1]
