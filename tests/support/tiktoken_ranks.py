"""From a tiktoken ranks file (a token and its rank a line) to a BPE of the tokenizers library."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers


def read_ranks(path: Path) -> dict[bytes, int]:
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def backend_of_ranks(
    ranks: dict[bytes, int], pattern: str, specials: Sequence[tuple[int, str]]
) -> Tokenizer:
    """A byte-level BPE with these ranks as ids; texts are NFC-normalised and split by `pattern`.

    As in tiktoken, a piece of a text that is a token becomes that token, whatever merges give.
    """
    spelling = _spelling()
    spelled = {token: "".join(spelling[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            parts = _parts(token, ranks)
            if len(parts) == 2:
                merges.append((spelled[parts[0]], spelled[parts[1]]))
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for _, t in sorted(specials)]
    )
    return backend


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """What merges of lower rank leave of a token's bytes: two parts, if merges lead to it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, at = min(pairs)
        if rank >= limit:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _spelling() -> dict[int, str]:
    """The character that stands for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = {ord(character): character for character in alphabet if ord(character) < 0x100}
    others = [character for character in alphabet if ord(character) >= 0x100]
    missing = (byte for byte in range(256) if byte not in plain)
    return plain | dict(zip(missing, others, strict=True))
