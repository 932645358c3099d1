import codecs
import os.path
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.detokenizer import IncrementalDetokenizer
from tests.serving.tiny_tokenizers import TOKENIZERS


KINDS = sorted(TOKENIZERS)


def answer_text(tokenizer, prompt, answer):
    """What the answer adds to the prompt's text, from decoding both whole."""
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *answer])
    return whole[len(os.path.commonprefix([before, whole])) :]


def stream(tokenizer, prompt, batches):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [detokenizer.add(batch) for batch in batches] + [detokenizer.finish()]


def batches_of(answer, sizes):
    batches, start = [], 0
    for size in sizes:
        batches.append(answer[start : start + size])
        start += size
    return [*batches, *([token] for token in answer[start:])]


def single_bytes(tokenizer, text):
    """`text` as one token for each byte."""
    bytes_of = {tokenizer.token_bytes(i): i for i in range(4, tokenizer.vocab_size)}
    return [bytes_of[bytes([byte])] for byte in text.encode()]


def ids_of(tokenizer):
    """Any ids: all tokens, those of emoji and other scripts, specials, and past the end."""
    any_id = st.integers(0, tokenizer.vocab_size + 2)
    has_bytes = tokenizer.vocab_size > 256
    parts = single_bytes(tokenizer, "😀€é") if has_bytes else [tokenizer.vocab_size - 1]
    return st.lists(any_id | st.sampled_from(parts) | st.integers(0, 3), max_size=24)


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, max_examples=120, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_whole_decode(kind, data):
    tokenizer = TOKENIZERS[kind]
    prompt, answer = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    batches = batches_of(answer, data.draw(st.lists(st.integers(0, 4), max_size=5)))
    joined = "".join(stream(tokenizer, prompt, batches))
    assert joined == answer_text(tokenizer, prompt, answer)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_strip"])
@settings(derandomize=True, max_examples=50, deadline=None)
@given(prompt=st.text(max_size=6), answer=st.text(max_size=12))
def test_text_comes_back_after_a_prompt_of_text(kind, prompt, answer):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(prompt + answer)
    count = len(tokenizer.encode(prompt))
    joined = "".join(stream(tokenizer, ids[:count], [[token] for token in ids[count:]]))
    assert joined == answer_text(tokenizer, ids[:count], ids[count:])
    assert "".join(stream(tokenizer, [], [[token] for token in ids])) == tokenizer.decode(ids)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(text=st.text(alphabet="aé€😀 \n", max_size=12))
def test_byte_level_text_is_shown_as_soon_as_its_characters_are_complete(text):
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer, [1])
    complete = codecs.getincrementaldecoder("utf-8")()
    for token in tokenizer.encode(text):
        assert detokenizer.add([token]) == complete.decode(tokenizer.token_bytes(token))
    assert detokenizer.finish() == ""


def test_an_emoji_over_four_tokens_comes_whole():
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [*tokenizer.encode("😀"), *tokenizer.encode("a")]
    assert stream(tokenizer, [1], [[token] for token in ids]) == ["", "", "", "", "😀a", ""]


def test_a_special_token_inside_a_character_does_not_break_it():
    tokenizer = TOKENIZERS["byte_level"]
    first, *rest = tokenizer.encode("€")
    batches = [[first], [2], *([token] for token in rest)]
    assert stream(tokenizer, [], batches) == ["", "", "", "€", ""]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_character_begun_by_the_prompt_belongs_to_the_answer(count):
    tokenizer = TOKENIZERS["byte_level"]
    text = single_bytes(tokenizer, "a😀")
    prompt, answer = text[: 1 + count], text[1 + count :]
    assert "".join(stream(tokenizer, prompt, [answer])) == "😀"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_character_begun_with_other_text_is_completed_by_the_next_tokens(count):
    tokenizer = TOKENIZERS["byte_level"]
    text = single_bytes(tokenizer, "abcde😀")
    assert stream(tokenizer, [], [text[: 5 + count], text[5 + count :]]) == ["abcde", "😀", ""]


def test_an_answer_after_a_prompt_keeps_its_leading_space():
    tokenizer = TOKENIZERS["byte_fallback_strip"]
    assert "".join(stream(tokenizer, tokenizer.encode("a"), [tokenizer.encode("b")])) == " b"
    # also where special tokens stand between, which a window of the last tokens would show alone
    prompt = [*tokenizer.encode("a"), *[2] * 20]
    assert "".join(stream(tokenizer, prompt, [tokenizer.encode("b")])) == " b"


def test_bytes_that_never_complete_are_shown_as_replacement_characters():
    tokenizer = TOKENIZERS["byte_level"]
    lead = tokenizer.encode("€")[0]
    shown = stream(tokenizer, [], [[lead]] * 3)
    assert shown == ["", "\ufffd", "\ufffd", "\ufffd"]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("character", ["€", "a", "</s>"])
def test_a_long_run_costs_the_same_for_every_token(kind, character):
    tokenizer = TOKENIZERS[kind]
    token = tokenizer.encode(character)[0]
    count = 20_000  # quadratic work would take minutes
    start = time.perf_counter()
    joined = "".join(stream(tokenizer, [token] * 1000, [[token]] * count))
    assert time.perf_counter() - start < 10
    assert joined == answer_text(tokenizer, [token] * 1000, [token] * count)
