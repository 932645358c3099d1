"""The files of a model folder that make its tokenizer, read as transformers reads them.

What tokenizer.json says holds: how a text is split, and which tokens are put around it. Other files
only add to it what transformers' `PreTrainedTokenizerFast` takes from them. (transformers 5 builds
a LlamaTokenizer anew and ignores how tokenizer.json puts spaces before texts; version 4 did not,
and a folder that version 5 saved says the same in both.)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from jaxlora.errors import CheckpointError


# The named special tokens, in the order transformers has them.
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# Where special tokens stand without a name, or, in an object, with a name of the model's own.
_NAMELESS = ("additional_special_tokens", "extra_special_tokens")

# Classes of transformers that do what tokenizer.json says, whatever the config's options are.
_CLASSES_OF_THE_FILE = (None, "PreTrainedTokenizerFast", "TokenizersBackend")

# What the bytes of a token are is known for these.
_DECODERS = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")
_SPACE = "\u2581"  # SentencePiece's

# Of (file, its values), the weightier last.
_Sources = list[tuple[Path, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """`backend` has every added token; `config` is tokenizer_config.json's object."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # bos_token and the like, by name
    eos_token_ids: tuple[int, ...]
    config: dict[str, Any]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read tokenizer.json and, where they exist, the config files beside it.

    Raises CheckpointError, naming the file, for one that is missing, malformed, contradicts another
    or is of a kind that is not served.
    """
    path = folder / "tokenizer.json"
    backend = _load_backend(path)
    _check_kind(path, backend)
    config = _read_json(folder / "tokenizer_config.json")
    sources = _special_token_sources(folder, config)
    special_tokens = _special_tokens(sources)
    named = {*special_tokens.values(), *_tokens_of_own_names(sources)}
    _add_tokens(backend, folder, config, named, _nameless_tokens(sources))
    _check_prefix_space(backend, folder, config)
    eos_token_ids = _eos_token_ids(folder)
    if eos_token_ids is None:
        eos = special_tokens.get("eos_token")
        eos_id = None if eos is None else backend.token_to_id(eos)
        if eos is not None and eos_id is None:
            raise CheckpointError(f"{path}: eos_token {eos!r} is not in it")
        eos_token_ids = () if eos_id is None else (eos_id,)
    return TokenizerFiles(backend, special_tokens, eos_token_ids, config)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: no such file; the tokenizer is read from it, no other form of it is served"
        ) from error
    except Exception as error:  # the library raises plain Exception for a malformed file
        raise CheckpointError(f"{path}: not a tokenizer: {_one_line(error)}") from error
    # A file may carry its training's settings; a prompt is never cut or padded here.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_kind(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Raise CheckpointError for a tokenizer whose tokens don't spell the text they stand for."""
    model = backend.model
    if not isinstance(model, models.BPE | models.Unigram):
        kind = type(model).__name__
        raise CheckpointError(f"{path}: model type {kind} is not served (served: BPE, Unigram)")
    if isinstance(model, models.BPE):
        for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
            value = getattr(model, name)
            if value:
                raise CheckpointError(f"{path}: model's {name} {value!r} is not served")
    decoder: Any = {"type": "null"}
    if backend.decoder is not None:
        decoder = json.loads(backend.decoder.__getstate__())
    for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        if step["type"] not in _DECODERS:
            known = ", ".join(_DECODERS)
            raise CheckpointError(f"{path}: decoder {step['type']} is not served (served: {known})")
        if step["type"] == "Metaspace":
            replaced = (step["replacement"], " ")
        elif step["type"] == "Replace":
            replaced = (step["pattern"].get("String"), step["content"])
        else:
            continue
        if replaced != (_SPACE, " "):
            raise CheckpointError(
                f"{path}: decoder {step['type']} is only served for {_SPACE!r} and a space"
            )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # no lone surrogate, which is no text
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a JSON file: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def _special_token_sources(folder: Path, config: Mapping[str, Any]) -> _Sources:
    """The files that name special tokens. special_tokens_map.json wins, unless the config lists
    added tokens: transformers' rule for files of before and after its version 4.34.
    """
    sources: _Sources = [(folder / "tokenizer_config.json", config)]
    if "added_tokens_decoder" not in config:
        path = folder / "special_tokens_map.json"
        sources.append((path, _read_json(path)))
    return sources


def _special_tokens(sources: _Sources) -> dict[str, str]:
    named: dict[str, str] = {}
    for path, values in sources:
        for name in _SPECIAL_NAMES:
            if name not in values:
                continue
            content = _content(path, name, values[name])
            if content is None:
                named.pop(name, None)
            else:
                named[name] = content
    return named


