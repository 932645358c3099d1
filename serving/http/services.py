"""What the routes work with. Everything is passed in; no module holds state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from serving.catalog import ModelCatalog
from serving.engine_protocol import Engine
from serving.errors import UnavailableError
from serving.metrics import Metrics


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


@dataclasses.dataclass(frozen=True, slots=True)
class Services:
    engine: Engine
    catalog: ModelCatalog
    tokenizer: Tokenizer
    metrics: Metrics

    def check_alive(self) -> None:
        """Raise UnavailableError where the engine has ended."""
        if not self.engine.alive:
            raise UnavailableError("the engine has stopped")
