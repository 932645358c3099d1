"""What the routes work with. Everything is passed in; no module holds state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from serving.catalog import ModelCatalog
from serving.engine_protocol import Engine
from serving.errors import UnavailableError
from serving.metrics import Metrics


_SPELLINGS_KEPT = 2**16


class Tokenizer(Protocol):
    """What the HTTP layer knows of a tokenizer. Methods may be called from several threads."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    @property
    def longest_token(self) -> int | None:
        """Most characters that a token stands for; None: no bound is known."""
        ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The named ones that it has: "bos_token", "eos_token" and so on."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for within a text; need not be whole characters."""
        ...

    def is_silent(self, token_id: int) -> bool: ...

    def is_byte_fallback(self, token_id: int) -> bool: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; a message's content is a text or a list of text parts.

        Raises ValueError with the template's own reason for a refusal; where it is about one of the
        last two arguments it begins with the argument's name.
        """
        ...


class TokenSpelling:
    """A token's text, and the bytes it stands for, kept for the tokens that come again and again.

    A token that stands for a part of a character is spelled "bytes:\\xe2\\x96", as OpenAI does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept = functools.lru_cache(maxsize=_SPELLINGS_KEPT)(self._spell)

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        return self._kept(token_id)

    def _spell(self, token_id: int) -> tuple[str, list[int]]:
        data = self._tokenizer.token_bytes(token_id)
        try:
            name = data.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return name, list(data)


@dataclasses.dataclass(frozen=True, slots=True)
class Services:
    engine: Engine
    catalog: ModelCatalog
    tokenizer: Tokenizer
    metrics: Metrics
    spelling: TokenSpelling

    def check_alive(self) -> None:
        """Raise UnavailableError where the engine has ended."""
        if not self.engine.alive:
            raise UnavailableError("the engine has stopped")
