"""An adapter's identity, and where in a prompt it begins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlora.adapters.adapter import TokenRows
from jaxlora.adapters.modules import EMBEDDING, HEAD
from tests.support.adapters import tiny_adapter


TOKENS = st.integers(0, 2)


def test_invocation_tokens_are_part_of_the_identity():
    tokens = [(), (1,), (1, 2), (2, 1), (12,)]
    keys = {tiny_adapter("a", invocation_tokens=given).key for given in tokens}
    assert len(keys) == len(tokens)


def test_everything_that_changes_the_output_is_part_of_the_identity():
    plain = tiny_adapter("a")
    site = next(iter(plain.factors))
    factors = plain.factors[site]
    vector, rows = np.arange(64, dtype=np.float32), np.ones((2, 48), np.float32)
    bump = vector + (np.arange(64) == 63)

    def with_factors(**changes):
        changed = {**plain.factors, site: dataclasses.replace(factors, **changes)}
        return dataclasses.replace(plain, factors=changed)

    def with_rows(**rows):
        names = {"embedding": EMBEDDING, "head": HEAD}
        return dataclasses.replace(plain, token_rows={names[k]: v for k, v in rows.items()})

    adapters = [
        plain,
        dataclasses.replace(plain, strength=0.5),
        with_factors(scale=0.25),
        with_factors(b_bias=vector),
        with_factors(b_bias=bump),
        with_factors(magnitude=vector),
        with_factors(magnitude=vector.astype(np.float16)),
        dataclasses.replace(plain, biases={site: vector}),
        dataclasses.replace(plain, biases={(1, site[1]): vector}),
        with_rows(embedding=TokenRows((1, 2), rows)),
        with_rows(embedding=TokenRows((1, 3), rows)),
        with_rows(embedding=TokenRows((1, 2), 2 * rows)),
        with_rows(head=TokenRows((1, 2), rows)),
        with_rows(embedding=TokenRows((1, 2), rows), head=TokenRows((1, 2), rows)),
    ]
    assert len({adapter.key for adapter in adapters}) == len(adapters)
    copy = dataclasses.replace(plain, base_copies={HEAD: rows})
    assert copy.key == plain.key, "a copy of the base's weights changes nothing"


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
