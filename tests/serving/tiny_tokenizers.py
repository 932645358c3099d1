"""Small tokenizers of every kind that decodes differently, made without a file or a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from serving.tokenizer import Tokenizer


SPECIALS = ("<unk>", "<s>", "</s>", "<|end|>")
WORDS = ("▁", "▁a", "▁b", "a", "b", "ab", "▁▁", "\n", ".", "é", "日")


def _with_specials(backend: Backend) -> Backend:
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return backend


def byte_level_backend() -> Backend:
    """256 byte tokens and merges of two that make "é", "he" and " he"."""
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ã©", "he", "Ġhe", "ðŁ"]
    merges = [("Ã", "©"), ("h", "e"), ("Ġ", "he"), ("ð", "Ł")]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _with_specials(backend)


def byte_fallback_backend(*, strip: bool) -> Backend:
    """A SentencePiece BPE vocabulary, as Llama 2's (`strip`) or Gemma's."""
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *spelled, *WORDS])}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "▁")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    spaces = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _with_specials(backend)


def metaspace_backend() -> Backend:
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *WORDS])}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return _with_specials(backend)


def wordpiece_backend() -> Backend:
    tokens = [*SPECIALS, "he", "##llo", ".", "##s", "n't", "é"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.WordPiece(vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    return _with_specials(backend)


def trained_backend() -> Backend:
    """A byte-level BPE trained so that tokens end inside characters of several scripts."""
    texts = ["the cat, the hat", "日本語日本人", "привет мир", "😀😁😂🤣", "नमस्ते", "שלום"] * 4
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _with_specials(backend)


def unigram_backend() -> Backend:
    """A SentencePiece unigram vocabulary with bytes for what it lacks."""
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [(token, -10.0 - i / 100) for i, token in enumerate([*SPECIALS, *spelled, *WORDS])]
    backend = Backend(models.Unigram(scores, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return _with_specials(backend)


BACKENDS = {
    "trained": trained_backend(),
    "unigram": unigram_backend(),
    "byte_level": byte_level_backend(),
    "byte_fallback": byte_fallback_backend(strip=False),
    "byte_fallback_strip": byte_fallback_backend(strip=True),
    "metaspace": metaspace_backend(),
    "wordpiece": wordpiece_backend(),
}
TOKENIZERS = {name: Tokenizer(backend, {}, (), None) for name, backend in BACKENDS.items()}


def write_folder(folder: Path, backend: Backend, **files: Any) -> Path:
    """A model folder with tokenizer.json, and a JSON file for each name in `files`."""
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder
