"""Routing arrays of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlora.adapters.routing import prefill_routing


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_segments_say_the_same_as_slots(slots):
    routing = prefill_routing(np.array(slots, np.int32), max_segments=12)
    rebuilt = np.zeros(len(slots), np.int32)
    end = 0
    for slot, start, length in routing.segments:
        if length:
            assert slot and start >= end
            end = start + length
            rebuilt[start:end] = slot
    np.testing.assert_array_equal(rebuilt, slots)
    np.testing.assert_array_equal(routing.slots, slots)


def test_too_many_runs_are_an_error():
    with pytest.raises(ValueError, match="3 runs of slots in a step that holds 2"):
        prefill_routing(np.array([1, 2, 1], np.int32), max_segments=2)
