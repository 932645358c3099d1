"""A model folder's tokenizer: text to token ids and back, its special tokens, its chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from serving.chat_template import ChatTemplate, ChatTemplateError, load_chat_template
from serving.tokenizer_files import read_tokenizer_files


class Tokenizer:
    """Encodes and decodes as transformers does for the same folder. Threads may share one.

    tokenizer.json alone says which tokens are added around a text: its config's add_bos_token and
    add_eos_token are ignored beside it, as in transformers 5.

    Properties: `vocab_size` is one more than the largest token id; `longest_token` is the most
    characters a token stands for, None where that has no bound (a word unknown to the vocabulary);
    `eos_token_ids` ends an answer; `bos_token_id`, `bos_token` and `eos_token` are None where the
    folder names none. `special_tokens` are the named ones (bos_token, pad_token, ...) that it has,
    `chat_template` is the default template's source or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        chat_template: ChatTemplate | None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.chat_template = None if chat_template is None else chat_template.source
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        self.bos_token_id = None if self.bos_token is None else backend.token_to_id(self.bos_token)

        vocabulary = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = _longest_token(backend.model, vocabulary)
        self._added = frozenset(added)
        special = {token_id for token_id, token in added.items() if token.special}
        empty = {token_id for token, token_id in vocabulary.items() if not token}
        holes = set(range(self.vocab_size)).difference(vocabulary.values())
        self._silent = frozenset(special | empty | holes)
        decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._byte_level = b'"ByteLevel"' in decoder
        self._metaspace = "\u2581".encode() in decoder
        self._bytes_of: dict[int, int] = {}  # byte-fallback token -> the byte it stands for
        if b'"ByteFallback"' in decoder:
            spelled = {f"<0x{byte:02X}>": byte for byte in range(256)}
            self._bytes_of = {
                vocabulary[token]: byte for token, byte in spelled.items() if token in vocabulary
            }

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where they exist, the config files beside it.

        Raises CheckpointError, naming the file, for one that is missing, malformed, contradicts
        another or is of a kind that is not served.
        """
        folder = Path(path)
        files = read_tokenizer_files(folder)
        template = load_chat_template(folder, files.config, files.special_tokens)
        return cls(files.backend, files.special_tokens, files.eos_token_ids, template)

    @classmethod
    def of_bytes(cls, eos_token_ids: Sequence[int]) -> Tokenizer:
        """Token i is byte i: for a model made from its config.json alone."""
        backend = tokenizers.Tokenizer(models.BPE(vocab=dict(_BYTE_OF), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls(backend, {}, eos_token_ids, None)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json."""
        self._backend.save(str(Path(folder) / "tokenizer.json"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; names of special tokens in it become those tokens.

        Other threads run meanwhile: the library's `encode` would hold them up, a batch does not.

        Raises ValueError for text that has no UTF-8 form (a lone surrogate).
        """
        try:
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise ValueError("text holds a lone surrogate, which has no UTF-8 form") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids without a token (a model's padded vocabulary) add nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat, to be encoded without adding special tokens.

        Arguments as in `ChatTemplate.render`. Raises ChatTemplateError where the folder has no
        default template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise ChatTemplateError("this model has no default chat template")
        return self._chat_template.render(
            messages, add_generation_prompt, continue_final_message, chat_template_kwargs
        )

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it, "" for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for within a text, "" for an id without a token.

        A special token stands for its own name. Bytes need not be whole characters.
        """
        token = self.token(token_id)
        if token_id in self._added:
            return token.encode()
        if token_id in self._bytes_of:
            return bytes([self._bytes_of[token_id]])
        if self._byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return (token.replace("\u2581", " ") if self._metaspace else token).encode()

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` skips the id: a special token, or an id without a token."""
        return token_id >= self.vocab_size or token_id in self._silent

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token stands for one byte, which the decoder reads with its neighbours."""
        return token_id in self._bytes_of


def _longest_token(model: models.Model, vocabulary: Mapping[str, int]) -> int | None:
    """Most characters of a text that become one token."""
    # Bytes are spelled as characters, so a token's spelling is never shorter than what it is for.
    spelled_out = isinstance(model, models.BPE) and (model.unk_token is None or model.byte_fallback)
    return max(map(len, vocabulary), default=0) if spelled_out else None


def _byte_characters() -> Iterator[tuple[str, int]]:
    """GPT-2's printable character for every byte."""
    shifted = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            yield chr(byte), byte
        else:
            yield chr(shifted), byte
            shifted += 1


_BYTE_OF = dict(_byte_characters())
