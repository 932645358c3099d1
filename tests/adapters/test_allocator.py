"""The run allocator: no row is lost, shared, or handed out twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxlora.adapters.allocator import RunAllocator


ROWS = 64


def test_lengths_follow_one_another_where_a_free_run_is_long_enough():
    allocator = RunAllocator(10)
    assert allocator.allocate([3, 2, 4]) == [0, 3, 5]


def test_lengths_are_scattered_where_no_run_is_long_enough():
    allocator = RunAllocator(10)
    kept = allocator.allocate([4, 3, 3])
    allocator.release([kept[0]])
    allocator.release([kept[2]])
    assert sorted(allocator.allocate([4, 3])) == [0, 7]
    assert allocator.free_rows == 0


def test_what_does_not_fit_changes_nothing():
    allocator = RunAllocator(10)
    start = allocator.allocate([6])
    assert allocator.allocate([3, 3]) is None
    assert allocator.free_rows == 4
    allocator.check_integrity()
    with pytest.raises(KeyError):
        allocator.release([start[0] + 1])


def test_fragmentation_is_the_share_of_free_rows_outside_the_largest_run():
    allocator = RunAllocator(12)
    runs = allocator.allocate([4, 4, 4])
    allocator.release([runs[0], runs[2]])
    assert allocator.fragmentation == pytest.approx(0.5)
    allocator.release([runs[1]])
    assert allocator.fragmentation == 0.0


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = RunAllocator(ROWS)
        self.held: list[tuple[list[int], list[int]]] = []  # (starts, lengths)

    @rule(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6))
    def allocate(self, lengths):
        starts = self.allocator.allocate(lengths)
        if starts is None:
            if sum(lengths) <= self.allocator.free_rows:
                assert self.allocator.fragmentation > 0
        else:
            self.held.append((starts, lengths))

    @rule(index=st.integers(0, 20))
    def release(self, index):
        if index < len(self.held):
            starts, _ = self.held.pop(index)
            self.allocator.release(starts)

    @invariant()
    def rows_are_owned_once(self):
        self.allocator.check_integrity()
        rows = [
            row
            for starts, lengths in self.held
            for start, length in zip(starts, lengths, strict=True)
            for row in range(start, start + length)
        ]
        assert len(rows) == len(set(rows)) == ROWS - self.allocator.free_rows


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
