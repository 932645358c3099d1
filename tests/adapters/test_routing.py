"""Routing arrays of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxlora.adapters.routing import build_routing


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 4))
def test_segments_say_the_same_as_slots(slots, padding):
    tokens = len(slots) + padding
    routing = build_routing(slots, tokens, max_segments=12)
    rebuilt = np.zeros(tokens, np.int32)
    end = 0
    for slot, start, length in routing.segments:
        if length:
            assert slot and start >= end
            end = start + length
            rebuilt[start:end] = slot
    np.testing.assert_array_equal(rebuilt, routing.slots)
    np.testing.assert_array_equal(routing.slots[: len(slots)], slots)
    assert not routing.slots[len(slots) :].any()


def test_too_many_runs_are_an_error():
    with pytest.raises(ValueError, match="3 runs of slots in a step that holds 2"):
        build_routing([1, 2, 1], 3, max_segments=2)