def _tokens_of_own_names(sources: _Sources) -> set[str]:
    """Special tokens with names that transformers doesn't know, such as image_token."""
    tokens: set[str] = set()
    for path, values in sources:
        own = {
            key: value
            for key, value in values.items()
            if key.endswith("_token") and key not in _SPECIAL_NAMES and isinstance(value, str)
        }
        for key in _NAMELESS:
            if isinstance(values.get(key), dict):
                own |= values[key]
        tokens |= {text for key in own if (text := _content(path, key, own[key])) is not None}
    return tokens


def _nameless_tokens(sources: _Sources) -> set[str]:
    tokens: set[str] = set()
    for path, values in sources:
        for key in _NAMELESS:
            listed = values.get(key) or []
            if not isinstance(listed, list | dict):
                raise CheckpointError(f"{path}: {key} must be a list or an object")
            if isinstance(listed, list):
                tokens |= {text for t in listed if (text := _content(path, key, t)) is not None}
    return tokens


def _content(path: Path, name: str, value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    if isinstance(content, str) or (content is None and not isinstance(value, dict)):
        return content
    raise CheckpointError(f"{path}: {name} must be a string or hold `content`")


def _add_tokens(
    backend: tokenizers.Tokenizer,
    folder: Path,
    config: Mapping[str, Any],
    named: set[str],
    nameless: set[str],
) -> None:
    """Give `backend` the added tokens that only other files list, with the flags those give.

    As in transformers, tokens with a name become special; those without one only if they are
    tokens of the vocabulary that nothing has added. A token that no file gives an id is none.
    """
    path, listed = _listed_tokens(folder, config, named | nameless, backend)
    present = list(backend.get_added_tokens_decoder().values())
    backend.add_tokens([token for _, token in listed if token not in present])
    for token_id, token in listed:
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{path}: added token {token.content!r} has id {token_id},"
                f" but tokenizer.json has a place for it at {backend.token_to_id(token.content)}"
            )
    added = {t.content: t.special for t in backend.get_added_tokens_decoder().values()}
    special = sorted({t for t in named if not added.get(t)} | (nameless - added.keys()))
    known = [token for token in special if backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in known])
    split = config.get("split_special_tokens", False)
    if not isinstance(split, bool):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: split_special_tokens must be true or false"
        )
    backend.encode_special_tokens = split  # whether their names in a text are ordinary text


def _listed_tokens(
    folder: Path, config: Mapping[str, Any], special: set[str], backend: tokenizers.Tokenizer
) -> tuple[Path, list[tuple[int, AddedToken]]]:
    """The config's added tokens in the order of their ids, and the file that lists them: the
    config, or else an added_tokens.json, which knows no flags, so that tokenizer.json's are kept.
    """
    if "added_tokens_decoder" in config:
        path = folder / "tokenizer_config.json"
        listed = config["added_tokens_decoder"]
        pairs: list[Any] = list(listed.items()) if isinstance(listed, dict) else [listed]
    else:
        path = folder / "added_tokens.json"
        kept = {token.content for token in backend.get_added_tokens_decoder().values()}
        pairs = [
            (token_id, {"content": t, "special": t in special, "normalized": t not in special})
            for t, token_id in _read_json(path).items()
            if t not in kept
        ]
    try:
        tokens = [(_token_id(token_id), AddedToken(**token)) for token_id, token in pairs]
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the list of added tokens is malformed") from error
    return path, sorted(tokens, key=lambda pair: pair[0])


def _token_id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"{value!r} is no token id")
    return int(value)


def _check_prefix_space(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]
) -> None:
    """Raise CheckpointError where tokenizer.json does not do what its class was told."""
    wanted = config.get("add_prefix_space")
    if config.get("tokenizer_class") in _CLASSES_OF_THE_FILE or not isinstance(wanted, bool):
        return
    tokens = backend.encode("a", add_special_tokens=False).tokens
    if (tokens[:1] != [] and tokens[0][0] in (_SPACE, "\u0120")) != wanted:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: add_prefix_space is {json.dumps(wanted)}, but"
            f" tokenizer.json puts {'no' if wanted else 'a'} space before a text"
        )


def _eos_token_ids(folder: Path) -> tuple[int, ...] | None:
    """The ids that end an answer: generation_config.json's, else config.json's, else None."""
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        value = config.get("eos_token_id")
        if value is None and isinstance(config.get("text_config"), dict):
            value = config["text_config"].get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise CheckpointError(
                f"{folder / name}: eos_token_id must be a token id or a list of them, got {value!r}"
            )
        return tuple(dict.fromkeys(ids))
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
