"""An adapter's identity, and where in a prompt it begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.adapters import tiny_adapter


TOKENS = st.integers(0, 2)


def test_invocation_tokens_are_part_of_the_identity():
    tokens = [(), (1,), (1, 2), (2, 1), (12,)]
    keys = {tiny_adapter("a", invocation_tokens=given).key for given in tokens}
    assert len(keys) == len(tokens)


def test_a_name_is_no_part_of_the_identity():
    assert (
        tiny_adapter("a", invocation_tokens=(3,)).key
        == tiny_adapter("b", invocation_tokens=(3,)).key
    )


@pytest.mark.parametrize("prompt", [[], [1, 2, 3]])
def test_plain_lora_begins_with_the_prompt(prompt):
    assert tiny_adapter("a").first_position(prompt) == 0


@given(st.lists(TOKENS, max_size=12), st.lists(TOKENS, min_size=1, max_size=3))
def test_an_activated_one_begins_at_the_last_occurrence(prompt, tokens):
    adapter = tiny_adapter("a", invocation_tokens=tuple(tokens))
    text, wanted = "".join(map(str, prompt)), "".join(map(str, tokens))
    start = text.rfind(wanted)
    assert adapter.first_position(tuple(prompt)) == (None if start < 0 else start)
